"""in flight -> retry, or garbage after the last attempt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from lisa.core.model.outcomes import LONGEST_REASON_BYTES
from lisa.core.transitions.ack import NO_LATENESS, Settlement, lateness_argument
from lisa.core.transitions.base import Argument, ById, OfGroup, Recorded, text


class Failed(StrEnum):
    """Outcome for one failed message."""

    RETRYING = "retrying"
    DEAD = "dead"
    STALE = "stale"


class Failure(NamedTuple):
    """One failed delivery. `delay`: None for the policy's, milliseconds, or 'discard' for garbage.

    `traceback` (at most 2 KiB) is kept if the message moves to garbage.
    With `attempt`, a repeated call finds the message where the first call put it, at any later
    time.
    """

    id: str
    entry: str
    reason: str
    delay: int | Literal["discard"] | None = None
    lateness: str = NO_LATENESS
    attempt: int = 0
    traceback: str = ""
    late_ms: int = 0

    @classmethod
    def of(
        cls,
        one: Settlement,
        reason: str,
        delay: int | Literal["discard"] | None = None,
        traceback: str = "",
    ) -> Failure:
        """The failure of a delivery that a client holds."""
        return cls(
            one.id, one.entry, reason, delay, one.lateness, one.attempt, traceback, one.late_ms
        )


class Retried(NamedTuple):
    """Outcome of one failure; `due_ms` is that of the next attempt, None if there is none."""

    outcome: Failed
    due_ms: int | None
    failed_attempts: int


def _encoded(reason: str, traceback: str = "") -> bytes:
    """A reason, at most 1 KiB of UTF-8, and a traceback after a zero byte."""
    encoded = reason.encode("utf-8", "replace")[:LONGEST_REASON_BYTES].replace(b"\0", b" ")
    return encoded + b"\0" + traceback.encode("utf-8", "replace") if traceback else encoded


def new_seed() -> int:
    """A random seed: Lua's random numbers start with the same value in every script."""
    return random.getrandbits(31)


def parse_failed(outcome: bytes, failed_attempts: int | bytes) -> Retried:
    """Parse one outcome: 'r' and the due time, 'g' for garbage, or 's' for stale."""
    code = text(outcome)
    if code[0] == "r":
        return Retried(Failed.RETRYING, int(code[1:]), int(failed_attempts))
    return Retried(Failed.DEAD if code == "g" else Failed.STALE, None, int(failed_attempts))


@dataclass(frozen=True)
class Fail(Recorded, OfGroup, ById[Retried]):
    """Fail deliveries of one group."""

    script: ClassVar[str] = "retry"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    kept_ms: ClassVar[int] = 60_000
    columns: ClassVar[tuple[str, ...]] = ("failures",)
    failures: Sequence[Failure]
    seed: int = field(default_factory=new_seed, compare=False)

    def args(self) -> Sequence[Argument]:
        lateness = lateness_argument(
            [failure.lateness for failure in self.failures],
            [failure.late_ms for failure in self.failures],
        )
        arguments: list[Argument] = [self.seed, lateness, len(self.failures)]
        for failure in self.failures:
            arguments += (
                failure.id,
                failure.entry,
                failure.attempt,
                "" if failure.delay is None else failure.delay,
                _encoded(failure.reason, failure.traceback),
            )
        return arguments

    def is_nowhere(self, result: Retried) -> bool:
        return result.outcome is Failed.STALE

    def parse(self, reply: Sequence[Any]) -> list[Retried]:
        pairs = reply[1:]
        return [parse_failed(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)]


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
    rests_lane: the delay is one in which the message's lane rests.
    """

    id: str
    entry: str
    opens_ms: int
    reason: str = ""
    closes_ms: int | None = None
    rests_lane: bool = False


class Postponed(NamedTuple):
    """Outcome of one deferral; `due_ms` is that of the next delivery if it was deferred."""

    outcome: Deferred
    due_ms: int | None = None


def _parsed(outcome: bytes) -> Postponed:
    code = text(outcome)
    if code[0] == "d":
        return Postponed(Deferred.DEFERRED, int(code[1:]))
    return Postponed(Deferred.RELEASED if code == "y" else Deferred.STALE)


@dataclass(frozen=True)
class Postpone(Recorded, OfGroup, ById[Postponed]):
    """Defer deliveries of one group: no attempt counts."""

    script: ClassVar[str] = "defer"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0
    kept_ms: ClassVar[int] = 60_000
    columns: ClassVar[tuple[str, ...]] = ("deferrals",)
    deferrals: Sequence[Deferral]

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = [len(self.deferrals)]
        for deferral in self.deferrals:
            delay = "rest" if deferral.rests_lane else ""
            closes = delay if deferral.closes_ms is None else deferral.closes_ms
            arguments += (
                deferral.id,
                deferral.entry,
                closes,
                deferral.opens_ms,
                _encoded(deferral.reason),
            )
        return arguments

    def is_nowhere(self, result: Postponed) -> bool:
        return result.outcome is Deferred.STALE

    def parse(self, reply: Sequence[Any]) -> list[Postponed]:
        return [_parsed(outcome) for outcome in reply]
