"""The history of a topic, from the samples of its counters that the manager takes each minute.

Counters only grow, and unchanged counters are not sampled again. A topic's counters at an instant
are therefore in the last sample before it. A reader requests one sample per instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lisa.admin.live import lateness_percentile, risen
from lisa.admin.reading import ask_all
from lisa.admin.shards import counted, counted_pairs
from lisa.admin.steps import Steps
from lisa.admin.topics import total_of
from lisa.core.redis.flow import Flow
from lisa.core.store.replies import counters, summed
from lisa.core.store.store import Store, chunks

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
SAMPLE_DELAY_MS = 15_000
"""How long after a full minute its samples may be missing."""

KEPT_MS = 89 * DAY_MS
"""For how long managers certainly keep a topic's samples."""

MIN_FRACTION = 4
"""Intervals shorter than 1/MIN_FRACTION of the longest are too short to measure a rate."""


MOST_PER_STEP = 1_000
"""Samples that one round trip requests at most."""


class HistorySpan(Steps):
    """The period of a history."""

    HOUR = (60, MINUTE_MS)
    DAY = (96, 15 * MINUTE_MS)
    WEEK = (168, HOUR_MS)
    QUARTER = (90, DAY_MS)


@dataclass(frozen=True, slots=True)
class Interval:
    """The period between two instants; `counters` are the increases of the counters.

    is_first: it ends with the topic's first sample, and has what was counted before as well.
    """

    start_ms: int
    end_ms: int
    counters: Mapping[str, int]
    is_first: bool = False

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return max(1, self.end_ms - self.start_ms) / 1000

    def rise(self, counter: str, group: str | None = None) -> int:
        """The increase of a counter, for one group or all."""
        if group is not None:
            return self.counters.get(f"{counter}@{group}", 0)
        return total_of(self.counters, counter)

    def per_s(self, counter: str, group: str | None = None) -> float:
        """The rate of a counter per second, for one group or all."""
        return self.rise(counter, group) / self.seconds

    def lateness_ms(self, fraction: float) -> float | None:
        """A percentile of the lateness of first deliveries; None if there were none."""
        return lateness_percentile(self.counters, fraction)


def history(store: Store, topic: str, span: HistorySpan, *, now_ms: int) -> Flow[list[Interval]]:
    """The intervals of a span, oldest first; the last one ends now, with the live counters.

    Intervals before the topic's first sample are omitted.
    """
    step = span.step_ms
    last = now_ms - now_ms % step
    bounds = [last - i * step for i in range(span.count - 1, -1, -1)]
    if now_ms - last < SAMPLE_DELAY_MS:
        bounds.pop()
    known = (yield from _samples(store, [topic], bounds))[topic]
    live: dict[str, int] = {}
    for shard in (yield from counted(store, [topic]))[topic]:
        live = summed([live, (yield from store.stats(shard))])
    ends = [*zip(bounds, known, strict=True), (now_ms, live)]
    return [*_first(ends, now_ms), *intervals(ends)]


def _first(ends: Sequence[tuple[int, Mapping[str, int] | None]], now_ms: int) -> Iterator[Interval]:
    """The interval in which a topic was sampled first, if older samples would still be kept."""
    for (start, before), (end, after) in pairwise(ends):
        if before is None and after and end > start and start > now_ms - KEPT_MS:
            yield Interval(start, end, dict(after), is_first=True)


def intervals(ends: Sequence[tuple[int, Mapping[str, int] | None]]) -> list[Interval]:
    """The intervals between instants, given the counters at each; None where they are unknown."""
    return [
        Interval(start, end, risen(before, after))
        for (start, before), (end, after) in pairwise(ends)
        if before is not None and after is not None and end > start
    ]


def recent(
    store: Store, topics: Sequence[str], step_ms: int, count: int, *, now_ms: int
) -> Flow[dict[str, list[Interval]]]:
    """The last `count` full intervals of `step_ms` of each topic, oldest first."""
    last = now_ms - SAMPLE_DELAY_MS
    last -= last % step_ms
    bounds = [last - i * step_ms for i in range(count, -1, -1)]
    known = yield from _samples(store, topics, bounds)
    return {topic: intervals(list(zip(bounds, known[topic], strict=True))) for topic in topics}


def counters_at(store: Store, topics: Sequence[str], at_ms: int) -> Flow[dict[str, dict[str, int]]]:
    """The counters of topics at an instant; omits topics without an earlier sample."""
    samples = yield from _samples(store, topics, [at_ms])
    return {topic: found for topic, (found,) in samples.items() if found is not None}


def _samples(
    store: Store, topics: Sequence[str], bounds: Sequence[int]
) -> Flow[dict[str, list[dict[str, int] | None]]]:
    """The counters of each topic at each instant; None before a topic's first sample."""
    found: dict[str, list[dict[str, int] | None]] = {one: [None] * len(bounds) for one in topics}
    pairs = yield from counted_pairs(store, topics)
    for some in chunks(pairs, max(1, MOST_PER_STEP // max(1, len(bounds)))):
        samples = yield from ask_all(
            store,
            [
                ("XREVRANGE", store.keys.topic(shard).history, bound, "-", "COUNT", 1)
                for _, shard in some
                for bound in bounds
            ],
        )
        for i, (topic, _) in enumerate(some):
            own = map(_counters, samples[i * len(bounds) : (i + 1) * len(bounds)])
            found[topic] = [
                one if sample is None else summed([one or {}, sample])
                for one, sample in zip(found[topic], own, strict=True)
            ]
    return found


def best_pace(intervals: Sequence[Interval], group: str | None) -> float | None:
    """The highest rate of acks per second of any interval; None if there were no acks.

    Intervals that have just begun are ignored, because a short burst is not a sustained rate.
    """
    intervals = [one for one in intervals if not one.is_first]
    longest = max((one.seconds for one in intervals), default=0.0)
    measured = [one for one in intervals if one.seconds * MIN_FRACTION >= longest]
    return max((one.per_s("acked", group) for one in measured), default=0.0) or None


def _counters(reply: Sequence[tuple[bytes, Sequence[bytes]]] | None) -> dict[str, int] | None:
    return counters(reply[0][1]) if reply else None
