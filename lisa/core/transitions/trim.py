"""Removes from a group's stream what is foreign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, Transition, text

__all__ = ["Trim", "Trimmed"]


class Trimmed(NamedTuple):
    """One window's result; `cursor` is None at the end.

    Fewer `entries` in the stream than ids in the index (`indexed`) means that a foreign hand took
    some: mend puts their messages right.
    """

    cursor: str | None
    removed: int
    entries: int
    indexed: int


@dataclass(frozen=True, slots=True)
class Trim(Transition[Trimmed]):
    """Look at one window of a group's stream, from `start` on."""

    script: ClassVar[str] = "trim"
    topic: str
    group: str
    start: str = "-"
    window: int = 200

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        return (self.start, self.window)

    def parse(self, reply: Sequence[Any]) -> Trimmed:
        cursor, removed, entries, indexed = reply
        return Trimmed(text(cursor) or None, removed, entries, indexed)
