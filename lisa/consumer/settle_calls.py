"""The calls that settle finished deliveries, many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

from blinker import Signal

from lisa.consumer.inflight import Held, Verdict, settlements_of
from lisa.consumer.outcomes import Refusals
from lisa.consumer.settled import SettleWatch
from lisa.consumer.signal_queue import SignalSender
from lisa.consumer.subscription import Subscription
from lisa.consumer.thread_queue import ThreadQueue
from lisa.core.model.errors import LisaError
from lisa.core.model.outcomes import traceback_of
from lisa.core.redis.flow import Command, Execute, Flow
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.defer import Deferral, Postpone
from lisa.core.transitions.retry import Fail, Failed, Failure

log = logging.getLogger("lisa.consumer")

MOST_REFUSALS = 100
"""The most failures or deferrals of one call: each has a reason of 1 KiB, or with a traceback 3."""

MOST_READ_ACKS = 32
"""The most acks that share a pipeline with the next read; the settler thread sends more."""


class ReadAcks(NamedTuple):
    """Acks to send in one pipeline with a read. `take` must get the reply or the error, once."""

    command: Command
    take: Callable[[Any], None]


class SettleCalls:
    """Settles outcomes on the server, then forgets the deliveries and fires the signals."""

    def __init__(self, signal_sender: SignalSender, watch: SettleWatch) -> None:
        self._signal_sender = signal_sender
        self._watch = watch

    def acks_for_read(
        self, sub: Subscription, put_back: Callable[[Subscription], None]
    ) -> ReadAcks | None:
        """Acks to send with a read; None if there are none, too many, or other outcomes.

        If the reader's call fails, its acks are queued again, and `put_back` is called.
        """
        outcomes = sub.outcomes
        fits = 0 < len(outcomes.acks) <= min(MOST_READ_ACKS, sub.store.batch_size(sub.shard, Ack))
        has_others = outcomes.has_refusals or outcomes.expired
        if not fits or has_others or self._signal_sender.has_receivers(self._signal_sender.acked):
            return None
        some = outcomes.acks.take_many(MOST_READ_ACKS)
        if not some:  # the settler took them first
            return None
        flow = sub.store.run(Ack(sub.shard, sub.group, settlements_of(some)))
        with suppress(LisaError):  # the settler's own call will meet the error
            step = next(flow)
            if isinstance(step, Execute) and step.command[0] == "EVALSHA":
                return ReadAcks(step.command, partial(self._take, sub, some, flow, put_back))
        outcomes.acks.put_back(some)
        return None

    def _take(
        self,
        sub: Subscription,
        some: Sequence[Held],
        flow: Flow[list[Acked]],
        put_back: Callable[[Subscription], None],
        reply: Any,
    ) -> None:
        """Take the reply to acks that were sent with a read, or the error of that call."""
        try:
            if isinstance(reply, Exception):
                flow.throw(reply)
            else:
                flow.send(reply)
        except StopIteration as end:
            self._watch.report(sub, "ack", some)
            self._acked(sub, some, end.value, self._signal_sender.acked)
            return
        except Exception as error:  # noqa: BLE001  the settler's own call handles the error
            log.debug("topic %s: the reader's acks are sent again: %s", sub.shard, error)
        sub.outcomes.acks.put_back(some)
        put_back(sub)

    def flush(self, sub: Subscription) -> None:
        """Settle all finished deliveries of a subscription. Raises LisaError."""
        outcomes = sub.outcomes
        while outcomes.acks:
            self._ack(sub, outcomes.acks, "acked")
        while outcomes.expired:
            self._ack(sub, outcomes.expired, "expired")
        while outcomes.has_refusals:
            self._refuse(sub)

    def _ack(self, sub: Subscription, queue: ThreadQueue[Held], state: str) -> None:
        some = queue.take_many(sub.store.batch_size(sub.shard, Ack))
        if not some:  # the reader took them first
            return
        try:
            settlements = settlements_of(some)
            if state == "expired":  # do not count an attempt
                settlements = [one._replace(attempt=one.attempt - 1) for one in settlements]
            call = Ack(sub.shard, sub.group, settlements, state)
            operation = "expire" if state == "expired" else "ack"
            outcomes = self._watch.call(sub, call, operation, some)
        except BaseException:
            queue.put_back(some)
            raise
        pair = self._signal_sender.expired if state == "expired" else self._signal_sender.acked
        self._acked(sub, some, outcomes, pair)

    def _acked(
        self,
        sub: Subscription,
        some: Sequence[Held],
        outcomes: Sequence[Acked],
        pair: tuple[Signal, Signal],
    ) -> None:
        has_receivers = self._signal_sender.has_receivers(pair)
        sub.leases.forget(some)
        for held, outcome in zip(some, outcomes, strict=True):
            if outcome is Acked.STALE:
                log.info(
                    "topic %s: message %s was already settled elsewhere, or replaced",
                    sub.shard,
                    held.message.id,
                    extra=held.message.log_fields,
                )
            elif has_receivers:
                self._signal_sender.fire(pair, held.message)

    def _refuse(self, sub: Subscription) -> None:
        call, some = sub.outcomes.unanswered or _refusing(sub)
        if not some:  # dropped meanwhile
            return
        sub.outcomes.begin_call(call, some)
        deliveries = [held for held, _ in some]
        if isinstance(call, Postpone):
            self._watch.call(sub, call, "defer", deliveries)
            sub.outcomes.end_call()
            sub.leases.forget(deliveries)
            return
        outcomes = self._watch.call(sub, call, "retry", deliveries)
        sub.outcomes.end_call()
        for (held, verdict), outcome in zip(some, outcomes, strict=True):
            sub.leases.forget([held])
            if outcome.outcome is Failed.DEAD:
                log.error(
                    "topic %s: message %s moved to garbage after %d failed attempt%s: %s",
                    held.message.topic,
                    held.message.id,
                    outcome.failed_attempts,
                    "" if outcome.failed_attempts == 1 else "s",
                    verdict.reason,
                    exc_info=verdict.error,
                    extra=held.message.log_fields,
                )
            self._signal_sender.fire_failure(held.message, verdict.reason, outcome)


def _refusing(sub: Subscription) -> tuple[Fail | Postpone, Refusals]:
    """A call for the next deferrals or failures, and the deliveries that it ends."""
    size = min(MOST_REFUSALS, sub.store.batch_size(sub.shard, Fail))
    deferred = sub.outcomes.deferrals.take_many(size)
    if deferred:
        rows = [
            Deferral(*held.receipt, cast("int", verdict.delay), verdict.reason)
            for held, verdict in deferred
        ]
        return Postpone(sub.shard, sub.group, rows), deferred
    some = sub.outcomes.failures.take_many(size)
    try:
        settlements = settlements_of(held for held, _ in some)
        failures = [
            Failure.of(one, verdict.reason, verdict.delay, _traceback(verdict))
            for one, (_, verdict) in zip(settlements, some, strict=True)
        ]
    except BaseException:
        sub.outcomes.failures.put_back(some)
        raise
    return Fail(sub.shard, sub.group, failures), some


def _traceback(verdict: Verdict) -> str:
    return "" if verdict.error is None else traceback_of(verdict.error)
