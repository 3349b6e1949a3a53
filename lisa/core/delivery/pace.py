"""How far to read ahead: by the sizes of bodies, and one message at a time after failures."""

from __future__ import annotations

import time

from lisa.core.model.backoff import Backoff

AHEAD_BYTES = 16 * 1024 * 1024
"""Maximum total of bodies that one consumer or one pull holds before handlers start on them."""

SMOOTHING = 0.2


class Average:
    """An exponential average. A value more than four times as large replaces the average."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Add a measured value."""
        average = self.value
        if average is None or value > 4 * average:
            self.value = value
        else:
            self.value = average + SMOOTHING * (value - average)


class BodySize:
    """The average size of bodies in bytes."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = Average()

    def measured(self, total: int, count: int) -> None:
        """Add `count` bodies with `total` bytes."""
        self._bytes.add(total / max(1, count))

    def fitting(self) -> int:
        """The number of average bodies that fit into `AHEAD_BYTES`, at least one."""
        return max(1, int(AHEAD_BYTES / max(self._bytes.value or 0.0, 1.0)))


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
