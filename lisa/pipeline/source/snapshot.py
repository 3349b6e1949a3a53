"""`spark.read.format("lisa")`: live messages, one row per message and group.

Options: `topic` (one, or several separated by commas; default: all registered topics), `state`
(some of waiting, ready, in_flight, parked, retry, garbage), `partitions` (tasks per large set).
Filters on `topic`, `state`, `group`, `id` and `due` are pushed down: an id is looked up, not
scanned for.

Messages change state during the read. A message that keeps its state is read exactly once. A
message that changes its state may appear in the old state, in the new one, in both, or (if the new
state was read before) not at all. Within one group, a message appears at most once.

Pages have a bounded size. Lengths of bodies are read first, so that a reply with bodies has at most
BYTES_PER_CALL, or a single body.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

from lisa.admin.messages import (
    FoundAt,
    LiveState,
    MessageSource,
    Row,
    candidates,
    rows_of,
)
from lisa.admin.reading import Position, positions_in
from lisa.core.model.clock import EPOCH
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_topic
from lisa.core.model.sharding import Layout, Topic, shard_suffix, topic_of
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import readable
from lisa.core.store.store import Store, chunks, portions
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

_IN_STREAM = (LiveState.READY, LiveState.IN_FLIGHT)


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
            small = set(wanted.states & {"ready", "in_flight", "parked"})
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
    for source in _sources(part):
        for found in _pages(store, part, source):
            store.drive(rows.add(store, found))
            if rows.full:
                yield rows.take()
    if len(rows):
        yield rows.take()


def _sources(part: ReadPart) -> Iterator[MessageSource]:
    if LiveState.WAITING in part.states:
        yield MessageSource(part.topic, "", LiveState.WAITING, None)
    for group in part.groups:
        for state in (*_IN_STREAM, LiveState.RETRY, LiveState.GARBAGE):
            if state in part.states:
                yield MessageSource(part.topic, group, state, None)


def _pages(store: SyncStore, part: ReadPart, source: MessageSource) -> Iterator[list[Row]]:
    """The part's messages that one source has, a page at a time."""
    if part.ids is not None:
        asked = [FoundAt(source, message_id.encode("utf-8", "replace")) for message_id in part.ids]
        for page in chunks(asked, PAGE):
            yield store.drive(rows_of(store, page))
        return
    after, until = (None, None) if source.state in _IN_STREAM else (part.after, part.until)
    position = f"{after.score}:{after.member.decode('utf-8', 'surrogateescape')}" if after else ""
    while True:
        found, behind = store.drive(candidates(store, source, position, PAGE))
        inside = [row for row in found if until is None or row.order <= until]
        if source.state is LiveState.WAITING:
            yield [
                Row(id=name, topic=part.topic, state=source.state, group=None, due_ms=row.order[0])
                for row in inside
                for name in readable([row.id])[0]
            ]
        else:
            yield store.drive(rows_of(store, [FoundAt(source, row.id) for row in inside]))
        if behind is None or len(inside) < len(found):
            return
        position = behind


class RowCollector:
    """Collects rows, each id once per group, and returns them as record batches of a schema."""

    def __init__(self, topic: str, schema: pa.Schema) -> None:
        self._topic = topic
        self._schema = schema
        self._seen: set[tuple[str | None, str]] = set()
        names = set(schema.names)
        self._with_bodies = bool(names & {"body", "headers", "kind", "envelope"})
        self._with_expiry = "expires" in names
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._envelopes: list[bytes] = []
        self._ends: list[int | None] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether there are enough rows for a record batch."""
        return len(self._rows) >= BATCH_ROWS or self._bytes >= BATCH_BYTES

    def take(self) -> pa.RecordBatch:
        """The rows added since the last batch."""
        rows, count = self._rows, len(self._rows)
        columns: dict[str, Any] = {
            name: [getattr(row, name) for row in rows]
            for name in ("id", "group", "state", "attempts", "reason", "consumer")
        }
        columns["due"] = timestamps(pa.array([row.due_ms for row in rows], pa.int64()))
        columns["expires"] = timestamps(pa.array(self._ends, pa.int64()))
        columns["topic"] = pa.repeat(pa.scalar(topic_of(self._topic)), count)
        columns["shard"] = pa.repeat(pa.scalar(shard_suffix(self._topic), pa.string()), count)
        if self._with_bodies:
            columns.update(opened(self._envelopes), envelope=self._envelopes)
        self._clear()
        return to_batch(self._schema, columns, count)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, store: Store, found: Sequence[Row]) -> Flow[None]:
        """Add messages with their other columns; messages that no longer exist are skipped."""
        fresh = [row for row in found if (row.group, row.id) not in self._seen]
        if not fresh:
            return
        self._seen.update((row.group, row.id) for row in fresh)
        ids = [row.id for row in fresh]
        bodies: list[bytes | None] = [b""] * len(ids)
        if self._with_bodies:
            bodies = yield from _bodies(store, self._topic, ids)
        ends = (yield from self._expiries(store, ids)) if self._with_expiry else [None] * len(ids)
        for row, body, end in zip(fresh, bodies, ends, strict=True):
            if body is not None:
                self._rows.append(row)
                self._envelopes.append(body)
                self._ends.append(end)
                self._bytes += len(body)

    def _expiries(self, store: Store, ids: Sequence[str]) -> Flow[list[int | None]]:
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
    for part in portions(zip(keys, lengths, strict=True), len(keys), itemgetter(1)):
        bodies += yield from store.command("MGET", *(key for key, _ in part))
    return bodies
