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


@dataclass(frozen=True, slots=True)
class Interval:
    """A topic's activity between two instants; `counters` are the increases of its counters.

    is_first: it ends with the topic's first sample, and has what was counted before as well.
    """

    start_ms: int
    end_ms: int
    counters: Mapping[str, int] = field(repr=False)
    is_first: bool = False

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return max(1, self.end_ms - self.start_ms) / 1000

    @property
    def early(self) -> int:
        """Deliveries before the due time, which only a clock set back can cause."""
        return lateness_buckets(self.counters).get(EARLY, 0)

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


def activity(before: TopicsSnapshot, after: TopicsSnapshot) -> dict[str, Interval]:
    """The activity of each topic of `after` between two snapshots, sorted by name.

    Without rates if the server's clock was set back meanwhile: how long it took is unknown.
    """
    if after.at_us <= before.at_us:
        before = after
    start_ms, end_ms = before.at_us // 1000, after.at_us // 1000
    found = {}
    for topic, now in sorted(after.topics.items()):
        then = before.topics.get(topic)
        found[topic] = Interval(start_ms, end_ms, risen(then.stats if then else {}, now.stats))
    return found
