"""Pull deliveries for programs with their own loop: `Consumer.pull`, `AsyncConsumer.pull`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from redis.exceptions import MaxConnectionsError

from lisa.consumer.event_loop import finish_logged
from lisa.consumer.options import ConsumerOptions
from lisa.consumer.settler import SignalSender
from lisa.consumer.subscription import SHUTDOWN_CALLS_S
from lisa.core.delivery.group_resolution import declared_again, join, wait_for_group, was_emptied
from lisa.core.delivery.source import (
    CUT_SHORT,
    LOOK_AGAIN_S,
    MOST,
    Delivered,
    GroupSource,
    Taken,
)
from lisa.core.model.clock import checked_delay_ms, duration_ms
from lisa.core.model.errors import GroupRemoved, InvalidMessage, LisaError
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.sharding import Topic, own_shard, topic_of
from lisa.core.model.signals import Signals
from lisa.core.redis.connection import AsyncConnection
from lisa.core.redis.errors import ClientError, passes, translated
from lisa.core.redis.flow import Command, Flow, Link, Pause, awaiting, blocking
from lisa.core.store import presence
from lisa.core.store.presence import ManagerWatch, unique_name
from lisa.core.store.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.base import ById
from lisa.core.transitions.lease import Extend, Release
from lisa.core.transitions.retry import Deferral, Fail, Failed, Failure, Postpone

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
        call = next((other for other in self._unanswered if other == call), call)
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

    def defer(
        self, *, delay: timedelta | str, reason: str = "", rests_lane: bool = False
    ) -> Flow[str]:
        """Deliver again after `delay`, without counting an attempt; returns `deferred` or `stale`.

        For messages that cannot be handled now. Only a ttl ends one that is always deferred.

        rests_lane: no other message with the same key is delivered to the group meanwhile; see
            `Limited`.
        """
        reason = reason or "the puller deferred it"
        delay_ms, receipt = checked_delay_ms(delay), self._settlement[:2]
        deferral = Deferral(*receipt, delay_ms, reason, rests_lane=rests_lane)
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


log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""Longest wait of a blocking read; its connection's socket timeout allows for it."""

D = TypeVar("D")


class _Read(NamedTuple):
    """A blocking read, which needs a connection of its own."""

    link: Link
    command: Command

    def run(self, _link: object) -> Any:
        return self.link.execute(self.command)

    def arun(self, _link: object) -> Any:
        return self.link.execute(self.command)


class Puller(Generic[D]):
    """Pulls for one consumer, as flows. Threads or tasks may share it.

    waiting: the connection for reads that block, for up to `LONGEST_WAIT_S`.
    wanted: the group to declare, or "" for the topic's only group.
    new_delivery: makes a delivery for the caller; the second argument is its ack timeout in ms.
    """

    def __init__(
        self,
        store: Store,
        waiting: Link,
        wanted: str,
        name: str,
        signal_sender: SignalSender,
        *,
        new_delivery: Callable[[Delivered, int | None], D],
    ) -> None:
        self._store = store
        self._waiting = waiting
        self._wanted = wanted
        self._name = name
        self._signal_sender = signal_sender
        self._new_delivery = new_delivery
        self._sources: dict[str, GroupSource] = {}
        self._removed: dict[str, str] = {}
        self._announced: dict[str, float] = {}
        self._watch = ManagerWatch(store)
        self._looked: dict[Topic, float] = {}

    def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> Flow[list[D]]:
        """Up to `batch` deliveries; waits up to `wait` for the first. Raises LisaError."""
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST:
            raise InvalidMessage(f"a pull takes 1 to {MOST} messages, not {batch!r}")
        timeout_ms = None if ack_timeout is None else _checked_timeout_ms(ack_timeout)
        name, ends = Topic(topic), time.monotonic() + wait.total_seconds()
        while True:
            source = yield from self._source(name, ends)
            if source is None:
                return (yield from self._nothing(name, ""))
            try:
                found = yield from self._pull(source, batch, ends, timeout_ms)
            except GroupRemoved:
                yield from self._group_removed(name, source.group)
            else:
                return found or (yield from self._nothing(name, source.group))

    def _nothing(self, topic: Topic, group: str) -> Flow[list[D]]:
        """Return no deliveries; warn if messages are overdue because no manager runs."""
        now = time.monotonic()
        if now - self._looked.get(topic, -math.inf) >= presence.BEAT.total_seconds():
            self._looked[topic] = now
            yield from self._watch.look([(topic, group)])
        return []

    def _pull(
        self, source: GroupSource, batch: int, ends: float, timeout_ms: int | None
    ) -> Flow[list[D]]:
        while True:
            taken = yield from source.take(batch, timeout_ms)
            if taken.entries:
                found = yield from self._opened(source, taken, batch, timeout_ms)
                if found:
                    return found
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return []
            if not taken.entries:
                yield from self._wait(source, taken, left_s)

    def _opened(
        self, source: GroupSource, taken: Taken, batch: int, timeout_ms: int | None
    ) -> Flow[list[D]]:
        """Deliveries for the caller. Releases entries beyond `batch` or `AHEAD_BYTES`."""
        try:
            opened = yield from source.open(taken, taken.entries[:batch], timeout_ms)
            self._signal_sender.fire_unfit((yield from source.settle_unfit(opened)))
            left = [(entry.id, entry.entry) for entry in taken.entries[len(opened) :]]
            if left:
                yield from self._release(source, left)
        except CUT_SHORT:
            source.repeat(taken)
            raise
        return [
            self._new_delivery(delivered, timeout_ms)
            for delivered in opened
            if delivered is not None and delivered.is_for_handler
        ]

    def _release(self, source: GroupSource, receipts: list[tuple[str, str]]) -> Flow[None]:
        try:
            yield from self._store.run_by_id(Release(source.topic, source.group, receipts))
        except LisaError as error:
            log.warning(
                "topic %s: %d messages could not be released and return after their ack timeout: "
                "%s",
                source.topic,
                len(receipts),
                error,
            )

    def _wait(self, source: GroupSource, taken: Taken, left_s: float) -> Flow[None]:
        """Wait until a stream of the group has a new entry, or the time is up."""
        pause_s, command = source.wait_for(taken.empty, left_s)
        if command is None:
            yield Pause(pause_s)
            return
        try:
            yield _Read(self._waiting, command)
        except MaxConnectionsError:  # a limit in the server's URL
            yield Pause(min(LOOK_AGAIN_S, left_s))
        except ClientError as error:
            # The next pull is retried with patience, and raises if the server stays unavailable.
            if not passes(error):
                raise translated(error, self._store.where) from error

    def _group_removed(self, topic: Topic, group: str) -> Flow[None]:
        self._sources.pop(topic, None)
        if not (yield from was_emptied(self._store, own_shard(topic), self._name, group)):
            self._removed[topic] = group  # this consumer must not declare it again
        for shard in list(self._announced):  # other threads may pull
            if topic_of(shard) == topic:
                self._announced.pop(shard, None)

    @property
    def looks(self) -> set[Any]:
        """The running threads or tasks that check for a manager."""
        return self._watch.running

    def leave(self, store: Store) -> list[Flow[None]]:
        """Flows for the given store: release what is left, and remove this consumer's records."""
        sources, shards = list(self._sources.values()), list(self._announced)
        self._announced.clear()
        return [
            *(source.give_back(store) for source in sources if source.may_hold_some),
            *(presence.leave_consumer(store, shard, self._name) for shard in shards),
        ]

    def _source(self, topic: Topic, ends: float) -> Flow[GroupSource | None]:
        source = self._sources.get(topic)
        if source is None:
            group = yield from (
                self._removed_group(topic, ends)
                if topic in self._removed
                else self._group(topic, ends)
            )
            if group is None:
                return None
            announce = partial(self._announce, group)
            source = GroupSource(self._store, topic, group, self._name, announce)
            source = self._sources.setdefault(topic, source)  # another pull may have been faster
        return source

    def _group(self, topic: Topic, ends: float) -> Flow[str | None]:
        return wait_for_group(
            self._store,
            own_shard(topic),
            self._name,
            partial(join, self._store, own_shard(topic), self._wanted),
            lambda: ends - time.monotonic(),
            announced=lambda _: self._announced.update({topic: -math.inf}),
            is_patient=False,
        )

    def _removed_group(self, topic: Topic, ends: float) -> Flow[str]:
        """The removed group, once it is declared again. Raises GroupRemoved."""
        before = self._removed[topic]
        while True:
            group = yield from declared_again(self._store, own_shard(topic), before, self._wanted)
            if group:
                self._removed.pop(topic, None)
                return group
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise GroupRemoved(f"group {before!r} was removed from topic {topic!r}")
            yield Pause(min(LOOK_AGAIN_S, left_s))

    def _announce(self, group: str, shard: str) -> Flow[None]:
        now = time.monotonic()
        if now - self._announced.get(shard, -math.inf) < presence.BEAT.total_seconds():
            return
        self._announced[shard] = now
        record = presence.ConsumerPresence(name=self._name, topic=topic_of(shard), group=group)
        yield from presence.announce_consumer(self._store, record, shard)


def _checked_timeout_ms(value: timedelta) -> int:
    if not MIN_ACK_TIMEOUT <= value <= MAX_ACK_TIMEOUT:
        raise InvalidMessage(f"an ack timeout is {MIN_ACK_TIMEOUT} to {MAX_ACK_TIMEOUT}: {value}")
    return duration_ms(value)


class AsyncPuller:
    """Runs one consumer's pulls on one event loop, over its own connections."""

    def __init__(self, options: ConsumerOptions, signals: Signals) -> None:
        self._store = AsyncStore(AsyncConnection(options.address), options.keys, who="consumer")
        self._blocking_reads = AsyncConnection(options.address.blocking_for(LONGEST_WAIT_S))
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        sender, name = SignalSender(signals, self._spawn), unique_name(options.name)
        self._puller = Puller(
            self._store,
            self._blocking_reads,
            options.group or "",
            name,
            sender,
            new_delivery=partial(AsyncDelivery, self._store, sender, name),
        )

    async def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> AsyncIterator[AsyncDelivery]:
        """The deliveries of one pull; releases those that the caller does not reach.

        Raises RuntimeError in another event loop than that of the first pull.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "this AsyncConsumer belongs to the event loop of its first pull, and this is "
                "another one: create a consumer in each loop, or stop() it at the loop's end"
            )
        self._loop = loop
        found = await self._store.drive(self._puller.pull(topic, batch, wait, ack_timeout))
        found.reverse()
        try:
            while found:
                yield found.pop()
        finally:
            for delivery in found:
                self._spawn(_release(delivery))

    async def close(self) -> None:
        """Finish releases, remove this consumer's records and close the connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUTDOWN_CALLS_S)
        with suppress(LisaError, TimeoutError):  # managers delete records that are left behind
            async with asyncio.timeout(SHUTDOWN_CALLS_S):
                for flow in self._puller.leave(self._store):
                    await self._store.drive(flow)
        for task in [*self._tasks, *self._puller.looks]:
            task.cancel()
        await self._store.close()
        await self._blocking_reads.close()

    def _spawn(self, awaitable: Awaitable[Any]) -> None:
        task = asyncio.create_task(finish_logged(awaitable))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _release(delivery: AsyncDelivery) -> None:
    with suppress(LisaError):  # then it is redelivered when its ack timeout ends
        await delivery.release()
