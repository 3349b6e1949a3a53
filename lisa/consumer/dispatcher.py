"""Run handlers within the slots: sync ones on threads, `async def` ones as tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from lisa.consumer.event_loop import AppLoop, HandlerTasks
from lisa.consumer.handler_stats import FAST_S
from lisa.consumer.handlers import HandlerPlan, Handlers
from lisa.consumer.inflight import Held
from lisa.consumer.invoke import on_batch, on_message_sync
from lisa.consumer.settler import Settler
from lisa.consumer.slots import TURN_S, AnySlots, SlotClaim, Slots, TopicSlots
from lisa.consumer.subscription import Subscription, Work, deliveries_of
from lisa.core.daemon.threads import ServiceThread, grow, unforeseen
from lisa.core.redis.flow import drive

P = ParamSpec("P")
T = TypeVar("T")


class Dispatcher:
    """Runs handlers for deliveries.

    `inline` runs handlers on the calling reader's thread. `submit` runs them on worker threads or
    on the event loop, with one slot per message or batch. `spawn` runs an awaitable on the event
    loop, and `wait` also waits for its result. With `app`, sync handlers get copies of its context.
    """

    def __init__(
        self, slots: Slots, handlers: Handlers, settler: Settler, app: AppLoop | None = None
    ) -> None:
        self.slots = slots
        self._handlers = handlers
        self._settler = settler
        self._grants: dict[tuple[Subscription, bool], Callable[[], None]] = {}
        # A topic's slots live as long as a subscription to one of its shards.
        self._topic_slots = WeakValueDictionary[tuple[str, str], TopicSlots]()
        self._work: SimpleQueue[Subscription | None] = SimpleQueue()
        self._threads: list[ServiceThread] = []
        self._busy = 0
        self._lock = threading.Lock()
        self._tasks = HandlerTasks(handlers, settler, app)
        self.spawn, self.wait = self._tasks.spawn, self._tasks.wait
        self.spawn_logged = self._tasks.spawn_logged
        self.check_loop = self._tasks.check_loop
        self.has_current_task = self._tasks.has_current_task
        self.end_tasks = self._tasks.end
        self._on_message, self._drive = on_message_sync, drive
        if app is not None:
            self._on_message = _in_copies_of(app.context, on_message_sync)
            self._drive = _in_copies_of(app.context, drive)

    def slots_of(self, topic: str, wanted: str) -> AnySlots:
        """The slots for all shards of a topic, for a requested group."""
        size = self._handlers.option(topic, wanted, "concurrency")
        if size is None:
            return self.slots
        known = self._topic_slots.get((topic, wanted))
        if known is None or known.size != min(size, self.slots.size):
            known = self._topic_slots[topic, wanted] = TopicSlots(self.slots, size)
        return known

    def threads(self) -> list[ServiceThread]:
        """The threads, for health checks. They run handlers, so they never count as stalled."""
        return [*self._threads, *self._tasks.threads()]

    @staticmethod
    def runs_inline(sub: Subscription, plan: HandlerPlan) -> bool:
        """Whether handlers run on the reader's thread: with one slot, if they are not `async def`.

        A batch handler must not, because the thread has to collect the next batch.
        """
        return sub.slots.size == 1 and not plan.is_async and plan.batch is None

    def inline(self, sub: Subscription, plan: HandlerPlan, turn: SlotClaim) -> bool:
        """Handle unstarted deliveries on this thread, in the slot that `turn` holds.

        After `TURN_S`, yields the slot to waiting topics between messages. Returns False if the
        slot was lost because the subscription is closing. The caller must notify the settler of the
        last ones.
        """
        busy = fast_s = 0.0
        done = fast = 0
        now = time.monotonic()
        slots, notify, unstarted = sub.slots, self._settler.notify, sub.unstarted
        while not sub.closing.is_set() and (work := unstarted.take()) is not None:
            began = now
            count = self._handle(sub, plan, work, now)
            now = time.monotonic()
            took = now - began
            busy += took
            done += count
            if took > FAST_S and count:
                sub.stats.observe(took, count)
            else:
                fast += count
                fast_s += took
            if unstarted:  # after the last delivery, the reader flushes
                notify(sub)
            if slots.waiting and now - turn.since >= TURN_S:
                notify(sub)
                sub.stats.observe_fast(fast_s, fast)
                fast, fast_s = 0, 0.0
                if not turn.yield_slot(sub.closing.is_set):
                    return False
                now = time.monotonic()
        sub.stats.observe_fast(fast_s, fast)
        if done:
            sub.pace.measured(busy / done)
        return True

    def submit(self, sub: Subscription, plan: HandlerPlan, count: int, *, has_slot: bool) -> None:
        """Claim a slot for each of `count` deliveries or batches that were queued.

        With `has_slot`, the first one uses the caller's slot. Raises RuntimeError if the event loop
        cannot be started; then the heartbeat releases the deliveries, as they wait too long.
        """
        try:
            grant = self._grant(sub, plan.is_async)
        except BaseException:
            if has_slot:
                sub.slots.release()
            raise
        if has_slot:
            grant()
        sub.slots.claim(grant, count - has_slot)

    def _grant(self, sub: Subscription, is_async: bool) -> Callable[[], None]:  # noqa: FBT001
        grant = self._grants.get((sub, is_async))
        if grant is None:
            grant = self._tasks.grant(sub) if is_async else partial(self._give_to_thread, sub)
            self._grants[sub, is_async] = grant
        return grant

    def forget(self, sub: Subscription) -> None:
        """Drop the state of a removed subscription."""
        for is_async in (False, True):
            self._grants.pop((sub, is_async), None)

    def _give_to_thread(self, sub: Subscription) -> None:
        with self._lock:
            self._busy += 1
        self.add_missing_thread()
        self._work.put(sub)

    def add_missing_thread(self) -> None:
        """Start a thread if there are fewer than deliveries with a slot.

        To be called again and again: at the thread limit there may be none for deliveries that
        have all the slots.
        """
        if len(self._threads) < min(self._busy, self.slots.size):
            name = f"lisa-handler-{len(self._threads) + 1}"
            grow(self._threads, ServiceThread(name, self._serve))

    def _serve(self) -> None:
        while (sub := self._work.get()) is not None:
            try:
                self._run_one(sub)
            except BaseException as error:  # noqa: BLE001  the slot must be freed
                unforeseen(f"topic {sub.shard}: a delivery failed", error)
            with self._lock:
                self._busy -= 1
            sub.slots.release()

    def _run_one(self, sub: Subscription) -> None:
        work = sub.unstarted.take()
        if work is None:
            return
        plan, now = self._handlers.plan(sub.topic, sub.wanted), time.monotonic()
        done = self._handle(sub, plan, work, now)
        if done:
            took = time.monotonic() - now
            sub.pace.measured(took / done)
            sub.stats.observe(took, done)
        self._settler.notify(sub)
        if not sub.unstarted:
            self._settler.flush_now()

    def _handle(self, sub: Subscription, plan: HandlerPlan, work: Work, now: float) -> int:
        """Handle a delivery or a batch; returns how many deliveries were started."""
        try:
            if plan.batch is not None or isinstance(work, list):
                return self._run_batch(sub, plan, deliveries_of(work))
            if not sub.start(work, now):
                return 0
            sub.finish(work, self._on_message(plan, work, self.wait))
        except BaseException as error:
            sub.fail_unhandled(work, error)
            raise
        finally:
            if isinstance(work, Held) and work.is_suspect:
                self._settler.flush_now_for(sub)  # the next suspect waits for that
        return 1

    def _run_batch(self, sub: Subscription, plan: HandlerPlan, batch: list[Held]) -> int:
        now = time.monotonic()
        started = [held for held in batch if sub.start(held, now)]
        outcomes = self._drive(on_batch(plan, started), self.wait) if started else []
        if started:
            sub.finish_batch(started, outcomes)
        return len(started)

    def cancel_tasks(self) -> None:
        """Cancel the running `async def` handlers, whose deliveries were released."""
        self._tasks.cancel()

    def close(self) -> None:
        """End idle threads. A thread whose handler hangs ends with the process."""
        for _ in self._threads:
            self._work.put(None)
        self._tasks.close()


def _in_copies_of(context: Context, function: Callable[P, T]) -> Callable[P, T]:
    """A function that makes each call in a copy of `context`, as `asyncio.to_thread` does."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)

    return call
