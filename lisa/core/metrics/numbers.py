"""Numbers as they are counted, added up and handed on; no label and no name is checked here."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from lisa.core.metrics.families import FAMILIES

__all__ = ["Numbers", "Spread", "Tally", "Value", "add", "lasting", "merge", "of_process", "put"]

Value: TypeAlias = float | list[float]
"""One number; of a histogram how many lay in each bucket, one above the last bound, and the sum."""

Numbers: TypeAlias = dict[str, dict[tuple[str, ...], Value]]
"""By the family's name and the values of its labels."""


class Tally:
    """Counts by the values of labels; threads may share one."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def add(self, n: int, *labels: str) -> None:
        """So many more."""
        with self._lock:
            self._counts[labels] = self._counts.get(labels, 0) + n

    def numbers(self) -> dict[tuple[str, ...], Value]:
        """All of them."""
        with self._lock:
            return dict(self._counts)


class Spread:
    """How values spread over the bounds of a histogram; threads may share one."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        """One more value, or the same for so many."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += times
            self._sum += value * times

    def numbers(self) -> list[float]:
        """As a histogram's value."""
        with self._lock:
            return [*self._counts, self._sum]


def put(numbers: Numbers, name: str, value: Value, *labels: str) -> None:
    """Set one number."""
    numbers.setdefault(name, {})[labels] = value


def add(numbers: Numbers, name: str, value: Value, *labels: str) -> None:
    """Add to one number, as its family is added up."""
    rows = numbers.setdefault(name, {})
    rows[labels] = value if labels not in rows else _sum(name, rows[labels], value)


def merge(parts: Iterable[Mapping[str, Mapping[tuple[str, ...], Value]]]) -> Numbers:
    """The numbers of several processes as one."""
    merged: Numbers = {}
    for part in parts:
        for name, rows in part.items():
            for labels, value in rows.items():
                add(merged, name, value, *labels)
    return merged


def lasting(numbers: Numbers) -> Numbers:
    """What stays true of a process that has ended: counters and histograms."""
    return {name: rows for name, rows in numbers.items() if FAMILIES[name].kind != "gauge"}


def _sum(name: str, one: Value, other: Value) -> Value:
    if isinstance(one, list) and isinstance(other, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    if isinstance(one, list) or isinstance(other, list):
        raise TypeError(f"{name} is a histogram here and a number there")
    return min(one, other) if FAMILIES[name].is_least else one + other


def of_process() -> Numbers:
    """What this process costs."""
    numbers: Numbers = {}
    put(numbers, "lisa_processes", 1)
    put(numbers, "lisa_process_cpu_seconds_total", time.process_time())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return numbers
    put(numbers, "lisa_process_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"))
    return numbers
