"""ready -> in flight, for those who keep no connection blocked on the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.stream import Entry, parse_entry
from lisa.core.transitions.base import Argument, Transition, text

__all__ = ["Pull", "Pulled"]


class Pulled(NamedTuple):
    """Entries taken, and the last id that the group was given: XREAD from it waits for more."""

    paused: bool
    last_id: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Pull(Transition[Pulled]):
    """Take at most `most` messages at once; open gives their bodies."""

    script: ClassVar[str] = "pull"
    steps: ClassVar[int] = 2
    topic: str
    group: str
    consumer: str
    most: int
    ack_timeout_ms: int | None = None

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        return (self.consumer, self.most, timeout)

    def parse(self, reply: Sequence[Any]) -> Pulled:
        paused, last_id, *items = reply
        return Pulled(bool(paused), text(last_id), [parse_entry(item) for item in items])
