"""Reads events of a topic's journal, up to the byte budget of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, Transition

MOST_EVENTS = 250


class EventPage(NamedTuple):
    """Events in the form of XRANGE, and whether they include the last one."""

    is_last: bool
    items: list[Any]


@dataclass(frozen=True, slots=True)
class Read(Transition[EventPage]):
    """Read the first events between two entries, or the last ones if `backwards`.

    start, end: as for XRANGE: `-`, `+`, an entry, or `(` and an entry.
    """

    script: ClassVar[str] = "read"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    topic: str
    start: str
    end: str
    backwards: bool = False
    most: int = MOST_EVENTS

    def args(self) -> Sequence[Argument]:
        return (self.start, self.end, int(self.backwards), min(self.most, MOST_EVENTS))

    def parse(self, reply: Sequence[Any]) -> EventPage:
        is_last, *items = reply
        return EventPage(bool(is_last), items)
