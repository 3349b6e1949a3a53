"""waiting, retry, ready, garbage -> settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.transitions.base import ById, OfIds


class Cancelled(StrEnum):
    """Outcome for one id. Only `CANCELLED` guarantees that the message will not be handled."""

    CANCELLED = "cancelled"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cancel(OfIds, ById[Cancelled]):
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
    topic: str
    ids: Sequence[str]

    def is_nowhere(self, result: Cancelled) -> bool:
        return result is Cancelled.UNKNOWN

    def may_be_settled(self, result: Cancelled) -> bool:
        return result in (Cancelled.CANCELLED, Cancelled.DONE)
