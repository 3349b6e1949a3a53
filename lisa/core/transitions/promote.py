"""waiting, retry -> ready, when due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.transitions.base import Argument, Transition, text

__all__ = ["LARGEST_BATCH", "Promote", "Promoted"]

LARGEST_BATCH = 250
"""Messages that one call moves, at most."""


class Promoted(NamedTuple):
    """What one call did.

    `next_due_ms` is the earliest due left, None if nothing waits; `full` how many groups have no
    room; `cut_short` whether more may be due already; `expired` ids past their ttl, left in place.
    """

    moved: int
    full: int
    next_due_ms: int | None
    now_ms: int
    paused: bool
    cut_short: bool
    expired: list[str]


@dataclass(frozen=True, slots=True)
class Promote(Transition[Promoted]):
    """Move what is due by Redis's clock, at most `limit` messages."""

    script: ClassVar[str] = "promote"
    topic: str
    limit: int = LARGEST_BATCH

    def args(self) -> Sequence[Argument]:
        return (self.limit,)

    def parse(self, reply: Sequence[Any]) -> Promoted:
        moved, full, next_due, now, paused, cut, *expired = reply
        return Promoted(
            moved, full, int(next_due) if next_due else None, int(now), bool(paused), bool(cut),
            [text(message_id) for message_id in expired],
        )  # fmt: skip
