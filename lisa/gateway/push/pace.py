"""The pace of pushes to one target, by the degraded rule and the target's `Retry-After`."""

from __future__ import annotations

import time

from lisa.core.delivery.degradation import FIRST_S, LONGEST_S, Degradation
from lisa.core.model.backoff import Backoff
from lisa.core.store.presence import PushPresence


class TargetRecord:
    """One gateway's record of how one target responded.

    A degraded target, or one that asked to wait, gets one message at a time until a push succeeds.
    """

    def __init__(self) -> None:
        self.resumes = 0.0
        self._degradation = Degradation()
        self._faults = Backoff(FIRST_S, LONGEST_S)
        self._fault = ""  # why this gateway cannot push
        self._faulty = 0.0  # since when
        self._is_asked_to_wait = False
        self._wish = ""
        self._asked = 0.0

    def presence(self, group: str, host: str) -> PushPresence:
        """This record as other roles see it."""
        row, waits = self._degradation, self._is_asked_to_wait
        since = self._faulty if self._fault else self._asked
        asked_ms = round((time.monotonic() - since) * 1000) if waits or self._fault else 0
        state = "waiting" if waits else "running"
        if row.is_degraded or self._fault:
            state = "degraded"
        return PushPresence(
            group=group,
            host=host,
            state=state,
            failed=row.failed_in_row,
            failing_ms=max(row.failing_ms, asked_ms),
            error=self._fault or row.error or (self._wish if waits else ""),
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
        is_slowed = self.is_degraded or self._is_asked_to_wait or bool(self._fault)
        return 1 if is_slowed else concurrency

    def succeeded(self) -> bool:
        """Record a successful push; returns whether it ended a slow period."""
        was_slowed = self._reached() or self._is_asked_to_wait
        was_slowed = self._degradation.succeeded() or was_slowed
        if not self.left_s:  # a push that began before the wait does not end it
            self._is_asked_to_wait = False
        return was_slowed and not self._is_asked_to_wait

    def failed(self, error: str) -> bool:
        """Record a failed push; returns whether the target has just become degraded."""
        self._reached()
        has_begun = self._degradation.failed(error)
        if self.is_degraded and not self.left_s:  # concurrent failures cost one pause
            self._rest(self._degradation.backoff.take())
        return has_begun

    def asked_to_wait(self, seconds: float, error: str) -> None:
        """Record that the target asked for no push for `seconds`."""
        self._reached()
        if not self._is_asked_to_wait:
            self._asked = time.monotonic()
        self._is_asked_to_wait, self._wish = True, error
        self._rest(seconds)

    def could_not_push(self, error: str) -> bool:
        """Record a fault of the gateway itself; returns whether it has just begun."""
        has_begun = not self._fault
        if has_begun:
            self._faulty = time.monotonic()
        self._fault = error
        if not self.left_s:
            self._rest(self._faults.take())
        return has_begun

    def _reached(self) -> bool:
        """Record that the target was asked; returns whether that ended a fault of the gateway."""
        was_faulty, self._fault = bool(self._fault), ""
        self._faults.reset()
        return was_faulty

    def _rest(self, seconds: float) -> None:
        self.resumes = max(self.resumes, time.monotonic() + seconds)
