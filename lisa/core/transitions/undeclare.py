"""Removes a group; what it owed is settled page by page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition

__all__ = ["Undeclare", "Undeclared"]


class Undeclared(NamedTuple):
    """Messages settled for good by this page, and whether nothing more is to be done.

    That is: the group's keys are gone, or it was declared anew meanwhile.
    """

    settled: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Undeclare(Transition[Undeclared]):
    """One page: the group is declared no more, and `ids` are no longer owed to it.

    begun: this is not the removal's first call, so it does nothing if the group is declared (anew).
    rest: there is no removal; only drop keys without messages, if nobody declares the group.
    """

    script: ClassVar[str] = "undeclare"
    steps: ClassVar[int] = 4  # as Purge: it does the same to an id, and asks all other groups
    topic: str
    group: str
    ids: Sequence[str] = ()
    drop: bool = False
    begun: bool = False
    rest: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        single = [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]
        return [*keys.group(self.group), *single]

    def args(self) -> Sequence[Argument]:
        begun = 2 if self.rest else int(self.begun)
        return [self.group, begun, int(self.drop), len(self.ids), *self.ids]

    def parse(self, reply: Sequence[Any]) -> Undeclared:
        return Undeclared(reply[0], bool(reply[1]))
