"""Writes a topic's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, Recorded, Transition


@dataclass(frozen=True, slots=True)
class Configure(Recorded, Transition[int]):
    """Write encoded options; None removes one. Returns the number of options changed.

    With `declared`, changes only options that a declaration wrote last.
    """

    script: ClassVar[str] = "configure"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    topic: str
    values: Mapping[str, str | None]
    declared: bool = False

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = ["declare" if self.declared else "set", len(self.values)]
        for name, value in self.values.items():
            arguments += (name, 0, "") if value is None else (name, 1, value)
        return arguments

    def parse(self, reply: Sequence[Any]) -> int:
        return int(reply[0])
