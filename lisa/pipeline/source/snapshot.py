"""`spark.read.format("lisa")`: what is live, one row per message and place.

Options: `topic` (one, or several with commas; without it all that are registered), `state` (some of
waiting, ready, in_flight, retry, garbage), `partitions` (tasks for each large set). Filters on
`topic`, `state`, `group`, `id` and `due` reach the server: an id is looked up, not searched for.

Messages move while they are read. One that stood in the same place throughout is read exactly
once. One that moved may be seen where it was, where it went, in both, or (where it moved to a place
already read) not at all; what moved within one group's places is seen once at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

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

from lisa.admin.messages import State
from lisa.admin.reading import Position, pairs_of
from lisa.core.clock import EPOCH
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.flow import Flow
from lisa.core.keys import check_topic
from lisa.core.shards import Layout, base
from lisa.pipeline.source import options
from lisa.pipeline.source.places import ABOVE, Part, Rows, read_part
from lisa.pipeline.source.read_columns import arrow_schema, checked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from lisa.core.store import Store

__all__ = ["SnapshotReader"]

_OPTIONS = options.SERVER | {"topic", "state", "partitions"}
_STATES = tuple(state.value for state in State)
_MILLISECOND = timedelta(milliseconds=1)
_TASKS = 4
_WORTH_SPLITTING = 20_000  # members of a set
_MOST_IN_A_TASK = 250_000  # each task remembers the ids that it gave


@dataclass(frozen=True)
class Wanted:
    """What is read; None is everything. `low_ms` and `high_ms` bound what has a due time."""

    topics: frozenset[str] | None = None
    states: frozenset[str] = frozenset(_STATES)
    groups: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    low_ms: int | None = None
    high_ms: int | None = None


class SnapshotReader(DataSourceReader):
    """Reads what is live. Raises ConfigError for options that cannot work."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options.refuse_unknown(given, _OPTIONS, "read")
        self._server = options.server_of(given)
        self._schema = checked(schema)
        self._tasks = options.whole_number(given, "partitions") or _TASKS
        topics = frozenset(check_topic(one) for one in _listed(given, "topic"))
        states = frozenset(_listed(given, "state"))
        for state in states:
            if state not in _STATES:
                raise ConfigError(
                    f"format(\"lisa\"), option 'state': {state!r} is none of {', '.join(_STATES)}"
                )
        self._wanted = Wanted(topics or None, states or frozenset(_STATES))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Narrow what is read; gives back what Spark has to look at itself."""
        for one in filters:
            narrowed = _narrowed(self._wanted, one)
            if narrowed is not None:
                self._wanted = narrowed
            if narrowed is None or one.attribute == ("due",):  # type: ignore[attr-defined]
                yield one

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges of large sets, and what else there is group by group."""
        store = options.open_store(*self._server)
        try:
            return store.drive(self._parts(store))
        finally:
            store.close()

    def _parts(self, store: Store) -> Flow[list[InputPartition]]:
        wanted, parts = self._wanted, []
        names = wanted.topics if wanted.topics is not None else (yield from store.topics())
        for topic in sorted(names):
            with suppress(InvalidMessage):  # a filter may ask for what can be no topic
                check_topic(topic)
                layout = yield from store.layout(topic)
                for place in layout.places(topic):
                    parts += yield from self._of_place(store, place, layout)
        return parts

    def _of_place(self, store: Store, topic: str, layout: Layout) -> Flow[list[InputPartition]]:
        wanted, keys = self._wanted, store.keys.topic(topic)
        groups = yield from store.groups(topic)
        if wanted.groups is not None:
            groups = tuple(name for name in groups if name in wanted.groups)
        waits = "waiting" in wanted.states and wanted.groups is None
        if wanted.ids is not None:
            states = wanted.states if waits else wanted.states - {"waiting"}
            counts = (layout.shards, *layout.older)
            mine = [one for one in sorted(wanted.ids)
                    if topic in {layout.place(base(topic), one, n) for n in counts}]  # fmt: skip
            return [Part(topic, states, groups=groups, ids=tuple(mine))]
        parts: list[InputPartition] = []
        if waits:
            parts += yield from self._ranges(store, keys.waiting, Part(topic, {"waiting"}))
        for name in groups:
            small = set(wanted.states & {"ready", "in_flight"})
            own = keys.group(name)
            for state, key in (("retry", own.retry), ("garbage", own.garbage)):
                if state in wanted.states:
                    whole = Part(topic, {state}, groups=(name,))
                    ranges = yield from self._ranges(store, key, whole)
                    if len(ranges) > 1:
                        parts += ranges
                    elif ranges:
                        small.add(state)
            if small:
                bounds = _bounds(wanted)
                parts.append(Part(topic, small, (name,), after=bounds[0], until=bounds[1]))
        return parts

    def _ranges(self, store: Store, key: str, whole: Part) -> Flow[list[Part]]:
        """A sorted set in ranges of about one size; none where it is empty."""
        low, high = self._wanted.low_ms, self._wanted.high_ms
        lowest = "-inf" if low is None else low
        below, count = yield from store.commands([
            ("ZCOUNT", key, "-inf", f"({lowest}"),
            ("ZCOUNT", key, lowest, "+inf" if high is None else high),
        ])  # fmt: skip
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
            for member, score in pairs_of(reply):
                ranges.append(replace(whole, after=after, until=(score, member)))
                after = Position(score, member.decode("utf-8", "surrogateescape"))
        return [*ranges, replace(whole, after=after, until=until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One part, in record batches."""
        if not isinstance(partition, Part):
            return
        schema = arrow_schema(self._schema)
        store = options.open_store(*self._server)
        try:
            yield from read_part(store, partition, Rows(partition.topic, schema))
        finally:
            store.close()


def _listed(given: Mapping[str, str], name: str) -> list[str]:
    return [one.strip() for one in given.get(name, "").split(",") if one.strip()]


def _bounds(wanted: Wanted) -> tuple[Position | None, tuple[int, bytes] | None]:
    """Before the first and behind the last that has a wanted due time."""
    after = None if wanted.low_ms is None else Position(wanted.low_ms, "")
    return after, None if wanted.high_ms is None else (wanted.high_ms, ABOVE)


def _narrowed(wanted: Wanted, one: Filter) -> Wanted | None:
    """What a filter leaves, or None for one that the server cannot answer."""
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
    # Rounded down, both bounds let through a little more than was asked for: Spark looks again.
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
