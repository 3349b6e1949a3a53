"""in flight, the lease starts anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Extend"]


@dataclass(frozen=True, slots=True)
class Extend(ById[bool]):
    """Renew the leases of (id, entry) pairs; answers which of them are still held."""

    script: ClassVar[str] = "extend"
    steps: ClassVar[int] = 4
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    topic: str
    group: str
    consumer: str
    receipts: Sequence[tuple[str, str]]
    ack_timeout_ms: int | None = None

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        receipts = (part for receipt in self.receipts for part in receipt)
        return [self.consumer, timeout, len(self.receipts), *receipts]

    @property
    def message_ids(self) -> Sequence[str]:
        return [one for one, _ in self.receipts]

    def parse(self, reply: Sequence[Any]) -> list[bool]:
        return [letter == "k" for letter in letters(reply[0])]
