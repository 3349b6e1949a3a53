"""The degraded rule, shared by consumers and pushes."""

from __future__ import annotations

import time

from lisa.core.model.backoff import Backoff

DEGRADED_AFTER = 20
"""Failures in a row after which messages are taken one at a time."""

FIRST_S = 0.25
LONGEST_S = 30.0
MOST_ERROR = 200
"""Characters of an error that are kept."""


class Degradation:
    """The failures in a row of one subscription or one push target.

    While degraded, messages are taken one at a time, with growing pauses, until one succeeds. A
    handler or target that fails for an hour then costs only a few messages their attempts.

    backoff: the pauses before the next message while degraded.
    error: the reason of the last failure in the row.
    """

    __slots__ = ("_began", "backoff", "error", "failed_in_row")

    def __init__(self) -> None:
        self.failed_in_row = 0
        self.error = ""
        self._began = 0.0
        self.backoff = Backoff(FIRST_S, LONGEST_S)

    @property
    def is_degraded(self) -> bool:
        """Whether `DEGRADED_AFTER` messages failed in a row."""
        return self.failed_in_row >= DEGRADED_AFTER

    @property
    def failing_ms(self) -> int:
        """How long messages have failed in a row; 0 if the last one succeeded."""
        return round((time.monotonic() - self._began) * 1000) if self.failed_in_row else 0

    def succeeded(self) -> bool:
        """Count a success; returns whether it ended the degraded state."""
        if not self.failed_in_row:
            return False
        was_degraded = self.is_degraded
        self.failed_in_row = 0
        self.error = ""
        self.backoff.reset()
        return was_degraded

    def failed(self, error: str) -> bool:
        """Count a failure; returns whether it began the degraded state."""
        if not self.failed_in_row:
            self._began = time.monotonic()
        self.error = error.partition("\n")[0][:MOST_ERROR]
        self.failed_in_row += 1
        return self.failed_in_row == DEGRADED_AFTER
