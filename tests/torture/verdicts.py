"""What a judge says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["FAULTS", "Finding", "Verdicts"]

FAULTS = ("lost", "early", "late", "after cancel", "after replace", "stuck", "unexplained")


class Finding(NamedTuple):
    """One message (0: none in particular), and what is the matter with it."""

    number: int
    what: str


@dataclass
class Verdicts:
    """`guilty` is empty after a clean run; `excused` has what a fault explains, each by name."""

    guilty: dict[str, list[Finding]] = field(default_factory=lambda: {one: [] for one in FAULTS})
    excused: dict[str, list[Finding]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not any(self.guilty.values())

    def accuse(self, fault: str, number: int, what: str) -> None:
        self.guilty[fault].append(Finding(number, what))

    def excuse(self, fault: str, number: int, what: str) -> None:
        self.excused.setdefault(fault, []).append(Finding(number, what))
