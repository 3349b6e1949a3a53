"""Merges the counters and the history of former shards into the topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import JOURNALED
from lisa.core.transitions.base import Argument, Transition


@dataclass(frozen=True, slots=True)
class Absorb(Transition[bool]):
    """Merge the shards of one former count into their topic. Returns whether this call did so.

    number: the layout in which the shards of `count` are empty. counters: the sums of their
    counters. journaled: by shard (`3of8`), the last number of its journal. merged: the key of a
    stream that replaces the topic's history, if the stream exists.
    """

    script: ClassVar[str] = "absorb"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    topic: str
    number: int
    count: int
    counters: Mapping[str, int]
    journaled: Mapping[str, int]
    merged: str

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return (keys.history, self.merged)

    def args(self) -> Sequence[Argument]:
        counters: list[Argument] = [part for item in self.counters.items() for part in item]
        journals = " ".join(f"{JOURNALED}{shard} {last}" for shard, last in self.journaled.items())
        return (self.number, self.count, journals, len(self.counters), *counters)

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(reply[0])
