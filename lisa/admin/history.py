"""The past and the future of a topic in equal steps.

The history comes from the samples of the topic's counters that the manager takes each minute.
Counters only grow, and unchanged counters are not sampled again. A topic's counters at an instant
are therefore in the last sample before it. A reader requests one sample per instant.

The forecast counts the messages that fall due, and says whether consumers can keep up with them.
Each group receives every message, so each has its own forecast, from the waiting messages, its
retries and its ready messages, at the best handling rate that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from operator import add

from lisa.admin.live import Interval, risen
from lisa.admin.reading import ask_all, counted, counted_pairs, shards
from lisa.core.model.sharding import Shard
from lisa.core.redis.flow import Command, Flow
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


MIN_BACKLOG = 10
"""A smaller backlog is not reported as falling behind."""


BANDS_MS = (
    1_000,
    5_000,
    10_000,
    30_000,
    60_000,
    300_000,
    1_800_000,
    3_600_000,
    21_600_000,
    86_400_000,
    604_800_000,
    2_592_000_000,
)
"""Upper bounds of the remaining waiting time; the last band has no upper bound."""


@dataclass(frozen=True)
class Steps:
    """A period: the number of steps, and the milliseconds of each."""

    count: int
    step_ms: int


class HistorySpan(Steps, Enum):
    """The period of a history."""

    HOUR = (60, MINUTE_MS)
    DAY = (96, 15 * MINUTE_MS)
    WEEK = (168, HOUR_MS)
    QUARTER = (90, DAY_MS)


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
    found: dict[str, list[dict[str, int] | None]] = {
        topic: [None] * len(bounds) for topic in topics
    }
    pairs = yield from counted_pairs(store, topics)
    for part in chunks(pairs, max(1, MOST_PER_STEP // max(1, len(bounds)))):
        samples = yield from ask_all(
            store,
            [
                ("XREVRANGE", store.keys.topic(shard).history, bound, "-", "COUNT", 1)
                for _, shard in part
                for bound in bounds
            ],
        )
        for i, (topic, _) in enumerate(part):
            own = map(_counters, samples[i * len(bounds) : (i + 1) * len(bounds)])
            found[topic] = [
                known if sample is None else summed([known or {}, sample])
                for known, sample in zip(found[topic], own, strict=True)
            ]
    return found


def best_pace(intervals: Sequence[Interval], group: str | None) -> float | None:
    """The highest rate of acks per second of any interval; None if there were no acks.

    Intervals that have just begun are ignored, because a short burst is not a sustained rate.
    """
    intervals = [interval for interval in intervals if not interval.is_first]
    longest = max((interval.seconds for interval in intervals), default=0.0)
    measured = [interval for interval in intervals if interval.seconds * MIN_FRACTION >= longest]
    return max((interval.per_s("acked", group) for interval in measured), default=0.0) or None


def _counters(reply: Sequence[tuple[bytes, Sequence[bytes]]] | None) -> dict[str, int] | None:
    return counters(reply[0][1]) if reply else None


class Horizon(Steps, Enum):
    """The period of a forecast."""

    MINUTES = (60, 60_000)
    HOURS = (48, 3_600_000)
    DAYS = (30, 86_400_000)


@dataclass(frozen=True, slots=True)
class Band:
    """The number of messages due between two distances from now; None means unbounded."""

    from_ms: int | None
    to_ms: int | None
    messages: int


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """One step: messages due within it, and messages left at its end at the assumed rate."""

    start_ms: int
    end_ms: int
    due: int
    left: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """A group's forecast: `backlog` is due now, `beyond` after the steps.

    pace: the assumed rate, in messages per second; None if nothing was handled yet.
    crossing_ms: when the group starts to fall behind; None if it keeps up.
    most: the largest backlog from then on.
    clear_ms: when the last backlog is gone; None if not within the steps.
    """

    group: str
    backlog: int
    steps: tuple[ForecastStep, ...]
    beyond: int
    pace: float | None = None
    crossing_ms: int | None = None
    most: int = 0
    clear_ms: int | None = None


def bands(store: Store, topic: str, *, now_ms: int) -> Flow[list[Band]]:
    """Count waiting messages and retries by remaining time; the first band is overdue."""
    edges = [0, *BANDS_MS]
    keys: list[str] = []
    for shard in (yield from shards(store, topic)):
        own = store.keys.topic(shard)
        groups = yield from store.groups(shard)
        keys += [own.waiting, *(own.group(name).retry for name in groups)]
    ends = [now_ms + edge for edge in edges]
    counts = yield from ask_all(
        store, [command for key in keys for command in counts_between(key, ends)]
    )
    ranges = list(pairwise((None, *edges, None)))
    return [
        Band(low, high, sum(n or 0 for n in counts[i :: len(ranges)]))
        for i, (low, high) in enumerate(ranges)
    ]


def due(store: Store, topic: str, horizon: Horizon, *, now_ms: int) -> Flow[list[Outlook]]:
    """The load of each group, without a rate.

    Steps after the first one begin at full minutes, hours or days (UTC). A topic without groups
    yields the waiting messages for a group named "".
    """
    step = horizon.step_ms
    first = now_ms - now_ms % step
    edges = [now_ms, *(first + i * step for i in range(1, horizon.count + 1))]
    loads: dict[str, list[int]] = {}
    for shard in (yield from shards(store, topic)):
        for group, counts in (yield from _due_in_shard(store, shard, edges)).items():
            loads[group] = list(map(add, counts, loads.get(group, [0] * len(counts))))
    return [
        Outlook(
            group=group,
            backlog=backlog,
            steps=tuple(map(ForecastStep, edges, edges[1:], counts)),
            beyond=beyond,
        )
        for group, (backlog, *counts, beyond) in sorted(loads.items())
    ]


def _due_in_shard(store: Store, shard: Shard, edges: list[int]) -> Flow[dict[str, list[int]]]:
    """By group, the messages in one shard that are due between the edges, and beyond all edges.

    The replies are the counts of each sorted set, then two replies per group on its ready stream.
    """
    groups = yield from store.groups(shard)
    keys = store.keys.topic(shard)
    zsets = [keys.waiting, *(keys.group(name).retry for name in groups)]
    asked: list[Command] = [command for key in zsets for command in counts_between(key, edges)]
    for name in groups:
        ready = keys.group(name).ready
        asked += [("XLEN", ready), ("XPENDING", ready, name)]
    replies = iter((yield from ask_all(store, asked)))
    waiting, *retries = [[next(replies) or 0 for _ in range(len(edges) + 1)] for _ in zsets]
    if not groups:
        return {"": waiting}
    found = {}
    for name, retry in zip(groups, retries, strict=True):
        length, pending = next(replies) or 0, next(replies)
        counts = list(map(add, waiting, retry))
        counts[0] += max(0, length - (pending[0] if pending else 0))
        found[name] = counts
    return found


def outlook(ahead: Outlook, pace: float | None) -> Outlook:
    """Simulate the steps at a handling rate of `pace` messages per second."""
    if pace is None:
        return ahead
    steps: list[ForecastStep] = []
    left, most, crossing, clear = float(ahead.backlog), 0, None, None
    for step in ahead.steps:
        start, room = step.start_ms, pace * (step.end_ms - step.start_ms) / 1000
        before, todo = left, left + step.due
        left = max(0.0, todo - room)
        if left >= MIN_BACKLOG:
            if crossing is None:
                crossing, most = start, round(before)
            clear = None
        elif crossing is not None and clear is None and not left:
            clear = start + round(todo / pace * 1000)
        most = max(most, round(left))
        steps.append(replace(step, left=round(left)))
    return replace(
        ahead,
        steps=tuple(steps),
        pace=pace,
        crossing_ms=crossing,
        most=most if crossing is not None else 0,
        clear_ms=clear,
    )


def counts_between(key: str, edges: list[int]) -> list[Command]:
    """Count the scores between each two edges, the upper one included, and beyond all edges."""
    lows, highs = ["-inf", *(f"({edge}" for edge in edges)], [*map(str, edges), "+inf"]
    return [("ZCOUNT", key, low, high) for low, high in zip(lows, highs, strict=True)]
