"""Settle finished deliveries, many per call, and tell signals and middleware."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import msgspec
from blinker import Signal

from lisa.consumer.inflight import Held, Refusals, Verdict, put_back, settlements_of, take_many
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import LONGEST_S, KeyedPool, ServiceThread, begin_round, unforeseen
from lisa.core.delivery.source import Delivered
from lisa.core.model.backoff import Backoff, longest_after
from lisa.core.model.errors import GroupRemoved, LisaError
from lisa.core.model.keys import shown_id
from lisa.core.model.message import Message
from lisa.core.model.middleware import SETTLED, BaseMiddleware, methods
from lisa.core.model.outcomes import traceback_of
from lisa.core.model.signals import Signals, call_receivers, everywhere
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.base import Transition
from lisa.core.transitions.retry import Deferral, Fail, Failed, Failure, Postpone, Retried

log = logging.getLogger("lisa.consumer")


class SignalSender:
    """Fires a consumer's own signals together with the module-wide ones.

    Errors of receivers are logged and ignored, because the message is settled already. `spawn` runs
    the coroutine of an `async def` receiver.
    """

    def __init__(self, own: Signals, spawn: Callable[[Awaitable[Any]], Any]) -> None:
        self._spawn = spawn
        self.acked = (own.acked, everywhere.acked)
        self.retrying = (own.retrying, everywhere.retrying)
        self.dead = (own.dead, everywhere.dead)
        self.expired = (own.expired, everywhere.expired)

    @staticmethod
    def has_receivers(pair: tuple[Signal, Signal]) -> bool:
        """Whether either signal has receivers; if not, no message needs to be built."""
        return bool(pair[0].receivers or pair[1].receivers)

    def fire_failure(self, message: Message, reason: str, retried: Retried) -> None:
        """Fire `retrying` or `dead` for a failed message, unless its delivery was stale."""
        if retried.outcome is Failed.STALE:
            return
        pair = self.dead if retried.outcome is Failed.DEAD else self.retrying
        if self.has_receivers(pair):
            due_ms = retried.due_ms
            self.fire(pair, msgspec.structs.replace(message, reason=reason, next_due_ms=due_ms))

    def fire_unfit(self, unfit: Iterable[tuple[Delivered, Acked | Retried]]) -> None:
        """Fire `expired`, `retrying` or `dead` for settled messages that no handler may see."""
        for delivered, outcome in unfit:
            if delivered.fault is not None and isinstance(outcome, Retried):
                self.fire_failure(delivered.message, delivered.fault.reason, outcome)
            elif outcome is not Acked.STALE:
                self.fire(self.expired, delivered.message)

    def fire(self, pair: tuple[Signal, Signal], message: Message) -> None:
        """Call all receivers of both signals."""
        call_receivers(pair, message, self._spawn, log)


T = TypeVar("T")


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """One call that settled messages of a topic for a group.

    operation: "ack"; "retry", also for messages that moved to garbage; "defer"; or "expire".
    ended: when the call ended, in seconds since the epoch.
    seconds: how long the call took.
    error: the error of the call, which will be repeated; None if it succeeded.
    """

    topic: str
    group: str
    operation: str
    messages: Sequence[Message]
    ended: float
    seconds: float
    error: BaseException | None = None


class SettleWatch:
    """Reports calls that settle messages to middleware with the method `settled`."""

    def __init__(self, middleware: Sequence[BaseMiddleware] = ()) -> None:
        self._methods = methods(middleware, SETTLED, "settled", "a consumer")

    def call(
        self,
        sub: Subscription,
        transition: Transition[T],
        operation: str,
        deliveries: Sequence[Held],
    ) -> T:
        """Run a transition that settles deliveries. Raises LisaError."""
        if not self._methods:
            return sub.store.call(transition)
        began, error = time.monotonic(), None
        try:
            return sub.store.call(transition)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._report(sub, operation, deliveries, time.monotonic() - began, error)

    def _report(
        self,
        sub: Subscription,
        operation: str,
        deliveries: Sequence[Held],
        seconds: float,
        error: BaseException | None,
    ) -> None:
        settled = Settled(
            topic=sub.topic,
            group=sub.group,
            operation=operation,
            messages=[held.message for held in deliveries],
            ended=time.time(),
            seconds=seconds,
            error=error,
        )
        for method in self._methods:
            try:
                method(settled)
            except BaseException:  # sys.exit() in middleware must not end the calling thread
                log.exception("topic %s: the method settled of middleware raised", sub.shard)


MOST_REFUSALS = 100
"""The most failures or deferrals of one call: each has a reason of 1 KiB, or with a traceback 3."""


def _refusing(sub: Subscription) -> tuple[Fail | Postpone, Refusals]:
    """A call for the next deferrals or failures, and the deliveries that it ends."""
    size = min(MOST_REFUSALS, sub.store.batch_size(sub.shard, Fail))
    deferred = take_many(sub.outcomes.deferrals, size)
    if deferred:
        rows = [
            Deferral(
                *held.receipt,
                cast("int", verdict.delay),
                verdict.reason,
                rests_lane=verdict.rests_lane,
            )
            for held, verdict in deferred
        ]
        return Postpone(sub.shard, sub.group, rows), deferred
    taken = take_many(sub.outcomes.failures, size)
    try:
        settlements = settlements_of(held for held, _ in taken)
        failures = [
            Failure.of(settlement, verdict.reason, verdict.delay, _traceback(verdict))
            for settlement, (_, verdict) in zip(settlements, taken, strict=True)
        ]
    except BaseException:
        put_back(sub.outcomes.failures, taken)
        raise
    return Fail(sub.shard, sub.group, failures), taken


def _traceback(verdict: Verdict) -> str:
    return "" if verdict.error is None else traceback_of(verdict.error)


def _wait_for_lanes(subscriptions: Iterable[Subscription | None]) -> bool:
    return any(sub.waits_for_lanes for sub in subscriptions if sub is not None)


FLUSH_AFTER_S = 0.005
"""How long a finished delivery waits for others to share a call."""

CLOSING_S = 1.0
"""Grace period for calls still running at the shutdown deadline."""

CLOSING_RETRY_S = 0.1
"""Interval of attempts while closing."""


class Settler:
    """A thread that collects finished deliveries for 5 ms, then settles them topic by topic.

    Failed calls are retried with growing pauses, separately for each topic.

    subscriptions: returns the subscriptions to flush.
    has_nodes: whether the server is a cluster. Then each subscription is flushed on a separate
        thread, so that a hanging node does not delay the others.
    watch: reports each call to middleware.
    settled: called after deliveries of a subscription were settled.
    """

    def __init__(
        self,
        subscriptions: Callable[[], Iterable[Subscription]],
        signal_sender: SignalSender,
        *,
        has_nodes: bool = False,
        longest_s: float = LONGEST_S,
        watch: SettleWatch | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._subscriptions = subscriptions
        self._signal_sender = signal_sender
        self._watch = watch or SettleWatch()
        self._settled = settled
        self._has_nodes = has_nodes
        self._pool = KeyedPool("lisa-settler", self._ended, longest_s)
        self._requested: SimpleQueue[Subscription | None] = SimpleQueue()
        self._was_busy = False
        self._closes: float | None = None
        self._pauses: dict[Subscription, tuple[float, Backoff]] = {}
        self._thread = ServiceThread("lisa-settler", self._run, longest_s)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def threads(self) -> list[ServiceThread]:
        """The settler's threads, for health checks."""
        return [self._thread, *self._pool.threads()]

    def notify(self, sub: Subscription) -> None:
        """Request a flush of a subscription within 5 ms. Cheap if one is already requested."""
        if not sub.outcomes.is_requested:
            sub.outcomes.is_requested = True
            self._requested.put(sub)

    def _settle_all(self, sub: Subscription) -> None:
        """Settle all finished deliveries of a subscription. Raises LisaError."""
        outcomes = sub.outcomes
        while outcomes.acks:
            self._ack(sub, outcomes.acks, "acked")
        while outcomes.expired:
            self._ack(sub, outcomes.expired, "expired")
        while outcomes.has_refusals:
            self._refuse(sub)

    def _ack(self, sub: Subscription, queue: deque[Held], state: str) -> None:
        taken = take_many(queue, sub.store.batch_size(sub.shard, Ack))
        try:
            settlements = settlements_of(taken)
            if state == "expired":  # do not count an attempt
                settlements = [
                    settlement._replace(attempt=settlement.attempt - 1)
                    for settlement in settlements
                ]
            call = Ack(sub.shard, sub.group, settlements, state)
            operation = "expire" if state == "expired" else "ack"
            outcomes = self._watch.call(sub, call, operation, taken)
        except BaseException:
            put_back(queue, taken)
            raise
        pair = self._signal_sender.expired if state == "expired" else self._signal_sender.acked
        self._acked(sub, taken, outcomes, pair)

    def _acked(
        self,
        sub: Subscription,
        taken: Sequence[Held],
        outcomes: Sequence[Acked],
        pair: tuple[Signal, Signal],
    ) -> None:
        has_receivers = self._signal_sender.has_receivers(pair)
        sub.leases.forget(taken)
        self._settled()
        for held, outcome in zip(taken, outcomes, strict=True):
            if outcome is Acked.STALE:
                log.info(
                    "topic %s: message %s was already settled elsewhere, or replaced",
                    sub.shard,
                    shown_id(held.message.id),
                    extra=held.message.log_fields,
                )
            elif has_receivers:
                self._signal_sender.fire(pair, held.message)

    def _refuse(self, sub: Subscription) -> None:
        call, taken = sub.outcomes.unanswered or _refusing(sub)
        if not taken:  # dropped meanwhile
            return
        sub.outcomes.begin_call(call, taken)
        deliveries = [held for held, _ in taken]
        if isinstance(call, Postpone):
            self._watch.call(sub, call, "defer", deliveries)
            sub.outcomes.end_call()
            sub.leases.forget(deliveries)
            self._settled()
            return
        outcomes = self._watch.call(sub, call, "retry", deliveries)
        sub.outcomes.end_call()
        sub.leases.forget(deliveries)
        self._settled()
        for (held, verdict), outcome in zip(taken, outcomes, strict=True):
            if outcome.outcome is Failed.DEAD:
                log.error(
                    "topic %s: message %s moved to garbage after %d failed attempt%s: %s",
                    held.message.topic,
                    shown_id(held.message.id),
                    outcome.failed_attempts,
                    "" if outcome.failed_attempts == 1 else "s",
                    verdict.reason,
                    exc_info=verdict.error,
                    extra=held.message.log_fields,
                )
            self._signal_sender.fire_failure(held.message, verdict.reason, outcome)

    def close(self, timeout_s: float) -> None:
        """Flush the rest for up to `timeout_s`, then end the thread."""
        self._closes = time.monotonic() + timeout_s
        self._requested.put(None)
        self._thread.join(timeout_s + CLOSING_S)

    def _run(self) -> None:
        while self._closes is None:
            requested = self._take_requested()
            try:
                self.flush([*requested, *self._pauses])
            except BaseException:
                for sub in requested:  # the restarted thread must flush them again
                    self.notify(sub)
                raise
            del requested  # else a removed subscription would be kept until the next flush
        self._flush_rest(self._closes)

    def _take_requested(self) -> set[Subscription]:
        """Wait for a request or the end of a pause, then 5 ms for other requests.

        A topic with lanes does not wait if nothing is left to start: what its ack lets through is
        what the handlers wait for.
        """
        found = set[Subscription | None]()
        with suppress(Empty):
            if not self._was_busy:  # else more is likely to end within 5 ms
                self._thread.rest()
                found.add(self._requested.get(timeout=self._next_try_s() if self._pauses else None))
            if not _wait_for_lanes(found):
                time.sleep(FLUSH_AFTER_S)
            while True:
                found.add(self._requested.get_nowait())
        self._thread.begin()
        self._was_busy = bool(found) and not _wait_for_lanes(found)
        requested = {sub for sub in found if sub is not None}
        for sub in requested:  # before the flush, so that what ends later is requested again
            sub.outcomes.is_requested = False
        return requested

    def _next_try_s(self) -> float | None:
        tries = [again for sub, (again, _) in self._pauses.items() if not self._pool.is_busy(sub)]
        return max(0.0, min(tries) - time.monotonic()) if tries else None

    def _flush_rest(self, closes: float) -> None:
        """Flush all subscriptions until nothing is left, or the time to close has come."""
        while self.flush(list(self._subscriptions())) and time.monotonic() < closes:
            if self._pool.wait(CLOSING_RETRY_S) and self._pauses:
                time.sleep(CLOSING_RETRY_S)
        self._pool.wait(max(0.0, closes + CLOSING_S - time.monotonic()))
        self._pool.close()

    def flush(self, subscriptions: Iterable[Subscription]) -> bool:
        """Settle the finished deliveries of subscriptions.

        Returns whether work or a pause is still under way.
        """
        if self._pauses:
            for sub in set(self._pauses).difference(self._subscriptions()):  # unsubscribed
                self._pauses.pop(sub, None)
        is_busy = False
        one_by_one = not self._has_nodes or len(list(self._subscriptions())) == 1
        for sub in subscriptions:
            again, _ = self._pauses.get(sub, (0.0, None))
            if self._pool.is_busy(sub):
                is_busy = True
            elif again > time.monotonic() and self._closes is None:
                continue
            elif one_by_one:
                self._settle(sub)
            else:
                is_busy = True
                self._pool.start(sub, partial(self._settle, sub))
        return is_busy or bool(self._pauses)

    def _settle(self, sub: Subscription) -> None:
        begin_round()  # each topic may take as long as a whole round
        try:
            self._settle_all(sub)
        except GroupRemoved as error:
            self._give_up(sub, error)
        except Exception as error:  # noqa: BLE001  logged and retried
            self._postpone(sub, error)
        else:
            self._end_pause(sub)

    def _ended(self, sub: Subscription) -> None:
        """Flush again if a subscription finished more while its flush ran."""
        if sub in self._pauses or sub.outcomes:
            self.notify(sub)

    def _end_pause(self, sub: Subscription) -> None:
        if self._pauses.pop(sub, None):
            log.info("topic %s: settling again", sub.shard)

    def _postpone(self, sub: Subscription, error: Exception) -> None:
        _, backoff = self._pauses.get(sub, (0.0, None))
        if not isinstance(error, LisaError):
            unforeseen(f"topic {sub.shard}: settling", error)
        elif backoff is None:
            log.warning("topic %s: cannot settle, trying again: %s", sub.shard, error)
        backoff = backoff or Backoff()
        pause_s = backoff.take(longest_after(error))
        self._pauses[sub] = (time.monotonic() + pause_s, backoff)

    def _give_up(self, sub: Subscription, error: GroupRemoved) -> None:
        self._pauses.pop(sub, None)
        lost = sub.outcomes.take_all()
        for held in lost:
            sub.leases.drop(held)
        log.warning("topic %s: dropped %d settlements: %s", sub.shard, len(lost), error)
