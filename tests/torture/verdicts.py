"""The findings of the judges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

FAULTS = ("lost", "early", "late", "after cancel", "after replace", "stuck", "unexplained")


class Finding(NamedTuple):
    """A message (0: none in particular), and what is wrong with it."""

    number: int
    what: str


@dataclass
class Verdicts:
    """`guilty` is empty after a clean run; `excused` has what a fault explains, by kind."""

    guilty: dict[str, list[Finding]] = field(default_factory=lambda: {one: [] for one in FAULTS})
    excused: dict[str, list[Finding]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether there are no accusations."""
        return not any(self.guilty.values())

    def accuse(self, fault: str, number: int, what: str) -> None:
        self.guilty[fault].append(Finding(number, what))

    def excuse(self, fault: str, number: int, what: str) -> None:
        self.excused.setdefault(fault, []).append(Finding(number, what))
