"""A topic's options and layout, and the end of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import JOURNALED
from lisa.core.transitions.base import Argument, Recorded, Transition


@dataclass(frozen=True)
class Configure(Recorded, Transition[int]):
    """Write encoded options; None removes one. Returns the number of options changed.

    With `declared`, changes only options that a declaration wrote last.
    """

    script: ClassVar[str] = "configure"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    values: Mapping[str, str | None]
    declared: bool = False

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = ["declare" if self.declared else "set", len(self.values)]
        for name, value in self.values.items():
            arguments += (name, 0, "") if value is None else (name, 1, value)
        return arguments

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])


@dataclass(frozen=True)
class LimitKeys(Recorded, Transition[int]):
    """Write encoded limits of keys by field of the hash; "" removes them.

    what: `set` numbers a change, in the topic's own shard. So does `declare`, which changes only
    limits that a declaration wrote last, and those of keys that have none. To copy the change
    `number` to another shard, the first call is `open`, and the last one `close`.

    Returns how many changed; -1 if the shard knows of a later change.
    """

    script: ClassVar[str] = "limit"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    what: Literal["set", "declare", "open", "copy", "close"]
    limits: Mapping[str, str]
    number: int = 0

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return (keys.limits,)

    def args(self) -> Sequence[Argument]:
        return [self.what, self.number, len(self.limits), *self.limits, *self.limits.values()]

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])


@dataclass(frozen=True)
class SetLayout(Transition[int]):
    """Open or close one shard for new messages; on the topic itself, forget or renumber.

    `forget` drops an older shard count. `renumber` raises a layout whose last changes were lost
    above a number already seen by shards; `counts` are the shard counts found. An opened shard
    without a journal continues with the journal number after `journaled`.

    Returns the number of the latest layout known to the shard, negative if that layout closed it.
    If this differs from `number`, the call was outdated and changed nothing.
    """

    script: ClassVar[str] = "set_layout"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    what: Literal["open", "close", "forget", "renumber"]
    number: int
    counts: Sequence[int] = ()
    journaled: int = 0

    def args(self) -> Sequence[Argument]:
        return (self.what, self.number, ",".join(map(str, self.counts)), self.journaled)

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])


@dataclass(frozen=True)
class Absorb(Transition[bool]):
    """Merge the shards of one former count into their topic. Returns whether this call did so.

    number: the layout in which the shards of `count` are empty. counters: the sums of their
    counters. journaled: by shard (`3of8`), the last number of its journal. merged: the key of a
    stream that replaces the topic's history, if the stream exists.
    """

    script: ClassVar[str] = "absorb"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
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


@dataclass(frozen=True)
class Clear(Transition[bool]):
    """Delete the keys of one shard, or of a topic. Returns whether none is left.

    number: the layout that does not include the shard; for a topic, the one that it accepts.
    groups: all its groups.

    A shard or topic that holds messages or has another group, and a shard that has become part of
    its topic again, is left unchanged.
    """

    script: ClassVar[str] = "clear"
    number: int
    groups: tuple[str, ...] = ()
    is_whole_topic: bool = False

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return self.groups

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        own = (keys.schedules, keys.ticks, keys.local) if self.is_whole_topic else ()
        return (keys.consumers, keys.history, keys.archived, keys.confirm, keys.throttled, *own)

    def args(self) -> Sequence[Argument]:
        return (self.number, int(self.is_whole_topic))

    def parse(self, reply: Sequence[Any]) -> bool:
        return bool(reply[0])
