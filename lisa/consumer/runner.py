"""Run handlers: who runs next, how many at the same time, and on which thread or event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from contextvars import Context
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from lisa.consumer.event_loop import AppLoop, HandlerLoop
from lisa.consumer.handlers import (
    HandlerPlan,
    Handlers,
    on_batch,
    on_message,
    on_message_sync,
)
from lisa.consumer.inflight import Held, Outcome, Verdict
from lisa.consumer.subscription import FAST_S, Limit, Subscription, Work, deliveries_of
from lisa.core.daemon.threads import ServiceThread, grow, in_thread, unforeseen
from lisa.core.model.clock import human
from lisa.core.redis.flow import adrive, drive

P = ParamSpec("P")
T = TypeVar("T")

TURN_S = 0.005
"""How long a reader's thread handles messages of one topic while others wait."""

SUSPECT_S = 10.0
"""After this time the next suspect may begin, so that long handlers do not hold up all others."""


class Where(Enum):
    """Where a topic's handlers run."""

    HERE = auto()
    """On a reader's thread: one handler at a time, of single messages, and not `async def`."""
    THREAD = auto()
    LOOP = auto()


class Claim(NamedTuple):
    """Work that may begin now, and that counts as running until it ends."""

    sub: Subscription
    work: Work
    plan: HandlerPlan
    where: Where


class Suspects:
    """Which suspect runs in this process: one at a time.

    A suspect is a message that a process held when it ended, without having told whether its
    handler had begun. If the process of a suspect ends again, only that suspect has begun, and
    counts an attempt; see decision 33.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Held | None = None
        self._holder: Container[str] = ()
        self._since = 0.0

    def begin(self, held: Held, holder: Container[str]) -> bool:
        """Whether a suspect may begin now, because the one before is settled.

        holder: the entries of deliveries that its subscription holds, without settled ones.
        """
        now = time.monotonic()
        with self._lock:
            before = self._running
            if before and before.entry in self._holder and now - self._since < SUSPECT_S:
                return False
            self._running, self._holder, self._since = held, holder, now
            return True


SUSPECTS = Suspects()
"""One for all consumers of the process, which would end together."""


class Runner:
    """Starts handlers of waiting deliveries, the topics in turn, at most `concurrency` at once.

    `submit` takes note of a topic whose deliveries wait. Handlers that are `async def` run as tasks
    on the event loop, others on worker threads; if the consumer's concurrency is 1, on a reader's
    thread (`run_here`), which saves two context switches a message. With `app`, sync handlers get
    copies of its context.

    limit: how many handlers run and may run, of all topics.
    loop: the event loop.
    """

    def __init__(self, concurrency: int, handlers: Handlers, app: AppLoop | None = None) -> None:
        self.limit = Limit(concurrency)
        self.loop = HandlerLoop(app)
        self._handlers = handlers
        self._changed = threading.Condition()
        self._ready: dict[Subscription, tuple[HandlerPlan, Where]] = {}
        # A topic's limit lives as long as a subscription to one of its shards.
        self._limits = WeakValueDictionary[tuple[str, str], Limit]()
        self._work: SimpleQueue[Claim | None] = SimpleQueue()
        self._threads: list[ServiceThread] = []
        self._on_threads = 0
        self._for_loop: list[Claim] = []
        self._is_leaving = False
        self._on_message, self._drive = on_message_sync, drive
        if app is not None:
            self._on_message = _in_copies_of(app.context, on_message_sync)
            self._drive = _in_copies_of(app.context, drive)

    def limit_of(self, topic: str, wanted: str) -> Limit:
        """The limit for all shards of a topic, for a requested group."""
        size = self._handlers.option(topic, wanted, "concurrency")
        if size is None or size >= self.limit.size:
            return self.limit
        known = self._limits.get((topic, wanted))
        if known is None or known.size != size:
            known = self._limits[topic, wanted] = Limit(size)
        return known

    def threads(self) -> list[ServiceThread]:
        """The threads, for health checks. They run handlers, so they never count as stalled."""
        return [*self._threads, *self.loop.threads()]

    def submit(self, sub: Subscription, plan: HandlerPlan) -> None:
        """Let handlers begin on what waits in a subscription.

        Raises RuntimeError if the event loop cannot be started; then the heartbeat releases the
        deliveries, as they wait too long.
        """
        where = Where.THREAD
        if plan.is_async:
            self.loop.start()
            where = Where.LOOP
        elif self.limit.size == 1 and plan.batch is None:
            where = Where.HERE
        with self._changed:
            self._ready[sub] = plan, where
        if where is not Where.HERE or sub.suspects:
            self.start_waiting()

    def start_waiting(self) -> None:
        """Begin what may begin on other threads than the caller's.

        To be called again and again: a suspect waits until the one before is settled, and at the
        thread limit there may be no thread for a delivery.
        """
        while True:
            with self._changed:
                claim = self._claim()
            if claim is None:
                break
            self._give(claim)
        missing = min(self._on_threads, self.limit.size) - len(self._threads)
        for _ in range(missing):
            name = f"lisa-handler-{len(self._threads) + 1}"
            grow(self._threads, ServiceThread(name, self._serve))

    def _claim(self) -> Claim | None:
        """The next work for another thread; the caller holds the lock."""
        if not self.limit.free:
            return None
        for sub, (plan, where) in self._ready.items():
            if sub.limit.free and (work := _next_of(sub, where)) is not None:
                del self._ready[sub]  # let the other topics go first
                if sub.is_waiting:
                    self._ready[sub] = plan, where
                self._count_begun(sub)
                return Claim(sub, work, plan, Where.THREAD if where is Where.HERE else where)
        return None

    def _count_begun(self, sub: Subscription) -> None:
        """Count a running handler; the caller holds the lock."""
        self.limit.running += 1
        if sub.limit is not self.limit:
            sub.limit.running += 1

    def _give(self, claim: Claim) -> None:
        with self._changed:
            if claim.where is Where.THREAD:
                self._on_threads += 1
                self._work.put(claim)
                return
            self._for_loop.append(claim)
            if len(self._for_loop) > 1:  # one wake-up serves many
                return
        self.loop.call_soon(self._start_tasks)

    def _count_ended(self, sub: Subscription, plan: HandlerPlan | None = None) -> None:
        """Count a handler that has ended. plan: for what a turn on a reader's thread has left."""
        with self._changed:
            if plan is not None and sub.is_waiting:
                self._ready.setdefault(sub, (plan, Where.HERE))
            self.limit.running -= 1
            if sub.limit is not self.limit:
                sub.limit.running -= 1
            self._changed.notify_all()

    def forget(self, sub: Subscription) -> None:
        """Drop the state of a removed subscription."""
        with self._changed:
            self._ready.pop(sub, None)

    def wait_free(self, limit: Limit, is_over: Callable[[], bool]) -> bool:
        """Wait until a handler can begin at once; False once `is_over` is true (see `wake`)."""
        with self._changed:
            while not is_over():
                if self.limit.free and limit.free:
                    return True
                self._changed.wait()
        return False

    def wait_all_free(self, timeout_s: float) -> bool:
        """Wait until no handler runs; returns False after `timeout_s`."""
        most_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: not self.limit.running, most_s)

    def wake(self) -> None:
        """Make a waiting `wait_free` check `is_over` again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def has_work_here(self) -> bool:
        """Whether work waits for a reader's thread."""
        for sub, (_, where) in list(self._ready.items()):
            if where is Where.HERE and sub.unstarted:
                return True
        return False

    def run_here(self) -> None:
        """Handle what waits for a reader's thread, unless another thread does.

        Returns after `TURN_S` if there is more, because the reader's own topics may have messages.
        """
        ends = time.monotonic() + TURN_S
        while (claimed := self._claim_here()) is not None:
            sub, plan = claimed
            try:
                self._take_turn(sub, plan, ends)
            finally:
                self._count_ended(sub, plan)
                if self._ready:
                    self.start_waiting()
            if time.monotonic() >= ends:
                break

    def _claim_here(self) -> tuple[Subscription, HandlerPlan] | None:
        """A topic for this thread; its deliveries are taken while it has its turn."""
        with self._changed:
            if not self.limit.free:
                return None
            for sub, (plan, where) in self._ready.items():
                if where is Where.HERE and sub.unstarted:
                    del self._ready[sub]
                    self._count_begun(sub)
                    return sub, plan
            return None

    def _take_turn(self, sub: Subscription, plan: HandlerPlan, ends: float) -> None:
        """Handle what waits in a subscription; until `ends` if other topics wait, too."""
        busy = fast_s = 0.0
        done = fast = 0
        now, unstarted = time.monotonic(), sub.unstarted
        while not sub.closing.is_set() and unstarted:
            try:
                work = unstarted.popleft()
            except IndexError:  # the heartbeat took it
                break
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
            if now >= ends and self._ready:
                break
        sub.stats.observe_fast(fast_s, fast)
        if done:
            sub.pace.measured(busy / done)

    def _serve(self) -> None:
        while (claim := self._work.get()) is not None:
            while claim is not None:
                try:
                    self._run_one(claim)
                except BaseException as error:  # noqa: BLE001  the others must be handled
                    unforeseen(f"topic {claim.sub.shard}: a delivery failed", error)
                    claim.sub.fail_unhandled(claim.work, error)
                claim = self._next(claim.sub)

    def _next(self, sub: Subscription) -> Claim | None:
        """The next work of a thread that has ended its last one, of `sub`."""
        self._count_ended(sub)
        while self._work.empty():  # else there are fewer threads than claims, and that comes first
            with self._changed:
                claim = self._claim()
            if claim is None:
                break
            if claim.where is Where.THREAD:
                return claim
            self._give(claim)
        with self._changed:
            self._on_threads -= 1
        self.start_waiting()
        return None

    def _run_one(self, claim: Claim) -> None:
        sub, work, plan, _ = claim
        now = time.monotonic()
        done = self._handle(sub, plan, work, now)
        if done:
            self._measure(sub, now, done)

    def _handle(self, sub: Subscription, plan: HandlerPlan, work: Work, now: float) -> int:
        """Handle a delivery or a batch; returns how many deliveries were started."""
        try:
            if plan.batch is not None or isinstance(work, list):
                return self._run_batch(sub, plan, deliveries_of(work))
            if not sub.start(work, now):
                return 0
            sub.finish(work, self._on_message(plan, work, self.loop.wait))
        except BaseException as error:
            sub.fail_unhandled(work, error)
            raise
        return 1

    def _run_batch(self, sub: Subscription, plan: HandlerPlan, batch: list[Held]) -> int:
        now = time.monotonic()
        started = [held for held in batch if sub.start(held, now)]
        if started:
            sub.finish_batch(started, self._drive(on_batch(plan, started), self.loop.wait))
        return len(started)

    def _start_tasks(self) -> None:
        """Start a task for each delivery or batch that was given to the event loop."""
        with self._changed:
            claims, self._for_loop = self._for_loop, []
        for claim in claims:
            sub, work, plan, _ = claim
            is_batch = isinstance(work, list) or plan.batch is not None
            run = self._batch_task if is_batch else self._task
            cancel = self.loop.start_task(run(sub, plan, work), partial(self._task_ended, claim))
            for held in deliveries_of(work):
                held.task = cancel

    def _task_ended(self, claim: Claim, error: BaseException | None) -> None:
        sub, work = claim.sub, claim.work
        if error is not None:
            unforeseen(f"topic {sub.shard}: a delivery failed", error)
            sub.fail_unhandled(work, error)
        self._count_ended(sub)
        self.start_waiting()

    async def _task(self, sub: Subscription, plan: HandlerPlan, work: Work) -> None:
        (held,) = deliveries_of(work)
        began = time.monotonic()
        if not (held.is_startable(began) or await in_thread(sub.make_startable, held)):
            return
        held.started = began
        outcome = await adrive(on_message(plan, held), None)
        if self._is_leaving and held.ended:
            return
        sub.finish(held, _unless_overdue(sub, held, outcome))
        self._measure(sub, began, 1)

    async def _batch_task(self, sub: Subscription, plan: HandlerPlan, work: Work) -> None:
        began = time.monotonic()
        started = []
        for held in deliveries_of(work):
            if held.is_startable(began) or await in_thread(sub.make_startable, held):
                held.started = time.monotonic()
                started.append(held)
        if not started:
            return
        outcomes = await adrive(on_batch(plan, started), None)
        if self._is_leaving and any(held.ended for held in started):
            return
        judged = [_unless_overdue(sub, *pair) for pair in zip(started, outcomes, strict=True)]
        sub.finish_batch(started, judged)
        self._measure(sub, began, len(started))

    @staticmethod
    def _measure(sub: Subscription, began: float, count: int) -> None:
        took = time.monotonic() - began
        sub.pace.measured(took / count)
        sub.stats.observe(took, count)

    def cancel_tasks(self) -> None:
        """Cancel the running `async def` handlers, whose deliveries were released."""
        self._is_leaving = True
        self.loop.cancel()

    def close(self) -> None:
        """End idle threads. A thread whose handler hangs ends with the process."""
        for _ in self._threads:
            self._work.put(None)
        self.loop.close()


def _next_of(sub: Subscription, where: Where) -> Work | None:
    """A suspect that may begin, or else what waits for another thread; None if there is none."""
    suspects = sub.suspects
    if suspects and SUSPECTS.begin(suspects[0], sub.leases.held):
        try:
            return suspects.popleft()
        except IndexError:  # the heartbeat took it
            return None
    if where is Where.HERE:
        return None
    try:
        return sub.unstarted.popleft()
    except IndexError:
        return None


def _unless_overdue(sub: Subscription, held: Held, outcome: Outcome) -> Outcome:
    """The outcome of an `async def` handler; of one that was cancelled, why."""
    if outcome is not None and held.overdue:
        limit = human(int(sub.leases.handler_timeout_s * 1000))
        return Verdict(f"the handler ran longer than its timeout of {limit}")
    return outcome


def _in_copies_of(context: Context, function: Callable[P, T]) -> Callable[P, T]:
    """A function that makes each call in a copy of `context`, as `asyncio.to_thread` does."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)

    return call
