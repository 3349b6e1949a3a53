"""Leases: renewed, given back (in flight -> ready), or ended (in flight -> retry, garbage)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.options import LARGEST_WINDOW
from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded, Transition, text
from lisa.core.transitions.retry import Retried, new_seed, parse_failed

FIRST = "-"
"""Where the first window of a pending list starts."""


class Begun(IntEnum):
    """What to record of deliveries: that their handlers have begun, perhaps without new leases."""

    NO = 0
    YES = 1
    AND_NO_LEASE = 2


@dataclass(frozen=True)
class Extend(Recorded, OfGroup, ById[bool]):
    """Renew the leases of (id, entry) pairs. Returns which of them are still held."""

    script: ClassVar[str] = "extend"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    outcomes: ClassVar[Mapping[str, Any]] = {"k": True, "l": False}
    consumer: str
    receipts: Sequence[tuple[str, str]]
    ack_timeout_ms: int | None = None
    begun: Begun = Begun.NO

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        receipts = (part for receipt in self.receipts for part in receipt)
        return [self.consumer, timeout, int(self.begun), len(self.receipts), *receipts]


class Renewed(NamedTuple):
    """Result for one window; `cursor` is None at the end of the list."""

    cursor: str | None
    renewed: int


@dataclass(frozen=True)
class Renew(OfGroup, Transition[Renewed]):
    """Renew the leases in one window of a group's pending list, from `start` on.

    by_ms: size of the clock step, negative for a step back. 0: unknown; then deliveries with their
        own ack timeout are skipped.
    since_ms: the earliest time of the new clock at which the step can have happened. 0: unknown;
        then only deliveries in the future of the clock are renewed.
    """

    script: ClassVar[str] = "renew"
    by_ms: int = 0
    since_ms: int = 0
    start: str = FIRST
    window: int = LARGEST_WINDOW

    def args(self) -> Sequence[Argument]:
        return (self.start, self.window, self.by_ms, self.since_ms)

    def parse(self, reply: Sequence[Any]) -> Renewed:
        cursor, renewed = reply
        return Renewed(text(cursor) or None, renewed)


@dataclass(frozen=True)
class Release(Recorded, OfGroup, ById[bool]):
    """Give (id, entry) pairs of deliveries back to the group. Returns which were still held."""

    script: ClassVar[str] = "release"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    columns: ClassVar[tuple[str, ...]] = ("receipts",)
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "s": False}
    receipts: Sequence[tuple[str, str]]

    def args(self) -> Sequence[Argument]:
        return [len(self.receipts), *(part for receipt in self.receipts for part in receipt)]


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


@dataclass(frozen=True)
class Reclaim(Recorded, OfGroup, Transition[Reclaimed]):
    """Check one window of a group's pending list, from `start` on.

    latest_ms: the latest time that the server's clock can plausibly show; if it shows a later time,
        nothing is reclaimed.
    """

    script: ClassVar[str] = "reclaim"
    kept_ms: ClassVar[int] = 600_000
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
