"""Adds a group to a topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.model.errors import RemovalUnfinished, TooManyGroups
from lisa.core.model.sharding import topic_of
from lisa.core.transitions.base import Argument, Recorded, Transition


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Declare(Recorded, Transition[bool]):
    """Declare a group and create its stream. Returns whether the group is new.

    Raises RemovalUnfinished if the group still owes messages from before its removal, and
    TooManyGroups if it is new and the topic has its maximum number of groups.
    only_mend: do nothing if the group is not declared (any longer).
    only_lost: declare the group only if it owes messages although it was never removed.
    unlimited: ignore `max_groups`, because the topic had the group before. Shards always ignore it,
        because they follow their topic.
    """

    script: ClassVar[str] = "declare"
    topic: str
    group: str
    only_mend: bool = False
    only_lost: bool = False
    unlimited: bool = False

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return (self.group,)

    def args(self) -> Sequence[Argument]:
        is_limited = not (self.unlimited or self.only_lost) and topic_of(self.topic) == self.topic
        return (2 if self.only_lost else int(self.only_mend), int(is_limited))

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(int(reply[0]))

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"OWES":
            raise RemovalUnfinished(
                f"group {self.group!r} was removed from topic {self.topic!r}, but the removal is "
                "still settling its messages; declare it again once the removal is complete"
            )
        if reply[0] == b"MANY":
            raise TooManyGroups(
                f"group {self.group!r} is not declared: topic {self.topic!r} has {reply[1]} groups "
                f"and allows {reply[2]} (its option max_groups). Every group gets a copy of every "
                "message; remove unused groups, or raise the option"
            )
        Transition.refuse(self, reply)
