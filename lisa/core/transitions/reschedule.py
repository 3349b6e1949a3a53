"""waiting, retry, ready -> waiting with a new due time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Reschedule", "Rescheduled"]


class Rescheduled(StrEnum):
    """The truth about one id: only `RESCHEDULED` says that its due time is the new one."""

    RESCHEDULED = "rescheduled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


_OUTCOMES = {
    "s": Rescheduled.RESCHEDULED, "f": Rescheduled.IN_FLIGHT,
    "d": Rescheduled.DONE, "u": Rescheduled.UNKNOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reschedule(ById[Rescheduled]):
    """Give (id, due) pairs a new due time: '+<ms>' is a delay, else epoch ms in decimal."""

    script: ClassVar[str] = "reschedule"
    steps: ClassVar[int] = 8
    minds_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("items",)
    topic: str
    items: Sequence[tuple[str, str]]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id, _ in self.items for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        return [len(self.items), *(part for item in self.items for part in item)]

    @property
    def message_ids(self) -> Sequence[str]:
        return [one for one, _ in self.items]

    def is_nowhere(self, result: Rescheduled) -> bool:
        return result is Rescheduled.UNKNOWN

    def may_be_settled(self, result: Rescheduled) -> bool:
        return result is Rescheduled.DONE

    def parse(self, reply: Sequence[Any]) -> list[Rescheduled]:
        return [_OUTCOMES[letter] for letter in letters(reply[0])]
