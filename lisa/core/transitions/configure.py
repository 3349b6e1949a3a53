"""Writes a topic's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, Transition

__all__ = ["Configure"]


@dataclass(frozen=True, slots=True)
class Configure(Transition[int]):
    """Write options in the form of their hash; None takes one away. Answers how many changed.

    A declaration (`declared`) changes only what a declaration last wrote.
    """

    script: ClassVar[str] = "configure"
    topic: str
    values: Mapping[str, str | None]
    declared: bool = False

    @property
    def fixed_groups(self) -> tuple[str, ...]:
        return ()

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = ["declare" if self.declared else "set", len(self.values)]
        for name, value in self.values.items():
            arguments += (name, 0, "") if value is None else (name, 1, value)
        return arguments

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])
