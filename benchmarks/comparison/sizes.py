"""The amounts that only the comparison measures: of peers, and of Lisa."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.bench.measures import FULL

LONG = replace(FULL, mode="long", paced_seconds=60.0)
"""The amounts of the measures of `benchmarks.bench` with `--long`."""


@dataclass(frozen=True, slots=True)
class BusyTopics:
    """Topics whose messages fall due evenly.

    rate: messages per second of all topics together, for `seconds`.
    period_s: how often the raw commands visit the topics.
    repeats: maximum number of repeats.
    """

    topics: int
    rate: float
    seconds: float
    period_s: float
    repeats: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherSizes:
    """The amounts of `lisa_measures`: numbers of messages, unless noted otherwise.

    burst: messages due at one instant.
    topics: idle topics; idle_seconds: how long their manager is observed.
    waiting: backlogs with which promotion is measured, in ascending order.
    promoted: messages promoted before each backlog.
    side_by_side: numbers of managers, each with as many consumers.
    busy_topics: see `BusyTopics`.
    limited: messages of a limited rate.
    """

    burst: int = 50_000
    topics: int = 1_000
    idle_seconds: float = 20.0
    waiting: tuple[int, ...] = (10_000, 1_000_000)
    promoted: int = 20_000
    side_by_side: tuple[int, ...] = (1, 2, 4)
    busy_topics: tuple[BusyTopics, ...] = (
        BusyTopics(10, 1_000, 20.0, 0.002),
        BusyTopics(10, 5_000, 10.0, 0.002),
        BusyTopics(1_000, 1_000, 20.0, 0.1, repeats=2),
    )
    limited: int = 2_000

    @classmethod
    def of(cls, mode: str) -> FurtherSizes:
        """The sizes of a `quick`, `full` or `long` run."""
        if mode == "quick":
            return cls(
                idle_seconds=4.0,
                waiting=(10_000, 300_000),
                promoted=5_000,
                side_by_side=(),
                busy_topics=(BusyTopics(10, 1_000, 3.0, 0.002),),
                limited=500,
            )
        return cls(waiting=(10_000, 1_000_000, 10_000_000)) if mode == "long" else cls()

    def scaled(self, scale: float) -> FurtherSizes:
        """Scale the amounts; `scale` is positive."""
        if scale == 1.0:
            return self
        return FurtherSizes(
            burst=max(20, int(self.burst * scale)),
            topics=max(20, int(self.topics * scale)),
            idle_seconds=max(0.2, self.idle_seconds * scale),
            waiting=tuple(max(20, int(amount * scale)) for amount in self.waiting),
            promoted=max(20, int(self.promoted * scale)),
            side_by_side=self.side_by_side[:2],
            busy_topics=(BusyTopics(3, 100, max(0.2, 5 * scale), 0.002),),
            limited=max(20, int(self.limited * scale)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSizes:
    """The amounts for a peer.

    repeats: maximum number of repeats of each figure.
    most: maximum number of messages in one measurement.
    seconds: how long a measurement should keep the peer busy.
    start_seconds: maximum start time of a sending process on a busy machine.
    limited: see `FurtherSizes`.
    """

    repeats: int = 2
    most: int = 100_000
    seconds: float = 3.0
    start_seconds: float = 4.0
    limited: int = 2_000

    @classmethod
    def of(cls, mode: str) -> PeerSizes:
        """The sizes of a `quick`, `full` or `long` run."""
        return cls(repeats=3, seconds=5.0) if mode == "long" else cls()

    def scaled(self, scale: float) -> PeerSizes:
        """Scale the amounts; `scale` is positive."""
        if scale == 1.0:
            return self
        return replace(
            self,
            most=max(20, int(self.most * scale)),
            seconds=max(0.2, self.seconds * scale),
            start_seconds=max(2.0, self.start_seconds * scale),
            limited=max(20, int(self.limited * scale)),
        )
