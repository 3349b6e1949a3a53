"""A delivery that a consumer holds, the verdict of its handler, and its way to the settler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from lisa.core.model.clock import duration_ms
from lisa.core.model.message import Message
from lisa.core.model.outcomes import (
    Defer,
    Discard,
    Limited,
    Retry,
    joined,
    leaves_of,
    reason_of,
    text_of,
)
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.transitions.ack import Settlement, settlement_of
from lisa.core.transitions.delivery import Limits
from lisa.core.transitions.retry import Fail, Postpone

T = TypeVar("T")


def take_many(queue: deque[T], most: int) -> list[T]:
    """Remove and return up to `most` items; fewer if another thread takes items too."""
    part: list[T] = []
    with suppress(IndexError):
        while len(part) < most:
            part.append(queue.popleft())
    return part


def put_back(queue: deque[T], items: Sequence[T]) -> None:
    """Return the items of `take_many` to the front, in order."""
    queue.extendleft(reversed(items))


class Cancellable(Protocol):
    """A running `async def` handler that another thread can cancel."""

    def cancel(self) -> Any:
        """Cancel the handler at its next await."""


class Held(msgspec.Struct, eq=False):
    """One delivery, from `open` until Redis has confirmed its settlement.

    entry: the stream entry id.
    data: the envelope, handed over at `handed_us` (Redis's clock, in microseconds).
    opened, started: `time.monotonic` seconds; `started` is 0 until a handler runs.
    lease_ends: when the manager may reclaim the delivery, as far as known. Once reclaimed, 0 if no
        handler runs, else infinite: the outcome of the handler will count as late.
    ended: the handler has finished, or the delivery was dropped.
    limits: of the message's window, if it has one; `closes`: when it may have closed by Redis's
        clock, in `time.monotonic` seconds. No handler starts from then on.
    is_suspect: an earlier process ended while it held the message; the handler begins alone.
    overdue: the handler exceeded its timeout; leases of such handlers are not renewed.
    task: of an `async def` handler that runs.
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
    is_suspect: bool = False
    limits: Limits | None = None
    closes: float = math.inf
    task: Cancellable | None = None

    @property
    def receipt(self) -> tuple[str, str]:
        """The message id and the stream entry id."""
        return self.message.id, self.entry

    @property
    def is_running(self) -> bool:
        """Whether a handler runs."""
        return bool(self.started) and not self.ended

    def is_startable(self, now: float) -> bool:
        """Whether a handler may start at once: the lease holds, and the window is open."""
        return now < self.closes and now <= self.lease_ends and not self.is_suspect

    def close_at(self, limits: Limits, at_us: int, at: float) -> None:
        """Record the message's window; Redis's clock showed `at_us` at or after `at`."""
        self.limits = limits
        self.closes = at + limits.closes_ms / 1e3 - at_us / 1e6

    def lose_lease(self) -> None:
        """Record that the manager reclaimed the delivery; the lease is never extended again."""
        self.lease_ends = math.inf if self.started else 0.0

    def stop_extending(self) -> None:
        """Record that the handler exceeded its timeout, and cancel its task."""
        self.overdue = True
        if self.task is not None:
            self.task.cancel()


class Verdict(NamedTuple):
    """Why a message was not handled.

    delay: milliseconds until the next delivery, "discard", or None for the retry policy.
    error: the exception to log; None for `Retry`, `Defer`, `Discard`, the text of `Batch.fail` and
        a return of False.
    is_deferral: no attempt counts.
    rests_lane: the message's lane rests during the delay.
    """

    reason: str
    delay: int | Literal["discard"] | None = None
    error: BaseException | None = None
    is_deferral: bool = False
    rests_lane: bool = False

    @property
    def is_discard(self) -> bool:
        """Whether the message must not be retried."""
        return self.delay == "discard"

    @property
    def precedence(self) -> tuple[int, int]:
        """Orders the outcomes of one message; the highest counts.

        A failure, or a retry after the policy's pause; a retry after a delay; a deferral; a
        discard, which can be repeated. Of two alike, the one with the longer delay.
        """
        if self.delay is None:
            return 3, 0
        if self.delay == "discard":
            return 0, 0
        return 1 if self.is_deferral else 2, self.delay

    def under(self, policy: RetryPolicy | None, attempt: int) -> Verdict:
        """This verdict with the pause of a handler's policy after that failed attempt."""
        if policy is None or self.delay is not None:
            return self
        pause_ms = policy.pause_ms(attempt)
        return self._replace(delay="discard" if pause_ms is None else pause_ms)


RETURNED_FALSE = Verdict("the handler returned False")

Outcome = Verdict | None


def verdict_of(error: object) -> Verdict:
    """The verdict for an exception, or for the text given to `Batch.fail`.

    An exception group, as of a task group, is a failure if one of its leaves is. Otherwise the
    outcome among its leaves that takes precedence counts.
    """
    if isinstance(error, BaseExceptionGroup):
        verdicts = [verdict_of(leaf) for leaf in leaves_of(error)]
        if any(verdict.error is not None for verdict in verdicts):
            return Verdict(reason_of(error), None, error)
        reason = joined(verdict.reason for verdict in verdicts)
        return max(verdicts, key=lambda verdict: verdict.precedence)._replace(reason=reason)
    if isinstance(error, (Retry, Defer)):
        # A subclass may not call `super().__init__`.
        delay: timedelta | None = getattr(error, "delay", None)
        if delay is not None:
            is_deferral = isinstance(error, Defer)
            return Verdict(
                text_of(error),
                duration_ms(delay),
                is_deferral=is_deferral,
                rests_lane=isinstance(error, Limited),
            )
    if isinstance(error, Retry):
        return Verdict(text_of(error))
    if isinstance(error, Discard):
        return Verdict(text_of(error), "discard")
    if isinstance(error, BaseException):
        return Verdict(reason_of(error), None, error)
    return Verdict(str(error))


def combined(first: Outcome, second: Outcome) -> Outcome:
    """The outcome for two receivers of one message, which both get if it is delivered again."""
    if first is None or second is None:
        return first or second
    return max(first, second, key=lambda outcome: outcome.precedence)


def settlements_of(deliveries: Iterable[Held]) -> list[Settlement]:
    """The settlement of each delivery."""
    return [
        settlement_of(held.message, held.entry, held.data, held.handed_us) for held in deliveries
    ]


Refusals = list[tuple[Held, Verdict]]


class Outcomes:
    """Ended deliveries of one subscription that wait to be settled.

    Handlers and the reader put deliveries in, and the settler takes them out.

    is_requested: whether the settler was asked to take what has ended.
    unanswered: a call for failures or deferrals that got no reply and may have taken effect. Only
        repeating the same call returns its outcomes. Acks need no such care: a further ack of the
        same delivery tells that it is settled, in any call.
    """

    def __init__(self) -> None:
        self.acks: deque[Held] = deque()
        self.expired: deque[Held] = deque()
        self.failures: deque[tuple[Held, Verdict]] = deque()
        self.deferrals: deque[tuple[Held, Verdict]] = deque()
        self.is_requested = False
        self.unanswered: tuple[Fail | Postpone, Refusals] | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.expired or self.has_refusals)

    @property
    def has_refusals(self) -> bool:
        """Whether failures or deferrals wait."""
        return bool(self.failures or self.deferrals or self.unanswered)

    def begin_call(self, call: Fail | Postpone, refusals: Refusals) -> None:
        """Keep a call for failures or deferrals until its reply arrives."""
        self.unanswered = call, refusals

    def end_call(self) -> None:
        """Forget that call, whose reply has arrived."""
        self.unanswered = None

    def take_all(self) -> list[Held]:
        """Remove and return the deliveries that wait now."""
        taken = take_many(self.acks, len(self.acks)) + take_many(self.expired, len(self.expired))
        refusals = take_many(self.failures, len(self.failures))
        refusals += take_many(self.deferrals, len(self.deferrals))
        if self.unanswered:
            refusals += self.unanswered[1]
            self.unanswered = None
        return taken + [held for held, _ in refusals]
