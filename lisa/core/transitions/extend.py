"""in flight, with a new lease, or begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded


class Begun(IntEnum):
    """What to record of a delivery: that its handler has begun, perhaps without a new lease."""

    NO = 0
    YES = 1
    AND_NO_LEASE = 2


@dataclass(frozen=True, slots=True)
class Extend(Recorded, OfGroup, ById[bool]):
    """Renew the leases of (id, entry) pairs. Returns which of them are still held.

    begun: one item per pair, or none.
    """

    script: ClassVar[str] = "extend"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("receipts", "begun")
    outcomes: ClassVar[Mapping[str, Any]] = {"k": True, "l": False}
    topic: str
    group: str
    consumer: str
    receipts: Sequence[tuple[str, str]]
    ack_timeout_ms: int | None = None
    begun: Sequence[Begun] = ()

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        begun = self.begun or [Begun.NO] * len(self.receipts)
        deliveries = (
            part
            for pair, one in zip(self.receipts, begun, strict=True)
            for part in (*pair, int(one))
        )
        return [self.consumer, timeout, len(self.receipts), *deliveries]
