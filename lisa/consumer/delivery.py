"""The deliveries that `Consumer.pull` and `AsyncConsumer.pull` return."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from lisa.consumer.signal_queue import SignalSender
from lisa.core.delivery.source import Delivered
from lisa.core.model.clock import checked_delay_ms
from lisa.core.redis.flow import Flow, awaiting, blocking
from lisa.core.store.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.base import ById
from lisa.core.transitions.defer import Deferral, Postpone
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Fail, Failed, Failure

T = TypeVar("T")


class PulledMessage:
    """The message of a delivery and what its settlement needs."""

    def __init__(
        self,
        store: Store,
        signal_sender: SignalSender,
        consumer: str,
        one: Delivered,
        ack_timeout_ms: int | None,
    ) -> None:
        self._store = store
        self._signal_sender = signal_sender
        self._consumer = consumer
        self.message = one.message
        self._settlement = one.settlement
        self._ack_timeout_ms = ack_timeout_ms
        self._unanswered: list[ById[Any]] = []

    @property
    def id(self) -> str:
        """The message's id."""
        return self.message.id

    @property
    def topic(self) -> str:
        """The topic of the message."""
        return self.message.topic

    @property
    def group(self) -> str:
        """The group for which the message was pulled."""
        return self.message.group

    @property
    def body(self) -> Any:
        """The body as sent: JSON values, str or bytes."""
        return self.message.body

    @property
    def due(self) -> datetime:
        """The due time, an aware datetime in UTC."""
        return self.message.due

    @property
    def due_ms(self) -> int:
        """The due time in epoch milliseconds."""
        return self.message.due_ms

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.message.attempt

    @property
    def headers(self) -> dict[str, str]:
        """The headers."""
        return self.message.headers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.id!r} on {self.topic!r}, attempt {self.attempt}>"

    def _fail(self, reason: str, delay: int | Literal["discard"] | None) -> Flow[Failed]:
        one = self._settlement
        failure = Failure(one.id, one.entry, reason, delay, one.lateness, late_ms=one.late_ms)
        retried = yield from self._ask(Fail(self.topic, self.group, [failure]))
        self._signal_sender.fire_failure(self.message, reason, retried)
        return retried.outcome

    def _ask(self, call: ById[T]) -> Flow[T]:
        """The outcome of a call; repeats an equal call that got no reply."""
        call = next((one for one in self._unanswered if one == call), call)
        if call not in self._unanswered:
            self._unanswered.append(call)
        outcomes = yield from self._store.run_by_id(call)
        self._unanswered.remove(call)
        return outcomes[0]


class _Settling(PulledMessage):
    """The methods of both deliveries, as flows."""

    def ack(self) -> Flow[str]:
        """Settle as handled; returns `acked`, `late` (the lease had ended), `stale`, `repeated`."""
        outcomes = yield from self._store.run_by_id(Ack(self.topic, self.group, [self._settlement]))
        if outcomes[0] is not Acked.STALE:
            self._signal_sender.fire(self._signal_sender.acked, self.message)
        return outcomes[0]

    def retry(self, *, delay: timedelta | str | None = None, reason: str = "") -> Flow[str]:
        """Settle as failed; returns `retrying`, `dead` (the last attempt) or `stale` (not held)."""
        wait_ms = None if delay is None else checked_delay_ms(delay)
        return (yield from self._fail(reason or "the puller asked for a retry", wait_ms))

    def discard(self, reason: str = "") -> Flow[str]:
        """Make the message a dead letter; returns `dead`, or `stale` if it is no longer held."""
        return (yield from self._fail(reason or "the puller discarded it", "discard"))

    def defer(self, *, delay: timedelta | str, reason: str = "") -> Flow[str]:
        """Deliver again after `delay`, without counting an attempt; returns `deferred` or `stale`.

        For messages that cannot be handled now. Only a ttl ends one that is always deferred.
        """
        reason = reason or "the puller deferred it"
        deferral = Deferral(*self._settlement[:2], checked_delay_ms(delay), reason)
        postponed = yield from self._ask(Postpone(self.topic, self.group, [deferral]))
        return postponed.outcome

    def extend(self) -> Flow[bool]:
        """Restart the ack timeout; returns False if the delivery is no longer held."""
        receipts, timeout_ms = [self._settlement[:2]], self._ack_timeout_ms
        call = Extend(self.topic, self.group, self._consumer, receipts, timeout_ms)
        outcomes = yield from self._store.run_by_id(call)
        return outcomes[0]

    def release(self) -> Flow[bool]:
        """Return the delivery without counting an attempt; False if it is no longer held."""
        return self._ask(Release(self.topic, self.group, [self._settlement[:2]]))


class Delivery(PulledMessage):
    """A message to settle: has the attributes of `.message`, and methods to settle it.

    An unsettled delivery is redelivered when its ack timeout ends; `extend` restarts that time.
    Methods raise LisaError. A call that raised ServerUnavailable may have taken effect. Repeated
    within half a minute, it returns the outcome.
    """

    _store: SyncStore

    ack = blocking(_Settling.ack)
    retry = blocking(_Settling.retry)
    discard = blocking(_Settling.discard)
    defer = blocking(_Settling.defer)
    extend = blocking(_Settling.extend)
    release = blocking(_Settling.release)

    def _drive(self, flow: Flow[T]) -> T:
        return self._store.drive(flow)


class AsyncDelivery(PulledMessage):
    """Asynchronous version of `Delivery`; every method to settle it is a coroutine."""

    _store: AsyncStore

    ack = awaiting(_Settling.ack)
    retry = awaiting(_Settling.retry)
    discard = awaiting(_Settling.discard)
    defer = awaiting(_Settling.defer)
    extend = awaiting(_Settling.extend)
    release = awaiting(_Settling.release)

    async def _drive(self, flow: Flow[T]) -> T:
        return await self._store.drive(flow)
