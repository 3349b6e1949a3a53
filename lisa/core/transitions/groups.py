"""The groups of a topic: declares and removes them, and forgets their idle consumers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.errors import RemovalUnfinished, TooManyGroups
from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import topic_of
from lisa.core.transitions.base import Argument, OfGroup, Recorded, Transition, text


@dataclass(frozen=True, eq=False, repr=False)
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


class Undeclared(NamedTuple):
    """Messages settled by this page, and whether the removal has ended.

    A removal ends when the group's keys are gone, or when the group was declared again.
    """

    settled: int
    gone: bool


@dataclass(frozen=True)
class Undeclare(Recorded, Transition[Undeclared]):
    """One page of a removal: deletes the declaration, and settles `ids` for the group.

    begun: not the removal's first call, so do nothing if the group is declared (again).
    rest: no removal; only delete keys without messages if the group is not declared.
    """

    script: ClassVar[str] = "undeclare"
    steps: ClassVar[int] = 4  # as for Purge, which does the same per id
    group: str
    ids: Sequence[str] = ()
    drop: bool = False
    begun: bool = False
    rest: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [
            *keys.group(self.group),
            *keys.lanes(self.group),
            *keys.bodies_and_tombstones(self.ids),
        ]

    def args(self) -> Sequence[Argument]:
        begun = 2 if self.rest else int(self.begun)
        return [self.group, begun, int(self.drop), len(self.ids), *self.ids]

    def parse(self, reply: Sequence[Any]) -> Undeclared:
        return Undeclared(int(reply[0]), bool(int(reply[1])))


@dataclass(frozen=True)
class Forget(OfGroup, Transition[list[str]]):
    """Delete consumers idle for `least_idle_ms` with nothing pending. Returns their names."""

    script: ClassVar[str] = "forget"
    consumers: Sequence[str]
    least_idle_ms: int

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return (keys.consumers,)

    def args(self) -> Sequence[Argument]:
        return [self.least_idle_ms, len(self.consumers), *self.consumers]

    def parse(self, reply: Sequence[Any]) -> list[str]:
        return [text(name) for name in reply]
