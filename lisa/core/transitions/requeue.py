"""garbage -> that group's retry, due now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Requeue"]


@dataclass(frozen=True, slots=True)
class Requeue(ById[bool]):
    """Give dead messages a new life; answers which ids were in the group's garbage."""

    script: ClassVar[str] = "requeue"
    steps: ClassVar[int] = 3
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    topic: str
    group: str
    ids: Sequence[str]

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids]

    @property
    def message_ids(self) -> Sequence[str]:
        return self.ids

    def parse(self, reply: Sequence[Any]) -> list[bool]:
        return [letter == "y" for letter in letters(reply[0])]
