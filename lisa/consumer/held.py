"""One delivery in a consumer's hands, and what a handler said about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from lisa.core.clock import duration_ms
from lisa.core.message import Message
from lisa.core.outcomes import Discard, Retry

__all__ = [
    "RETURNED_FALSE",
    "Cancellable",
    "Held",
    "Outcome",
    "Verdict",
    "heavier",
    "reason_of",
    "verdict_of",
]

LONGEST_REASON_BYTES = 1024


class Cancellable(Protocol):
    """What stops a running `async def` handler from another thread."""

    def cancel(self) -> Any:
        """Make it end as soon as it awaits something."""


class Held(msgspec.Struct, eq=False):
    """One delivery from its opening until Redis has confirmed what became of it.

    `entry` is the stream entry id, `data` the envelope as it was handed over at `handed_us`, by
    Redis's clock in microseconds. The other times are of the monotonic clock, in seconds;
    `started` is 0 while no handler runs. `lease_ends` is when the manager may take the delivery
    back, as far as this side knows; 0 once it has.
    """

    entry: str
    message: Message
    data: bytes
    handed_us: int
    opened: float
    lease_ends: float
    started: float = 0.0
    ended: bool = False
    overdue: bool = False
    task: Cancellable | None = None

    @property
    def receipt(self) -> tuple[str, str]:
        """Id and stream entry id."""
        return self.message.id, self.entry


class Verdict(NamedTuple):
    """Why a message was not handled: `delay` as in a Failure (None: by policy).

    `error` is what the handler raised, for the log; None if it said so in words of its own.
    """

    reason: str
    delay: int | Literal["discard"] | None = None
    error: BaseException | None = None

    @property
    def is_discard(self) -> bool:
        """Whether no further attempt is wanted."""
        return self.delay == "discard"


RETURNED_FALSE = Verdict("the handler returned False")

Outcome = Verdict | None


def reason_of(error: BaseException) -> str:
    """`ExceptionName: message`, at most 1 KiB of UTF-8."""
    said = _said(error)
    name = type(error).__name__
    encoded = (f"{name}: {said}" if said else name).encode("utf-8", "replace")
    return encoded[:LONGEST_REASON_BYTES].decode("utf-8", "ignore")


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  its __str__ is the user's: a fault there is a failure too
        return ""


def verdict_of(error: object) -> Verdict:
    """What an exception (or, for `Batch.fail`, a text) says about its message."""
    if isinstance(error, Retry):
        delay: timedelta | None = error.delay
        return Verdict(_said(error), None if delay is None else duration_ms(delay))
    if isinstance(error, Discard):
        return Verdict(_said(error), "discard")
    if isinstance(error, BaseException):
        return Verdict(reason_of(error), None, error)
    return Verdict(str(error))


def heavier(first: Outcome, second: Outcome) -> Outcome:
    """What counts when several receivers spoke: a wish to try again outranks a discard.

    Each receiver gets its chance that way; the discard will be said again.
    """
    if first is None or second is None:
        return first or second
    return second if first.is_discard and not second.is_discard else first
