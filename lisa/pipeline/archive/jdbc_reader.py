"""Reads the archive in a database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lisa.core.clock import ms_datetime
from lisa.core.errors import ConfigError
from lisa.core.shards import place_of
from lisa.pipeline.archive import Archive, Gap, TopicRecord
from lisa.pipeline.archive.database import Connection, Database
from lisa.pipeline.archive.rows import (
    LOG_COLUMNS,
    MESSAGE_COLUMNS,
    from_log_rows,
    from_message_rows,
    names,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["JdbcArchive"]

LAYOUT = 2
"""The version of the tables that this build makes; it reads the earlier ones, too.

2: with a column `shard`.
"""

ROWS_PER_READER = 250_000


class JdbcArchive(Archive):
    """What is in an archive: all that was committed when each part of it is read."""

    def __init__(self, spark: SparkSession, database: Database) -> None:
        self._spark = spark
        self._database = database
        with self._connected() as connection:
            if not connection.has_tables():
                raise ConfigError(
                    f"{database.shown} holds no archive with table prefix {database.prefix!r}"
                )
            _check_layout(connection, database)
            self._shard = '"shard"' if connection.has_shards() else "''"

    def log(self) -> DataFrame:
        """Rows of LOG_SCHEMA: every event, in no order."""
        return from_log_rows(self._table("message_log", LOG_COLUMNS, "at"))

    def messages(self) -> DataFrame:
        """Rows of MESSAGES_SCHEMA: one per message and life, as of the log."""
        return from_message_rows(self._table("messages", MESSAGE_COLUMNS, "id"))

    def offsets(self) -> dict[str, tuple[str, int]]:
        """How far the archive has come: place -> entry id and number of its last event."""
        return {
            place_of(topic, shard): (entry, int(number))
            for topic, shard, entry, number, _, _ in self._ask("topics")
            if entry
        }

    def topics(self) -> dict[str, TopicRecord]:
        """Each topic's options and groups as last seen, to build it anew from."""
        return {
            topic: TopicRecord(json.loads(options), tuple(json.loads(groups)))
            for topic, shard, _, _, options, groups in self._ask("topics")
            if not shard
        }

    def gaps(self) -> list[Gap]:
        """The gaps that the journal had."""
        return [
            Gap(
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
            return connection.ask(self._database.statements(name, shard=self._shard)[0])

    def _table(self, name: str, columns: Iterable[str], by: str) -> DataFrame:
        """A table in parts of about ROWS_PER_READER rows, each found by the primary key."""
        table = self._database.prefix + name
        with self._connected() as connection:
            parts = _parts(connection, self._database, table, by)
        listed = names(columns).replace('"shard"', f'{self._shard} AS "shard"')
        select = f"SELECT {listed} FROM {table} WHERE"  # noqa: S608 - names of our own
        return self._database.read(self._spark, *(f"{select} {part}" for part in parts))

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        connection = Connection(self._spark, self._database)
        try:
            with self._database.telling():
                yield connection
        finally:
            connection.close()


def _check_layout(connection: Connection, database: Database) -> None:
    [[layout]] = connection.ask(database.statements("layout")[0])
    if int(layout) > LAYOUT:
        raise ConfigError(
            f"the archive in {database.shown} has layout {layout}; this build reads up to {LAYOUT}"
        )


def _parts(connection: Connection, database: Database, table: str, by: str) -> list[str]:
    """Conditions that each hold for some ROWS_PER_READER rows; every row meets exactly one."""
    parts: list[str] = []
    small: list[str] = []
    pending = 0
    for topic, count in connection.ask(database.statements("sizes", table=table)[0]):
        if int(count) > ROWS_PER_READER:
            parts += _ranges(connection, database, table, by, topic)
            continue
        small.append(_quoted(topic))
        pending += int(count)
        if pending > ROWS_PER_READER:
            parts.append(f"topic IN ({', '.join(small)})")
            small, pending = [], 0
    if small:
        parts.append(f"topic IN ({', '.join(small)})")
    return parts or ["1 = 0"]


def _ranges(
    connection: Connection, database: Database, table: str, by: str, topic: str
) -> list[str]:
    [query] = database.statements(
        "bounds", table=table, column=f'"{by}"', rows=str(ROWS_PER_READER)
    )
    bounds = [bound for (bound,) in connection.ask(query, topic)]
    bounds = [_quoted(bound) if by == "id" else bound for bound in dict.fromkeys(bounds)]
    ranges = []
    for low, high in zip([None, *bounds], [*bounds, None], strict=True):
        terms = [f"topic = {_quoted(topic)}"]
        terms += [f'"{by}" > {low}'] if low else []
        terms += [f'"{by}" <= {high}'] if high else []
        ranges.append(" AND ".join(terms))
    return ranges


def _quoted(text: str) -> str:
    # A backslash is a backslash: PostgreSQL's default, and how our sessions in MariaDB are set.
    return "'" + text.replace("'", "''") + "'"


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
