"""The results of a run: figures with the values of all repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """Identifies a figure: measure, subject (floor, lisa, a peer) and name."""

    measure: str
    subject: str
    name: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure with its values in the order of the repeats."""

    key: Key
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The nearest-rank quantile of values in ascending order."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


@dataclass
class Results:
    """All figures of a run, in order of their first values.

    missing: reasons for subjects without any measurement (a peer, a server).
    failed: reasons for failed measurements, by measure and subject.
    lateness: all values in milliseconds, by load and subject.
    """

    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    lateness: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _units: dict[Key, str] = field(default_factory=dict)
    _values: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, measure: str, subject: str, name: str, value: float, unit: str) -> None:
        """Add the value of one repeat."""
        key = Key(measure, subject, name)
        self._units[key] = unit
        self._values.setdefault(key, []).append(value)

    def add_lateness(
        self, measure: str, subject: str, lateness_us: Sequence[int], label: str = ""
    ) -> None:
        """Add the lateness of one repeat: percentiles, early messages, all values."""
        ordered = sorted(late / 1000 for late in lateness_us)
        tail = f" {label}" if label else ""
        for name, fraction in (
            ("min", 0.0),
            ("p50", 0.5),
            ("p99", 0.99),
            ("p99.9", 0.999),
            ("max", 1.0),
        ):
            self.add(measure, subject, name + tail, quantile(ordered, fraction), "ms")
        self.add(measure, subject, "early" + tail, sum(late < 0 for late in lateness_us), "")
        self.lateness.setdefault((label, subject), []).extend(ordered)

    def figures(self) -> list[Figure]:
        """All figures."""
        return [Figure(key, self._units[key], tuple(all_)) for key, all_ in self._values.items()]

    def values(self, measure: str, subject: str, name: str) -> tuple[float, ...]:
        """The values of a figure; empty if it was not measured."""
        return tuple(self._values.get(Key(measure, subject, name), ()))

    def median(self, measure: str, subject: str, name: str) -> float | None:
        """The median of a figure; None if it was not measured."""
        values = self.values(measure, subject, name)
        return statistics.median(values) if values else None
