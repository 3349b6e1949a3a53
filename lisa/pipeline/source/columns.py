"""The columns of a write: checks their types before any row is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from pyspark.sql import types as spark

from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

CORRUPT = "_corrupt_record"
"""Spark's name for the column with what a reader could not read of a row; such rows are refused."""

_INTEGERS = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
_INTERVAL = spark.DayTimeIntervalType
_PLAIN = (
    spark.StringType,
    spark.BinaryType,
    spark.BooleanType,
    *_INTEGERS,
    spark.FloatType,
    spark.DoubleType,
    spark.DecimalType,
    spark.DateType,
    spark.TimestampType,
    spark.TimestampNTZType,
    _INTERVAL,
    spark.NullType,
)


def _is_json(kind: DataType) -> bool:
    if isinstance(kind, spark.StructType):
        return len(set(kind.names)) == len(kind.names) and all(
            _is_json(field.dataType) for field in kind.fields
        )
    if isinstance(kind, spark.MapType):
        return isinstance(kind.keyType, (spark.StringType, *_INTEGERS)) and _is_json(kind.valueType)
    if isinstance(kind, spark.ArrayType):
        return _is_json(kind.elementType)
    return isinstance(kind, _PLAIN)


def _is_body(kind: DataType) -> bool:
    texts = (spark.StringType, spark.BinaryType)
    nested = (spark.StructType, spark.MapType, spark.ArrayType)
    return isinstance(kind, texts) or (isinstance(kind, nested) and _is_json(kind))


def _is_headers(kind: DataType) -> bool:
    return (
        isinstance(kind, spark.MapType)
        and isinstance(kind.keyType, spark.StringType)
        and isinstance(kind.valueType, spark.StringType)
    )


def _is_retry(kind: DataType) -> bool:
    if isinstance(kind, spark.ArrayType):
        return isinstance(kind.elementType, (*_INTEGERS, _INTERVAL))
    return isinstance(kind, spark.StringType)


def _one_of(*kinds: type[DataType]) -> Callable[[DataType], bool]:
    return lambda kind: isinstance(kind, kinds)


_is_duration = _one_of(_INTERVAL, *_INTEGERS, spark.StringType)
_DURATION = "day-time interval, bigint of milliseconds, or string as in '1h30m'"

COLUMNS: Mapping[str, tuple[Callable[[DataType], bool], str]] = {
    "body": (
        _is_body,
        "string, binary, or a struct (with different names), map or array of what JSON can hold",
    ),
    "kind": (_one_of(spark.StringType), "string: j (the text of the body is JSON), s or b"),
    "due": (
        _one_of(spark.TimestampType, *_INTEGERS),
        "timestamp, or bigint of epoch milliseconds; a timestamp_ntz is for 'at_local', with 'tz'",
    ),
    "delay": (_is_duration, _DURATION),
    "at_local": (
        _one_of(spark.StringType, spark.TimestampNTZType),
        "string as in '2026-12-24T09:00', or timestamp_ntz",
    ),
    "tz": (_one_of(spark.StringType), "string, the name of a time zone"),
    "window": (_one_of(spark.StringType), "string as in 'mon-fri 9-17'"),
    "id": (_one_of(spark.StringType, *_INTEGERS), "string or bigint"),
    "key": (_one_of(spark.StringType, *_INTEGERS), "string or bigint"),
    "ttl": (_is_duration, _DURATION),
    "headers": (_is_headers, "map<string,string>"),
    "retry": (
        _is_retry,
        "string as in '0,0,2m', or an array of day-time intervals or of bigint milliseconds",
    ),
    "late": (_one_of(spark.StringType), "string as in 'skip after 10m'"),
    "cost": (_one_of(*_INTEGERS, spark.StringType), "bigint, or string of a number"),
    "slack": (_is_duration, _DURATION),
    "topic": (_one_of(spark.StringType), "string"),
    CORRUPT: (_one_of(spark.StringType), "string, what could not be read of the row"),
}
"""Column -> test of its type, and a description of the allowed types."""


def with_types(df: DataFrame) -> DataFrame:
    """Give columns that have nulls only, and thus no type, one that a message's column may have.

    So their rows are refused or sent one by one; an export without rows is sent, too.
    """
    kinds = {"due": "timestamp", "headers": "map<string,string>"}
    untyped = {
        field.name: df[field.name].cast(kinds.get(field.name, "string"))
        for field in df.schema.fields
        if field.name in COLUMNS and isinstance(field.dataType, spark.NullType)
    }
    return df.withColumns(untyped) if untyped else df


def _check_times(names: Collection[str]) -> None:
    given = [name for name in ("due", "delay", "at_local") if name in names]
    if len(given) > 1:
        raise ConfigError(f"give column {given[0]!r} or column {given[1]!r}, not both")
    if "at_local" in names and "tz" not in names and "window" not in names:
        raise ConfigError("column 'at_local' needs a column 'tz', the time zone of each row")
    if "tz" in names and "at_local" not in names and "window" not in names:
        raise ConfigError("column 'tz' needs a column 'at_local' or 'window', whose zone it names")


def check_columns(schema: StructType, *, topic: str | None, job: str | None) -> None:
    """Raises ConfigError if a table with this schema cannot be sent.

    topic, job: the options of these names, which may replace the columns `topic` and `id`.
    """
    kinds = {field.name: field.dataType for field in schema.fields}
    if len(kinds) < len(schema.fields):
        raise ConfigError("two columns have the same name; select the columns to write")
    for name, kind in kinds.items():
        if name not in COLUMNS:
            raise ConfigError(
                f"a message has no column {name!r}; the columns are {', '.join(COLUMNS)}. Drop the "
                "column, or put it into the body, as in struct(...) AS body"
            )
        fits, words = COLUMNS[name]
        if not fits(kind):
            raise ConfigError(f"column {name!r} has type {kind.simpleString()}; it must be {words}")
    if "body" not in kinds:
        raise ConfigError(f"column 'body' is missing; it must be {COLUMNS['body'][1]}")
    _check_times(kinds)
    if ("topic" in kinds) == (topic is not None):
        raise ConfigError(
            "the topic is missing: give option 'topic' or a column 'topic'"
            if topic is None
            else "give option 'topic' or a column 'topic', not both"
        )
    if "id" not in kinds and job is None:
        raise ConfigError(
            "there is no column 'id': give option 'job', a name from which ids are derived; use "
            "the same name whenever this job is repeated, and another name for any other job"
        )
