"""Removes a group and settles, page by page, the messages that it owes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Recorded, Transition


class Undeclared(NamedTuple):
    """Messages settled by this page, and whether the removal has ended.

    A removal ends when the group's keys are gone, or when the group was declared again.
    """

    settled: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Undeclare(Recorded, Transition[Undeclared]):
    """One page of a removal: deletes the declaration, and settles `ids` for the group.

    begun: not the removal's first call, so do nothing if the group is declared (again).
    rest: no removal; only delete keys without messages if the group is not declared.
    """

    script: ClassVar[str] = "undeclare"
    steps: ClassVar[int] = 4  # as for Purge, which does the same per id
    topic: str
    group: str
    ids: Sequence[str] = ()
    drop: bool = False
    begun: bool = False
    rest: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [*keys.group(self.group), *keys.bodies_and_tombstones(self.ids)]

    def args(self) -> Sequence[Argument]:
        begun = 2 if self.rest else int(self.begun)
        return [self.group, begun, int(self.drop), len(self.ids), *self.ids]

    def parse(self, reply: Sequence[Any]) -> Undeclared:
        return Undeclared(int(reply[0]), bool(int(reply[1])))
