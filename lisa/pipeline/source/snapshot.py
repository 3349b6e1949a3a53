"""`spark.read.format("lisa")`: live messages, one row per message and group.

Options: `topic` (one, or several separated by commas; default: all registered topics), `state`
(some of waiting, ready, in_flight, retry, garbage), `partitions` (tasks per large set). Filters on
`topic`, `state`, `group`, `id` and `due` are pushed down: an id is looked up, not scanned for.

Messages change state during the read. A message that keeps its state is read exactly once. A
message that changes its state may appear in the old state, in the new one, in both, or (if the new
state was read before) not at all. Within one group, a message appears at most once.

Pages have a bounded size. Lengths of bodies are read first, so that a reply with bodies has at most
BYTES_PER_CALL, or a single body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from lisa.admin.messages import LiveState
from lisa.admin.reading import Position, pending_entries, positions_in, sorted_page, unread_entries
from lisa.core.model.clock import EPOCH
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_topic
from lisa.core.model.sharding import Layout, Topic, shard_suffix, topic_of
from lisa.core.model.stream import parse_entry
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import readable
from lisa.core.store.store import Store, chunks, portions
from lisa.core.transitions.inspect import Inspect, parted
from lisa.pipeline.server import Server
from lisa.pipeline.source import options
from lisa.pipeline.source.events import opened
from lisa.pipeline.source.read_columns import arrow_schema, checked, timestamps, to_batch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from lisa.core.store.store import SyncStore

_OPTIONS = options.SERVER | {"topic", "state", "partitions"}
_STATES = tuple(state.value for state in LiveState)
_MILLISECOND = timedelta(milliseconds=1)
_TASKS = 4
_WORTH_SPLITTING = 20_000  # members of a set
_MOST_IN_A_TASK = 250_000  # each task remembers the ids it has returned


ABOVE = b"\xff" * 257
"""Greater than any member of a sorted set."""

PAGE = 400

BATCH_ROWS = 10_000

BATCH_BYTES = 16 << 20

_COLUMNS = (
    "id",
    "group",
    "state",
    "due",
    "attempts",
    "reason",
    "consumer",
    "expires",
    "envelopes",
)


@dataclass(frozen=True)
class Selection:
    """The messages to read; None means no restriction.

    low_ms, high_ms: inclusive bounds of due times, epoch ms.
    """

    topics: frozenset[str] | None = None
    states: frozenset[str] = frozenset(_STATES)
    groups: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    low_ms: int | None = None
    high_ms: int | None = None


class SnapshotReader(DataSourceReader):
    """Reads live messages. Raises ConfigError for invalid options."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options.refuse_unknown(given, _OPTIONS, "read")
        self._server = Server.of(given.get("url"), given.get("prefix"))
        self._schema = checked(schema)
        self._tasks = options.whole_number(given, "partitions") or _TASKS
        topics = frozenset(map(check_topic, options.listed(given.get("topic", ""))))
        states = frozenset(options.listed(given.get("state", "")))
        for state in states:
            if state not in _STATES:
                raise options.wrong("state", state, f"one of {', '.join(_STATES)}")
        self._wanted = Selection(topics or None, states or frozenset(_STATES))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Restrict the selection; yields the filters that Spark must evaluate itself."""
        for condition in filters:
            narrowed = _narrowed(self._wanted, condition)
            if narrowed is not None:
                self._wanted = narrowed
            if narrowed is None or condition.attribute == ("due",):  # type: ignore[attr-defined]
                yield condition

    def partitions(self) -> Sequence[InputPartition]:
        """The parts to read: ranges of large sets, and one part per group for the rest."""
        with self._server.open() as store:
            return store.drive(self._parts(store))

    def _parts(self, store: Store) -> Flow[list[InputPartition]]:
        wanted, parts = self._wanted, []
        names = wanted.topics if wanted.topics is not None else (yield from store.topics())
        for topic in sorted(names):
            with suppress(InvalidMessage):  # a filter may contain an invalid topic
                check_topic(topic)
                layout = yield from store.layout(Topic(topic))
                for shard in layout.active(Topic(topic)):
                    parts += yield from self._of_shard(store, shard, layout)
        return parts

    def _of_shard(self, store: Store, topic: str, layout: Layout) -> Flow[list[InputPartition]]:
        wanted, keys = self._wanted, store.keys.topic(topic)
        groups = yield from store.groups(topic)
        if wanted.groups is not None:
            groups = tuple(name for name in groups if name in wanted.groups)
        waits = "waiting" in wanted.states and wanted.groups is None
        if wanted.ids is not None:
            states = wanted.states if waits else wanted.states - {"waiting"}
            shards_of_id = partial(layout.shards_of_id, topic_of(topic))
            mine = [message_id for message_id in wanted.ids if topic in shards_of_id(message_id)]
            return [ReadPart(topic, states, groups=groups, ids=tuple(sorted(mine)))]
        parts: list[InputPartition] = []
        if waits:
            parts += yield from self._ranges(store, keys.waiting, ReadPart(topic, {"waiting"}))
        for name in groups:
            small = set(wanted.states & {"ready", "in_flight"})
            own = keys.group(name)
            for state, key in (("retry", own.retry), ("garbage", own.garbage)):
                if state in wanted.states:
                    whole = ReadPart(topic, {state}, groups=(name,))
                    ranges = yield from self._ranges(store, key, whole)
                    if len(ranges) > 1:
                        parts += ranges
                    elif ranges:
                        small.add(state)
            if small:
                bounds = _bounds(wanted)
                parts.append(ReadPart(topic, small, (name,), after=bounds[0], until=bounds[1]))
        return parts

    def _ranges(self, store: Store, key: str, whole: ReadPart) -> Flow[list[ReadPart]]:
        """Split a sorted set into ranges of similar size; empty if the set is empty."""
        low, high = self._wanted.low_ms, self._wanted.high_ms
        lowest = "-inf" if low is None else low
        below, count = yield from store.commands(
            [
                ("ZCOUNT", key, "-inf", f"({lowest}"),
                ("ZCOUNT", key, lowest, "+inf" if high is None else high),
            ]
        )
        after, until = _bounds(self._wanted)
        if not count:
            return []
        tasks = 1
        if count >= _WORTH_SPLITTING:
            tasks = max(self._tasks, -(-count // _MOST_IN_A_TASK))
        ranks = [below + count * task // tasks for task in range(1, tasks)]
        replies = yield from store.commands(
            [("ZRANGE", key, rank, rank, "WITHSCORES") for rank in ranks]
        )
        ranges = []
        for reply in replies:
            for here in positions_in(reply):
                ranges.append(replace(whole, after=after, until=here))
                after = here
        return [*ranges, replace(whole, after=after, until=until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part as record batches."""
        if not isinstance(partition, ReadPart):
            return
        schema = arrow_schema(self._schema)
        with self._server.open() as store:
            yield from read_part(store, partition, RowCollector(partition.topic, schema))


def _bounds(wanted: Selection) -> tuple[Position | None, Position | None]:
    """Positions before the first and after the last message with a selected due time."""
    after = None if wanted.low_ms is None else Position(wanted.low_ms, b"")
    return after, None if wanted.high_ms is None else Position(wanted.high_ms, ABOVE)


def _narrowed(wanted: Selection, one: Filter) -> Selection | None:
    """The selection restricted by a filter; None if the filter cannot be pushed down."""
    if isinstance(one, (EqualTo, In)):
        values = one.value if isinstance(one, In) else (one.value,)
        match one.attribute:
            case ("topic",):
                return replace(wanted, topics=_both(wanted.topics, values))
            case ("state",):
                return replace(wanted, states=_both(wanted.states, values))
            case ("group",):
                return replace(wanted, groups=_both(wanted.groups, values))
            case ("id",):
                return replace(wanted, ids=_both(wanted.ids, values))
    if getattr(one, "attribute", None) != ("due",) or not isinstance(
        one, (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
    ):
        return None
    if not isinstance(one.value, datetime):
        return None
    # Rounded down, the bounds select slightly too much; Spark applies the exact filter again.
    at_ms = (one.value.astimezone(UTC) - EPOCH) // _MILLISECOND
    low, high = wanted.low_ms, wanted.high_ms
    if not isinstance(one, (LessThan, LessThanOrEqual)):
        low = at_ms if low is None else max(low, at_ms)
    if not isinstance(one, (GreaterThan, GreaterThanOrEqual)):
        high = at_ms if high is None else min(high, at_ms)
    return replace(wanted, low_ms=low, high_ms=high)


def _both(known: frozenset[str] | None, values: Collection[Any]) -> frozenset[str]:
    asked = frozenset(value for value in values if isinstance(value, str))
    return asked if known is None else known & asked


@dataclass(frozen=True)
class ReadPart(InputPartition):
    """The messages that one task reads: some states and groups of a topic, or some ids.

    topic: the topic, or one shard of a sharded topic.
    after, until: bounds of the range of a sorted set; `until` is inclusive.
    """

    topic: str
    states: Collection[str]
    groups: tuple[str, ...] = ()
    after: Position | None = None
    until: Position | None = None
    ids: tuple[str, ...] | None = None


def read_part(store: SyncStore, part: ReadPart, rows: RowCollector) -> Iterator[pa.RecordBatch]:
    """The messages of a part as record batches.

    The states of a group are read in the order in which messages pass through them: a message that
    moves during the read is found twice and deduplicated, rather than missed.
    """
    for pages in _pages(store, part):
        for found in pages:
            store.drive(rows.add(store, found))
            if rows.full:
                yield rows.take()
    if len(rows):
        yield rows.take()


def _pages(store: SyncStore, part: ReadPart) -> Iterator[Iterator[LiveMessages]]:
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
    store: SyncStore, part: ReadPart, key: str, state: str, group: str | None
) -> Iterator[LiveMessages]:
    after = part.after
    while True:
        page = store.drive(sorted_page(store, key, after, PAGE))
        inside = page
        if part.until is not None:
            inside = [member for member in page if member <= part.until]
        ids, dues = [], []
        for score, member in inside:
            for name in readable([member])[0]:
                ids.append(name)
                dues.append(score)
        found = LiveMessages(state, group, ids, dues)
        if group is not None and ids:
            store.drive(_failures(store, part.topic, group, found))
        yield found
        if len(inside) < PAGE:
            return
        after = inside[-1]


def _failures(store: Store, topic: str, group: str, found: LiveMessages) -> Flow[None]:
    """Set the number of failed attempts and the last reason."""
    own = store.keys.topic(topic).group(group)
    attempts, reasons = yield from store.commands(
        [
            ("HMGET", own.attempts, *found.ids),
            ("HMGET", own.reasons, *found.ids),
        ]
    )
    found.attempts = [int(attempt or 0) for attempt in attempts]
    found.reasons = [None if reason is None else parted(reason).reason for reason in reasons]


_Page = Callable[[Store, str, str, str], Flow[tuple[list[tuple[Any, str | None]], str | None]]]


def _stream(
    store: SyncStore, topic: str, group: str, state: str, read: _Page
) -> Iterator[LiveMessages]:
    """Messages in a group's stream, if the group's index refers to their entry."""
    own = store.keys.topic(topic).group(group)
    position: str | None = ""
    while position is not None:
        items, position = store.drive(read(store, own.ready, group, position))
        entries = [(parse_entry(item), consumer) for item, consumer in items]
        named = [entry for entry in entries if entry[0].id and readable([entry[0].id.encode()])[0]]
        if not named:
            continue
        indexed = store.ask("HMGET", own.entries, *(entry.id for entry, _ in named))
        held = [
            one
            for one, index in zip(named, indexed, strict=True)
            if index is not None and index.decode() == one[0].entry
        ]
        if not held:
            continue
        found = LiveMessages(
            state, group, [entry.id for entry, _ in held], [entry.due_ms for entry, _ in held]
        )
        store.drive(_failures(store, topic, group, found))
        found.consumers = [consumer for _, consumer in held]
        yield found


def _ready(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    items = yield from unread_entries(store, key, group, position, PAGE)
    behind = items[-1][0].decode() if len(items) == PAGE else None
    return [(item, None) for item in items], behind


def _in_flight(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    start = f"({position}" if position else "-"
    held = yield from pending_entries(store, key, group, start, PAGE)
    items = [(item, row[1].decode("utf-8", "replace")) for row, item in held if item]
    return items, held[-1][0][0].decode() if len(held) == PAGE else None


def _by_id(store: SyncStore, part: ReadPart) -> Iterator[LiveMessages]:
    """Look up ids in all states of the part."""
    ids, _ = readable([message_id.encode("utf-8", "replace") for message_id in part.ids or ()])
    for some in chunks(ids, store.batch_size(part.topic, Inspect)):
        seen = store.call(Inspect(part.topic, some, bodies=False))
        for one, inspection in zip(some, seen, strict=True):
            if inspection.waiting_due_ms is not None and "waiting" in part.states:
                yield LiveMessages("waiting", None, [one], [inspection.waiting_due_ms])
            for held in inspection.group_states:
                if held.group in part.groups and held.state in part.states:
                    found = LiveMessages(held.state, held.group, [one], [])
                    found.dues = [held.due_ms]
                    found.attempts = [held.failed_attempts]
                    found.reasons, found.consumers = [held.reason], [held.consumer]
                    yield found


class LiveMessages:
    """Messages in the same state and group, as columns."""

    def __init__(self, state: str, group: str | None, ids: list[str], dues: list[int]) -> None:
        self.state = state
        self.group = group
        self.ids = ids
        self.dues: Sequence[int | None] = dues
        self.attempts: Sequence[int] = [0] * len(ids)
        self.reasons: Sequence[str | None] = [None] * len(ids)
        self.consumers: Sequence[str | None] = [None] * len(ids)


class RowCollector:
    """Collects rows, each id once per group, and returns them as record batches of a schema."""

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
        """Whether there are enough rows for a record batch."""
        return len(self._columns["id"]) >= BATCH_ROWS or self._bytes >= BATCH_BYTES

    def take(self) -> pa.RecordBatch:
        """The rows added since the last batch."""
        columns: dict[str, Any] = dict(self._columns)
        self._columns = {name: [] for name in _COLUMNS}
        rows, self._bytes = len(columns["id"]), 0
        for name in ("due", "expires"):
            columns[name] = timestamps(pa.array(columns[name], pa.int64()))
        columns["topic"] = pa.repeat(pa.scalar(topic_of(self._topic)), rows)
        columns["shard"] = pa.repeat(pa.scalar(shard_suffix(self._topic), pa.string()), rows)
        envelopes = columns.pop("envelopes")
        if self._with_bodies:
            columns.update(opened(envelopes), envelope=envelopes)
        return to_batch(self._schema, columns, rows)

    def __len__(self) -> int:
        return len(self._columns["id"])

    def add(self, store: Store, found: LiveMessages) -> Flow[None]:
        """Add messages with their other columns; messages that no longer exist are skipped."""
        fresh = [i for i, one in enumerate(found.ids) if (found.group, one) not in self._seen]
        ids = [found.ids[i] for i in fresh]
        if not ids:
            return
        self._seen.update((found.group, message_id) for message_id in ids)
        bodies: list[bytes | None] = [b""] * len(ids)
        if self._with_bodies:
            bodies = yield from _bodies(store, self._topic, ids)
        ends = (yield from self._ends(store, ids)) if self._with_expiry else [None] * len(ids)
        columns = self._columns
        for index, i in enumerate(fresh):
            body = bodies[index]
            if body is None:
                continue
            self._bytes += len(body)
            values = (
                ids[index],
                found.group,
                found.state,
                found.dues[i],
                found.attempts[i],
                found.reasons[i],
                found.consumers[i],
                ends[index],
                body,
            )
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name].append(value)

    def _ends(self, store: Store, ids: Sequence[str]) -> Flow[list[int | None]]:
        key = store.keys.topic(self._topic).expiry
        if not (yield from store.command("EXISTS", key)):
            return [None] * len(ids)
        scores = yield from store.commands([("ZSCORE", key, message_id) for message_id in ids])
        return [None if score is None else int(float(score)) for score in scores]


def _bodies(store: Store, topic: str, ids: Sequence[str]) -> Flow[list[bytes | None]]:
    """The envelopes of ids, None for messages that no longer exist."""
    keys = [store.keys.topic(topic).body(message_id) for message_id in ids]
    lengths = yield from store.commands([("STRLEN", key) for key in keys])
    bodies: list[bytes | None] = []
    for some in portions(zip(keys, lengths, strict=True), len(keys), itemgetter(1)):
        bodies += yield from store.command("MGET", *(key for key, _ in some))
    return bodies
