"""in flight for too long -> retry or garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, Transition, text
from lisa.core.transitions.retry import Retried, new_seed, parse_failed

__all__ = ["FIRST", "LARGEST_WINDOW", "Reclaim", "Reclaimed", "TakenBack"]

FIRST = "-"

LARGEST_WINDOW = 50
"""Pending entries that one call looks at, at most; and as many leases."""


class TakenBack(NamedTuple):
    """One message; `due_ms` is what it had been delivered for, None if nobody knows any more."""

    id: str
    due_ms: int | None
    retried: Retried


class Reclaimed(NamedTuple):
    """One window's result; `cursor` is None at the end of the list.

    `next_end_ms` is how long until the next lease seen here ends, None if none was seen.
    """

    cursor: str | None
    next_end_ms: int | None
    cleared: int
    moved: list[TakenBack]


@dataclass(frozen=True, slots=True)
class Reclaim(Transition[Reclaimed]):
    """Look at one window of a group's pending list, from `start` on."""

    script: ClassVar[str] = "reclaim"
    topic: str
    group: str
    start: str = FIRST
    end: str = "+"
    window: int = LARGEST_WINDOW
    seed: int = field(default_factory=new_seed)

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        return (self.seed, self.start, self.end, self.window)

    def parse(self, reply: Sequence[Any]) -> Reclaimed:
        cursor, next_end, cleared, *rest = reply
        moved = [
            TakenBack(
                text(rest[i]), int(rest[i + 1]) if rest[i + 1] else None,
                parse_failed(rest[i + 2], rest[i + 3]),
            )
            for i in range(0, len(rest), 4)
        ]  # fmt: skip
        return Reclaimed(text(cursor) or None, None if next_end < 0 else next_end, cleared, moved)
