"""How many messages to prefetch: as many as handlers finish in 50 ms, within a byte limit."""

from __future__ import annotations

from lisa.core.delivery.body_size import BodySize

AHEAD_S = 0.05
MOST = 250
"""The most entries per read and per call of open."""

MOST_AHEAD = 1_000
"""The most unstarted messages: supplies 20,000 handlers a second while a read takes 50 ms."""

SMOOTHING = 0.2


class Pace:
    """A moving average of handler times.

    A message more than four times slower replaces the average: prefetching too few messages costs
    microseconds, but prefetching too many makes them wait behind a slow one.
    """

    __slots__ = ("seconds", "size")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.size = BodySize()

    def measured(self, seconds: float) -> None:
        """Add the time of one message, or the mean time of several, in seconds."""
        average = self.seconds
        if average is None or seconds > 4 * average:
            self.seconds = seconds
        else:
            self.seconds = average + SMOOTHING * (seconds - average)

    def ahead(self, handlers: int) -> int:
        """The number of messages that `handlers` finish in 50 ms, within the limits.

        0 before the first measurement.
        """
        if self.seconds is None:
            return 0
        in_time = int(handlers * AHEAD_S / max(self.seconds, 1e-6))
        return min(MOST_AHEAD, in_time, self.size.fitting())
