"""The archive in a database: PostgreSQL or MariaDB, reached through JDBC.

A batch is written in four idempotent steps:

1. Spark's workers write the events to a staging table, `lisa_staged_events`.
2. The messages concerned are folded from all of their events, those in `message_log` and the
   staged ones, and written to `lisa_staged_messages`.
3. One transaction adds the staged events to `message_log`, upserts the staged rows into
   `messages`, and records offsets, topics and gaps.
4. The staging tables are dropped.

If the process is killed before the commit, the archive is unchanged. If it is killed afterwards
and the batch is written again, no event is added, because events have a primary key, and the fold
yields the same rows. So the state of Spark's checkpoint does not matter.

The transaction runs on the connection that has held the archive's lock since before step 1.
Therefore no other archive process can write in between, and rows never go back to older states. If
the database restarts and empties the staging tables, that connection breaks and nothing is
committed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import shard_named, shard_suffix, topic_of, topics_of
from lisa.pipeline.archive.base import (
    Archive,
    ArchiveGap,
    PresentTopics,
    TopicRecord,
    selected,
)
from lisa.pipeline.archive.batches import BatchSummary, is_new, summarize
from lisa.pipeline.archive.database import (
    JSON_COLUMNS,
    LOG_COLUMNS,
    MESSAGE_COLUMNS,
    Database,
    JdbcConnection,
    from_log_rows,
    from_message_rows,
    names,
    to_log_rows,
    to_message_rows,
)
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.reading import with_log_columns
from lisa.pipeline.archive.schemas import LOG_SCHEMA
from lisa.pipeline.session import parallelism, persisted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCK_SECONDS = 15
"""How long to wait for the lock of a killed predecessor, whose JVM may still be stopping."""

STAGED_BYTES = 8 << 20
"""Approximate memory limit of one of Spark's inserts."""

LAYOUT = 2
"""The layout of the tables; 1 was that of version 0.1, without the column `shard`."""


class JdbcWriter:
    """The only writer of a database's tables; creates missing ones. `close` it.

    where: jdbc:postgresql://... or jdbc:mariadb://... properties: `user`, `password`,
    `table_prefix`; all others are passed to the driver. topics: called for each batch.

    Raises ConfigError if another archive process writes to the same tables, or if they have another
    layout; ServerUnavailable if the database cannot be reached.
    """

    def __init__(
        self,
        spark: SparkSession,
        where: str,
        properties: Mapping[str, str],
        *,
        topics: PresentTopics = lambda _: {},
    ) -> None:
        self._spark = spark
        self._database = Database.of(where, properties)
        self._topics = topics
        self._connection = self._open()
        self._offsets = self.archive().offsets()
        self._is_first = True

    def write(
        self,
        events: DataFrame,
        batch: int,
        query: str = "",  # noqa: ARG002  only files need it
    ) -> tuple[int, Sequence[ArchiveGap]]:
        """Add a batch exactly once; returns the number of new events, and the gaps in it."""
        if self._is_first:
            # If the checkpoint was lost, Spark may repeat archived events.
            events = events.where(is_new(self._offsets))
        rows = persisted(with_log_columns(events).select(*LOG_SCHEMA.names))
        try:
            found = summarize(rows)
            self._is_first = False
            if not found.journals:
                return 0, ()
            with self._database.translated_errors():
                if not self._connection.alive():  # the server restarted, or closed the connection
                    self._connection = self._open()
                self._stage(to_log_rows(rows))
                self._commit(batch, found, self._topics(topics_of(found.journals)))
                self._connection.run("clear")
        finally:
            rows.unpersist()
        self._offsets |= found.offsets
        return found.events, found.gaps

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """Journal -> entry id and number of its last archived event."""
        return self._offsets

    def gaps(self) -> Sequence[ArchiveGap]:
        """The recorded gaps."""
        return self.archive().gaps()

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Does nothing: `write` keeps the tables current."""

    def archive(self) -> JdbcArchive:
        """Open the archive for reading."""
        return JdbcArchive(self._spark, self._database)

    def close(self) -> None:
        """Close the connection and release the archive's lock."""
        self._connection.close()

    def _open(self) -> JdbcConnection:
        """Connect, take the archive's lock, create tables and drop old staging tables."""
        connection = JdbcConnection(self._spark, self._database)
        with self._database.translated_errors():
            try:
                _lock(connection, self._database)
                if connection.has_tables():
                    _check_layout(connection, self._database)
                connection.run("tables")
                connection.run("views")
                connection.run("clear")
            except BaseException:
                connection.close()
                raise
        return connection

    def _stage(self, rows: DataFrame) -> None:
        """Write the rows, and the messages that they and earlier events fold to, to staging tables.

        rows: rows of the table `message_log`.
        """
        size = sf.coalesce(sf.max(sf.octet_length("envelope")), sf.lit(0))
        [[most_bytes]] = rows.agg(size).collect()
        batch = max(1, min(2000, STAGED_BYTES // (most_bytes + 500)))
        log = names(LOG_COLUMNS)
        self._connection.run("stage_events", log=log)
        self._connection.run("stage_messages", messages=names(MESSAGE_COLUMNS))
        spark, database = self._spark, self._database
        database.insert(rows, "lisa_staged_events", batch=batch)
        self._connection.run("staged_events")
        old = ", ".join(f'old."{name}"' for name in LOG_COLUMNS)
        [history] = database.statements("history", old=old)
        staged = f"SELECT {log} FROM {database.prefix}lisa_staged_events"  # noqa: S608
        messages = fold(from_log_rows(database.read(spark, history, staged)))
        database.insert(to_message_rows(messages), "lisa_staged_messages", batch=batch)

    def _commit(self, batch: int, found: BatchSummary, topics: Mapping[str, TopicRecord]) -> None:
        connection = self._connection
        with connection.transaction():
            connection.run("add_events", log=names(LOG_COLUMNS))
            connection.run("put_messages", **_put_messages(self._database.kind.name))
            for topic, record in topics.items():
                groups = json.dumps(list(record.groups))
                connection.put("put_topic", topic, json.dumps(dict(record.options)), groups)
            for journal, (entry, number) in found.offsets.items():
                shard = shard_suffix(journal) or ""
                connection.put("put_offset", topic_of(journal), shard, entry, number)
            for gap in found.gaps:
                connection.put(
                    "add_gap",
                    gap.topic,
                    gap.shard or "",
                    gap.after_id or "",
                    gap.after_number,
                    gap.to_id,
                    gap.to_number,
                    gap.reason,
                    datetime_ms(gap.at),
                )
            connection.put("put_archive", batch, time.time_ns() // 1_000_000)


def _lock(connection: JdbcConnection, database: Database) -> None:
    """Take the archive's lock; the connection holds it until it is closed. Raises ConfigError."""
    name = f"lisa archive {connection.ask(database.statements('here')[0])} {database.prefix}"
    digest = hashlib.sha256(name.encode()).digest()
    # PostgreSQL identifies locks by number, MariaDB by a name that is global to the server.
    mark = int.from_bytes(digest[:8], "big", signed=True)
    key = mark if database.kind.name == "postgresql" else f"lisa{digest.hex()[:40]}"
    deadline = time.monotonic() + LOCK_SECONDS
    while connection.ask(database.statements("lock")[0], key) != [("1",)]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"another archive process writes to {database.shown} with table prefix "
                f"{database.prefix!r}: stop that process, or use another table prefix"
            )
        time.sleep(0.1)


def _put_messages(kind: str) -> dict[str, str]:
    """The lists of columns that the upsert needs."""
    rest = [name for name in MESSAGE_COLUMNS if name not in ("topic", "id", "token")]
    new = 'excluded."{0}"' if kind == "postgresql" else 'VALUES("{0}")'
    typed = [f'"{name}"::json' if name in JSON_COLUMNS else f'"{name}"' for name in MESSAGE_COLUMNS]
    return {
        "messages": names(MESSAGE_COLUMNS),
        "messages_json": ", ".join(typed),
        "excluded": ", ".join(f'"{name}" = {new.format(name)}' for name in rest),
    }


class JdbcArchive(Archive):
    """An archive in a database. Each method reads what is committed at the time of its call."""

    def __init__(self, spark: SparkSession, database: Database) -> None:
        self._spark = spark
        self._database = database
        with self._connected() as connection:
            if not connection.has_tables():
                raise ConfigError(
                    f"there is no archive in {database.shown} with table prefix {database.prefix!r}"
                )
            _check_layout(connection, database)

    def log(self) -> DataFrame:
        """Every committed event: rows of LOG_SCHEMA, in no particular order."""
        return from_log_rows(self._table("message_log", LOG_COLUMNS))

    def messages(
        self, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        return selected(from_message_rows(self._table("messages", MESSAGE_COLUMNS)), topics, ids)

    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event."""
        return {
            shard_named(topic, shard): (entry, int(number))
            for topic, shard, entry, number, _, _ in self._ask("topics")
            if entry
        }

    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups when last seen, as needed to restore it."""
        return {
            topic: TopicRecord(json.loads(options), tuple(json.loads(groups)))
            for topic, shard, _, _, options, groups in self._ask("topics")
            if not shard
        }

    def gaps(self) -> list[ArchiveGap]:
        """The events that the log lacks."""
        return [
            ArchiveGap(
                topic,
                after or None,
                _number(first),
                to,
                _number(last),
                reason,
                ms_datetime(int(at)),
                shard or None,
            )
            for topic, shard, after, first, to, last, reason, at in self._ask("gaps")
        ]

    def _ask(self, name: str) -> list[tuple[Any, ...]]:
        with self._connected() as connection:
            return connection.ask(self._database.statements(name)[0])

    def _table(self, name: str, columns: Iterable[str]) -> DataFrame:
        select = f"SELECT {names(columns)} FROM {self._database.prefix}{name}"  # noqa: S608 - ours
        # One task reads the rows, all share the work.
        rows = self._database.read(self._spark, select)
        return rows.repartition(parallelism(self._spark))

    @contextmanager
    def _connected(self) -> Iterator[JdbcConnection]:
        connection = JdbcConnection(self._spark, self._database)
        try:
            with self._database.translated_errors():
                yield connection
        finally:
            connection.close()


def _check_layout(connection: JdbcConnection, database: Database) -> None:
    [[layout]] = connection.ask(database.statements("layout")[0])
    if int(layout) not in (0, LAYOUT):  # 0: no batch was written yet
        raise ConfigError(
            f"the archive in {database.shown} has layout {layout}, this version of Lisa needs "
            f"{LAYOUT}: use another database or table_prefix"
        )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
