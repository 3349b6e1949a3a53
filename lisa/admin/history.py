"""A topic over time, out of the samples of its counters that the manager takes each minute.

Counters only grow, and no sample is written where nothing changed: so what a topic's counters were
at an instant stands in the last sample before it, and what happened between two instants is the
difference. A reader asks for one sample an instant, however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from lisa.admin.live import lateness_buckets
from lisa.admin.parts import counted, summed
from lisa.admin.reading import ask_all
from lisa.core.flow import Flow
from lisa.core.lateness import percentile
from lisa.core.store import Store, counters

__all__ = ["Interval", "Span", "best_pace", "counters_at", "history"]

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
SETTLES_MS = 15_000
"""So long after a minute its samples may still be missing; what came since belongs to it."""

ENOUGH = 4
"""Less than one part in so many of the longest interval says nothing of a pace."""


class Span(Enum):
    """How far back is looked, and in which steps: (number of steps, milliseconds of each)."""

    HOUR = (60, MINUTE_MS)
    DAY = (96, 15 * MINUTE_MS)
    WEEK = (168, HOUR_MS)
    QUARTER = (90, DAY_MS)

    @property
    def count(self) -> int:
        """How many steps."""
        return self.value[0]

    @property
    def step_ms(self) -> int:
        """How long each is."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two instants: `counters` has what each counter grew by."""

    start_ms: int
    end_ms: int
    counters: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """How long it was."""
        return max(1, self.end_ms - self.start_ms) / 1000

    def per_s(self, counter: str, group: str | None = None) -> float:
        """How often a second a counter rose, in one group or over all."""
        if group is not None:
            return self.counters.get(f"{counter}@{group}", 0) / self.seconds
        head = f"{counter}@"
        rise = sum(n for name, n in self.counters.items() if name.startswith(head))
        return (self.counters.get(counter, 0) + rise) / self.seconds

    def lateness_ms(self, fraction: float) -> float | None:
        """A percentile of the lateness of first hand-overs; None where there were none."""
        return percentile(lateness_buckets(self.counters), fraction)


def history(store: Store, topic: str, span: Span, *, now_ms: int) -> Flow[list[Interval]]:
    """The steps of a span up to now, the oldest first; the last ends now, with the live counters.

    What lies before the first sample is left out: nothing is known of it.
    """
    step = span.step_ms
    last = now_ms - now_ms % step
    bounds = [last - i * step for i in range(span.count - 1, -1, -1)]
    if now_ms - last < SETTLES_MS:
        bounds.pop()
    known: list[dict[str, int] | None] = [None] * len(bounds)
    live: dict[str, int] = {}
    for place in (yield from counted(store, [topic]))[topic]:
        samples = yield from ask_all(store, [
            ("XREVRANGE", store.keys.topic(place).history, bound, "-", "COUNT", 1)
            for bound in bounds
        ])  # fmt: skip
        live = summed([live, (yield from store.stats(place))])
        known = [
            one if sample is None else summed([one or {}, sample])
            for one, sample in zip(known, map(_counters, samples), strict=True)
        ]
    ends = [*zip(bounds, known, strict=True), (now_ms, live)]
    return [
        Interval(start, end, _risen(before, after))
        for (start, before), (end, after) in pairwise(ends)
        if before is not None and after is not None and end > start
    ]


def counters_at(store: Store, topics: Sequence[str], at_ms: int) -> Flow[dict[str, dict[str, int]]]:
    """The counters of topics as they were at an instant; nothing where no sample tells."""
    parts = yield from counted(store, topics)
    places = [(topic, place) for topic in topics for place in parts[topic]]
    samples = yield from ask_all(store, [
        ("XREVRANGE", store.keys.topic(place).history, at_ms, "-", "COUNT", 1)
        for _, place in places
    ])  # fmt: skip
    found: dict[str, dict[str, int]] = {}
    for (topic, _), sample in zip(places, samples, strict=True):
        counters = _counters(sample)
        if counters is not None:
            found[topic] = summed([found.get(topic, {}), counters])
    return found


def best_pace(intervals: Sequence[Interval], group: str | None) -> float | None:
    """The most that was acked a second in any one interval; None where nothing was.

    An interval that has only begun is left out: a burst of a second is no pace.
    """
    longest = max((one.seconds for one in intervals), default=0.0)
    measured = [one for one in intervals if one.seconds * ENOUGH >= longest]
    return max((one.per_s("acked", group) for one in measured), default=0.0) or None


def _counters(reply: Sequence[tuple[bytes, Sequence[bytes]]] | None) -> dict[str, int] | None:
    return counters(reply[0][1]) if reply else None


def _risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What each counter grew by; one that fell belongs to a server that came back empty."""
    rises = {name: n - before.get(name, 0) for name, n in after.items()}
    return {name: n for name, n in rises.items() if n > 0}
