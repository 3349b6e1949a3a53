"""Adds a group to a topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.errors import RemovalUnfinished
from lisa.core.transitions.base import Argument, Transition

__all__ = ["Declare"]


@dataclass(frozen=True, slots=True)
class Declare(Transition[bool]):
    """Declare a group and make its stream; answers whether it is new: a repeated call says no.

    Raises RemovalUnfinished if it owes messages since its removal.
    only_mend: leave a group alone that is not declared (any more).
    only_lost: declare it only if it owes messages though nobody removed it.
    """

    script: ClassVar[str] = "declare"
    topic: str
    group: str
    only_mend: bool = False
    only_lost: bool = False

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return (self.group,)

    def args(self) -> Sequence[Argument]:
        return (2 if self.only_lost else int(self.only_mend),)

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(reply[0])

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"OWES":
            raise RemovalUnfinished(
                f"group {self.group!r} was removed from topic {self.topic!r}, and what it owed is "
                "not settled yet: it can be declared again once that is done"
            )
        Transition.refuse(self, reply)
