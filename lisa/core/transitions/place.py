"""Opens and closes the places of a topic that is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lisa.core.transitions.base import Argument, Transition

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place(Transition[int]):
    """Have one place take new messages, or none. Of the topic itself: forget an older count.

    `renumber` puts a layout of which the last changes were lost above a number that places know
    already; `counts` are those of which places were found. Answers the number of the latest layout
    that is known there, negative if that one has closed the place: another than `number` asked for,
    the call was late and changed nothing.
    """

    script: ClassVar[str] = "place"
    topic: str
    what: Literal["open", "close", "forget", "renumber"]
    number: int
    counts: Sequence[int] = ()

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return ()

    def args(self) -> Sequence[Argument]:
        return (self.what, self.number, ",".join(map(str, self.counts)))

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])
