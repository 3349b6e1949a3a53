"""Lateness histogram: one letter per bucket.

Lateness is the time of the first delivery minus the due time, by Redis's clock. Bucket bounds grow
by a factor of two to three and are finer where most values fall. Percentiles are interpolated
linearly within a bucket, as in Prometheus's `histogram_quantile`, and never exceed the highest
lateness, which each group's counters keep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import inf

# One decade of bounds per line; the last line continues in minutes and hours.
BOUNDS_MS = (
    0.25, 0.5, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 300, 500,
    1_000, 2_000, 5_000, 10_000, 30_000, 60_000,
    120_000, 300_000, 600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 21_600_000, 86_400_000,
)  # fmt: skip
"""Upper bounds of the buckets in milliseconds; a last bucket holds everything above."""

LETTERS = "abcdefghijklmnopqrstuvwxBCDEFGHIJK"
"""A letter for each bucket. A letter that was ever written keeps its range."""

FORMER = {"y": "BC", "z": "DEFG", "A": "HIJK"}
"""The letters of 0.1.0 for more than a minute, and the buckets that divide each. Counters of
earlier deliveries, processes of 0.1.0, and receipts use them."""

EARLY = "-"
"""The letter for a negative lateness, possible only if Redis's clock was set back."""

KEPT_ABOVE_MS = 1_000
"""Buckets below are so narrow that the highest lateness would not change a percentile much."""

_BOUNDS_US = tuple(round(bound * 1_000) for bound in BOUNDS_MS)
_LOWER = (0.0, *BOUNDS_MS)
_RANGES = dict(zip(LETTERS, zip(_LOWER, (*BOUNDS_MS, inf), strict=True), strict=True))
_RANGES |= {name: (_RANGES[parts[0]][0], _RANGES[parts[-1]][1]) for name, parts in FORMER.items()}
_FORMER_OF = {part: name for name, parts in FORMER.items() for part in parts}


def letter(lateness_us: int) -> str:
    """The bucket of one delivery."""
    return EARLY if lateness_us < 0 else LETTERS[bisect_left(_BOUNDS_US, lateness_us)]


def kept_ms(lateness_us: int) -> int:
    """A lateness in ms, rounded up, as the highest one is kept; 0 if it is too low to be kept."""
    return -(-lateness_us // 1_000) if lateness_us > KEPT_ABOVE_MS * 1_000 else 0


def former(name: str) -> str:
    """The letter that 0.1.0 writes for a bucket."""
    return _FORMER_OF.get(name, name)


def narrowed(name: str, most_us: int) -> tuple[str, int]:
    """The letter and `kept_ms` of a lateness of at most `most_us` whose former letter is known."""
    low, high = _RANGES.get(name, (0.0, 0.0))
    if low < KEPT_ABOVE_MS:
        return name, 0
    late_us = round(min(max(most_us, low * 1_000 + 1), high * 1_000))
    return letter(late_us), kept_ms(late_us)


def bucket_counts(counts: Mapping[str, int]) -> list[int]:
    """Deliveries in each bucket; those of a former letter are in the last of its buckets."""
    found = [counts.get(name, 0) for name in LETTERS]
    for name, parts in FORMER.items():
        found[LETTERS.index(parts[-1])] += counts.get(name, 0)
    return found


def total_ms(counts: Mapping[str, int]) -> float:
    """The sum of all lateness, each counted with the middle of its bucket, or the last bound."""
    return sum(
        n * ((low + high) / 2 if high < inf else low)
        for name, (low, high) in _RANGES.items()
        if (n := counts.get(name, 0))
    )


def percentile(
    counts: Mapping[str, int], fraction: float, highest_ms: float | None = None
) -> float | None:
    """The lateness in ms that `fraction` of deliveries did not exceed; None without deliveries.

    `highest_ms` ends the bucket that contains it. It has no effect on higher buckets: their
    deliveries were counted by a version that did not keep the highest lateness. Ignores letters
    of later versions.
    """
    shares = _shares(counts)
    below = float(counts.get(EARLY, 0))
    wanted = fraction * (below + sum(shares.values()))
    found = 0.0 if below else None
    for name, inside in shares.items():
        low, high = _RANGES[name]
        if highest_ms is not None and low < highest_ms < high:
            high = highest_ms
        found = high if high < inf else low
        if below + inside >= wanted:
            return low + (found - low) * max(0.0, wanted - below) / inside
        below += inside
    return found


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Deliveries by letter, lowest first; those of former letters spread by the buckets' widths.

    The former last bucket has no upper bound, so it counts as the least that it can mean.
    """
    found = {name: float(counts.get(name, 0)) for name in LETTERS}
    for name, parts in FORMER.items():
        low, high = _RANGES[name]
        for part in parts if high < inf else parts[:1]:
            start, end = _RANGES[part]
            share = (end - start) / (high - low) if high < inf else 1.0
            found[part] += counts.get(name, 0) * share
    return {name: n for name, n in found.items() if n > 0}
