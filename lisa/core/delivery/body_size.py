"""Moving averages, and the average size of bodies, which bounds how many bytes one read holds."""

from __future__ import annotations

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
