"""Reads the places where live messages stand, in pages that hold up nobody.

Bodies are read by their lengths, which are asked for first: so a reply has a megabyte, or one body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from lisa.admin.reading import (
    Position,
    ask_stream,
    entry_number,
    sorted_page,
    stream_group,
)
from lisa.core.flow import Flow
from lisa.core.pages import readable
from lisa.core.shards import base, shard_of
from lisa.core.store import Store, chunks
from lisa.core.stream import parse_entry
from lisa.core.transitions.inspect import Inspect
from lisa.pipeline.source.events import opened
from lisa.pipeline.source.read_columns import to_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from lisa.core.store import SyncStore

__all__ = ["ABOVE", "Part", "Rows", "read_part"]

ABOVE = b"\xff" * 257
"""Behind any member of a sorted set."""

PAGE = 400
REPLY_BYTES = 1 << 20
BATCH_ROWS = 10_000
BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Part(InputPartition):
    """What one task reads: the states of a topic and its groups named, or the ids named.

    `topic` is one place of it, where it is split over shards.

    Of sorted sets what lies behind `after`, up to and with `until` (score and member).
    """

    topic: str
    states: Collection[str]
    groups: tuple[str, ...] = ()
    after: Position | None = None
    until: tuple[int, bytes] | None = None
    ids: tuple[str, ...] | None = None


class Found:
    """Messages in one place, as columns."""

    def __init__(self, state: str, group: str | None, ids: list[str], dues: list[int]) -> None:
        self.state = state
        self.group = group
        self.ids = ids
        self.dues: Sequence[int | None] = dues
        self.attempts: Sequence[int] = [0] * len(ids)
        self.reasons: Sequence[str | None] = [None] * len(ids)
        self.consumers: Sequence[str | None] = [None] * len(ids)


class Rows:
    """Gathers rows, each id once per group, and gives them as record batches of a schema."""

    def __init__(self, topic: str, schema: pa.Schema) -> None:
        self._topic = topic
        self._schema = schema
        self._seen: set[tuple[str | None, str]] = set()
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        names = set(schema.names)
        self._with_bodies = bool(names & {"body", "headers", "kind", "envelope"})
        self._with_expiry = "expires" in names
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether a batch is worth giving."""
        return len(self._columns["id"]) >= BATCH_ROWS or self._bytes >= BATCH_BYTES

    def take(self) -> pa.RecordBatch:
        """What was gathered since the last batch."""
        import pyarrow as pa

        columns: dict[str, Any] = dict(self._columns)
        self._columns = {name: [] for name in _COLUMNS}
        rows, self._bytes = len(columns["id"]), 0
        for name in ("due", "expires"):
            milliseconds = pa.array(columns[name], pa.int64())
            columns[name] = milliseconds.cast(pa.timestamp("ms", "UTC")).cast(
                pa.timestamp("us", "UTC")
            )
        columns["topic"] = pa.repeat(pa.scalar(base(self._topic)), rows)
        columns["shard"] = pa.repeat(pa.scalar(shard_of(self._topic), pa.string()), rows)
        envelopes = columns.pop("envelopes")
        if self._with_bodies:
            columns.update(opened(envelopes), envelope=envelopes)
        return to_batch(self._schema, columns, rows)

    def __len__(self) -> int:
        return len(self._columns["id"])

    def add(self, store: Store, found: Found) -> Flow[None]:
        """Add messages with all else that is asked for; those that have gone are left out."""
        fresh = [i for i, one in enumerate(found.ids) if (found.group, one) not in self._seen]
        ids = [found.ids[i] for i in fresh]
        if not ids:
            return
        self._seen.update((found.group, one) for one in ids)
        bodies: list[bytes | None] = [b""] * len(ids)
        if self._with_bodies:
            bodies = yield from _bodies(store, self._topic, ids)
        ends = (yield from self._ends(store, ids)) if self._with_expiry else [None] * len(ids)
        columns = self._columns
        for place, i in enumerate(fresh):
            body = bodies[place]
            if body is None:
                continue
            self._bytes += len(body)
            values = (
                ids[place], found.group, found.state, found.dues[i], found.attempts[i],
                found.reasons[i], found.consumers[i], ends[place], body,
            )  # fmt: skip
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name].append(value)

    def _ends(self, store: Store, ids: Sequence[str]) -> Flow[list[int | None]]:
        key = store.keys.topic(self._topic).expiry
        if not (yield from store.command("EXISTS", key)):
            return [None] * len(ids)
        scores = yield from store.commands([("ZSCORE", key, one) for one in ids])
        return [None if score is None else int(float(score)) for score in scores]


_COLUMNS = (
    "id", "group", "state", "due", "attempts", "reason", "consumer", "expires", "envelopes",
)  # fmt: skip


def read_part(store: SyncStore, part: Part, rows: Rows) -> Iterator[pa.RecordBatch]:
    """All of a part, in record batches.

    A group's places come in the order in which messages go through them, so that one that goes on
    meanwhile is met again, and known, rather than missed.
    """
    for pages in _places(store, part):
        for found in pages:
            store.drive(rows.add(store, found))
            if rows.full:
                yield rows.take()
    if len(rows):
        yield rows.take()


def _places(store: SyncStore, part: Part) -> Iterator[Iterator[Found]]:
    if part.ids is not None:
        yield _by_id(store, part)
        return
    keys = store.keys.topic(part.topic)
    if "waiting" in part.states:
        yield _sorted(store, part, keys.waiting, "waiting", None)
    for name in part.groups:
        own = keys.group(name)
        if "ready" in part.states:
            yield _stream(store, part.topic, name, "ready", _ready)
        if "in_flight" in part.states:
            yield _stream(store, part.topic, name, "in_flight", _in_flight)
        for state, key in (("retry", own.retry), ("garbage", own.garbage)):
            if state in part.states:
                yield _sorted(store, part, key, state, name)


def _sorted(
    store: SyncStore, part: Part, key: str, state: str, group: str | None
) -> Iterator[Found]:
    after = part.after
    while True:
        page = store.drive(sorted_page(store, key, after, PAGE))
        inside = page
        if part.until is not None:
            inside = [one for one in page if (one[1], one[0]) <= part.until]
        ids, dues = [], []
        for member, score in inside:
            for name in readable([member])[0]:
                ids.append(name)
                dues.append(score)
        found = Found(state, group, ids, dues)
        if group is not None and ids:
            store.drive(_failures(store, part.topic, group, found))
        yield found
        if len(inside) < PAGE:
            return
        last, score = inside[-1]
        after = Position(score, last.decode("utf-8", "surrogateescape"))


def _failures(store: Store, topic: str, group: str, found: Found) -> Flow[None]:
    """Fill in how often and why attempts have failed."""
    own = store.keys.topic(topic).group(group)
    attempts, reasons = yield from store.commands([
        ("HMGET", own.attempts, *found.ids), ("HMGET", own.reasons, *found.ids),
    ])  # fmt: skip
    found.attempts = [int(one or 0) for one in attempts]
    found.reasons = [None if one is None else one.decode("utf-8", "replace") for one in reasons]


_Item = tuple[str, bytes, bytes | None, int, int]  # entry id, consumer, message id, due, attempt
_Page = Callable[[Store, str, str, str], Flow[tuple[list[tuple[Any, str | None]], str | None]]]


def _stream(store: SyncStore, topic: str, group: str, state: str, read: _Page) -> Iterator[Found]:
    """What stands in a group's stream, handed out or not, as far as the group's index names it."""
    own = store.keys.topic(topic).group(group)
    position: str | None = ""
    while position is not None:
        items, position = store.drive(read(store, own.ready, group, position))
        entries = [(parse_entry(item), consumer) for item, consumer in items]
        named = [one for one in entries if one[0].id and readable([one[0].id.encode()])[0]]
        if not named:
            continue
        indexed = store.ask("HMGET", own.entries, *(entry.id for entry, _ in named))
        held = [
            one for one, index in zip(named, indexed, strict=True)
            if index is not None and index.decode() == one[0].entry
        ]  # fmt: skip
        if not held:
            continue
        found = Found(
            state, group, [entry.id for entry, _ in held], [entry.due_ms for entry, _ in held]
        )
        store.drive(_failures(store, topic, group, found))
        found.consumers = [consumer for _, consumer in held]
        yield found


def _ready(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    info = stream_group((yield from ask_stream(store, "XINFO", "GROUPS", key)), group)
    if info is None:
        return [], None
    start = info["last-delivered-id"].decode()
    if position and entry_number(position) > entry_number(start):
        start = position
    items = yield from store.command("XRANGE", key, f"({start}", "+", "COUNT", PAGE)
    behind = items[-1][0].decode() if len(items) == PAGE else None
    return [(item, None) for item in items], behind


def _in_flight(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    start = f"({position}" if position else "-"
    held = yield from ask_stream(store, "XPENDING", key, group, start, "+", PAGE)
    replies = yield from store.commands([("XRANGE", key, row[0], row[0]) for row in held or ()])
    items = [
        (reply[0], row[1].decode("utf-8", "replace"))
        for row, reply in zip(held or (), replies, strict=True)
        if reply
    ]
    return items, held[-1][0].decode() if held and len(held) == PAGE else None


def _by_id(store: SyncStore, part: Part) -> Iterator[Found]:
    """Ids that are looked up, wherever they stand."""
    ids, _ = readable([one.encode("utf-8", "replace") for one in part.ids or ()])
    for some in chunks(ids, store.batch_size(part.topic, Inspect)):
        seen = store.drive(store.run(Inspect(part.topic, some, bodies=False)))
        for one, inspection in zip(some, seen, strict=True):
            if inspection.waiting_due_ms is not None and "waiting" in part.states:
                yield Found("waiting", None, [one], [inspection.waiting_due_ms])
            for place in inspection.places:
                if place.group in part.groups and place.state in part.states:
                    found = Found(place.state, place.group, [one], [])
                    found.dues = [place.due_ms]
                    found.attempts = [place.failed_attempts]
                    found.reasons, found.consumers = [place.reason], [place.consumer]
                    yield found


def _bodies(store: Store, topic: str, ids: Sequence[str]) -> Flow[list[bytes | None]]:
    """The envelopes of ids, None for each that has gone."""
    keys = [store.keys.topic(topic).body(one) for one in ids]
    lengths = yield from store.commands([("STRLEN", key) for key in keys])
    bodies: list[bytes | None] = []
    sums = [0, *accumulate(lengths)]
    start = 0
    while start < len(keys):
        end = start + 1
        while end < len(keys) and sums[end + 1] - sums[start] <= REPLY_BYTES:
            end += 1
        bodies += yield from store.command("MGET", *keys[start:end])
        start = end
    return bodies
