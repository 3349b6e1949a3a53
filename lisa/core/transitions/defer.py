"""in flight -> retry, until the message's window opens, without an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded


class Deferred(StrEnum):
    """Outcome for one delivery.

    WAITING: until its window opens. RELEASED: the window is open by Redis's clock, so the delivery
    returned to ready. STALE: another call ended it.
    """

    WAITING = "waiting"
    RELEASED = "released"
    STALE = "stale"


class Outside(NamedTuple):
    """A delivery whose window closes at an instant, and opens again at a later one; epoch ms."""

    id: str
    entry: str
    closes_ms: int
    opens_ms: int


@dataclass(frozen=True, slots=True)
class Defer(Recorded, OfGroup, ById[Deferred]):
    """End deliveries that no handler has started in time."""

    script: ClassVar[str] = "defer"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("deliveries",)
    outcomes: ClassVar[Mapping[str, Any]] = {
        "w": Deferred.WAITING,
        "y": Deferred.RELEASED,
        "s": Deferred.STALE,
    }
    topic: str
    group: str
    deliveries: Sequence[Outside]

    def args(self) -> Sequence[Argument]:
        return [len(self.deliveries), *(part for one in self.deliveries for part in one)]
