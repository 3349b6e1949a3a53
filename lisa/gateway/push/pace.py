"""How fast a target is pushed to, by how it took what it got.

The rule of consumers, for targets: after twenty failures in a row one message at a time, with
growing pauses, until one arrives. So a target that is down for an hour costs a few messages their
attempts, and not every message of that hour. A target that asked to wait is begun with one message,
too.
"""

from __future__ import annotations

import time

__all__ = ["DEGRADED_AFTER", "Pace"]

DEGRADED_AFTER = 20
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0


class Pace:
    """What one gateway knows of one target."""

    def __init__(self) -> None:
        self.resumes = 0.0
        self._failed_in_row = 0
        self._pause_s = FIRST_PAUSE_S
        self._is_asked_to_wait = False

    @property
    def is_degraded(self) -> bool:
        """Whether it has failed too often."""
        return self._failed_in_row >= DEGRADED_AFTER

    @property
    def left_s(self) -> float:
        """How long nothing is to be pushed."""
        return max(0.0, self.resumes - time.monotonic())

    def most(self, concurrency: int) -> int:
        """Pushes that may be under way."""
        return 1 if self.is_degraded or self._is_asked_to_wait else concurrency

    def arrived(self) -> bool:
        """A push arrived. Answers whether that ends a bad time."""
        was_slowed = self.is_degraded or self._is_asked_to_wait
        self._failed_in_row, self._pause_s = 0, FIRST_PAUSE_S
        if not self.left_s:  # one that was under way before says nothing of the time after
            self._is_asked_to_wait = False
        return was_slowed and not self._is_asked_to_wait

    def failed(self) -> bool:
        """One failed. Answers whether the target has just become degraded."""
        self._failed_in_row += 1
        if self.is_degraded and not self.left_s:  # those that fail together cost one pause
            self._rest(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return self._failed_in_row == DEGRADED_AFTER

    def asked_to_wait(self, seconds: float) -> None:
        """The target said when to come again."""
        self._is_asked_to_wait = True
        self._rest(seconds)

    def _rest(self, seconds: float) -> None:
        self.resumes = max(self.resumes, time.monotonic() + seconds)
