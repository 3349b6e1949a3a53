"""Converts rows of the archive to rows of a database's tables, and back.

In the database, times are epoch milliseconds; headers and groups are JSON. An unknown token is
empty, not null, because the token is part of the primary key; the same goes for the shard of an
event in the topic's own journal. NUL in text becomes U+FFFD, because PostgreSQL cannot store it.
Envelopes and bodies are stored unchanged, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

from lisa.pipeline.archive.schemas import GROUP_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LOG_FIELDS = [field for field in LOG_SCHEMA.fields if field.name != "day"]

LOG_COLUMNS = tuple(field.name for field in _LOG_FIELDS)
"""Columns of the table `message_log`, without `day`, which the database computes."""

MESSAGE_COLUMNS = (*MESSAGES_SCHEMA.names, "bizkey", "subtopic", "readable")
"""Columns of the table `messages`, including those that only its views need."""

JSON_COLUMNS = ("headers", "groups")

_GROUP_FIELDS = GROUP_SCHEMA.fields
_GROUPS_IN_MS = ArrayType(
    StructType(
        [
            StructField(one.name, LongType() if one.dataType == TimestampType() else one.dataType)
            for one in _GROUP_FIELDS
        ]
    )
)


def names(columns: Iterable[str]) -> str:
    """A list of quoted column names for SQL."""
    return ", ".join(f'"{name}"' for name in columns)


def to_log_rows(events: DataFrame) -> DataFrame:
    """Rows of LOG_SCHEMA -> rows of the table `message_log`."""
    special = {"shard": sf.coalesce("shard", sf.lit(""))}
    return events.select(*_columns(_LOG_FIELDS, _stored, special))


def from_log_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `message_log` -> rows of LOG_SCHEMA."""
    special = {"shard": sf.nullif(sf.col("shard"), sf.lit(""))}
    days = sf.coalesce(sf.floor(sf.col("at") / 86_400_000).cast("int"), sf.lit(0))
    day = sf.date_from_unix_date(days).alias("day")
    return rows.select(*_columns(_LOG_FIELDS, _read, special), day).to(LOG_SCHEMA)


def to_message_rows(messages: DataFrame) -> DataFrame:
    """Rows of MESSAGES_SCHEMA -> rows of the table `messages`."""
    groups = sf.transform(
        "groups",
        lambda one: sf.struct(
            *(_in_ms(one[field.name], field.dataType).alias(field.name) for field in _GROUP_FIELDS)
        ),
    )
    special = {
        "token": sf.coalesce(_clean(sf.col("token")), sf.lit("")),
        "headers": sf.to_json("headers"),
        "groups": sf.to_json(groups),
    }
    headers = sf.col("headers")
    text = sf.col("body").cast("string")
    return messages.select(
        *_columns(MESSAGES_SCHEMA.fields, _stored, special),
        _clean(sf.coalesce(headers["bizkey"], headers["bizKey"])).alias("bizkey"),
        _clean(headers["subtopic"]).alias("subtopic"),
        (text.isNull() | (sf.is_valid_utf8(text) & ~sf.contains(text, sf.lit("\0")))).alias(
            "readable"
        ),
    )


def from_message_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `messages` -> rows of MESSAGES_SCHEMA."""
    groups = sf.transform(
        sf.from_json("groups", _GROUPS_IN_MS),
        lambda one: sf.struct(
            *(_read(field, one[field.name]).alias(field.name) for field in _GROUP_FIELDS)
        ),
    )
    special = {
        "token": sf.nullif(sf.col("token"), sf.lit("")),
        "headers": sf.from_json("headers", "map<string,string>"),
        "groups": sf.coalesce(groups, sf.array()),
    }
    return rows.select(*_columns(MESSAGES_SCHEMA.fields, _read, special)).to(MESSAGES_SCHEMA)


def _columns(
    fields: Iterable[StructField],
    convert: Callable[[StructField], Column],
    special: Mapping[str, Column],
) -> list[Column]:
    """The columns of some fields: the special ones as given, the others converted."""
    return [
        (special[field.name] if field.name in special else convert(field)).alias(field.name)
        for field in fields
    ]


def _stored(field: StructField) -> Column:
    column = sf.col(field.name)
    return _clean(column) if field.dataType == StringType() else _in_ms(column, field.dataType)


def _read(field: StructField, column: Column | None = None) -> Column:
    column = sf.col(field.name) if column is None else column
    # A driver may return a boolean as a bit or a number.
    stored = LongType() if field.dataType == TimestampType() else field.dataType
    column = column.cast(stored)
    if not field.nullable:  # Spark treats all columns read through JDBC as nullable
        column = sf.coalesce(column, sf.lit("" if stored == StringType() else 0).cast(stored))
    return sf.timestamp_millis(column) if field.dataType == TimestampType() else column


def _in_ms(column: Column, kind: DataType) -> Column:
    return sf.unix_millis(column) if kind == TimestampType() else column


def _clean(text: Column) -> Column:
    return sf.translate(text, "\0", "\ufffd")
