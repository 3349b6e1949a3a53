"""Deletes unused consumer names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, OfGroup, Transition, text


@dataclass(frozen=True, slots=True)
class Forget(OfGroup, Transition[list[str]]):
    """Delete consumers idle for `least_idle_ms` with nothing pending. Returns their names."""

    script: ClassVar[str] = "forget"
    topic: str
    group: str
    consumers: Sequence[str]
    least_idle_ms: int

    def args(self) -> Sequence[Argument]:
        return [self.least_idle_ms, len(self.consumers), *self.consumers]

    def parse(self, reply: Sequence[Any]) -> list[str]:
        return [text(name) for name in reply]
