"""Runs handlers: sync ones on threads, `async def` ones on an event loop, within the slots."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import Any

from lisa.consumer.handlers import Handlers, Plan
from lisa.consumer.held import Held, Outcome, Verdict
from lisa.consumer.running import arun, on_batch, on_message_here, run
from lisa.consumer.settler import Settler
from lisa.consumer.slots import Slots, Turn
from lisa.consumer.subscription import FAST_S, Subscription, Work, deliveries_of
from lisa.core.clock import human

__all__ = ["Dispatcher"]

log = logging.getLogger("lisa.consumer")


class Dispatcher:
    """Hands deliveries to handlers.

    `inline` runs them on the calling reader's thread, without a hand-over. `submit` gives them to
    worker threads or to the event loop, each message (or batch) in a slot of its own.
    """

    def __init__(self, slots: Slots, handlers: Handlers, settler: Settler) -> None:
        self.slots = slots
        self._handlers = handlers
        self._settler = settler
        self._grants: dict[tuple[Subscription, bool], Callable[[], None]] = {}
        self._work: SimpleQueue[Subscription | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    def owns_this_thread(self) -> bool:
        """Whether the caller is a handler on one of these threads."""
        current = threading.current_thread()
        return current in self._threads or current is self._loop_thread

    def inline(self, sub: Subscription, plan: Plan, turn: Turn) -> bool:
        """Run what is unstarted on this thread, in the slot that `turn` holds.

        Lets other topics have their turns between messages. False: the slot was lost on the way
        because the subscription is closing. What was finished last, the reader has settled.
        """
        busy = fast_s = 0.0
        done = fast = 0
        now = time.monotonic()
        slots, ring, wait, unstarted = self.slots, self._settler.ring, self.wait, sub.unstarted
        while not sub.closing.is_set() and (work := sub.next_work()) is not None:
            began = now
            count = 0
            if plan.batch is not None or isinstance(work, list):
                count = self._run_batch(sub, plan, deliveries_of(work))
            elif sub.start(work, now):
                sub.finish(work, on_message_here(plan, work, wait))
                count = 1
            now = time.monotonic()
            took = now - began
            busy += took
            done += count
            if took > FAST_S and count:
                sub.took(took, count)
            else:
                fast += count
                fast_s += took
            if unstarted:  # else the reader sees to it, at once
                ring()
            if slots.waiting:
                ring()
                sub.fast, sub.fast_s = sub.fast + fast, sub.fast_s + fast_s
                fast, fast_s = 0, 0.0
                if not turn.pass_on(sub.closing.is_set):
                    return False
                now = time.monotonic()
        sub.fast, sub.fast_s = sub.fast + fast, sub.fast_s + fast_s
        if done:
            sub.pace.measured(busy / done)
        return True

    def submit(
        self, sub: Subscription, plan: Plan, work: Sequence[Work], *, has_slot: bool
    ) -> None:
        """Queue deliveries or batches, and claim a slot for each.

        The caller's slot, if it has one, goes to the first.
        """
        sub.unstarted.extend(work)
        grant = self._grant(sub, plan.is_async)
        if has_slot:
            grant()
        self.slots.claim(grant, len(work) - has_slot)

    def _grant(self, sub: Subscription, is_async: bool) -> Callable[[], None]:  # noqa: FBT001
        grant = self._grants.get((sub, is_async))
        if grant is None:
            loop = self._event_loop() if is_async else None

            def grant() -> None:
                if loop is None:
                    self._give_to_thread(sub)
                elif threading.current_thread() is self._loop_thread:
                    loop.call_soon(self._start_task, sub)  # it is awake: spare it the waking
                else:
                    loop.call_soon_threadsafe(self._start_task, sub)

            self._grants[sub, is_async] = grant
        return grant

    def forget(self, sub: Subscription) -> None:
        """A subscription is over."""
        for is_async in (False, True):
            self._grants.pop((sub, is_async), None)

    def _give_to_thread(self, sub: Subscription) -> None:
        with self._lock:
            self._busy += 1
            is_short = self._busy > len(self._threads)
        if is_short and len(self._threads) < self.slots.size:
            thread = threading.Thread(
                target=self._serve, name=f"lisa-handler-{len(self._threads) + 1}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._work.put(sub)

    def _serve(self) -> None:
        while (sub := self._work.get()) is not None:
            try:
                self._run_one(sub)
            except Exception:
                log.exception("topic %s: a delivery is left to its lease", sub.topic)
            with self._lock:
                self._busy -= 1
            self.slots.leave()

    def _run_one(self, sub: Subscription) -> None:
        work = sub.next_work()
        if work is None:
            return
        plan, now = self._handlers.plan(sub.whole), time.monotonic()
        done = 1
        if plan.batch is not None or isinstance(work, list):
            done = self._run_batch(sub, plan, deliveries_of(work))
        elif not sub.start(work, now):
            done = 0
        else:
            sub.finish(work, on_message_here(plan, work, self.wait))
        if done:
            took = time.monotonic() - now
            sub.pace.measured(took / done)
            sub.took(took, done)
        self._settler.ring()
        if not sub.unstarted:
            self._settler.hurry()

    def _run_batch(self, sub: Subscription, plan: Plan, batch: list[Held]) -> int:
        now = time.monotonic()
        started = [held for held in batch if sub.start(held, now)]
        outcomes = run(on_batch(plan, started), self.wait) if started else []
        if started:
            sub.finish_batch(started, outcomes)
        return len(started)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Have the event loop run what a receiver returned, and wait for it on this thread."""
        return self.spawn(awaitable).result()

    def spawn(self, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
        """Have the event loop run what a receiver returned."""

        async def finish() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(finish(), self._event_loop())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=self._run_loop, args=(self._loop,), name="lisa-loop", daemon=True
                )
                self._loop_thread.start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.run_until_complete(_last_steps(self._tasks))
        loop.close()

    def _start_task(self, sub: Subscription) -> None:
        work = sub.next_work()
        if work is None:
            self.slots.leave()
            return
        task = asyncio.get_running_loop().create_task(self._run_task(sub, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for held in deliveries_of(work):
            held.task = _FromOutside(task)

    async def _run_task(self, sub: Subscription, work: Work) -> None:
        try:
            await self._run_async(sub, work)
        finally:
            self.slots.leave()
            self._settler.ring()
            if not sub.unstarted:
                self._settler.hurry()

    async def _run_async(self, sub: Subscription, work: Work) -> None:
        now = time.monotonic()
        started = []
        for held in deliveries_of(work):
            if held.lease_ends > now or await asyncio.to_thread(sub.renew, held):
                held.started = now
                started.append(held)
            else:
                sub.drop(held)
        if not started:
            return
        plan = self._handlers.plan(sub.whole)
        outcomes = await arun(on_batch(plan, started))
        if self._leaving and any(held.ended for held in started):
            return
        judged = [self._judged(sub, *pair) for pair in zip(started, outcomes, strict=True)]
        if isinstance(work, list):
            sub.finish_batch(started, judged)
        else:
            sub.finish(work, judged[0])
        took = time.monotonic() - now
        sub.pace.measured(took / len(started))
        sub.took(took, len(started))

    @staticmethod
    def _judged(sub: Subscription, held: Held, outcome: Outcome) -> Outcome:
        if outcome is not None and held.overdue:
            limit = human(int(sub.handler_timeout_s * 1000))
            return Verdict(f"the handler ran longer than its timeout of {limit}")
        return outcome

    def cancel_tasks(self) -> None:
        """Cancel the `async def` handlers that still run; their deliveries were taken away."""
        self._leaving = True
        if self._loop is not None:
            for task in list(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Let idle threads end. One that a handler hangs in ends with the process."""
        for _ in self._threads:
            self._work.put(None)
        loop, thread = self._loop, self._loop_thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(2)  # a handler that blocks the loop holds it up for longer


class _FromOutside:
    """Cancels a task from another thread."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


async def _last_steps(tasks: set[asyncio.Task[None]]) -> None:
    """Give cancelled tasks the moment that they need to end."""
    waiting: set[Any] = set(tasks)
    if waiting:
        await asyncio.wait(waiting, timeout=1)
