"""Removes foreign entries from a group's stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, OfGroup, Transition, text


class Trimmed(NamedTuple):
    """Result for one window; `cursor` is None at the end.

    If the stream has fewer `entries` than the index has ids (`indexed`), another program deleted
    some; `Mend` repairs their messages.
    """

    cursor: str | None
    removed: int
    entries: int
    indexed: int


@dataclass(frozen=True, slots=True)
class Trim(OfGroup, Transition[Trimmed]):
    """Check one window of a group's stream, from `start` on."""

    script: ClassVar[str] = "trim"
    topic: str
    group: str
    start: str = "-"
    window: int = 200

    def args(self) -> Sequence[Argument]:
        return (self.start, self.window)

    def parse(self, reply: Sequence[Any]) -> Trimmed:
        cursor, removed, entries, indexed = reply
        return Trimmed(text(cursor) or None, removed, entries, indexed)
