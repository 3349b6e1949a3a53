"""Dead messages: garbage -> retry, or garbage -> settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, ById, OfGroup, OfIds, Recorded


@dataclass(frozen=True)
class Requeue(Recorded, OfGroup, ById[bool]):
    """Move dead messages to retry and reset their attempts. Returns which ids were in garbage."""

    script: ClassVar[str] = "requeue"
    steps: ClassVar[int] = 3
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "n": False}
    ids: Sequence[str]

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids]


@dataclass(frozen=True)
class Purge(Recorded, OfIds, OfGroup, ById[bool]):
    """Settle dead messages for good. Returns which ids were purged.

    With `before_ms`, only messages that died at or before that time.
    """

    script: ClassVar[str] = "purge"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 1
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "n": False}
    before_ms: int | None = None

    def args(self) -> Sequence[Argument]:
        before: Argument = "" if self.before_ms is None else self.before_ms
        return [before, *OfIds.args(self)]
