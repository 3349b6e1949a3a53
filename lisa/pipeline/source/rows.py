"""Converts rows to messages.

Values are read from Arrow column by column, because an object per row would cost more than
everything else. Rows that are not valid messages are refused with a reason. Rows with a wall time
or a window are placed as by `Producer.send`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from lisa.core.model.clock import (
    FIRST_COMPACT_MS,
    MAX_DUE_MS,
    OLDEST_DUE_MS,
    check_due_ms,
    duration_ms,
    parse_duration,
)
from lisa.core.model.envelope import encode_headers, encode_tail
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import (
    COALESCED_IDS,
    MAX_ID_BYTES,
    WINDOW_HEADER,
    check_id,
    check_key,
    check_own_id,
    check_topic,
    keyed_id,
)
from lisa.core.model.lanes import own_lane
from lisa.core.model.late import message_policy, own_late, split_policy
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.placing import LocalTime, check_window, clock_ms, place
from lisa.pipeline.source.outcome import corrupt_rows

T = TypeVar("T")


_INTEGERS = range(-(1 << 63), 1 << 64)
"""Decimals without fraction, such as Parquet's uint64, are numbers in JSON if they are in here."""


class _Conversion:
    """Converts the columns of a batch. refused: row number -> why a value of it is not valid."""

    def __init__(self, refused: dict[int, str]) -> None:
        self.refused = refused

    def each(
        self, name: str, convert: Callable[[Any], T], instead: T, values: Iterable[Any]
    ) -> list[T]:
        """The converted values of a column, and `instead` for refused rows."""
        values = values if isinstance(values, list) else list(values)
        try:
            return list(map(convert, values))
        except InvalidMessage:
            pass  # find the invalid values one by one
        made = []
        for number, value in enumerate(values):
            try:
                made.append(convert(value))
            except InvalidMessage as error:
                self.refused.setdefault(number, f"{name}: {error}")
                made.append(instead)
        return made


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Messages as columns; `ids`, `topics` and `keys` are empty if the table lacks the column.

    numbers: their row numbers in the Arrow batch. ids: those with a key include it. dues: in the
    form that Lua scripts parse. tails: envelopes without their heads. asked: the due times as the
    table gives them, before windows moved them; ids are derived from these, and from wall times in
    tails. named: these times with those of wall times, '0' where the time is refused. refused: row
    number -> why the row is not a valid message.
    """

    numbers: Sequence[int]
    ids: Sequence[str]
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]
    topics: Sequence[str] = ()
    asked: Sequence[str] = ()
    keys: Sequence[str | None] = ()
    named: Sequence[str] = ()
    refused: Mapping[int, str] = field(default_factory=dict)

    def good(self, without: Collection[int] = ()) -> MessageColumns:
        """The messages that are neither refused nor among the given row numbers."""
        if not self.refused and not without:
            return self
        left = set(self.numbers) - self.refused.keys() - set(without)
        return self.picked(sorted(left))

    def cut(self, start: int, end: int | None = None) -> MessageColumns:
        """The messages from index `start` up to but not including `end`."""
        return self._of_each(lambda column: column[start:end])

    def picked(self, positions: Sequence[int]) -> MessageColumns:
        """The messages at the given indexes."""
        return self._of_each(lambda column: [column[index] for index in positions])

    def _of_each(self, select: Callable[[Sequence[Any]], Sequence[Any]]) -> MessageColumns:
        columns = {column.name: getattr(self, column.name) for column in fields(self)[:-1]}
        picked: Any = {name: select(column) for name, column in columns.items() if column}
        return replace(self, refused={}, **picked)


def read_rows(batch: pa.RecordBatch, *, json_text: bool) -> MessageColumns:
    """Convert one Arrow batch of checked columns. json_text: text bodies contain JSON."""
    conversion = _Conversion(corrupt_rows(batch))
    each = conversion.each
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    nothing: list[None] = [None] * batch.num_rows

    dues = _dues(columns, batch.num_rows, conversion)
    ttls: Sequence[int | None] = nothing
    if "ttl" in columns:
        ttls = each("ttl", _ttl, None, _milliseconds(columns["ttl"]).to_pylist())
    policies: Sequence[str | None] = nothing
    if "retry" in columns:
        policies = each("retry", _policy, None, columns["retry"].to_pylist())
    if "late" in columns:
        lates = each("late", _late, None, columns["late"].to_pylist())
        policies = list(map(message_policy, policies, lates))
    if "cost" in columns or "slack" in columns:
        lanes = _lanes(columns, nothing, conversion)
        parts = map(split_policy, policies)
        policies = [
            message_policy(part.retry, part.late, lane)
            for part, lane in zip(parts, lanes, strict=True)
        ]
    given: Sequence[Any] = ()
    if "headers" in columns:
        given = each("headers", _different, None, columns["headers"].to_pylist())
    headers: Sequence[bytes] = ()
    asked = named = dues
    if "at_local" in columns or "window" in columns:
        dues, asked, named, headers = _placed(columns, dues, given, conversion)
    elif given:
        headers = each("headers", _row_headers, b"0000", given)
    kinds = columns["kind"].to_pylist() if "kind" in columns else ()
    tails = _tails(columns["body"], headers, kinds, conversion, json_text=json_text)
    keys: Sequence[str | None] = ()
    if "key" in columns:
        keys = each("key", _key, None, columns["key"].cast(pa.string()).to_pylist())
    ids = _ids(columns["id"].cast(pa.string()), keys, conversion) if "id" in columns else ()
    topics: Sequence[str] = ()
    if "topic" in columns:
        topics = each("topic", _topic, "", columns["topic"].to_pylist())
    return MessageColumns(
        numbers=range(batch.num_rows),
        ids=ids,
        dues=dues,
        tails=tails,
        ttls_ms=ttls,
        policies=policies,
        topics=topics,
        asked=asked,
        keys=keys,
        named=named,
        refused=conversion.refused,
    )


def _lanes(
    columns: Mapping[str, pa.Array], nothing: list[None], conversion: _Conversion
) -> list[str | None]:
    """The costs and slacks of messages in their stored form."""
    costs: Sequence[int | None] = nothing
    slacks: Sequence[timedelta | None] = nothing
    if "cost" in columns:
        costs = conversion.each("cost", read_cost, None, columns["cost"].to_pylist())
    if "slack" in columns:
        given = _milliseconds(columns["slack"]).to_pylist()
        slacks = conversion.each("slack", _slack, None, given)
    return [_lane(*both) for both in zip(costs, slacks, strict=True)]


def _ids(texts: pa.Array, keys: Sequence[str | None], conversion: _Conversion) -> Sequence[str]:
    """The ids of messages. Without a key, that of a row may be one that Lisa returned."""
    ids: list[str | None] = texts.to_pylist()
    if keys:
        return conversion.each("id", lambda pair: _keyed_id(*pair), "", zip(keys, ids, strict=True))
    return ids if _are_ids(texts) else conversion.each("id", _id, "", ids)  # type: ignore[return-value]  # no null is an id


def _keyed_id(key: str | None, own_id: str | None) -> str:
    if key is None:
        return _id(own_id)
    if own_id in COALESCED_IDS:
        raise InvalidMessage(f"id {own_id!r} is that of messages with debounce or the like")
    return keyed_id(key, check_own_id(_not_null(own_id)))


def _dues(columns: Mapping[str, pa.Array], n: int, conversion: _Conversion) -> list[str]:
    if "due" in columns:
        milliseconds = _milliseconds(columns["due"])
        if _is_within(milliseconds, OLDEST_DUE_MS, FIRST_COMPACT_MS - 1):
            texts: list[str] = milliseconds.cast(pa.string()).to_pylist()
            return texts
        return conversion.each("due", _due, "0", milliseconds.to_pylist())
    if "delay" in columns:
        return conversion.each("delay", _delay, "+0", _milliseconds(columns["delay"]).to_pylist())
    return ["+0"] * n


def _placed(
    columns: Mapping[str, pa.Array], dues: list[str], given: Sequence[Any], conversion: _Conversion
) -> tuple[list[Any], ...]:
    """For rows placed by a calendar: `dues`, `asked` and `named` of the messages, and headers.

    Equal rows are placed once.
    """
    is_local, now_ms = "at_local" in columns, clock_ms()
    nothing: list[None] = [None] * len(dues)
    named = (
        columns[name].to_pylist() if name in columns else nothing
        for name in ("at_local", "tz", "window")
    )

    @cache
    def placed(row: tuple[Any, ...]) -> tuple[str, str, str, bytes]:
        due, at_local, tz, window, pairs = row
        if is_local:
            # A wall time is in the headers. Its instant depends on the machine's time zone data.
            due, asked = None, ""
            _not_null(at_local)
        else:
            asked = due
        options = {"at_local": at_local, "window": window, "headers": dict(pairs)}
        made = place(options, due, tz, now_ms)
        local = LocalTime.of_headers(made.headers)
        named = asked if local is None else str(local.due_ms)
        return made.due, asked, named, encode_headers(made.headers)

    headers = (tuple(sorted(pairs or ())) for pairs in given or nothing)
    rows = list(zip(dues, *named, headers, strict=True))
    refused = ("0", "0", "0", b"0000")
    found = conversion.each("at_local" if is_local else "window", placed, refused, rows)
    return tuple(map(list, zip(*found, strict=True))) if found else ([], [], [], [])


def _milliseconds(column: pa.Array) -> pa.Array:
    """Timestamps and intervals, rounded up; integers and text as they are."""
    if _is_text(column.type):
        return column
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    elif pa.types.is_duration(column.type):
        column = column.cast(pa.duration("us"))
    else:
        return column.cast(pa.int64())
    return rounded_up(column.cast(pa.int64()))


def rounded_up(values: pa.Array) -> pa.Array:
    """Integers divided by 1000, rounded up."""
    whole = pc.divide(values, 1000)  # rounds towards zero
    is_cut = pc.greater(values, pc.multiply(whole, 1000))
    return pc.add(whole, is_cut.cast(pa.int64()))


def _is_within(column: pa.Array, least: int, most: int) -> bool:
    """Whether all values are in this range, both ends included, and none is null."""
    if column.null_count or not len(column):
        return False
    bounds = pc.min_max(column)
    return bool(bounds["min"].as_py() >= least and bounds["max"].as_py() <= most)


def _are_ids(column: pa.Array) -> bool:
    """Whether all texts are surely valid ids; False says nothing."""
    return (
        _is_within(pc.binary_length(column), 1, MAX_ID_BYTES)
        and pc.all(pc.ascii_is_printable(column)).as_py()
    )


def _due(ms: int | None) -> str:
    return str(check_due_ms(_not_null(ms)))


def _delay(given: int | str | None) -> str:
    ms = _duration_ms(_not_null(given))
    if ms < 0:
        raise InvalidMessage(f"delay {ms} ms is negative; use 0 for now")
    # The server's clock determines the due time; the local clock is accurate enough here.
    if ms + time.time_ns() // 1_000_000 > MAX_DUE_MS:
        raise InvalidMessage(f"delay {ms} ms ends after the year 9999")
    return f"+{ms}"


def _ttl(given: int | str | None) -> int | None:
    if given is None:
        return None
    ms = _duration_ms(given)
    if ms <= 0:
        raise InvalidMessage(f"ttl {ms} ms is not positive; it counts from due")
    return min(ms, MAX_DUE_MS)


@lru_cache(maxsize=1024)
def _duration_ms(given: int | str) -> int:
    return given if isinstance(given, int) else duration_ms(parse_duration(given, bare_ms=True))


def _policy(retry: Any) -> str | None:
    if retry is None or isinstance(retry, str):
        return None if retry is None else _policy_of_text(retry)
    if None in retry:
        raise InvalidMessage("a delay is null")
    if retry and isinstance(retry[0], int):
        return RetryPolicy(tuple(retry)).encode()
    return RetryPolicy.of(retry).encode()


@lru_cache(maxsize=1024)
def _policy_of_text(text: str) -> str:
    return RetryPolicy.parse(text).encode()


@lru_cache(maxsize=1024)
def _late(text: str | None) -> str | None:
    return own_late(text)


def read_cost(given: int | str | None) -> int | None:
    """The cost of a message, which may be text. Raises InvalidMessage."""
    if isinstance(given, str) and given.isascii() and given.isdecimal():
        given = int(given[:9])
    own_lane(given, None)
    return given if isinstance(given, int) else None


def _slack(given: int | str | None) -> timedelta | None:
    if given is None:
        return None
    slack = timedelta(milliseconds=_duration_ms(given))
    own_lane(None, slack)
    return slack


@lru_cache(maxsize=1024)
def _lane(cost: int | None, slack: timedelta | None) -> str | None:
    return own_lane(cost, slack)


def _id(value: str | None) -> str:
    return check_id(_not_null(value))


def _key(value: str | None) -> str | None:
    return None if value is None else check_key(value)


def _topic(value: str | None) -> str:
    return check_topic(_not_null(value))


def _different(pairs: Sequence[tuple[str, str]] | None) -> Sequence[tuple[str, str]] | None:
    """The headers of a row. Raises InvalidMessage if two have the same name."""
    if pairs and len(dict(pairs)) < len(pairs):
        raise InvalidMessage("a header occurs twice")
    return pairs


def _tails(
    column: pa.Array,
    headers: Sequence[bytes],
    kinds: Sequence[str | None],
    conversion: _Conversion,
    *,
    json_text: bool,
) -> list[bytes]:
    """Encode the bodies, each with its headers; `headers`, `kinds` are empty without that column.

    A kind of null follows from the type of the body.
    """
    kind = column.type
    if (_is_text(kind) or _is_binary(kind)) and any(kinds):
        usual = "j" if json_text else "s" if _is_text(kind) else "b"
        heads = headers or [b"0000"] * len(kinds)
        bodies = column.cast(pa.binary()).to_pylist()
        rows = list(zip((kind or usual for kind in kinds), heads, bodies, strict=True))
        return conversion.each("body", lambda row: _tail_of_kind(*row), b"", rows)
    if _is_text(kind) or _is_binary(kind):
        letter = b"j" if json_text else b"s" if _is_text(kind) else b"b"
        encoded = column.cast(pa.binary()).to_pylist()
        if column.null_count or json_text:
            encoded = conversion.each("body", _json if json_text else _not_null, b"", encoded)
        if not headers:
            start = letter + b"0000"
            return [start + body for body in encoded]
        return [letter + head + one for head, one in zip(headers, encoded, strict=True)]
    if _has(kind, _is_zoned):
        column = column.cast(_in_utc(kind))
    bodies = column.to_pylist()
    if _has(kind, pa.types.is_map, pa.types.is_decimal, pa.types.is_float32):
        plain = partial(_plain, kind)
        bodies = conversion.each("body", plain, "", bodies)
    if not headers:
        return conversion.each("body", _json_tail, b"", bodies)
    pairs = list(zip(bodies, headers, strict=True))
    return conversion.each("body", lambda pair: _json_tail(*pair), b"", pairs)


def _has(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or a type within it, fulfils one of the tests."""
    children = (kind.field(index).type for index in range(kind.num_fields))
    return any(test(kind) for test in tests) or any(_has(child, *tests) for child in children)


def _is_zoned(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """A type whose times print in UTC: bodies must not depend on the session's zone."""
    if _is_zoned(kind):
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_map(kind):
        return pa.map_(_in_utc(kind.key_type), _in_utc(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_in_utc(kind.value_type))
    return pa.large_list(_in_utc(kind.value_type)) if pa.types.is_large_list(kind) else kind


def _plain(kind: pa.DataType, value: Any) -> Any:
    """A value without Arrow's maps, decimals that are integers, and floats of 32 bits."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        made = {key: _plain(kind.item_type, item) for key, item in value}
        if len(made) < len(value):
            raise InvalidMessage("a map has the same key twice")
        return made
    if pa.types.is_struct(kind):
        return {field.name: _plain(field.type, value[field.name]) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(kind.value_type, item) for item in value]
    if pa.types.is_decimal(kind) and not kind.scale and int(value) in _INTEGERS:
        return int(value)
    return _printed(value) if pa.types.is_float32(kind) else value


def _printed(value: float) -> float:
    """The double that prints like a float of 32 bits: 1.1, not 1.100000023841858."""
    shortest = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(
        (shorter for shorter in shortest if _FLOAT.unpack(_FLOAT.pack(shorter))[0] == value), value
    )


_FLOAT = struct.Struct("f")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _not_null(value: T | None) -> T:
    if value is None:
        raise InvalidMessage("value is null")
    return value


def _json(body: bytes | None) -> bytes:
    text = _not_null(body)
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"not valid JSON: {error}") from None
    return text


def _utf8(body: bytes | None) -> bytes:
    text = _not_null(body)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"not UTF-8: {error}") from None
    return text


def _tail_of_kind(kind: str, headers: bytes, body: bytes | None) -> bytes:
    if kind not in _CHECKED:
        raise InvalidMessage(f"its kind {kind!r} is not j, s or b")
    return kind.encode() + headers + _CHECKED[kind](body)


_CHECKED: Mapping[str, Callable[[bytes | None], bytes]] = {
    "j": _json,
    "s": _utf8,
    "b": _not_null,
}


def _json_tail(body: object, headers: bytes = b"0000") -> bytes:
    return encode_tail(_not_null(body), headers)


def _row_headers(pairs: Sequence[tuple[str, str]] | None) -> bytes:
    """The encoded headers of a row that no calendar places. Raises InvalidMessage."""
    if not pairs:
        return b"0000"
    headers = dict(sorted(pairs, key=itemgetter(0)))
    if WINDOW_HEADER in headers:
        check_window(headers[WINDOW_HEADER])
    return encode_headers(headers)
