"""The archive in a database: PostgreSQL or MariaDB, reached through JDBC.

A batch is written in four steps, all of which may be repeated:

1. Spark's workers write its events into a table of their own, `lisa_staged_events`.
2. The messages concerned are folded from all of their events, those in `message_log` and the
   staged ones, and written to `lisa_staged_messages`.
3. One transaction adds the staged events to `message_log`, puts the staged rows into `messages`,
   and records offsets, topics and gaps.
4. The staged tables are dropped.

Killed before the end of the transaction, nothing has happened; killed behind it, the same batch
written again adds no event, as each stands in the log under its own key, and folds to the same
rows. So it does not matter what Spark's checkpoint remembers.

The transaction runs on the connection that holds the archive's lock since before the first step.
So no other archive process has come between, and a row never goes back; and if the database
restarted, and emptied the staged tables, that connection is gone and nothing is committed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.core.clock import datetime_ms
from lisa.core.errors import ConfigError
from lisa.core.shards import base, shard_of
from lisa.pipeline.archive.database import Connection, Database, jdbc_settings
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.jdbc_reader import JdbcArchive
from lisa.pipeline.archive.rows import (
    JSON_COLUMNS,
    LOG_COLUMNS,
    MESSAGE_COLUMNS,
    from_log_rows,
    names,
    to_log_rows,
    to_message_rows,
)
from lisa.pipeline.archive.schemas import GAP_STATE, journal_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive.records import Gap, TopicRecord

__all__ = ["JdbcArchive", "JdbcWriter", "jdbc_settings", "open", "writer"]

LOCK_SECONDS = 15
"""How long a killed predecessor may hold its lock: until its Java, too, has ended."""

STAGED_BYTES = 8 << 20
"""About what one insert of Spark's may hold in memory."""


def writer(spark: SparkSession, where: str, properties: Mapping[str, str]) -> JdbcWriter:
    """Write to the archive in a database; its tables are made where they are missing.

    where: jdbc:postgresql://... or jdbc:mariadb://... properties: `user`, `password`,
    `table_prefix`; others go to the driver. Raises ConfigError where another archive process
    writes to the same tables, ServerUnavailable where nobody answers.
    """
    return JdbcWriter(spark, Database.of(where, properties))


def open(spark: SparkSession, where: str, properties: Mapping[str, str]) -> JdbcArchive:  # noqa: A001
    """Read the archive in a database. Raises ConfigError where there is none."""
    return JdbcArchive(spark, Database.of(where, properties))


class JdbcWriter:
    """Takes batches of events, each exactly once. Hold one per archive; `close` it."""

    def __init__(self, spark: SparkSession, database: Database) -> None:
        self._spark = spark
        self._database = database
        self._connection = self._open()

    def write(
        self,
        batch: DataFrame,
        batch_id: int,
        topics: Mapping[str, TopicRecord] | None = None,
        gaps: Iterable[Gap] = (),
    ) -> None:
        """Add the events of a batch, rows of LOG_SCHEMA. The same again changes nothing.

        topics: options and groups of the batch's topics as they now are. gaps: those that the
        batch showed.
        """
        with self._database.telling():
            if not self._connection.alive():  # the server was restarted, or idleness ended it
                self._connection = self._open()
            rows = to_log_rows(batch).persist()
            try:
                places, most_bytes = _survey(rows)
                if places is not None:
                    self._stage(rows, most_bytes)
                self._commit(batch_id, places or {}, topics or {}, gaps, staged=places is not None)
            finally:
                rows.unpersist()
            self._connection.run("clear")

    def archive(self) -> JdbcArchive:
        """What has been written, for reading."""
        return JdbcArchive(self._spark, self._database)

    def close(self) -> None:
        """Let another one write."""
        self._connection.close()

    def _open(self) -> Connection:
        """A connection that holds the archive's lock, with nothing of a predecessor about."""
        connection = Connection(self._spark, self._database)
        with self._database.telling():
            try:
                _lock(connection, self._database)
                connection.run("tables")
                if not connection.has_shards():
                    connection.run("shards")
                connection.run("clear")
            except BaseException:
                connection.close()
                raise
        return connection

    def _stage(self, rows: DataFrame, most_bytes: int) -> None:
        log = names(LOG_COLUMNS)
        self._connection.run("stage_events", log=log)
        self._connection.run("stage_messages", messages=names(MESSAGE_COLUMNS))
        self._insert(rows, "lisa_staged_events", most_bytes)
        self._connection.run("staged_events")
        spark, database = self._spark, self._database
        old = ", ".join(f'old."{name}"' for name in LOG_COLUMNS)
        [history] = database.statements("history", old=old)
        staged = f"SELECT {log} FROM {database.prefix}lisa_staged_events"  # noqa: S608
        events = database.read(spark, history, staged)
        messages = fold(from_log_rows(events))
        self._insert(to_message_rows(messages), "lisa_staged_messages", most_bytes)

    def _commit(
        self,
        batch_id: int,
        places: Mapping[str, tuple[str, int]],
        topics: Mapping[str, TopicRecord],
        gaps: Iterable[Gap],
        *,
        staged: bool,
    ) -> None:
        connection = self._connection
        with connection.transaction():
            if staged:
                connection.run("add_events", log=names(LOG_COLUMNS))
                connection.run("put_messages", **_put_messages(self._database.kind.name))
            for topic, record in topics.items():
                groups = json.dumps(list(record.groups))
                connection.put("put_topic", topic, json.dumps(dict(record.options)), groups)
            for place, (entry, number) in places.items():
                shard = shard_of(place) or ""
                connection.put("put_offset", base(place), shard, entry, number)
            for gap in gaps:
                connection.put(
                    "add_gap", gap.topic, gap.shard or "", gap.after_id or "", gap.after_number,
                    gap.to_id, gap.to_number, gap.reason, datetime_ms(gap.at),
                )  # fmt: skip
            connection.put("put_archive", batch_id, time.time_ns() // 1_000_000)

    def _insert(self, rows: DataFrame, table: str, most_bytes: int) -> None:
        size = max(1, min(2000, STAGED_BYTES // (most_bytes + 500)))
        self._database.insert(rows, table, batch=size)


def _lock(connection: Connection, database: Database) -> None:
    """Be the only one who writes to these tables, as long as the connection lasts."""
    name = f"lisa archive {connection.ask(database.statements('here')[0])} {database.prefix}"
    digest = hashlib.sha256(name.encode()).digest()
    # PostgreSQL's locks are known by a number, MariaDB's by a name, the same in all databases.
    mark = int.from_bytes(digest[:8], "big", signed=True)
    key = mark if database.kind.name == "postgresql" else f"lisa{digest.hex()[:40]}"
    deadline = time.monotonic() + LOCK_SECONDS
    while connection.ask(database.statements("lock")[0], key) != [("1",)]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"another archive process writes to {database.shown} with table prefix "
                f"{database.prefix!r}: end it, or give this one a prefix of its own"
            )
        time.sleep(0.1)


def _survey(rows: DataFrame) -> tuple[dict[str, tuple[str, int]] | None, int]:
    """Place -> the batch's last event there (none for a gap), and the most bytes of a row's data.

    None instead if there are no rows at all.
    """
    place = sf.when(sf.col("state") != GAP_STATE, sf.struct("at", "seq", "number"))
    size = sf.coalesce(sf.octet_length("envelope"), sf.lit(0))
    by_journal = rows.groupBy(journal_of().alias("journal"))
    found = by_journal.agg(sf.max(place).alias("last"), sf.max(size).alias("size"))
    lasts = found.collect()
    places = {
        row["journal"]: (f"{row['last']['at']}-{row['last']['seq']}", row["last"]["number"])
        for row in lasts
        if row["last"] is not None
    }
    return (places if lasts else None), max((row["size"] for row in lasts), default=0)


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
