"""Reads an archive from a database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import shard_named
from lisa.pipeline.archive.base import Archive
from lisa.pipeline.archive.database import Database, JdbcConnection
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.rows import (
    LOG_COLUMNS,
    MESSAGE_COLUMNS,
    from_log_rows,
    from_message_rows,
    names,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LAYOUT = 2
"""The layout of the tables that this version creates; it also reads older layouts.

2: adds the column `shard`.
"""

ROWS_PER_READER = 250_000


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
            self._shard = '"shard"' if connection.has_shards() else "''"

    def log(self) -> DataFrame:
        """Every committed event: rows of LOG_SCHEMA, in no particular order."""
        return from_log_rows(self._table("message_log", LOG_COLUMNS, "at"))

    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        return from_message_rows(self._table("messages", MESSAGE_COLUMNS, "id"))

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
            return connection.ask(self._database.statements(name, shard=self._shard)[0])

    def _table(self, name: str, columns: Iterable[str], by: str) -> DataFrame:
        """Read a table in parts of about ROWS_PER_READER rows, selected by primary key."""
        table = self._database.prefix + name
        with self._connected() as connection:
            parts = _parts(connection, self._database, table, by)
        listed = names(columns).replace('"shard"', f'{self._shard} AS "shard"')
        select = f"SELECT {listed} FROM {table} WHERE"  # noqa: S608 - names of our own
        return self._database.read(self._spark, *(f"{select} {part}" for part in parts))

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
    if int(layout) > LAYOUT:
        raise ConfigError(
            f"the archive in {database.shown} has layout {layout}; this version of Lisa reads "
            f"layouts up to {LAYOUT}"
        )


def _parts(connection: JdbcConnection, database: Database, table: str, by: str) -> list[str]:
    """SQL conditions that split a table into parts of about ROWS_PER_READER rows."""
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
    connection: JdbcConnection, database: Database, table: str, by: str, topic: str
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
    # Backslash is no escape character: PostgreSQL's default, and set for our MariaDB sessions.
    return "'" + text.replace("'", "''") + "'"


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
