"""ready -> in flight, for callers that do not block on the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.stream import Entry, parse_entry
from lisa.core.transitions.base import Argument, OfGroup, Recorded, Transition, text


class Pulled(NamedTuple):
    """The entries taken, and the group's last delivered id, from which XREAD waits for more."""

    paused: bool
    last_id: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Pull(Recorded, OfGroup, Transition[Pulled]):
    """Take at most `most` messages without waiting; `Open` reads their bodies."""

    script: ClassVar[str] = "pull"
    steps: ClassVar[int] = 2
    group_steps: ClassVar[float | None] = 0
    topic: str
    group: str
    consumer: str
    most: int
    ack_timeout_ms: int | None = None

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        return (self.consumer, self.most, timeout)

    def parse(self, reply: Sequence[Any]) -> Pulled:
        paused, last_id, *items = reply
        return Pulled(bool(paused), text(last_id), [parse_entry(item) for item in items])
