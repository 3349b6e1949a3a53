"""Metric values: counting, merging, and sharing one reading of Redis between scrapes.

Names and labels are not checked here.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from lisa.core.daemon.logs import dropped_lines
from lisa.core.daemon.threads import unforeseen_errors
from lisa.core.metrics.families import FAMILIES
from lisa.core.model.errors import LisaError

METRICS = "/metrics"

LASTS_S = 1.0
SHARE = 20
"""A reading is valid for this multiple of the time it took, which bounds its cost."""

LASTS_AT_MOST_S = 5.0
"""Scrapes of one address at least this far apart never see a topic's counter decrease, although
several workers with their own readings may serve them."""

Value: TypeAlias = float | list[float]
"""A number; for a histogram, the count of each bucket, the count above the last, and the sum."""

Numbers: TypeAlias = dict[str, dict[tuple[str, ...], Value]]
"""Values by family name and label values."""


class Reading:
    """The last reading and its validity. Callers that share it renew it in turn."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}
        self._until = 0.0

    def get(self) -> Numbers | None:
        """The reading, or None after its expiry."""
        return self._numbers if time.monotonic() < self._until else None

    def keep(self, found: Numbers | LisaError, began: float) -> Numbers:
        """Store a new reading, or the error instead; `began` is when the reading started."""
        now = time.monotonic()
        self._numbers = {} if isinstance(found, LisaError) else found
        put(self._numbers, "lisa_up", float(not isinstance(found, LisaError)))
        self._until = now + min(max(LASTS_S, SHARE * (now - began)), LASTS_AT_MOST_S)
        return self._numbers


class Tally:
    """Counters by label values; safe to share between threads."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def add(self, n: int, *labels: str) -> None:
        """Add `n` to one counter."""
        with self._lock:
            self._counts[labels] = self._counts.get(labels, 0) + n

    def numbers(self) -> dict[tuple[str, ...], Value]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counts)


class Spread:
    """A histogram; safe to share between threads."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, `times` times."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += times
            self._sum += value * times

    def numbers(self) -> list[float]:
        """The histogram as a `Value`."""
        with self._lock:
            return [*self._counts, self._sum]


def put(numbers: Numbers, name: str, value: Value, *labels: str) -> None:
    """Set one number."""
    numbers.setdefault(name, {})[labels] = value


def add(numbers: Numbers, name: str, value: Value, *labels: str) -> None:
    """Add to one number, by sum or minimum according to its family."""
    rows = numbers.setdefault(name, {})
    rows[labels] = value if labels not in rows else _sum(name, rows[labels], value)


def merge(parts: Iterable[Mapping[str, Mapping[tuple[str, ...], Value]]]) -> Numbers:
    """Merge the numbers of several processes."""
    merged: Numbers = {}
    for part in parts:
        for name, rows in part.items():
            for labels, value in rows.items():
                add(merged, name, value, *labels)
    return merged


def lasting(numbers: Numbers) -> Numbers:
    """The numbers that remain valid after their process has ended: counters and histograms."""
    return {name: rows for name, rows in numbers.items() if FAMILIES[name].kind != "gauge"}


def _sum(name: str, value: Value, added: Value) -> Value:
    if isinstance(value, list) and isinstance(added, list):
        return [a + b for a, b in zip(value, added, strict=True)]
    if isinstance(value, list) or isinstance(added, list):
        raise TypeError(f"{name} is a histogram in one process and a number in another")
    return min(value, added) if FAMILIES[name].is_least else value + added


def of_process() -> Numbers:
    """Metrics of this process."""
    numbers: Numbers = {}
    put(numbers, "lisa_processes", 1)
    put(numbers, "lisa_process_cpu_seconds_total", time.process_time())
    put(numbers, "lisa_process_unforeseen_errors_total", unforeseen_errors())
    put(numbers, "lisa_process_log_lines_dropped_total", dropped_lines())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return numbers
    put(numbers, "lisa_process_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"))
    return numbers
