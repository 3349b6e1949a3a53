"""Puts ids right that a foreign hand, or a lost server, left standing wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition, text

__all__ = ["Mend"]


@dataclass(frozen=True, slots=True)
class Mend(Transition[list[list[str]]]):
    """Mend ids; answers for each what was wrong. With `judge` it says so and changes nothing.

    `entry-lost`: its stream entry was gone; `no-place`: live, but nowhere; `second-place`: in two
    places at once; `leftover`: a group remembers failures of a message that it does not owe;
    `no-body`: a record without a live message.
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
        return [text(said).split() for said in reply]
