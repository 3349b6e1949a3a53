"""Entries of a topic's journal as Arrow columns.

An entry is a flat list of names and values. They are gathered by column, without an object per
event: a reader that catches up has millions of them before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from lisa.core.envelope import decode_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.shards import base, shard_of
from lisa.pipeline.source.read_columns import to_batch

if TYPE_CHECKING:
    from lisa.pipeline.source.marks import Gap

__all__ = ["Events", "Item", "gap_batch", "number_of", "opened"]

Item = Sequence[Any]
"""An entry as XRANGE gives it: its id, and names and values by turns."""

_HEAD = [b"n", b"actor", b"id", b"state", b"group", b"attempt"]
_WIDTH = 2 * len(_HEAD)
_ENTRY_BYTES = 300
"""What an event takes in a reply, its envelope apart."""

_TEXT = ("policy", "reason", "place")
_TIMES = ("due", "expires")
_MS = pa.timestamp("ms", "UTC")
_US = pa.timestamp("us", "UTC")


def number_of(item: Item) -> int | None:
    """The running number of an event; None for an entry that is none."""
    flat = item[1]
    if not flat:
        return None
    at = 0 if flat[0] == b"n" else next((i for i in range(0, len(flat), 2) if flat[i] == b"n"), -1)
    try:
        return int(flat[at + 1]) if at >= 0 else None
    except (ValueError, IndexError):
        return None


class Size(NamedTuple):
    """How large the entries of a page were, in bytes."""

    total: int
    largest: int


class Events:
    """Gathers entries of one journal, and gives them as record batches of a schema."""

    def __init__(self, place: str, schema: pa.Schema) -> None:
        self._place = place
        self._schema = schema
        self._clear()

    def _clear(self) -> None:
        self._entries: list[bytes] = []
        self._heads: list[Sequence[bytes]] = []
        self._extras: dict[bytes, list[tuple[int, bytes]]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Sequence[Item]) -> tuple[list[int], Size]:
        """Take a page. Gives the running numbers of its events, and how large they were.

        Entries that are no events (written by a foreign hand) are passed over.
        """
        entries, heads, extras = self._entries, self._heads, self._extras
        first, largest, total = len(entries), 0, 0
        for item in items:
            entry, flat = item
            width = len(flat)
            if flat[0:_WIDTH:2] != _HEAD:
                flat = _in_order(item)
                if flat is None:
                    continue
                width = len(flat)
            for k in range(_WIDTH, width, 2):
                name = flat[k]
                if name == b"envelope":
                    length = len(flat[k + 1])
                    total += length
                    largest = max(largest, length)
                if name in extras:
                    extras[name].append((len(entries), flat[k + 1]))
                else:
                    extras[name] = [(len(entries), flat[k + 1])]
            entries.append(entry)
            heads.append(flat[1:_WIDTH:2])
        size = Size(total + _ENTRY_BYTES * len(items), largest + _ENTRY_BYTES)
        try:
            numbers = list(map(int, map(itemgetter(0), heads[first:])))
        except ValueError:  # a foreign hand's looks like an event, but has no number
            del entries[first:], heads[first:]
            for name, values in extras.items():
                extras[name] = [one for one in values if one[0] < first]
            return self.add([item for item in items if number_of(item) is not None])
        self.size += size.total
        return numbers, size

    def take(self) -> pa.RecordBatch:
        """What was gathered since the last batch, in the order of the journal."""
        rows = len(self._entries)
        numbers, actors, ids, states, groups, attempts = zip(*self._heads, strict=True)
        stamps = b"-".join(self._entries).split(b"-")
        columns: dict[str, Any] = {
            "topic": pa.repeat(pa.scalar(base(self._place)), rows),
            "shard": pa.repeat(pa.scalar(shard_of(self._place), pa.string()), rows),
            "group": _texts([one or None for one in groups]),
            "id": _texts([one or None for one in ids]),
            "state": _texts(states),
            "at": _times(stamps[0::2]),
            "attempt": _numbers(attempts, missing=0).cast(pa.int32()),
            "actor": _texts([one or None for one in actors]),
            "seq": _numbers(stamps[1::2], missing=0),
            "number": _numbers(numbers, missing=0),
        }
        envelopes = self._sparse(b"envelope", rows)
        columns["envelope"] = pa.array(envelopes, pa.binary())
        for name in _TIMES:
            columns[name] = _times(self._sparse(name.encode(), rows))
        for name in _TEXT:
            columns[name] = _texts(self._sparse(name.encode(), rows))
        columns["late_us"] = _numbers(self._sparse(b"late", rows))
        columns["settled"] = pa.array([one == b"1" for one in self._sparse(b"end", rows)])
        if "body" in self._schema.names or "headers" in self._schema.names:
            columns.update(opened(envelopes))
        self._clear()
        return to_batch(self._schema, columns, rows)

    def _sparse(self, name: bytes, rows: int) -> list[bytes | None]:
        """A field that not every event has."""
        values: list[bytes | None] = [None] * rows
        for at, value in self._extras.get(name, ()):
            values[at] = value
        return values


def gap_batch(gap: Gap, schema: pa.Schema) -> pa.RecordBatch:
    """The one row that stands for events which are gone."""
    milliseconds, sequence = gap.where
    columns = {
        "topic": [base(gap.place)],
        "shard": [shard_of(gap.place)],
        "state": ["gap"],
        "at": _times([b"%d" % milliseconds]),
        "attempt": [0],
        "reason": [gap.told()],
        "settled": [False],
        "seq": [sequence],
        "number": [gap.first],
    }
    return to_batch(schema, columns, 1)


def opened(envelopes: Sequence[bytes | None]) -> dict[str, list[Any]]:
    """Columns kind, headers and body of envelopes; a body is the whole of one that is unknown."""
    kinds: list[str | None] = []
    headers: list[list[tuple[str, str]] | None] = []
    bodies: list[bytes | None] = []
    for data in envelopes:
        kind, names, body = None, None, data
        if data:
            try:
                envelope = decode_envelope(data)
            except InvalidMessage:
                pass  # unknown: without a kind, its body the whole of it
            else:
                kind, body = envelope.kind, envelope.body
                names = list(envelope.headers.items())
        kinds.append(kind)
        headers.append(names)
        bodies.append(body)
    return {"kind": kinds, "headers": headers, "body": bodies}


def _in_order(item: Item) -> list[bytes] | None:
    """The fields of an event that stand in another order, those of every event first."""
    if number_of(item) is None:
        return None
    flat = item[1]
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    if not fields.get(b"id") or not fields.get(b"state"):
        return None
    ordered = [part for name in _HEAD for part in (name, fields.pop(name, b""))]
    return ordered + [part for pair in fields.items() for part in pair]


def _texts(values: Sequence[bytes | None]) -> pa.Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8: a foreign hand's
        return pa.array([v if v is None else v.decode("utf-8", "replace") for v in values])


def _numbers(values: Sequence[bytes | None], missing: int | None = None) -> pa.Array:
    try:
        return _texts(values).cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.array([_number(value, missing) for value in values], pa.int64())


def _times(values: Sequence[bytes | None]) -> pa.Array:
    return _numbers(values).cast(_MS).cast(_US)


def _number(value: bytes | None, missing: int | None) -> int | None:
    try:
        return int(float(value)) if value else missing
    except (ValueError, OverflowError):
        return missing
