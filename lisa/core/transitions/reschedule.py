"""waiting, retry, ready -> waiting with a new due time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, Recorded


class Rescheduled(StrEnum):
    """Outcome for one id. Only `RESCHEDULED` means that the due time has changed."""

    RESCHEDULED = "rescheduled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reschedule(Recorded, ById[Rescheduled]):
    """Set a new due time for (id, due) pairs: '+<ms>' is a delay, else epoch ms in decimal.

    '<ms>@<ms>' applies only if the message waits until the second instant; else returns DONE.
    is_placed: the due times were chosen by the messages' windows. Otherwise the call raises
        HasWindow, without a change, if a message may have one.
    """

    script: ClassVar[str] = "reschedule"
    steps: ClassVar[int] = 8
    checks_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("items",)
    outcomes: ClassVar[Mapping[str, Any]] = {
        "s": Rescheduled.RESCHEDULED,
        "f": Rescheduled.IN_FLIGHT,
        "d": Rescheduled.DONE,
        "u": Rescheduled.UNKNOWN,
    }
    topic: str
    items: Sequence[tuple[str, str]]
    is_placed: bool = True

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies_and_tombstones(self.message_ids)

    def args(self) -> Sequence[Argument]:
        placed = "1" if self.is_placed else ""
        return [placed, len(self.items), *(part for item in self.items for part in item)]

    def is_nowhere(self, result: Rescheduled) -> bool:
        return result is Rescheduled.UNKNOWN

    def may_be_settled(self, result: Rescheduled) -> bool:
        return result is Rescheduled.DONE
