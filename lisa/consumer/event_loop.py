"""The event loop of `async def` handlers, and warnings if a handler blocks it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from lisa.consumer.handlers import HandlerPlan, Handlers
from lisa.consumer.inflight import Held, Outcome, Verdict
from lisa.consumer.invoke import on_batch, on_message_async
from lisa.consumer.settler import Settler
from lisa.consumer.subscription import Subscription, Work, deliveries_of
from lisa.consumer.suspects import LOOK_S, SUSPECTS, WAIT_S
from lisa.core.daemon.threads import ServiceThread, in_thread, unforeseen
from lisa.core.model.clock import human
from lisa.core.redis.flow import adrive, start_task

BLOCKED_S = 1.0
WARN_EVERY_S = 60.0
LATE_S = 0.05
"""Half of the shortest ack timeout."""

_LIBRARIES = ("asyncio", "concurrent", "lisa", "selectors", "threading", "uvloop")
"""Packages that run handlers; their frames are not the cause of a blocked loop."""

_CALLBACK = asyncio.Handle._run.__code__  # noqa: SLF001
"""What asyncio runs a callback with."""

log = logging.getLogger("lisa.consumer")


class LoopWatch:
    """Schedules a callback on an event loop, and warns if the loop does not run it in time.

    The heartbeat calls `check`, twice per second, so the watch costs nothing per message.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._asked: float | None = None
        self._warned = -math.inf

    def check(self) -> None:
        """Warn if the loop has not answered for a second; at most once per minute."""
        now, asked = time.monotonic(), self._asked
        if asked is None:
            with suppress(RuntimeError):  # the loop is closed
                self._asked = now
                self._loop.call_soon_threadsafe(self._answered)
        elif now - asked >= BLOCKED_S and now - self._warned >= WARN_EVERY_S:
            self._warn(now - asked, now)

    def _answered(self) -> None:
        self._asked = None

    def _warn(self, blocked_s: float, now: float) -> None:
        frames = [] if self._thread.ident is None else list(_user_frames(self._thread.ident))
        if not frames:  # the process was suspended, or the loop is about to answer
            return
        self._warned = now
        handler, inner = frames[-1], frames[0]
        log.warning(
            "%s blocks the event loop for %.1f s, at %s:%d (in %s); no other async handler can "
            "run: await an asynchronous call or asyncio.to_thread(...) there, or write the handler "
            "without async",
            _name(handler),
            blocked_s,
            handler.f_code.co_filename,
            handler.f_lineno,
            _name(inner),
        )


class ThreadWatch:
    """Warns if the heartbeat could not run for most of an ack timeout.

    Usually a handler holds the interpreter's lock (GIL) in a long call, such as of a regular
    expression or of an extension written in C. Then no thread extends leases.

    names: returns the names of a topic's handlers.
    """

    def __init__(
        self,
        subscriptions: Callable[[], Iterable[Subscription]],
        names: Callable[[Subscription], Sequence[str]],
    ) -> None:
        self._subscriptions = subscriptions
        self._names = names
        self._warned = -math.inf

    def overslept(self, late_s: float) -> None:
        """Take note of how much longer than asked the heartbeat slept; warns once per minute."""
        if late_s < LATE_S or time.monotonic() - self._warned < WARN_EVERY_S:
            return
        for sub in self._subscriptions():
            timeout_s = sub.leases.ack_timeout_s
            if late_s > timeout_s / 2 and any(held.started for held in sub.leases.all()):
                self._warned = time.monotonic()
                log.warning(
                    "topic %s: nothing else could run for %.1f s while %s ran, and no lease was "
                    "extended; the ack timeout is %g s, so messages may be handled twice: move "
                    "work that holds the GIL into another process, or set a longer ack timeout",
                    sub.shard,
                    late_s,
                    " or ".join(self._names(sub)) or "a handler",
                    timeout_s,
                )


def _user_frames(thread_id: int) -> Iterator[FrameType]:
    """The frames of the loop's current callback, from the innermost outwards, without libraries."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001  public, despite its name
    # Outside of the callback is, on an application's own loop, the code that started the loop.
    while frame is not None and frame.f_code is not _CALLBACK:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


LAST_STEPS_S = 1.0
"""How long cancelled tasks may take to end."""


class AppLoop(NamedTuple):
    """The application's event loop and its thread, and the context that handlers start with."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    context: Context


class HandlerTasks:
    """The event loop, its thread, and the tasks of running handlers. The loop starts on use.

    With `app`, the tasks run on the application's loop, which has no thread here.
    """

    def __init__(self, handlers: Handlers, settler: Settler, app: AppLoop | None = None) -> None:
        self._handlers = handlers
        self._settler = settler
        self._lock = threading.Lock()
        self._loop = app.loop if app else None
        self._context = app.context if app else None
        self._thread: ServiceThread | None = None
        self._watch = LoopWatch(app.loop, app.thread) if app else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    def threads(self) -> list[ServiceThread]:
        """The loop's thread, once it runs."""
        return [self._thread] if self._thread else []

    def check_loop(self) -> None:
        """Warn if a handler blocks the loop; to be called twice per second."""
        if self._watch is not None:
            self._watch.check()

    def grant(self, sub: Subscription) -> Callable[[], None]:
        """A function that starts the next unstarted work of a subscription, called with a slot."""
        return _Granted(self._event_loop(), partial(self._start, sub), self._context)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Run a receiver's awaitable on the event loop; waits on this thread for the result."""
        result, error = self.spawn(_outcome(awaitable)).result()
        if error is not None:
            raise error
        return result

    def spawn(self, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
        """Run a receiver's awaitable on the event loop; returns its future."""
        loop = self._event_loop()

        async def finish() -> Any:
            return await awaitable

        spawn = partial(asyncio.run_coroutine_threadsafe, finish(), loop)
        return spawn() if self._context is None else self._context.copy().run(spawn)

    def spawn_logged(self, awaitable: Awaitable[Any]) -> None:
        """The same; its error is logged, as those of other receivers are."""
        self.spawn(finish_logged(awaitable))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = ServiceThread("lisa-loop", partial(self._run_loop, loop))
                try:
                    thread.start()
                except RuntimeError:  # the thread limit is reached; the next call tries again
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
                self._watch = LoopWatch(loop, thread)
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        if self._tasks:  # the loop was blocked when `end` waited for them
            loop.run_until_complete(asyncio.wait(set(self._tasks), timeout=LAST_STEPS_S))
        loop.close()

    def _start(self, sub: Subscription, count: int) -> None:
        """Start a task for each granted slot."""
        plan = self._handlers.plan(sub.topic, sub.wanted)
        for _ in range(count):
            work = sub.unstarted.take()
            if work is None:
                sub.slots.release()
                continue
            if isinstance(work, list) or plan.batch is not None:
                task = start_task(self._run_batch(sub, plan, work))
            else:
                task = start_task(self._run_one(sub, plan, work))
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, sub, work))
            cancel = _ThreadsafeCancel(task)
            for held in deliveries_of(work):
                held.run_in(cancel)

    def _end(self, sub: Subscription, work: Work, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            unforeseen(f"topic {sub.shard}: a delivery failed", error)
            sub.fail_unhandled(work, error)
        sub.slots.release()
        self._settler.notify(sub)
        if not sub.unstarted or (isinstance(work, Held) and work.is_suspect):
            self._settler.flush_now()

    async def _run_one(self, sub: Subscription, plan: HandlerPlan, held: Held) -> None:
        began = time.monotonic()
        if not await self._is_startable(sub, held, began):
            return
        if held.is_suspect:  # it may have waited
            began = time.monotonic()
        held.begin(began)
        outcome = await on_message_async(plan, held)
        if self._leaving and held.ended:
            return
        sub.finish(held, self._judged(sub, held, outcome))
        self._settler.notify(sub)  # now: the next task may block the loop
        self._measure(sub, began, 1)

    async def _run_batch(self, sub: Subscription, plan: HandlerPlan, work: Work) -> None:
        began = time.monotonic()
        started = []
        for held in deliveries_of(work):
            if await self._is_startable(sub, held, began):
                held.begin(time.monotonic())
                started.append(held)
        if not started:
            return
        outcomes = await adrive(on_batch(plan, started), None)
        if self._leaving and any(held.ended for held in started):
            return
        judged = [self._judged(sub, *pair) for pair in zip(started, outcomes, strict=True)]
        sub.finish_batch(started, judged)
        self._settler.notify(sub)
        self._measure(sub, began, len(started))

    @staticmethod
    async def _is_startable(sub: Subscription, held: Held, now: float) -> bool:
        """See `Subscription.start`."""
        if now < held.closes and now <= held.lease_ends and not held.is_suspect:
            return True
        ends = now + WAIT_S
        while held.is_suspect and not SUSPECTS.begin(held, sub.leases.held):
            if time.monotonic() > ends or sub.closing.is_set():
                await in_thread(sub.give_back, [held])
                return False
            await asyncio.sleep(LOOK_S)
        return await in_thread(sub.may_start, held, time.monotonic())

    @staticmethod
    def _measure(sub: Subscription, began: float, count: int) -> None:
        took = time.monotonic() - began
        sub.pace.measured(took / count)
        sub.stats.observe(took, count)

    @staticmethod
    def _judged(sub: Subscription, held: Held, outcome: Outcome) -> Outcome:
        if outcome is not None and held.overdue:
            limit = human(int(sub.leases.handler_timeout_s * 1000))
            return Verdict(f"the handler ran longer than its timeout of {limit}")
        return outcome

    def has_current_task(self) -> bool:
        """Whether the caller is a handler's task on the running event loop."""
        return asyncio.current_task() in self._tasks

    def cancel(self) -> None:
        """Cancel the running handlers, whose deliveries were released."""
        self._leaving = True
        if self._loop is not None:
            for task in list(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    def end(self) -> None:
        """Give cancelled tasks up to a second to end, on a thread other than the loop's."""
        ends = time.monotonic() + LAST_STEPS_S
        while self._tasks and time.monotonic() < ends:  # a handler may block the loop
            time.sleep(0.01)

    def close(self) -> None:
        """End the loop, unless it is the application's."""
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(2)  # a handler that blocks the loop may take longer


class _Granted:
    """Starts tasks on the event loop for granted slots. One wake-up serves many slots.

    Each task gets a copy of `context`, or of the context of the thread that granted the slot.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[int], None],
        context: Context | None,
    ) -> None:
        self._loop = loop
        self._start = start
        self._context = context
        self._count = 0
        self._thread_id: int | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Grant a slot, on any thread."""
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
        if threading.get_ident() == self._thread_id:  # cheaper: no need to wake the loop
            self._loop.call_soon(self._start_all, context=self._context)
        else:
            self._loop.call_soon_threadsafe(self._start_all, context=self._context)

    def _start_all(self) -> None:
        self._thread_id = threading.get_ident()
        with self._lock:
            count, self._count = self._count, 0
        self._start(count)


class _ThreadsafeCancel:
    """Cancels a task from another thread, once: a further time would interrupt its cleanup."""

    __slots__ = ("_is_used", "_task")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._is_used = False

    def cancel(self) -> None:
        if self._is_used:
            return
        self._is_used = True
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Result and error of an awaitable: a task that raises SystemExit stops its event loop."""
    try:
        return await awaitable, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


async def finish_logged(awaitable: Awaitable[Any]) -> None:
    """Await a signal receiver, and log its error: the message is settled already."""
    try:
        await awaitable
    except asyncio.CancelledError:
        raise
    except BaseException:  # sys.exit() in a receiver must not stop the event loop
        log.exception("a signal receiver raised an exception")
