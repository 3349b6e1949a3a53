"""How many messages to prefetch: as many as handlers finish in 50 ms, within a byte limit."""

from __future__ import annotations

from lisa.core.delivery.body_size import Average, BodySize

AHEAD_S = 0.05
MOST = 250
"""The most entries per read and per call of open."""

MOST_AHEAD = 1_000
"""The most unstarted messages: supplies 20,000 handlers a second while a read takes 50 ms."""


class Pace:
    """The average time of a message's handlers, and the average size of bodies.

    A much slower message replaces the average time: prefetching too few messages costs
    microseconds, but prefetching too many makes them wait behind a slow one.

    measured: adds the time of one message, or the mean time of several, in seconds.
    """

    __slots__ = ("_seconds", "measured", "size")

    def __init__(self) -> None:
        self._seconds = Average()
        self.measured = self._seconds.add
        self.size = BodySize()

    def ahead(self, handlers: int) -> int:
        """The number of messages that `handlers` finish in 50 ms, within the limits.

        0 before the first measurement.
        """
        seconds = self._seconds.value
        if seconds is None:
            return 0
        in_time = int(handlers * AHEAD_S / max(seconds, 1e-6))
        return min(MOST_AHEAD, in_time, self.size.fitting())
