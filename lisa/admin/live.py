"""What goes on right now: two looks at the counters, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lisa.admin import topics as topic_counts
from lisa.admin.topics import TopicCounts
from lisa.core.flow import Flow
from lisa.core.lateness import EARLY, percentile
from lisa.core.store import Store

__all__ = ["Activity", "Look", "activity", "lateness_buckets", "look"]


@dataclass(frozen=True, slots=True)
class Look:
    """All topics at one instant, by Redis's clock."""

    at_us: int
    topics: Mapping[str, TopicCounts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One topic between two looks.

    Rates are per second: accepted, acked (each group counts), failed and put to retry, to garbage.
    Lateness is that of first hand-overs in the interval, in milliseconds; None without any.
    `early` counts hand-overs before their due time: only a clock that was set back makes any.
    """

    counts: TopicCounts
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    early: int


def look(store: Store, topics: Sequence[str] = ()) -> Flow[Look]:
    """Look at the topics named, or at all that are registered."""
    names = list(topics) or (yield from store.topics())
    at_us = yield from store.server_time_us()
    found = yield from topic_counts.counts(store, names)
    return Look(at_us, {one.topic: one for one in found})


def lateness_buckets(stats: Mapping[str, int]) -> dict[str, int]:
    """Hand-overs by lateness bucket, all groups of a topic together."""
    found: dict[str, int] = {}
    for name, n in stats.items():
        if name.startswith("late:"):
            letter = name[len("late:") :][:1]
            found[letter] = found.get(letter, 0) + n
    return found


def activity(before: Look, after: Look) -> list[Activity]:
    """What happened between two looks, for each topic of the later one, in order of name."""
    seconds = max(1e-6, (after.at_us - before.at_us) / 1e6)
    found = []
    for topic, now in sorted(after.topics.items()):
        then = before.topics.get(topic)

        def rate(counter: str, now: TopicCounts = now, then: TopicCounts | None = then) -> float:
            past = then.total(counter) if then else 0
            return max(0, now.total(counter) - past) / seconds

        past = lateness_buckets(then.stats) if then else {}
        late = {letter: max(0, n - past.get(letter, 0))
                for letter, n in lateness_buckets(now.stats).items()}  # fmt: skip
        found.append(
            Activity(
                counts=now, in_per_s=rate("sent"), out_per_s=rate("acked"),
                retried_per_s=rate("retried"), garbage_per_s=rate("garbage"),
                p50_ms=percentile(late, 0.5), p99_ms=percentile(late, 0.99),
                early=late.get(EARLY, 0),
            )
        )  # fmt: skip
    return found
