"""in flight, with new leases after the server's clock was changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.options import LARGEST_WINDOW
from lisa.core.transitions.base import Argument, OfGroup, Transition, text
from lisa.core.transitions.reclaim import FIRST


class Renewed(NamedTuple):
    """Result for one window; `cursor` is None at the end of the list."""

    cursor: str | None
    renewed: int


@dataclass(frozen=True, slots=True)
class Renew(OfGroup, Transition[Renewed]):
    """Renew the leases in one window of a group's pending list, from `start` on.

    by_ms: size of the clock step, negative for a step back. 0: unknown; then deliveries with their
        own ack timeout are skipped.
    since_ms: the earliest time of the new clock at which the step can have happened. 0: unknown;
        then only deliveries in the future of the clock are renewed.
    """

    script: ClassVar[str] = "renew"
    topic: str
    group: str
    by_ms: int = 0
    since_ms: int = 0
    start: str = FIRST
    window: int = LARGEST_WINDOW

    def args(self) -> Sequence[Argument]:
        return (self.start, self.window, self.by_ms, self.since_ms)

    def parse(self, reply: Sequence[Any]) -> Renewed:
        cursor, renewed = reply
        return Renewed(text(cursor) or None, renewed)
