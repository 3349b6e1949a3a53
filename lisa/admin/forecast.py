"""A forecast of the messages that fall due, and whether consumers can keep up with them.

Each group receives every message, so each has its own forecast, from the waiting messages, its
retries and its ready messages, at the best handling rate that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lisa.admin.reading import ask_all
from lisa.admin.shards import shards
from lisa.admin.steps import Steps
from lisa.core.model.sharding import Shard
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.store import Store

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


class Horizon(Steps):
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
class Due:
    """One group's load: `backlog` is due now; `steps` are (start_ms, end_ms, messages)."""

    group: str
    backlog: int
    steps: tuple[tuple[int, int, int], ...]
    beyond: int


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """One step: messages due within it, and messages left at its end at the assumed rate."""

    start_ms: int
    end_ms: int
    due: int
    left: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """A group's forecast at a rate `pace` (messages per second; None if nothing was handled yet).

    crossing_ms: when the group starts to fall behind; None if it keeps up.
    most: the largest backlog from then on.
    clear_ms: when the last backlog is gone; None if not within the steps.
    """

    group: str
    backlog: int
    steps: tuple[ForecastStep, ...]
    beyond: int
    pace: float | None
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
    counts = yield from ask_all(store, [one for key in keys for one in _counts(key, ends)])
    ranges = list(pairwise((None, *edges, None)))
    return [
        Band(low, high, sum(n or 0 for n in counts[i :: len(ranges)]))
        for i, (low, high) in enumerate(ranges)
    ]


def due(store: Store, topic: str, horizon: Horizon, *, now_ms: int) -> Flow[list[Due]]:
    """The load of each group; later steps begin at full minutes, hours or days (UTC).

    A topic without groups yields the waiting messages for a group named "".
    """
    parts: dict[str, list[Due]] = {}
    for shard in (yield from shards(store, topic)):
        for one in (yield from _due_in_shard(store, shard, horizon, now_ms=now_ms)):
            parts.setdefault(one.group, []).append(one)
    return [_sum_of_shards(parts[group]) for group in sorted(parts)]


def _sum_of_shards(parts: Sequence[Due]) -> Due:
    """One group's load on all shards of a topic."""
    first = parts[0]
    return Due(
        first.group,
        sum(one.backlog for one in parts),
        tuple(
            (start, end, sum(one.steps[i][2] for one in parts))
            for i, (start, end, _) in enumerate(first.steps)
        ),
        sum(one.beyond for one in parts),
    )


def _due_in_shard(store: Store, shard: Shard, horizon: Horizon, *, now_ms: int) -> Flow[list[Due]]:
    """The load of each group in one shard.

    The replies are the counts of each sorted set, then two replies per group on its ready stream.
    """
    step = horizon.step_ms
    first = now_ms - now_ms % step
    edges = [now_ms, *(first + i * step for i in range(1, horizon.count + 1))]
    groups = yield from store.groups(shard)
    keys = store.keys.topic(shard)
    zsets = [keys.waiting, *(keys.group(name).retry for name in groups)]
    asked: list[Command] = [one for key in zsets for one in _counts(key, edges)]
    for name in groups:
        ready = keys.group(name).ready
        asked += [("XLEN", ready), ("XPENDING", ready, name)]
    replies = iter((yield from ask_all(store, asked)))
    width = len(edges) + 1
    rows = [[next(replies) or 0 for _ in range(width)] for _ in zsets]
    found = []
    for i, name in enumerate(groups or ("",)):
        sums = [sum(both) for both in zip(rows[0], rows[i + 1], strict=True)] if groups else rows[0]
        unread = 0
        if groups:
            length, pending = next(replies) or 0, next(replies)
            unread = max(0, length - (pending[0] if pending else 0))
        steps = tuple(
            (start, end, n) for (start, end), n in zip(pairwise(edges), sums[1:-1], strict=True)
        )
        found.append(Due(name, sums[0] + unread, steps, sums[-1]))
    return found


def outlook(ahead: Due, pace: float | None) -> Outlook:
    """Simulate the steps at a handling rate of `pace` messages per second."""
    steps: list[ForecastStep] = []
    left, most, crossing, clear = float(ahead.backlog), 0, None, None
    for start, end, count in ahead.steps:
        if pace is None:
            steps.append(ForecastStep(start, end, count, None))
            continue
        before, todo, room = left, left + count, pace * (end - start) / 1000
        left = max(0.0, todo - room)
        if left >= MIN_BACKLOG:
            if crossing is None:
                crossing, most = start, round(before)
            clear = None
        elif crossing is not None and clear is None and not left:
            clear = start + round(todo / pace * 1000)
        most = max(most, round(left))
        steps.append(ForecastStep(start, end, count, round(left)))
    return Outlook(
        group=ahead.group,
        backlog=ahead.backlog,
        steps=tuple(steps),
        beyond=ahead.beyond,
        pace=pace,
        crossing_ms=crossing,
        most=most if crossing is not None else 0,
        clear_ms=clear,
    )


def _counts(key: str, edges: list[int]) -> list[Command]:
    """Count the scores between each two edges, the upper one included, and beyond all edges."""
    lows, highs = ["-inf", *(f"({edge}" for edge in edges)], [*map(str, edges), "+inf"]
    return [("ZCOUNT", key, low, high) for low, high in zip(lows, highs, strict=True)]
