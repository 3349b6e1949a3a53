"""Patience: how long and how often a call is repeated."""

from __future__ import annotations

import random
import time

from lisa.core.model.backoff import Backoff
from lisa.core.redis import errors

LONGEST_S = 1.0
MAX_REPAIRS = 20


class Patience:
    """The retry budget of one call: growing pauses until a deadline, and a number of repairs.

    Each pause is random, between half of its nominal length and all of it.
    """

    __slots__ = ("_backoff", "_ends", "_mends")

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._backoff: Backoff | None = None  # few calls need one
        self._mends = 0

    def again(self) -> Patience:
        """A budget with the same deadline for another call; pauses and repairs start afresh."""
        other = Patience(0)
        other._ends = self._ends
        return other

    def mend(self, error: BaseException, where: str) -> None:
        """Count a repair on the server. Raises the error, as a LisaError, after `MAX_REPAIRS`."""
        self._mends += 1
        if self._mends > MAX_REPAIRS:
            raise errors.translated(error, where)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._ends - time.monotonic())

    def next_pause(self, most_s: float = LONGEST_S) -> float | None:
        """Seconds to wait before the next attempt, at most `most_s`; None after the deadline."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return None
        if self._backoff is None:
            self._backoff = Backoff(longest_s=LONGEST_S)
        return min(self._backoff.take(most_s) * random.uniform(0.5, 1.0), left)
