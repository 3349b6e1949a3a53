"""in flight past the ack timeout -> retry or garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.options import LARGEST_WINDOW
from lisa.core.transitions.base import Argument, OfGroup, Recorded, Transition, text
from lisa.core.transitions.retry import Retried, new_seed, parse_failed

FIRST = "-"


class ClockState(StrEnum):
    """The server's clock during a call.

    LATER: later than the caller thinks possible. AHEAD: deliveries have later times than the clock,
    so the clock was set back.
    """

    FINE = ""
    LATER = "later"
    AHEAD = "ahead"


class ReclaimedMessage(NamedTuple):
    """One reclaimed message; `due_ms` is the due time of its delivery, None if unknown."""

    id: str
    due_ms: int | None
    retried: Retried


class Reclaimed(NamedTuple):
    """Result for one window; `cursor` is None at the end of the list.

    `next_end_ms` is the time until the next lease in the window ends, None if there is none.
    `cleared` is the number of entries without a message that were deleted, `returned` that of
    messages that returned to ready as suspects. `clock` says whether the server's clock was as
    expected.
    """

    cursor: str | None
    next_end_ms: int | None
    cleared: int
    moved: list[ReclaimedMessage]
    clock: ClockState = ClockState.FINE
    returned: int = 0


@dataclass(frozen=True, slots=True)
class Reclaim(Recorded, OfGroup, Transition[Reclaimed]):
    """Check one window of a group's pending list, from `start` on.

    latest_ms: the latest time that the server's clock can plausibly show; if it shows a later time,
        nothing is reclaimed.
    """

    script: ClassVar[str] = "reclaim"
    kept_ms: ClassVar[int] = 600_000
    topic: str
    group: str
    start: str = FIRST
    end: str = "+"
    window: int = LARGEST_WINDOW
    latest_ms: int | None = None
    seed: int = field(default_factory=new_seed)

    def args(self) -> Sequence[Argument]:
        latest: Argument = "" if self.latest_ms is None else self.latest_ms
        return (self.seed, self.start, self.end, self.window, latest)

    def parse(self, reply: Sequence[Any]) -> Reclaimed:
        clock, cursor, next_end, cleared, returned, *rest = reply
        ends_ms = int(next_end)
        moved = [
            ReclaimedMessage(
                text(rest[i]),
                int(rest[i + 1]) if rest[i + 1] else None,
                parse_failed(rest[i + 2], rest[i + 3]),
            )
            for i in range(0, len(rest), 4)
        ]
        return Reclaimed(
            text(cursor) or None,
            None if ends_ms < 0 else ends_ms,
            int(cleared),
            moved,
            ClockState(text(clock)),
            int(returned),
        )
