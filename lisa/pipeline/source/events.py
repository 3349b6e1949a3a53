"""Positions and gaps of a journal, and its entries as Arrow columns.

Events of a journal are numbered 1, 2, 3, ..., so the number of events between two positions is
known, and missing events can be named. Each shard of a sharded topic has its own journal.

An entry is a flat list of names and values. Values are collected by column, without an object per
event, because a reader may have to catch up with millions of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Self

import pyarrow as pa

from lisa.admin.reading import entry_number
from lisa.core.model.clock import ms_datetime, utc_text
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.sharding import shard_suffix, topic_of
from lisa.core.model.stream import entry_fields
from lisa.pipeline.source.read_columns import timestamps, to_batch

_LARGEST = 2**63 - 1  # largest sequence number in Spark's bigint; Redis allows larger ones

ARCHIVE_ADVICE = (
    "To record this gap and continue, run the archive again with --on-gap record (in a program: "
    "on_gap='record'). To prevent gaps, run the archive more often, or raise the topic's "
    "journal_max"
)
"""The advice of the job `archive`, instead of `ADVICE`."""

ADVICE = (
    "To continue without these events, set option fail_on_gap=false: each gap is then one row of "
    "state 'gap'. To prevent gaps, read more often, raise the topic's journal_max, or set option "
    "archive to a name: the journal then keeps events until this reader has read them"
)


Item = Sequence[Any]
"""An entry as XRANGE returns it: its id, and a list of alternating names and values."""

_HEAD = [b"n", b"actor", b"id", b"state", b"group", b"attempt"]

_WIDTH = 2 * len(_HEAD)

_ENTRY_BYTES = 300
"""Approximate size of an event in a reply, without its envelope."""

_TEXT = ("policy", "reason", "place")

_TIMES = ("due", "expires")


class Mark(NamedTuple):
    """A position in a journal, right after an event: the event's entry id and number."""

    entry: str
    number: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Convert from the form stored in an offset."""
        return cls(str(stored["id"]), int(stored["n"]))

    def stored(self) -> dict[str, Any]:
        """The form stored in an offset."""
        return {"id": self.entry, "n": self.number}

    @property
    def where(self) -> tuple[int, int]:
        """The entry id as milliseconds and sequence number, which compare like ids."""
        return entry_number(self.entry)


START = Mark("0-0", 0)
"""The position before the first event."""


class JournalGap(NamedTuple):
    """Missing events of a journal.

    why: the reason. behind: entry id of the last event before the gap. first, last: numbers of the
    first and last missing event; `last` is None if the server came back empty or older, so that
    their number is unknown. until: entry id of the first event after the gap, None if there is none
    yet.
    """

    journal: str
    why: str
    behind: str
    first: int
    last: int | None
    until: str | None

    @property
    def where(self) -> tuple[int, int]:
        """The gap's position in the order of events: right after the event before it."""
        return entry_number(after(self.behind))

    def describe(self) -> str:
        """The gap as text: event numbers, entry ids with times, and the reason."""
        if self.last is None:
            what = f"an unknown number of events from {self.first} on"
        elif self.first == self.last:
            what = f"event {self.first}"
        else:
            what = f"events {self.first} to {self.last}"
        until = f", before {_shown(self.until)}" if self.until else ""
        shard = shard_suffix(self.journal)
        of = f"{topic_of(self.journal)!r}, shard {shard}," if shard else repr(self.journal)
        return (
            f"the journal of topic {of} lacks {what}: "
            f"after {_shown(self.behind)}{until}: {self.why}"
        )


def _shown(entry: str) -> str:
    try:
        at = ms_datetime(entry_number(entry)[0])
    except OverflowError:
        return entry
    return f"{entry} ({utc_text(at)})"


def after(entry: str) -> str:
    """The smallest id greater than `entry`."""
    milliseconds, sequence = entry_number(entry)
    if sequence >= _LARGEST:
        return f"{milliseconds + 1}-0"
    return f"{milliseconds}-{sequence + 1}"


def before(entry: str) -> str:
    """The largest id smaller than `entry`."""
    milliseconds, sequence = entry_number(entry)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{_LARGEST}" if milliseconds else "0-0"


def shares(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Split `limit` fairly: journal -> number of events; small journals are read whole."""
    given: dict[str, int] = {}
    left = limit
    ordered = sorted(counts.items(), key=lambda pair: (pair[1], pair[0]))
    for i, (journal, count) in enumerate(ordered):
        fair = -(-left // (len(ordered) - i))
        given[journal] = min(count, fair)
        left -= given[journal]
    return given


def number_of(item: Item) -> int | None:
    """The number of an event; None for an entry that is not an event."""
    flat = item[1]
    if not flat:
        return None
    at = 0 if flat[0] == b"n" else next((i for i in range(0, len(flat), 2) if flat[i] == b"n"), -1)
    try:
        return int(flat[at + 1]) if at >= 0 else None
    except (ValueError, IndexError):
        return None


class Events:
    """Collects entries of journals, and returns them as record batches of a schema.

    A record batch takes as long to make as hundreds of events, so small journals share one.
    """

    def __init__(self, journal: str, schema: pa.Schema) -> None:
        self._journal = journal
        self._schema = schema
        self._clear()

    def turn_to(self, journal: str) -> None:
        """Add the following entries as those of another journal."""
        if journal != self._journal:
            self._earlier.append((self._journal, len(self)))
            self._journal = journal

    def _clear(self) -> None:
        self._earlier: list[tuple[str, int]] = []
        """Journals before the present one, and how many entries there were at their end."""
        self._entries: list[bytes] = []
        self._heads: list[Sequence[bytes]] = []
        self._extras: dict[bytes, list[tuple[int, bytes]]] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Sequence[Item]) -> list[int]:
        """Add a page of entries; returns the numbers of its events.

        Entries that Lisa did not write are skipped.
        """
        entries, heads, extras = self._entries, self._heads, self._extras
        first, total = len(entries), 0
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
                    total += len(flat[k + 1])
                if name in extras:
                    extras[name].append((len(entries), flat[k + 1]))
                else:
                    extras[name] = [(len(entries), flat[k + 1])]
            entries.append(entry)
            heads.append(flat[1:_WIDTH:2])
        try:
            numbers = list(map(int, map(itemgetter(0), heads[first:])))
        except ValueError:  # a foreign entry has the fields of an event, but no valid number
            del entries[first:], heads[first:]
            for name, values in extras.items():
                extras[name] = [value for value in values if value[0] < first]
            return self.add([item for item in items if number_of(item) is not None])
        self.size += total + _ENTRY_BYTES * len(items)
        return numbers

    def take(self) -> pa.RecordBatch:
        """The events added since the last batch, in the order of each journal."""
        rows = len(self._entries)
        numbers, actors, ids, states, groups, attempts = zip(*self._heads, strict=True)
        stamps = b"-".join(self._entries).split(b"-")
        columns: dict[str, Any] = {
            **self._names(rows),
            "group": _texts([group or None for group in groups]),
            "id": _texts([message_id or None for message_id in ids]),
            "state": _texts(states),
            "at": _times(stamps[0::2]),
            "attempt": _numbers(attempts, missing=0).cast(pa.int32()),
            "actor": _texts([actor or None for actor in actors]),
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
        columns["settled"] = pa.array([end == b"1" for end in self._sparse(b"end", rows)])
        if "body" in self._schema.names or "headers" in self._schema.names:
            columns.update(opened(envelopes))
        self._clear()
        return to_batch(self._schema, columns, rows)

    def _names(self, rows: int) -> dict[str, pa.Array]:
        """The columns topic and shard."""
        topics: list[str] = []
        shards: list[str | None] = []
        for journal, end in (*self._earlier, (self._journal, rows)):
            count = end - len(topics)
            if count:
                topics += [topic_of(journal)] * count
                shards += [shard_suffix(journal)] * count
        return {"topic": pa.array(topics, pa.string()), "shard": pa.array(shards, pa.string())}

    def _sparse(self, name: bytes, rows: int) -> list[bytes | None]:
        """The column of an optional field."""
        values: list[bytes | None] = [None] * rows
        for at, value in self._extras.get(name, ()):
            values[at] = value
        return values


def gap_batch(gap: JournalGap, schema: pa.Schema) -> pa.RecordBatch:
    """One row of state `gap` that represents missing events."""
    milliseconds, sequence = gap.where
    columns = {
        "topic": [topic_of(gap.journal)],
        "shard": [shard_suffix(gap.journal)],
        "state": ["gap"],
        "at": _times([b"%d" % milliseconds]),
        "attempt": [0],
        "reason": [gap.describe()],
        "settled": [False],
        "seq": [sequence],
        "number": [gap.first],
    }
    return to_batch(schema, columns, 1)


def opened(envelopes: Sequence[bytes | None]) -> dict[str, list[Any]]:
    """Columns kind, headers and body of envelopes.

    For an envelope of unknown version, kind and headers are None and body is the whole envelope.
    """
    kinds: list[str | None] = []
    headers: list[list[tuple[str, str]] | None] = []
    bodies: list[bytes | None] = []
    for data in envelopes:
        kind, names, body = None, None, data
        if data:
            try:
                envelope = decode_envelope(data)
            except InvalidMessage:
                pass  # unknown version: keep the whole envelope as body
            else:
                kind, body = envelope.kind, envelope.body
                names = list(envelope.headers.items())
        kinds.append(kind)
        headers.append(names)
        bodies.append(body)
    return {"kind": kinds, "headers": headers, "body": bodies}


def _in_order(item: Item) -> list[bytes] | None:
    """The fields of an event with those of _HEAD first; None if the entry is not an event."""
    if number_of(item) is None:
        return None
    fields = entry_fields(item[1])
    if not fields.get(b"id") or not fields.get(b"state"):
        return None
    ordered = [part for name in _HEAD for part in (name, fields.pop(name, b""))]
    return ordered + [part for pair in fields.items() for part in pair]


def _texts(values: Sequence[bytes | None]) -> pa.Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # a foreign entry that is not UTF-8
        return pa.array([v if v is None else v.decode("utf-8", "replace") for v in values])


def _numbers(values: Sequence[bytes | None], missing: int | None = None) -> pa.Array:
    try:
        return _texts(values).cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.array([_number(value, missing) for value in values], pa.int64())


def _times(values: Sequence[bytes | None]) -> pa.Array:
    return timestamps(_numbers(values))


def _number(value: bytes | None, missing: int | None) -> int | None:
    try:
        return int(float(value)) if value else missing
    except (ValueError, OverflowError):
        return missing
