"""Start and stop the parts of one running consumer, and report their health."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from lisa.consumer.event_loop import AppLoop, ThreadWatch
from lisa.consumer.handlers import Handlers
from lisa.consumer.heartbeat import Heartbeat, OutageLog
from lisa.consumer.lifespan import LifespanRun
from lisa.consumer.options import ConsumerOptions, WantedTopic
from lisa.consumer.pull import LONGEST_WAIT_S, Delivery, Puller
from lisa.consumer.reader import Readers
from lisa.consumer.runner import Runner
from lisa.consumer.settler import Settler, SettleWatch, SignalSender
from lisa.consumer.subscription import (
    SHUTDOWN_CALLS_S,
    AheadBytes,
    Limit,
    ShutdownCalls,
    Subscription,
    end_handlers,
)
from lisa.core.daemon.threads import ServiceThread, longest_round_s, stalled
from lisa.core.delivery.group_resolution import find_group
from lisa.core.metrics.numbers import Numbers, add, put
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard, topic_of
from lisa.core.redis.connection import Connection
from lisa.core.redis.failover import watch_threads
from lisa.core.redis.flow import Flow
from lisa.core.store.presence import unique_name
from lisa.core.store.store import SyncStore


def own_numbers(readers: Iterable[tuple[Subscription, bool]], limit: Limit) -> Numbers:
    """The metrics of all subscriptions, each given with whether its reader is failing."""
    numbers: Numbers = {}
    any_failing = False
    for sub, is_failing in readers:
        any_failing |= is_failing
        _add_one(numbers, sub)
        group = sub.group or sub.wanted
        _put_worst(numbers, "lisa_consumer_unreachable", is_failing, sub.topic, group)
    put(numbers, "lisa_up", float(not any_failing))
    put(numbers, "lisa_consumer_concurrency", limit.size)
    put(numbers, "lisa_consumer_busy", limit.running)
    return numbers


def _add_one(numbers: Numbers, sub: Subscription) -> None:
    labels = (sub.topic, sub.group or sub.wanted)
    add(numbers, "lisa_consumer_running", len(sub.leases.running()), *labels)
    add(numbers, "lisa_consumer_held", len(sub.leases.held), *labels)
    _put_worst(numbers, "lisa_consumer_degraded", sub.stats.degradation.is_degraded, *labels)
    stats = sub.stats
    outcomes = {
        "ok": stats.succeeded,
        "failed": stats.failed,
        "discarded": stats.discarded,
        "deferred": stats.deferred,
    }
    for outcome, count in outcomes.items():
        add(numbers, "lisa_consumer_handled_total", count, *labels, outcome)
    add(numbers, "lisa_consumer_handler_seconds", stats.seconds(), *labels)


def _put_worst(numbers: Numbers, name: str, is_so: object, *labels: str) -> None:
    """Set a metric to 1 if the condition holds for any shard of a topic."""
    known = numbers.get(name, {}).get(labels) == 1.0
    put(numbers, name, float(known or bool(is_so)), *labels)


def health_of(
    readers: Iterable[tuple[Subscription, bool]], threads: Sequence[ServiceThread]
) -> Mapping[str, Any]:
    """What `/healthz` reports of subscriptions, each with whether its reads fail, and threads."""
    faults, is_failing = stalled(threads), False
    waiting = removed = False
    topics: dict[str, dict[str, Any]] = {}
    for sub, fails in readers:
        is_failing = is_failing or fails
        waiting = waiting or not sub.group
        removed = removed or sub.membership.is_removed
        state = "unreachable" if fails else sub.presence_state
        one = {"state": state, "held": len(sub.leases.held), "handled": sub.stats.handled}
        known = topics.setdefault(f"{sub.topic}/{sub.group or '-'}", one)
        if known is not one:  # a further shard of the topic
            known["held"] += one["held"]
            known["handled"] += one["handled"]
            if state not in ("running", "stopping"):
                known["state"] = state
    failing = bool(faults) or is_failing
    status = "failing" if failing else "waiting" if removed else "starting" if waiting else "ok"
    ages = {thread.name: round(thread.age_s, 1) for thread in threads}
    return {"status": status, "topics": topics, "threads": ages, "faults": faults}


log = logging.getLogger("lisa.consumer")

T = TypeVar("T")

PATIENCE = timedelta(seconds=1)
"""How long one call is retried; each thread also retries its work."""

HEARTBEAT_S = 5.0
"""Maximum time to wait for a running heartbeat."""


class Runtime:
    """The readers, dispatcher, settler and heartbeat of one consumer. Can be started once.

    failed: called with an error that stops the consumer.
    app: where `async def` handlers run; None for an event loop of the consumer's own.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        handlers: Handlers,
        *,
        failed: Callable[[LisaError], None],
        app: AppLoop | None = None,
    ) -> None:
        address = options.address
        self._options = options
        self._handlers = handlers
        self._store = SyncStore(Connection(address), options.keys, PATIENCE, who="consumer")
        self._patient_store = SyncStore(Connection(address), options.keys, who="consumer")
        self._outages = OutageLog()
        self._longest_s = longest_round_s(address.socket_timeout_s)
        self._runner = Runner(options.concurrency, handlers, app)
        self._signal_sender = SignalSender(handlers.signals, self._runner.loop.spawn_logged)
        self._settler = Settler(
            lambda: self.readers.subscriptions(),  # noqa: PLW0108  it is created below
            self._signal_sender,
            has_nodes=self._store.has_nodes,
            longest_s=self._longest_s,
            watch=SettleWatch(handlers.middleware),
            settled=self._runner.start_waiting,
        )
        self._ahead = AheadBytes(self._bytes_ahead)
        self.readers = Readers(
            self._store,
            options,
            handlers,
            self._runner,
            new_subscription=self._new_subscription,
            failed=failed,
            outages=self._outages,
        )
        self._heartbeat = Heartbeat(
            self._store,
            self.readers.subscriptions,
            self._runner.limit,
            self._drained,
            self.readers.follow,
            checks=(self._runner.loop.check, self._runner.start_waiting),
            overslept=ThreadWatch(
                self.readers.subscriptions,
                lambda sub: handlers.plan(sub.topic, sub.wanted).names,
            ).overslept,
            longest_s=self._longest_s,
            outages=self._outages,
        )
        self._blocking_reads = Connection(address.blocking_for(LONGEST_WAIT_S))
        self._puller: Puller[Delivery] | None = None
        self.has_current_task = self._runner.loop.has_current_task
        self._lifespan = LifespanRun(options.lifespan, self._runner.loop.spawn)
        self._lifespan_state: Any = None

    @property
    def is_started(self) -> bool:
        """Whether the threads run."""
        return self.readers.is_open

    def _new_subscription(self, shard: Shard, group: str, name: str) -> Subscription:
        topic = topic_of(shard)
        return Subscription(
            self._store,
            shard,
            group,
            name,
            shortened=self._heartbeat.wake,
            limit=self._runner.limit_of(topic, group),
            ahead=self._ahead,
            lifespan_state=self._lifespan_state,
            retry=partial(self._handlers.option, topic, group, "retry"),
            request_settling=self._settler.notify,
        )

    def _bytes_ahead(self) -> int:
        return sum(sub.leases.bytes_ahead() for sub in self.readers.subscriptions())

    def start(self, all_wanted: Iterable[WantedTopic]) -> None:
        """Enter the lifespan and start the threads.

        Raises StartupFailed, and ConfigError for errors that can be detected at the start.
        """
        all_wanted = list(all_wanted)
        try:
            self._store.drive(self._store.check_schema())
            self._store.drive(self._store.layouts([wanted.topic for wanted in all_wanted]))
            for wanted in all_wanted:
                if wanted.group is None:
                    self._store.drive(find_group(self._store, wanted.topic))
        except ServerUnavailable as error:
            self._outages.warn("starting without the server, trying again", error)
        self._lifespan_state = self._lifespan.enter()
        self._settler.start()
        self._heartbeat.start()
        self.readers.open(all_wanted)

    def puller(self, group: str | None) -> Puller[Delivery]:
        """The puller, created on first use; `drive` runs its flows."""
        if self._puller is None:
            # With its own name, because readers release unheld entries pending under theirs.
            name = unique_name(self._options.name)
            store, sender = self._patient_store, self._signal_sender
            new = partial(Delivery, store, sender, name)
            reads = self._blocking_reads
            self._puller = Puller(store, reads, group or "", name, sender, new_delivery=new)
        return self._puller

    def drive(self, flow: Flow[T]) -> T:
        """Run a flow of the puller. Raises LisaError."""
        return self._patient_store.drive(flow)

    def owns_this_thread(self) -> bool:
        """Whether the caller is a handler or a receiver on one of this consumer's threads."""
        owned = [*self._runner.threads(), *self._settler.threads()]
        return self.readers.is_own_thread or threading.current_thread() in owned

    def threads(self) -> list[ServiceThread]:
        """All threads that must be alive now."""
        if not self.is_started:
            return []
        return [
            *self.readers.threads(),
            *self._settler.threads(),
            *self._heartbeat.threads(),
            *self._runner.threads(),
            *watch_threads(),
        ]

    def health(self) -> Mapping[str, Any]:
        """The content of `/healthz`: the state of each topic and the age of each thread's round."""
        return health_of(self.readers.states(), self.threads())

    def numbers(self) -> Numbers:
        """The metrics of this consumer."""
        return own_numbers(self.readers.states(), self._runner.limit)

    def close(self, grace_s: float) -> None:
        """Stop reading, release unstarted deliveries, wait for handlers, settle and disconnect."""
        ends = time.monotonic() + grace_s
        was_started, subs = self.is_started, self.readers.close()
        last = ShutdownCalls(self._store)
        if was_started:
            log.info("stopping; running handlers have %g s to finish", grace_s)
            self.readers.end_reading(subs, last)
            waiting = time.monotonic()
            self._runner.wait_all_free(max(0.0, ends - waiting))
            if time.monotonic() - waiting > SHUTDOWN_CALLS_S:  # the server may be back
                last = ShutdownCalls(self._store)
            end_handlers(subs, last)
            self._runner.cancel_tasks()
            self.readers.join(subs, last)
            self._heartbeat.last_look(subs)
        self._settler.close(last.left_s())  # it also runs if a later step of the start failed
        self._heartbeat.close(last.left_s(HEARTBEAT_S))
        self.readers.end_pool()
        self._runner.loop.wait_ended()
        self._leave(subs, last)
        self._store.close()
        self._patient_store.close()
        self._blocking_reads.close()
        self._lifespan.leave()
        self._runner.close()
        if was_started:
            log.info("stopped")

    def _drained(self, sub: Subscription) -> None:
        """Remove a closing subscription that no longer holds deliveries."""
        if self.readers.has_ended(sub):
            self._leave_one(sub)
            self.readers.remove(sub)
            self._runner.forget(sub)

    def _leave(self, subs: Iterable[Subscription], last: ShutdownCalls) -> None:
        leaving: list[Callable[[], None]] = [partial(self._leave_one, sub) for sub in subs]
        if self._puller is not None:
            leaving += [
                partial(self._store.drive, flow) for flow in self._puller.leave(self._store)
            ]
        for leave in leaving:  # managers delete records that are left behind
            last.make(partial(self._has_left, leave, last))

    @staticmethod
    def _has_left(leave: Callable[[], None], last: ShutdownCalls) -> bool:
        try:
            leave()
        except LisaError as error:
            if last.is_answered:
                log.warning("could not remove the consumer's record: %s", error)
            return False
        return True

    def _leave_one(self, sub: Subscription) -> None:
        try:
            self._heartbeat.leave(sub)
        except GroupRemoved:
            log.debug("topic %s: group %s was already removed", sub.shard, sub.group)
