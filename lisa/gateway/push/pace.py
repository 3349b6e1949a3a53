"""The pace of pushes to one target, by the degraded rule and the target's `Retry-After`."""

from __future__ import annotations

import time

from lisa.core.delivery.degradation import Degradation
from lisa.core.store.presence import PushPresence


class TargetRecord:
    """One gateway's record of how one target responded.

    A degraded target, or one that asked to wait, gets one message at a time until a push succeeds.
    """

    def __init__(self) -> None:
        self.resumes = 0.0
        self._degradation = Degradation()
        self._is_asked_to_wait = False
        self._wish = ""
        self._asked = 0.0

    def presence(self, group: str, host: str) -> PushPresence:
        """This record as other roles see it."""
        row, waits = self._degradation, self._is_asked_to_wait
        asked_ms = round((time.monotonic() - self._asked) * 1000) if waits else 0
        return PushPresence(
            group=group,
            host=host,
            state="degraded" if row.is_degraded else "waiting" if waits else "running",
            failed=row.failed_in_row,
            failing_ms=max(row.failing_ms, asked_ms),
            error=row.error or (self._wish if waits else ""),
        )

    @property
    def is_degraded(self) -> bool:
        """Whether too many pushes failed in a row."""
        return self._degradation.is_degraded

    @property
    def left_s(self) -> float:
        """Seconds until the next push may start."""
        return max(0.0, self.resumes - time.monotonic())

    def most(self, concurrency: int) -> int:
        """The number of pushes that may run at the same time."""
        return 1 if self.is_degraded or self._is_asked_to_wait else concurrency

    def succeeded(self) -> bool:
        """Record a successful push; returns whether it ended a slow period."""
        was_slowed = self._degradation.succeeded() or self._is_asked_to_wait
        if not self.left_s:  # a push that began before the wait does not end it
            self._is_asked_to_wait = False
        return was_slowed and not self._is_asked_to_wait

    def failed(self, error: str) -> bool:
        """Record a failed push; returns whether the target has just become degraded."""
        has_begun = self._degradation.failed(error)
        if self.is_degraded and not self.left_s:  # concurrent failures cost one pause
            self._rest(self._degradation.backoff.take())
        return has_begun

    def asked_to_wait(self, seconds: float, error: str) -> None:
        """Record that the target asked for no push for `seconds`."""
        if not self._is_asked_to_wait:
            self._asked = time.monotonic()
        self._is_asked_to_wait, self._wish = True, error
        self._rest(seconds)

    def _rest(self, seconds: float) -> None:
        self.resumes = max(self.resumes, time.monotonic() + seconds)
