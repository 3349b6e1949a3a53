"""Live activity of topics: the difference between two snapshots of their counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lisa.admin import topics as topic_counts
from lisa.admin.topics import TopicState
from lisa.core.model.lateness import EARLY, percentile
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store


@dataclass(frozen=True, slots=True)
class TopicsSnapshot:
    """A snapshot of topics at one instant of the server's clock."""

    at_us: int
    topics: Mapping[str, TopicState]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicActivity:
    """The activity of one topic between two snapshots.

    in_per_s, out_per_s, retried_per_s, garbage_per_s: messages per second that were accepted,
        acked (in each group), moved to retry, and moved to garbage.
    p50_ms, p99_ms: lateness of first deliveries; None without deliveries.
    early: deliveries before the due time, which only a clock set back can cause.
    """

    counts: TopicState
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    early: int


def look(store: Store, topics: Sequence[str] = ()) -> Flow[TopicsSnapshot]:
    """Take a snapshot of the given topics, or of all registered topics."""
    names = list(topics) or (yield from store.topics())
    at_us = yield from store.server_time_us()
    found = yield from topic_counts.counts(store, names)
    return TopicsSnapshot(at_us, {one.topic: one for one in found})


def lateness_buckets(stats: Mapping[str, int]) -> dict[str, int]:
    """First deliveries by lateness bucket, summed over all groups."""
    found: dict[str, int] = {}
    for name, n in stats.items():
        if name.startswith("late:"):
            letter = name[len("late:") :][:1]
            found[letter] = found.get(letter, 0) + n
    return found


def activity(before: TopicsSnapshot, after: TopicsSnapshot) -> list[TopicActivity]:
    """The activity between two snapshots, for each topic of `after`, sorted by name."""
    seconds = max(1e-6, (after.at_us - before.at_us) / 1e6)
    found = []
    for topic, now in sorted(after.topics.items()):
        then = before.topics.get(topic)

        def rate(counter: str, now: TopicState = now, then: TopicState | None = then) -> float:
            past = then.total(counter) if then else 0
            return max(0, now.total(counter) - past) / seconds

        past = lateness_buckets(then.stats) if then else {}
        late = {
            letter: max(0, n - past.get(letter, 0))
            for letter, n in lateness_buckets(now.stats).items()
        }
        found.append(
            TopicActivity(
                counts=now,
                in_per_s=rate("sent"),
                out_per_s=rate("acked"),
                retried_per_s=rate("retried"),
                garbage_per_s=rate("garbage"),
                p50_ms=percentile(late, 0.5),
                p99_ms=percentile(late, 0.99),
                early=late.get(EARLY, 0),
            )
        )
    return found
