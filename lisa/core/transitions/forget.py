"""Takes away consumers' names that nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, Transition, text

__all__ = ["Forget"]


@dataclass(frozen=True, slots=True)
class Forget(Transition[list[str]]):
    """Forget consumers idle for `least_idle_ms` with nothing pending; answers which."""

    script: ClassVar[str] = "forget"
    topic: str
    group: str
    consumers: Sequence[str]
    least_idle_ms: int

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        return [self.least_idle_ms, len(self.consumers), *self.consumers]

    def parse(self, reply: Sequence[Any]) -> list[str]:
        return [text(name) for name in reply]
