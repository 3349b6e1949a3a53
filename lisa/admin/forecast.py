"""What falls due when, and whether it is more than was ever handled in the same time.

Each group gets every message, so each has a forecast of its own: what waits, its own retries, and
what it has in ready. It is played forward at the best pace that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from lisa.admin.parts import places
from lisa.admin.reading import ask_all
from lisa.core.flow import Command, Flow
from lisa.core.store import Store

__all__ = ["BANDS_MS", "Band", "Due", "Horizon", "Outlook", "Step", "bands", "due", "outlook"]

TRIFLE = 10
"""A backlog of so few messages is not worth a warning."""

BANDS_MS = (
    1_000, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000, 3_600_000, 21_600_000, 86_400_000,
    604_800_000, 2_592_000_000,
)  # fmt: skip
"""Upper bounds of how long messages still have to wait; one more band holds what is above."""


class Horizon(Enum):
    """How far ahead is looked, and in which steps: (number of steps, milliseconds of each)."""

    MINUTES = (60, 60_000)
    HOURS = (48, 3_600_000)
    DAYS = (30, 86_400_000)

    @property
    def count(self) -> int:
        """How many steps."""
        return self.value[0]

    @property
    def step_ms(self) -> int:
        """How long each is."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Band:
    """How many messages wait between so long and so long from now; None: without bound."""

    from_ms: int | None
    to_ms: int | None
    messages: int


@dataclass(frozen=True, slots=True)
class Due:
    """What one group has before it: `backlog` is due already, `steps` (start, end, messages)."""

    group: str
    backlog: int
    steps: tuple[tuple[int, int, int], ...]
    beyond: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what falls due in it, and what is left over at its end at the pace assumed."""

    start_ms: int
    end_ms: int
    due: int
    left: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """A group's steps at a pace (messages a second; None: nothing was ever handled).

    crossing_ms: from when on more falls due than is handled, None if that never happens; `most` is
    the largest backlog, and `clear_ms` when it is worked off, None if not within the steps.
    """

    group: str
    backlog: int
    steps: tuple[Step, ...]
    beyond: int
    pace: float | None
    crossing_ms: int | None = None
    most: int = 0
    clear_ms: int | None = None


def bands(store: Store, topic: str, *, now_ms: int) -> Flow[list[Band]]:
    """How long the messages in `waiting` still have to wait; the first band is overdue."""
    edges: list[int | None] = [None, 0, *BANDS_MS, None]
    ranges = list(pairwise(edges))
    keys = [store.keys.topic(place).waiting for place in (yield from places(store, topic))]
    counts = yield from ask_all(store, [
        ("ZCOUNT", key, *_range(None if low is None else low + now_ms,
                                None if high is None else high + now_ms))
        for low, high in ranges for key in keys
    ])  # fmt: skip
    width = len(keys)
    return [
        Band(low, high, sum(n or 0 for n in counts[i * width : (i + 1) * width]))
        for i, (low, high) in enumerate(ranges)
    ]


def due(store: Store, topic: str, horizon: Horizon, *, now_ms: int) -> Flow[list[Due]]:
    """What each group has before it, steps beginning at full minutes, hours or days (UTC).

    Without any group what waits is told all the same, for a group named "".
    """
    parts: dict[str, list[Due]] = {}
    for place in (yield from places(store, topic)):
        for one in (yield from _due(store, place, horizon, now_ms=now_ms)):
            parts.setdefault(one.group, []).append(one)
    return [_whole(parts[group]) for group in sorted(parts)]


def _whole(parts: Sequence[Due]) -> Due:
    """What several places have before them, together."""
    first = parts[0]
    return Due(
        first.group, sum(one.backlog for one in parts),
        tuple((start, end, sum(one.steps[i][2] for one in parts))
              for i, (start, end, _) in enumerate(first.steps)),
        sum(one.beyond for one in parts),
    )  # fmt: skip


def _due(store: Store, topic: str, horizon: Horizon, *, now_ms: int) -> Flow[list[Due]]:
    step = horizon.step_ms
    first = now_ms - now_ms % step
    edges = [now_ms, *(first + i * step for i in range(1, horizon.count + 1))]
    groups = yield from store.groups(topic)
    keys = store.keys.topic(topic)
    holding = [keys.waiting, *(keys.group(name).retry for name in groups)]
    asked: list[Command] = [one for key in holding for one in _counts(key, edges)]
    for name in groups:
        ready = keys.group(name).ready
        asked += [("XLEN", ready), ("XPENDING", ready, name)]
    replies = iter((yield from ask_all(store, asked)))
    width = len(edges) + 1
    rows = [[next(replies) or 0 for _ in range(width)] for _ in holding]
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
    """Play it forward: what is left over at the end of each step at that pace."""
    steps: list[Step] = []
    left, most, crossing, clear = float(ahead.backlog), 0, None, None
    for start, end, count in ahead.steps:
        if pace is None:
            steps.append(Step(start, end, count, None))
            continue
        todo, room = left + count, pace * (end - start) / 1000
        left = max(0.0, todo - room)
        if left >= TRIFLE and crossing is None:
            crossing = start
        elif crossing is not None and clear is None and not left:
            clear = start + round(todo / pace * 1000)
        most = max(most, round(left))
        steps.append(Step(start, end, count, round(left)))
    return Outlook(
        group=ahead.group, backlog=ahead.backlog, steps=tuple(steps), beyond=ahead.beyond,
        pace=pace, crossing_ms=crossing, most=most if crossing is not None else 0, clear_ms=clear,
    )  # fmt: skip


def _counts(key: str, edges: list[int]) -> list[Command]:
    bounds: list[int | None] = [None, *edges, None]
    return [("ZCOUNT", key, *_range(low, high)) for low, high in pairwise(bounds)]


def _range(low: int | None, high: int | None) -> tuple[str, str]:
    """Above `low`, up to and with `high`."""
    return ("-inf" if low is None else f"({low}", "+inf" if high is None else str(high))
