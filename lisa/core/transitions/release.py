"""in flight -> ready, unhandled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Release"]


@dataclass(frozen=True, slots=True)
class Release(ById[bool]):
    """Give deliveries, as (id, entry) pairs, back to the group; answers which were still held."""

    script: ClassVar[str] = "release"
    steps: ClassVar[int] = 4
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    topic: str
    group: str
    receipts: Sequence[tuple[str, str]]

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        return [len(self.receipts), *(part for receipt in self.receipts for part in receipt)]

    @property
    def message_ids(self) -> Sequence[str]:
        return [one for one, _ in self.receipts]

    def parse(self, reply: Sequence[Any]) -> list[bool]:
        return [letter == "y" for letter in letters(reply[0])]
