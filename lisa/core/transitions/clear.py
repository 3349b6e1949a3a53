"""Deletes all keys of a shard that its topic has stopped using."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition


@dataclass(frozen=True, slots=True)
class Clear(Transition[bool]):
    """Delete the keys of one shard, or of a topic. Returns whether none is left.

    number: the layout that does not include the shard; for a topic, the one that it accepts.
    groups: all its groups.

    A shard or topic that holds messages or has another group, and a shard that has become part of
    its topic again, is left unchanged.
    """

    script: ClassVar[str] = "clear"
    topic: str
    number: int
    groups: tuple[str, ...] = ()
    is_whole_topic: bool = False

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return self.groups

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        own = (keys.schedules, keys.ticks, keys.local) if self.is_whole_topic else ()
        return (keys.history, keys.archived, keys.confirm, *own)

    def args(self) -> Sequence[Argument]:
        return (self.number, int(self.is_whole_topic))

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(reply[0])
