"""Deletes all keys of a shard that its topic has stopped using."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition


@dataclass(frozen=True, slots=True)
class Clear(Transition[bool]):
    """Delete one shard's keys. Returns whether none is left. `groups` are all groups of the shard.

    number: the layout that does not include the shard. A shard that has become part of the topic
    again, or that holds messages, is left unchanged.
    """

    script: ClassVar[str] = "clear"
    topic: str
    number: int
    groups: tuple[str, ...] = ()

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return self.groups

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return (keys.history, keys.archived, keys.confirm)

    def args(self) -> Sequence[Argument]:
        return (self.number,)

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(reply[0])
