"""in flight -> retry, for a while, without an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.outcomes import LONGEST_REASON_BYTES
from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded, text


class Deferred(StrEnum):
    """Outcome for one delivery.

    DEFERRED: until its due time. RELEASED: the window is open by Redis's clock, so the delivery
    returned to ready. STALE: another call ended it.
    """

    DEFERRED = "deferred"
    RELEASED = "released"
    STALE = "stale"


class Deferral(NamedTuple):
    """A delivery to defer: for a delay, or until its window opens.

    opens_ms: the delay in milliseconds; if `closes_ms` is given, the instant at which the window
        opens, in epoch milliseconds.
    closes_ms: when the window closes; None for a delay.
    reason: at most 1 KiB; empty for a window.
    """

    id: str
    entry: str
    opens_ms: int
    reason: str = ""
    closes_ms: int | None = None

    @property
    def encoded_reason(self) -> bytes:
        """The reason, at most 1 KiB of UTF-8."""
        return self.reason.encode("utf-8", "replace")[:LONGEST_REASON_BYTES].replace(b"\0", b" ")


class Postponed(NamedTuple):
    """Outcome of one deferral; `due_ms` is that of the next delivery if it was deferred."""

    outcome: Deferred
    due_ms: int | None = None


def _parsed(outcome: bytes) -> Postponed:
    code = text(outcome)
    if code[0] == "d":
        return Postponed(Deferred.DEFERRED, int(code[1:]))
    return Postponed(Deferred.RELEASED if code == "y" else Deferred.STALE)


@dataclass(frozen=True, slots=True)
class Postpone(Recorded, OfGroup, ById[Postponed]):
    """Defer deliveries of one group: no attempt counts."""

    script: ClassVar[str] = "defer"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    kept_ms: ClassVar[int] = 60_000
    columns: ClassVar[tuple[str, ...]] = ("deferrals",)
    topic: str
    group: str
    deferrals: Sequence[Deferral]

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = [len(self.deferrals)]
        for one in self.deferrals:
            closes = "" if one.closes_ms is None else one.closes_ms
            arguments += (one.id, one.entry, closes, one.opens_ms, one.encoded_reason)
        return arguments

    def is_nowhere(self, result: Postponed) -> bool:
        return result.outcome is Deferred.STALE

    def parse(self, reply: Sequence[Any]) -> list[Postponed]:
        return [_parsed(outcome) for outcome in reply]
