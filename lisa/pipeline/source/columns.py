"""The columns that can be written: their types are checked before any row is sent.

Values are read a column at a time from Arrow: an object for each row would cost more than all the
rest. A row whose values can never be a message is set aside with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark

from lisa.core.clock import MAX_DUE_MS, check_due_ms
from lisa.core.envelope import encode_headers, encode_tail
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.keys import check_id, check_topic
from lisa.core.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

__all__ = ["COLUMNS", "Rows", "check_columns", "read_rows"]

T = TypeVar("T")

_INTEGERS = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
_INTERVAL = spark.DayTimeIntervalType
_PLAIN = (
    spark.StringType, spark.BinaryType, spark.BooleanType, *_INTEGERS, spark.FloatType,
    spark.DoubleType, spark.DecimalType, spark.DateType, spark.TimestampType,
    spark.TimestampNTZType, _INTERVAL, spark.NullType,
)  # fmt: skip
_SECONDS_ERA = range(10**8, 10**11)
"""Epoch seconds of 1973 to 5138; as milliseconds these all lie before the spring of 1973."""
_DATES = range(1900_01_01, 10_000_00_00)
"""Dates as in 20261224; as milliseconds these all lie in the first two days of 1970."""


def _is_json(kind: DataType) -> bool:
    if isinstance(kind, spark.StructType):
        return all(_is_json(one.dataType) for one in kind.fields)
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


COLUMNS: Mapping[str, tuple[Callable[[DataType], bool], str]] = {
    "body": (_is_body, "string, binary, or a struct, map or array of what JSON can hold"),
    "due": (_one_of(spark.TimestampType, *_INTEGERS), "timestamp, or bigint of epoch milliseconds"),
    "delay": (_one_of(_INTERVAL, *_INTEGERS), "day-time interval, or bigint of milliseconds"),
    "id": (_one_of(spark.StringType, *_INTEGERS), "string or bigint"),
    "ttl": (_one_of(_INTERVAL, *_INTEGERS), "day-time interval, or bigint of milliseconds"),
    "headers": (_is_headers, "map<string,string>"),
    "retry": (
        _is_retry,
        "string as in '0,0,2m', or an array of day-time intervals or of bigint milliseconds",
    ),
    "topic": (_one_of(spark.StringType), "string"),
}
"""Each column's types, as a test and in words."""


def check_columns(schema: StructType, *, topic: str | None, job: str | None) -> None:
    """Refuse a table that cannot be sent, before any row is. Raises ConfigError.

    topic, job: those options, which stand for columns that are not there.
    """
    kinds = {one.name: one.dataType for one in schema.fields}
    if len(kinds) < len(schema.fields):
        raise ConfigError("two columns have one name; select those to be written")
    for name, kind in kinds.items():
        if name not in COLUMNS:
            raise ConfigError(
                f"there is no column {name!r} in a message; columns are {', '.join(COLUMNS)}: "
                "drop it, or put it into the body, as in struct(...) AS body"
            )
        fits, words = COLUMNS[name]
        if not fits(kind):
            raise ConfigError(f"column {name!r} is of type {kind.simpleString()}; it takes {words}")
    if "body" not in kinds:
        raise ConfigError(f"column 'body' is missing; it takes {COLUMNS['body'][1]}")
    if "due" in kinds and "delay" in kinds:
        raise ConfigError("give one of the columns 'due' and 'delay'; they contradict each other")
    if ("topic" in kinds) == (topic is not None):
        raise ConfigError("the topic is missing: give option 'topic', or a column 'topic'"
                          if topic is None
                          else "give option 'topic' or a column 'topic', not both")  # fmt: skip
    if "id" not in kinds and job is None:
        raise ConfigError(
            "rows have no column 'id': give option 'job', a name that is the same whenever this "
            "job is run again, and another for every other job; ids are made from it"
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages by columns; `ids` and `topics` are None where there is no such column.

    dues are as scripts read them; tails are envelopes without their heads. `refused` holds, by
    number, the rows that can never be a message, each with the reason.
    """

    topics: Sequence[str] | None
    ids: Sequence[str] | None
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]
    refused: dict[int, str] = field(default_factory=dict)

    def good(self) -> tuple[Sequence[int], Rows]:
        """Those that are not refused, with their numbers."""
        numbers: Sequence[int] = range(len(self.tails))
        if not self.refused:
            return numbers, self
        numbers = [number for number in numbers if number not in self.refused]
        picked = [
            None if column is None else [column[number] for number in numbers]
            for column in (self.topics, self.ids, self.dues, self.tails, self.ttls_ms,
                           self.policies)
        ]  # fmt: skip
        return numbers, Rows(*picked)  # type: ignore[arg-type]


def read_rows(batch: pa.RecordBatch, *, json_text: bool) -> Rows:
    """Read one Arrow batch of checked columns. json_text: bodies of text are JSON already."""
    refused: dict[int, str] = {}
    names = batch.schema.names
    columns = {name: batch.column(name) for name in names}
    n = batch.num_rows
    nothing: list[None] = [None] * n

    def each(name: str, convert: Callable[[Any], T], instead: T, values: Iterable[Any]) -> list[T]:
        return _converted(name, values, convert, instead, refused)

    if "due" in columns:
        column = columns["due"]
        convert = _due_of_micros if pa.types.is_timestamp(column.type) else _due_of_ms
        dues = each("due", convert, "0", _integers(column))
    elif "delay" in columns:
        column = columns["delay"]
        convert = _delay_of_micros if pa.types.is_duration(column.type) else _delay_of_ms
        dues = each("delay", convert, "+0", _integers(column))
    else:
        dues = ["+0"] * n
    ttls: Sequence[int | None] = nothing
    if "ttl" in columns:
        column = columns["ttl"]
        in_ms = _ttl_of_micros if pa.types.is_duration(column.type) else _ttl_of_ms
        ttls = each("ttl", in_ms, None, _integers(column))
    policies: Sequence[str | None] = nothing
    if "retry" in columns:
        policies = each("retry", _policy, None, columns["retry"].to_pylist())
    headers: Sequence[bytes] = ()
    if "headers" in columns:
        headers = each("headers", _headers, b"0000", columns["headers"].to_pylist())
    tails = _tails(columns["body"], headers, refused, json_text=json_text)
    ids = topics = None
    if "id" in columns:
        ids = each("id", _id, "", columns["id"].to_pylist())
    if "topic" in columns:
        topics = each("topic", _topic, "", columns["topic"].to_pylist())
    return Rows(topics, ids, dues, tails, ttls, policies, refused)


def _converted(
    name: str, values: Iterable[Any], convert: Callable[[Any], T], instead: T,
    refused: dict[int, str],
) -> list[T]:  # fmt: skip
    values = values if isinstance(values, list) else list(values)
    try:
        return list(map(convert, values))
    except InvalidMessage:
        pass  # one of them: which, is found one by one
    made = []
    for number, value in enumerate(values):
        try:
            made.append(convert(value))
        except InvalidMessage as error:
            refused.setdefault(number, f"{name}: {error}")
            made.append(instead)
    return made


def _integers(column: pa.Array) -> list[int | None]:
    """Timestamps and intervals as microseconds, integers as they are."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    elif pa.types.is_duration(column.type):
        column = column.cast(pa.duration("us"))
    found: list[int | None] = column.cast(pa.int64()).to_pylist()
    return found


def _due_of_micros(us: int | None) -> str:
    if us is None:
        raise InvalidMessage("it is null")
    return str(check_due_ms(-(-us // 1000)))


def _due_of_ms(ms: int | None) -> str:
    if ms is None:
        raise InvalidMessage("it is null")
    if ms in _SECONDS_ERA:
        raise InvalidMessage(f"{ms} looks like seconds; epoch milliseconds are wanted")
    if ms in _DATES:
        raise InvalidMessage(f"{ms} looks like a date; epoch milliseconds are wanted")
    return str(check_due_ms(ms))


def _delay_of_micros(us: int | None) -> str:
    return _delay_of_ms(None if us is None else -(-us // 1000))


def _delay_of_ms(ms: int | None) -> str:
    if ms is None:
        raise InvalidMessage("it is null")
    if ms < 0:
        raise InvalidMessage(f"a delay cannot be negative: {ms} ms; 0 is now")
    # The server's clock decides when it is due; this one is near enough for the year.
    if ms + time.time_ns() // 1_000_000 > MAX_DUE_MS:
        raise InvalidMessage(f"a delay of {ms} ms ends beyond the year 9999")
    return f"+{ms}"


def _ttl_of_micros(us: int | None) -> int | None:
    return _ttl_of_ms(None if us is None else -(-us // 1000))


def _ttl_of_ms(ms: int | None) -> int | None:
    if ms is None:
        return None
    if ms <= 0:
        raise InvalidMessage(f"a ttl counts from due and is longer than 0, not {ms} ms")
    return min(ms, MAX_DUE_MS)


def _policy(retry: Any) -> str | None:
    if retry is None or isinstance(retry, str):
        return None if retry is None else _policy_of_text(retry)
    if None in retry:
        raise InvalidMessage("one of the delays is null")
    if retry and isinstance(retry[0], int):
        return RetryPolicy(tuple(retry)).encode()
    return RetryPolicy.of(retry).encode()


@lru_cache(maxsize=1024)
def _policy_of_text(text: str) -> str:
    return RetryPolicy.parse(text).encode()


def _headers(pairs: Sequence[tuple[str, str]] | None) -> bytes:
    return encode_headers(dict(sorted(pairs, key=_name))) if pairs else b"0000"


def _name(pair: tuple[str, str]) -> str:
    return pair[0]


def _id(value: str | int | None) -> str:
    if value is None:
        raise InvalidMessage("it is null")
    return check_id(value if isinstance(value, str) else str(value))


def _topic(value: str | None) -> str:
    if value is None:
        raise InvalidMessage("it is null")
    return check_topic(value)


def _tails(
    column: pa.Array, headers: Sequence[bytes], refused: dict[int, str], *, json_text: bool
) -> list[bytes]:
    kind = column.type
    if _is_text(kind) or _is_binary(kind):
        letter = b"j" if json_text else b"s" if _is_text(kind) else b"b"
        encoded = column.cast(pa.binary()).to_pylist()
        if column.null_count or json_text:
            encoded = _converted("body", encoded, _json if json_text else _given, b"", refused)
        if not headers:
            start = letter + b"0000"
            return [start + one for one in encoded]
        return [letter + head + one for head, one in zip(headers, encoded, strict=True)]
    bodies = column.to_pylist(maps_as_pydicts="lossy")
    if not headers:
        return _converted("body", bodies, _json_tail, b"", refused)
    pairs = list(zip(bodies, headers, strict=True))
    return _converted("body", pairs, lambda pair: _json_tail(*pair), b"", refused)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _given(body: bytes | None) -> bytes:
    if body is None:
        raise InvalidMessage("it is null")
    return body


def _json(body: bytes | None) -> bytes:
    try:
        msgspec.json.decode(_given(body))
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(str(error) if body is None else f"it is no JSON: {error}") from None
    return _given(body)


def _json_tail(body: object, headers: bytes = b"0000") -> bytes:
    if body is None:
        raise InvalidMessage("it is null")
    return encode_tail(body, headers)
