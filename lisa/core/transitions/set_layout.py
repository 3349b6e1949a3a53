"""Opens and closes the shards of a split topic, and keeps the topic's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lisa.core.transitions.base import Argument, Transition


@dataclass(frozen=True, slots=True)
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
    topic: str
    what: Literal["open", "close", "forget", "renumber"]
    number: int
    counts: Sequence[int] = ()
    journaled: int = 0

    def args(self) -> Sequence[Argument]:
        return (self.what, self.number, ",".join(map(str, self.counts)), self.journaled)

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])
