"""Lateness histogram: one letter per bucket.

Lateness is the time of the first delivery minus the due time, by Redis's clock. Bucket bounds grow
by about the square root of ten and are finer where most values fall. Percentiles are interpolated
linearly within a bucket, as in Prometheus's `histogram_quantile`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

# One decade of bounds per line.
BOUNDS_MS = (
    0.25, 0.5, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 300, 500,
    1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000,
)  # fmt: skip
"""Upper bounds of the buckets in milliseconds; a last bucket holds everything above."""

LETTERS = "abcdefghijklmnopqrstuvwxyzA"
EARLY = "-"
"""The letter for a negative lateness, possible only if Redis's clock was set back."""

_BOUNDS_US = tuple(round(bound * 1_000) for bound in BOUNDS_MS)


def letter(lateness_us: int) -> str:
    """The bucket of one delivery."""
    return EARLY if lateness_us < 0 else LETTERS[bisect_left(_BOUNDS_US, lateness_us)]


def percentile(counts: Mapping[str, int], fraction: float) -> float | None:
    """The lateness in ms that `fraction` of deliveries did not exceed; None without deliveries."""
    total = sum(counts.values())
    if total <= 0:
        return None
    wanted, below = fraction * total, float(counts.get(EARLY, 0))
    lower = 0.0
    for name, upper in zip(LETTERS, BOUNDS_MS, strict=False):
        inside = counts.get(name, 0)
        if inside and below + inside >= wanted:
            return lower + (upper - lower) * max(0.0, wanted - below) / inside
        below += inside
        lower = upper
    return float(BOUNDS_MS[-1])
