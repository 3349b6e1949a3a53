"""Rows of the archive as a database's tables hold them, and back.

Times are epoch milliseconds there, exact and without a zone; headers and groups are JSON. A message
whose token is unknown has an empty one, as the token is part of the key; so is the shard of an
event, empty for the topic's own journal. Text never holds NUL, which PostgreSQL cannot store: it
becomes U+FFFD. Envelopes and bodies are bytes, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lisa.pipeline.archive.schemas import LOG_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "JSON_COLUMNS",
    "LOG_COLUMNS",
    "MESSAGE_COLUMNS",
    "from_log_rows",
    "from_message_rows",
    "names",
    "to_log_rows",
    "to_message_rows",
]

LOG_COLUMNS = tuple(name for name in LOG_SCHEMA.names if name != "day")
"""The table `message_log`, without the column that the database computes itself."""

MESSAGE_COLUMNS = (*MESSAGES_SCHEMA.names, "bizkey", "subtopic", "readable")
"""The table `messages`: ours, and those that the views need."""

JSON_COLUMNS = ("headers", "groups")

_GROUP_FIELDS = next(
    field.dataType.elementType.fields
    for field in MESSAGES_SCHEMA.fields
    if isinstance(field.dataType, ArrayType) and isinstance(field.dataType.elementType, StructType)
)
_GROUPS_IN_MS = ArrayType(
    StructType(
        [
            StructField(one.name, LongType() if one.dataType == TimestampType() else one.dataType)
            for one in _GROUP_FIELDS
        ]
    )
)


def names(columns: Iterable[str]) -> str:
    """Columns as SQL lists them."""
    return ", ".join(f'"{name}"' for name in columns)


def to_log_rows(events: DataFrame) -> DataFrame:
    """Rows of LOG_SCHEMA -> rows of the table `message_log`."""
    types = {field.name: field.dataType for field in LOG_SCHEMA.fields}
    special = {"shard": sf.coalesce("shard", sf.lit("")).alias("shard")}
    return events.select(*(special.get(name, _stored(name, types[name])) for name in LOG_COLUMNS))


def from_log_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `message_log` -> rows of LOG_SCHEMA."""
    special = {"shard": sf.nullif(sf.col("shard"), sf.lit(""))}
    columns = [
        special.get(field.name, _read(sf.col(field.name), field)).alias(field.name)
        for field in LOG_SCHEMA.fields
        if field.name != "day"
    ]
    days = sf.coalesce(sf.floor(sf.col("at") / 86_400_000).cast("int"), sf.lit(0))
    return rows.select(*columns, sf.date_from_unix_date(days).alias("day")).to(LOG_SCHEMA)


def to_message_rows(messages: DataFrame) -> DataFrame:
    """Rows of MESSAGES_SCHEMA -> rows of the table `messages`."""
    groups = sf.transform("groups", lambda one: sf.struct(*(
        _in_ms(one[field.name], field.dataType).alias(field.name) for field in _GROUP_FIELDS
    )))  # fmt: skip
    special = {
        "token": sf.coalesce(_clean(sf.col("token")), sf.lit("")),
        "headers": sf.to_json("headers"),
        "groups": sf.to_json(groups),
    }
    headers = sf.col("headers")
    text = sf.col("body").cast("string")
    return messages.select(
        *(
            special[field.name].alias(field.name)
            if field.name in special
            else _stored(field.name, field.dataType)
            for field in MESSAGES_SCHEMA.fields
        ),
        _clean(sf.coalesce(headers["bizkey"], headers["bizKey"])).alias("bizkey"),
        _clean(headers["subtopic"]).alias("subtopic"),
        (text.isNull() | (sf.is_valid_utf8(text) & ~sf.contains(text, sf.lit("\0")))).alias(
            "readable"
        ),
    )


def from_message_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `messages` -> rows of MESSAGES_SCHEMA."""
    groups = sf.transform(sf.from_json("groups", _GROUPS_IN_MS), lambda one: sf.struct(*(
        _read(one[field.name], field).alias(field.name) for field in _GROUP_FIELDS
    )))  # fmt: skip
    special = {
        "token": sf.nullif(sf.col("token"), sf.lit("")),
        "headers": sf.from_json("headers", "map<string,string>"),
        "groups": sf.coalesce(groups, sf.array()),
    }
    return rows.select(*(
        (special[field.name] if field.name in special else _read(sf.col(field.name), field))
        .alias(field.name)
        for field in MESSAGES_SCHEMA.fields
    )).to(MESSAGES_SCHEMA)  # fmt: skip


def _stored(name: str, kind: DataType) -> Column:
    column = sf.col(name)
    return (_clean(column) if kind == StringType() else _in_ms(column, kind)).alias(name)


def _read(column: Column, field: StructField) -> Column:
    # A driver may give a boolean as a bit or a number.
    stored = LongType() if field.dataType == TimestampType() else field.dataType
    column = column.cast(stored)
    if not field.nullable:  # nor is it in the table, but Spark takes no table's word for that
        column = sf.coalesce(column, sf.lit("" if stored == StringType() else 0).cast(stored))
    return sf.timestamp_millis(column) if field.dataType == TimestampType() else column


def _in_ms(column: Column, kind: DataType) -> Column:
    return sf.unix_millis(column) if kind == TimestampType() else column


def _clean(text: Column) -> Column:
    return sf.translate(text, "\0", "\ufffd")
