"""How long a call is repeated, and how often."""

from __future__ import annotations

import random
import time

from lisa.core import failures

__all__ = ["LONGEST_AWAY_S", "Patience"]

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
MOST_MENDS = 20

LONGEST_AWAY_S = 0.5
"""So long at most until the next call, for those who go on trying by themselves while the server,
or a topic's node, is away: it is to be found soon after it is back."""


class Patience:
    """What one call may spend: growing pauses until a deadline, and a number of repairs.

    Each pause lies somewhere in the upper half of its length.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._pause = FIRST_PAUSE_S
        self._mends = 0

    def again(self) -> Patience:
        """For another call within the same time; its pauses begin small, and repairs anew."""
        other = Patience(0)
        other._ends = self._ends
        return other

    def mend(self, error: BaseException, where: str) -> None:
        """Count a repair on the server; raise when it is of no use again and again."""
        self._mends += 1
        if self._mends > MOST_MENDS:
            raise failures.translated(error, where)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, none of them negative."""
        return max(0.0, self._ends - time.monotonic())

    def next_pause(self) -> float | None:
        """Seconds to wait before the next try; None once the deadline is over."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return None
        pause = min(self._pause * random.uniform(0.5, 1.0), left)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        return pause
