"""Live activity of topics: the difference between two snapshots of their counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lisa.admin import topics as topic_counts
from lisa.admin.topics import TopicState, total_of
from lisa.core.model.keys import HIGHEST_LATENESS
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
    rises: the increase of each counter within `seconds`.
    """

    counts: TopicState
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    early: int
    rises: Mapping[str, int] = field(default_factory=dict, repr=False)
    seconds: float = 1.0

    def per_s(self, counter: str, group: str) -> float:
        """The rate of one group's counter per second."""
        return self.rises.get(f"{counter}@{group}", 0) / self.seconds


def look(store: Store, topics: Sequence[str] = ()) -> Flow[TopicsSnapshot]:
    """Take a snapshot of the given topics, or of all registered topics."""
    names = list(topics) or (yield from store.topics())
    at_us = yield from store.server_time_us()
    found = yield from topic_counts.counts(store, names)
    return TopicsSnapshot(at_us, {state.topic: state for state in found})


def lateness_buckets(stats: Mapping[str, int]) -> dict[str, int]:
    """First deliveries by lateness bucket, summed over all groups."""
    found: dict[str, int] = {}
    for name, n in stats.items():
        if name.startswith("late:"):
            letter = name[len("late:") :][:1]
            found[letter] = found.get(letter, 0) + n
    return found


def lateness_percentile(stats: Mapping[str, int], fraction: float) -> float | None:
    """A percentile in ms over all groups, at most the highest lateness; None without deliveries."""
    highest = [n for name, n in stats.items() if name.startswith(f"{HIGHEST_LATENESS}@")]
    return percentile(lateness_buckets(stats), fraction, max(highest, default=None))


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The increase of each counter; decreases (after a data loss) are omitted.

    A group's highest lateness remains that of `after`.
    """
    return {
        name: rise
        for name, n in after.items()
        if (rise := n if name.startswith(HIGHEST_LATENESS) else n - before.get(name, 0)) > 0
    }


def activity(before: TopicsSnapshot, after: TopicsSnapshot) -> list[TopicActivity]:
    """The activity between two snapshots, for each topic of `after`, sorted by name.

    Without rates if the server's clock was set back meanwhile: how long it took is unknown.
    """
    seconds = (after.at_us - before.at_us) / 1e6
    if seconds <= 0:
        before, seconds = after, 1.0
    found = []
    for topic, now in sorted(after.topics.items()):
        then = before.topics.get(topic)
        rises = risen(then.stats if then else {}, now.stats)
        found.append(
            TopicActivity(
                counts=now,
                in_per_s=total_of(rises, "sent") / seconds,
                out_per_s=total_of(rises, "acked") / seconds,
                retried_per_s=total_of(rises, "retried") / seconds,
                garbage_per_s=total_of(rises, "garbage") / seconds,
                p50_ms=lateness_percentile(rises, 0.5),
                p99_ms=lateness_percentile(rises, 0.99),
                early=lateness_buckets(rises).get(EARLY, 0),
                rises=rises,
                seconds=seconds,
            )
        )
    return found
