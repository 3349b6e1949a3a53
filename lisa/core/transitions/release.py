"""in flight -> ready, without an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded


@dataclass(frozen=True, slots=True)
class Release(Recorded, OfGroup, ById[bool]):
    """Give (id, entry) pairs of deliveries back to the group. Returns which were still held."""

    script: ClassVar[str] = "release"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "s": False}
    topic: str
    group: str
    receipts: Sequence[tuple[str, str]]

    def args(self) -> Sequence[Argument]:
        return [len(self.receipts), *(part for receipt in self.receipts for part in receipt)]
