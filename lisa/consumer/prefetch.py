"""How many messages to prefetch: as many as handlers finish in 50 ms, within a byte limit."""

from __future__ import annotations

from collections.abc import Callable

from lisa.core.delivery.body_size import AHEAD_BYTES, Average, BodySize

AHEAD_S = 0.05
MOST = 250
"""The most entries per read and per call of open."""

MOST_AHEAD = 1_000
"""The most unstarted messages: supplies 20,000 handlers a second while a read takes 50 ms."""


class AheadBytes:
    """The bodies that all readers of a consumer hold before handlers start on them.

    count: returns their exact total, which takes long if they are many.
    """

    __slots__ = ("_at_most", "_count")

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._at_most = 0

    def add(self, total: int) -> None:
        """Add bodies that were opened."""
        self._at_most += total

    def are_full(self) -> bool:
        """Whether the readers hold `AHEAD_BYTES`. Counts once for so many bytes."""
        if self._at_most < AHEAD_BYTES:
            return False
        self._at_most = self._count()
        return self._at_most >= AHEAD_BYTES


class Pace:
    """The average time of a message's handlers, and the average size of bodies.

    A much slower message replaces the average time: prefetching too few messages costs
    microseconds, but prefetching too many makes them wait behind a slow one.

    measured: adds the time of one message, or the mean time of several, in seconds.
    """

    __slots__ = ("_seconds", "held", "measured", "size")

    def __init__(self, held: AheadBytes) -> None:
        self._seconds = Average()
        self.held = held
        self.measured = self._seconds.add
        self.size = BodySize()

    def ahead(self, handlers: int) -> int:
        """The number of messages that `handlers` finish in 50 ms, within the limits.

        0 before the first measurement, and while readers hold as many bytes as they may.
        """
        seconds = self._seconds.value
        if seconds is None or self.held.are_full():
            return 0
        in_time = int(handlers * AHEAD_S / max(seconds, 1e-6))
        return min(MOST_AHEAD, in_time, self.size.fitting())
