"""The average size of bodies, to bound how many bytes one read holds."""

from __future__ import annotations

AHEAD_BYTES = 16 * 1024 * 1024
"""Maximum total of bodies that one reader or one pull holds before handlers start on them."""

SMOOTHING = 0.2


class BodySize:
    """An exponential average of body sizes in bytes. A much larger body replaces the average."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0.0

    def measured(self, total: int, count: int) -> None:
        """Add `count` bodies with `total` bytes."""
        size = total / max(1, count)
        if size > 4 * self.bytes:
            self.bytes = size
        else:
            self.bytes += SMOOTHING * (size - self.bytes)

    def fitting(self, limit: int = AHEAD_BYTES) -> int:
        """The number of average bodies that fit into `limit` bytes, at least one."""
        return max(1, int(limit / max(self.bytes, 1.0)))
