"""waiting, retry, ready, garbage -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Cancel", "Cancelled"]


class Cancelled(StrEnum):
    """The truth about one id: only `CANCELLED` says that it will not be handled."""

    CANCELLED = "cancelled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


_OUTCOMES = {
    "c": Cancelled.CANCELLED, "f": Cancelled.IN_FLIGHT,
    "d": Cancelled.DONE, "u": Cancelled.UNKNOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cancel(ById[Cancelled]):
    """Take messages back for good."""

    script: ClassVar[str] = "cancel"
    steps: ClassVar[int] = 6
    minds_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    topic: str
    ids: Sequence[str]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids]

    @property
    def message_ids(self) -> Sequence[str]:
        return self.ids

    def is_nowhere(self, result: Cancelled) -> bool:
        return result is Cancelled.UNKNOWN

    def may_be_settled(self, result: Cancelled) -> bool:
        return result in (Cancelled.CANCELLED, Cancelled.DONE)

    def parse(self, reply: Sequence[Any]) -> list[Cancelled]:
        return [_OUTCOMES[letter] for letter in letters(reply[0])]
