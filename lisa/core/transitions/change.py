"""Changes of live messages: waiting, retry, ready, garbage -> settled, or -> waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, OfIds, OfKey, Recorded


class Cancelled(StrEnum):
    """Outcome for one id. Only `CANCELLED` guarantees that the message will not be handled."""

    CANCELLED = "cancelled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False, repr=False)
class Cancel(OfKey, OfIds, ById[Cancelled]):
    """Cancel messages for good."""

    script: ClassVar[str] = "cancel"
    steps: ClassVar[int] = 6
    group_steps: ClassVar[float | None] = 2
    checks_layout: ClassVar[bool] = True
    outcomes: ClassVar[Mapping[str, Any]] = {
        "c": Cancelled.CANCELLED,
        "f": Cancelled.IN_FLIGHT,
        "d": Cancelled.DONE,
        "u": Cancelled.UNKNOWN,
    }

    def args(self) -> Sequence[Argument]:
        return [*self.list_args, *OfIds.args(self)]

    def is_nowhere(self, result: Cancelled) -> bool:
        return result is Cancelled.UNKNOWN

    def may_be_settled(self, result: Cancelled) -> bool:
        return result in (Cancelled.CANCELLED, Cancelled.DONE)


class Rescheduled(StrEnum):
    """Outcome for one id. Only `RESCHEDULED` means that the due time has changed."""

    RESCHEDULED = "rescheduled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False, repr=False)
class Reschedule(OfKey, Recorded, ById[Rescheduled]):
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
    items: Sequence[tuple[str, str]]
    is_placed: bool = True

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies_and_tombstones(self.message_ids)

    def args(self) -> Sequence[Argument]:
        placed = "1" if self.is_placed else ""
        parts = [part for item in self.items for part in item]
        return [*self.list_args, placed, len(self.items), *parts]

    def is_nowhere(self, result: Rescheduled) -> bool:
        return result is Rescheduled.UNKNOWN

    def may_be_settled(self, result: Rescheduled) -> bool:
        return result is Rescheduled.DONE
