"""How much to read ahead: what handlers finish in 50 ms at their measured pace."""

from __future__ import annotations

__all__ = ["AHEAD_S", "MOST", "Pace"]

AHEAD_S = 0.05
MOST = 250
"""The most that one read asks for, and one open takes."""

SMOOTHING = 0.2


class Pace:
    """An exponential average of how long one message takes.

    A message slower than the average counts at once in full: reading ahead too little costs
    microseconds, too much makes messages wait behind a slow one.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def measured(self, seconds: float) -> None:
        """One more message (or the mean of several) took so long."""
        average = self.seconds
        if average is None or seconds > 4 * average:
            self.seconds = seconds
        else:
            self.seconds = average + SMOOTHING * (seconds - average)

    def ahead(self, handlers: int) -> int:
        """Messages that so many handlers finish in 50 ms; 0 before anything was measured."""
        if self.seconds is None:
            return 0
        return min(MOST, int(handlers * AHEAD_S / max(self.seconds, 1e-6)))
