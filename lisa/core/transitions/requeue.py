"""garbage -> retry of the same group, due now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded


@dataclass(frozen=True, slots=True)
class Requeue(Recorded, OfGroup, ById[bool]):
    """Move dead messages to retry and reset their attempts. Returns which ids were in garbage."""

    script: ClassVar[str] = "requeue"
    steps: ClassVar[int] = 3
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "n": False}
    topic: str
    group: str
    ids: Sequence[str]

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids]
