"""Repairs the state of ids that another program or the loss of a server left inconsistent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Recorded, Transition, text


@dataclass(frozen=True, slots=True)
class Mend(Recorded, Transition[list[list[str]]]):
    """Repair ids. Returns the faults found for each. With `judge`, reports and changes nothing.

    `entry-lost`: the stream entry was missing; `no-place`: live, but in no group's data;
    `second-place`: in two states at the same time; `leftover`: a group has failures recorded for a
    message that it does not owe; `no-body`: a record without a live message.
    """

    script: ClassVar[str] = "mend"
    steps: ClassVar[int] = 4
    topic: str
    ids: Sequence[str]
    judge: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [keys.body(message_id) for message_id in self.ids]

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids, int(self.judge)]

    def parse(self, reply: Sequence[Any]) -> list[list[str]]:
        return [text(faults).split() for faults in reply]
