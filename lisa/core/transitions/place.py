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

    `renumber` puts a layout above a number that places know already. Answers the number of the
    latest layout that is known there: above `number`, the call was late and changed nothing.
    """

    script: ClassVar[str] = "place"
    topic: str
    what: Literal["open", "close", "forget", "renumber"]
    number: int
    count: int = 0

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return ()

    def args(self) -> Sequence[Argument]:
        return (self.what, self.number, self.count)

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])
