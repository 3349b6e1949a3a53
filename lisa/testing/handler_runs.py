"""Delivers ready messages to the application's handlers, one attempt after the other."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from lisa.consumer.consumer import BaseConsumer
from lisa.consumer.handlers import AwaitResult, HandlerPlan, Handlers, on_batch
from lisa.consumer.inflight import Held, Outcome, Verdict
from lisa.consumer.lifespan import Lifespan, managed
from lisa.consumer.options import WantedTopic
from lisa.consumer.pull import Delivery
from lisa.consumer.settler import SignalSender
from lisa.core.delivery.source import GroupSource
from lisa.core.model.clock import ms_datetime
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Acked
from lisa.testing.records import Attempt

NAME = "lisa-test-kit"
"""The consumer's name on the server."""


class AttachedLifespan:
    """One run of a lifespan. Its errors reach the test.

    An asynchronous context manager is entered and left by one task.
    """

    def __init__(self, lifespan: Lifespan | None) -> None:
        self._lifespan = lifespan
        self._state: Any = None
        self._entered = ExitStack()
        self._task: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()

    def enter(self) -> Flow[Any]:
        """The state for handlers; enters the lifespan at the first call."""
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            manager = managed(lifespan)
            if isinstance(manager, AbstractAsyncContextManager):
                self._state = yield AwaitResult(self._begin(manager))
            else:
                self._state = self._entered.enter_context(manager)
        return self._state

    def leave(self) -> Flow[None]:
        """Close what `enter` opened."""
        self._entered.close()
        if self._task is not None:
            yield AwaitResult(self._end(self._task))

    async def _begin(self, manager: AbstractAsyncContextManager[Any]) -> Any:
        state: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(manager, state))
        await asyncio.wait({task, state}, return_when=asyncio.FIRST_COMPLETED)
        if not state.done():
            task.result()  # raises
        self._task = task
        return state.result()

    async def _hold(
        self, manager: AbstractAsyncContextManager[Any], entered: asyncio.Future[Any]
    ) -> None:
        async with manager as state:
            entered.set_result(state)
            await self._leaving.wait()

    async def _end(self, task: asyncio.Task[None]) -> None:
        self._leaving.set()
        await task


log = logging.getLogger("lisa.testing")


class _Attached(NamedTuple):
    """A consumer of the application, and the lifespan whose state its handlers get."""

    consumer: BaseConsumer
    lifespan: AttachedLifespan

    @property
    def handlers(self) -> Handlers:
        return self.consumer._handlers  # noqa: SLF001  a consumer does not show its handlers

    def wanted_for(self, topic: str) -> list[WantedTopic]:
        """What the consumer would read of a topic."""
        return self.consumer._wanted_of(topic)  # noqa: SLF001  nor what it reads


class _Role(NamedTuple):
    """What serves a group: its handlers with their state and signals, and the message source."""

    handlers: Handlers
    lifespan: AttachedLifespan
    sender: SignalSender
    source: GroupSource


class HandlerRuns:
    """Pulls messages and calls the handlers of the attached consumers.

    Messages of other topics and groups are acked without a handler.

    just_before: a context in which the server rounds its time up to the present millisecond.
    """

    def __init__(
        self,
        store: SyncStore,
        now_ms: Callable[[], int],
        just_before: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._just_before = just_before
        self._attached: list[_Attached] = []
        self._roles: dict[tuple[str, str], _Role] = {}
        self._unfinished: list[Awaitable[Any]] = []
        self.attempts: list[Attempt] = []

    def attach(self, consumer: BaseConsumer) -> None:
        """Use the handlers of a consumer; do not start the consumer."""
        lifespan = consumer._options.lifespan  # noqa: SLF001  a consumer does not show its options
        self._attached.append(_Attached(consumer, AttachedLifespan(lifespan)))
        self._roles.clear()

    def wanted(self) -> set[tuple[str, str | None]]:
        """The topics of all attached consumers, each with a group that its consumer joins."""
        return {
            (topic, wanted.group)
            for attached in self._attached
            for topic in attached.consumer.topics()
            for wanted in attached.wanted_for(topic)
        }

    def leave(self) -> Flow[None]:
        """Leave the lifespans that were entered, the last one first. Raises their errors."""
        if self._attached:
            try:
                yield from self._attached.pop().lifespan.leave()
            finally:
                yield from self.leave()

    def deliver(self, topic: str, group: str) -> Flow[int]:
        """Hand the next message, or batch, to its handlers; returns the number of messages.

        Raises LisaError, and whatever ends a test: KeyboardInterrupt, `pytest.fail`.
        """
        role = self._role(topic, group)
        plan = role.handlers.plan(topic, group)
        count, deliveries = self._pull(role, 1 if plan.batch is None else plan.batch.batch or 1)
        state = None if plan.is_empty else (yield from role.lifespan.enter())
        outcomes = yield from _outcomes(plan, deliveries, state)
        retry = role.handlers.option(topic, group, "retry")
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            self._settle(delivery, outcome and outcome.under(retry, delivery.attempt))
        while self._unfinished:
            yield AwaitResult(self._unfinished.pop(0))
        return count

    def _role(self, topic: str, group: str) -> _Role:
        role = self._roles.get((topic, group))
        if role is None:
            handlers, lifespan = self._handlers(topic, group)
            sender = SignalSender(handlers.signals, self._unfinished.append)
            source = GroupSource(self._store, Topic(topic), group, NAME)
            role = self._roles[topic, group] = _Role(handlers, lifespan, sender, source)
        return role

    def _pull(self, role: _Role, most: int) -> tuple[int, list[Delivery]]:
        """Take messages; returns their number, and the deliveries that handlers may see."""
        source, sender, drive = role.source, role.sender, self._store.drive
        taken = drive(source.take(most))
        if not taken.entries:
            return 0, []
        opened = drive(source.open(taken, taken.entries, None, sys.maxsize))
        sender.fire_unfit(drive(source.settle_unfit(opened)))
        fit = [message for message in opened if message is not None and message.is_for_handler]
        return len(taken.entries), [
            Delivery(self._store, sender, NAME, message, None) for message in fit
        ]

    def _handlers(self, topic: str, group: str) -> tuple[Handlers, AttachedLifespan]:
        for attached in self._attached:
            groups = {wanted.group for wanted in attached.wanted_for(topic)}
            if groups & {None, group} and not attached.handlers.plan(topic, group).is_empty:
                return attached.handlers, attached.lifespan
        return Handlers(), AttachedLifespan(None)

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        at, reason = ms_datetime(self._now_ms()), ""
        if outcome is None:
            said = "stale" if delivery.ack() is Acked.STALE else "handled"
        else:
            reason = outcome.reason
            log.warning(
                "topic %s: message %s, attempt %d, was not handled: %s",
                delivery.topic,
                delivery.id,
                delivery.attempt,
                reason,
                exc_info=outcome.error,
                extra=delivery.message.log_fields,
            )
            said = self._refuse(delivery, outcome)
        attempt = Attempt(message=delivery.message, at=at, outcome=str(said), reason=reason)
        self.attempts.append(attempt)

    def _refuse(self, delivery: Delivery, verdict: Verdict) -> str:
        if verdict.is_discard:
            return delivery.discard(verdict.reason)
        pause = verdict.delay
        delay = timedelta(milliseconds=pause) if isinstance(pause, int) else None
        with self._just_before():
            if verdict.is_deferral and delay is not None:
                rests_lane = verdict.rests_lane
                return delivery.defer(delay=delay, reason=verdict.reason, rests_lane=rests_lane)
            return delivery.retry(delay=delay, reason=verdict.reason)


def _outcomes(
    plan: HandlerPlan, deliveries: Sequence[Delivery], state: Any
) -> Flow[Sequence[Outcome]]:
    if plan.is_empty or not deliveries:
        return [None] * len(deliveries)
    outcomes = yield from on_batch(plan, [_held(delivery, state) for delivery in deliveries])
    for outcome in outcomes:
        if isinstance(outcome, Verdict) and _ends_the_test(outcome.error):
            raise outcome.error  # type: ignore[misc]  # checked: an exception
    return outcomes


def _held(delivery: Delivery, state: Any) -> Held:
    """The delivery as handlers' code takes it; the body is encoded again for typed handlers."""
    message = delivery.message
    data = encode_envelope(message.token, message.body, message.headers)
    if state is not None:
        message = msgspec.structs.replace(message, state=state)
    return Held(delivery.id, message, data, 0, 0.0, math.inf)


def _ends_the_test(error: BaseException | None) -> bool:
    """Whether a handler raised what must reach the test: Ctrl-C, or `pytest.fail`."""
    is_failure = isinstance(error, (Exception, SystemExit, asyncio.CancelledError))
    return error is not None and not is_failure
