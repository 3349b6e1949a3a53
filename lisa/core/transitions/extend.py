"""in flight, with a new lease, or begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded


class Begun(IntEnum):
    """What to record of deliveries: that their handlers have begun, perhaps without new leases."""

    NO = 0
    YES = 1
    AND_NO_LEASE = 2


@dataclass(frozen=True, slots=True)
class Extend(Recorded, OfGroup, ById[bool]):
    """Renew the leases of (id, entry) pairs. Returns which of them are still held."""

    script: ClassVar[str] = "extend"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    outcomes: ClassVar[Mapping[str, Any]] = {"k": True, "l": False}
    topic: str
    group: str
    consumer: str
    receipts: Sequence[tuple[str, str]]
    ack_timeout_ms: int | None = None
    begun: Begun = Begun.NO

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        receipts = (part for receipt in self.receipts for part in receipt)
        return [self.consumer, timeout, int(self.begun), len(self.receipts), *receipts]
