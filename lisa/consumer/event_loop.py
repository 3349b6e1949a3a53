"""The event loop of `async def` handlers, and warnings if a handler blocks it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread
from lisa.core.redis.flow import start_task

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


class HandlerLoop:
    """The event loop of `async def` handlers, with their tasks. The loop starts on use.

    With `app`, it is the application's loop, which has no thread here.
    """

    def __init__(self, app: AppLoop | None = None) -> None:
        self._lock = threading.Lock()
        self._loop = app.loop if app else None
        self._context = app.context if app else None
        self._thread: ServiceThread | None = None
        self._thread_id: int | None = None
        self._watch = LoopWatch(app.loop, app.thread) if app else None
        self._tasks: set[asyncio.Task[None]] = set()

    def threads(self) -> list[ServiceThread]:
        """The loop's thread, once it runs."""
        return [self._thread] if self._thread else []

    def check(self) -> None:
        """Warn if a handler blocks the loop; to be called twice per second."""
        if self._watch is not None:
            self._watch.check()

    def start(self) -> asyncio.AbstractEventLoop:
        """The loop, started if necessary. Raises RuntimeError at the thread limit."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = ServiceThread("lisa-loop", partial(self._run, loop))
                try:
                    thread.start()
                except RuntimeError:  # the next call tries again
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
                self._watch = LoopWatch(loop, thread)
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        if self._tasks:  # the loop was blocked when `wait_ended` waited for them
            loop.run_until_complete(asyncio.wait(set(self._tasks), timeout=LAST_STEPS_S))
        loop.close()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call a function on the loop, from any thread, in the context for handlers.

        That is the application's, or the context of the calling thread.
        """
        loop = self.start()
        # Cheaper on the loop's own thread: no need to wake it.
        is_here = threading.get_ident() == self._thread_id
        call = loop.call_soon if is_here else loop.call_soon_threadsafe
        call(callback, context=self._context)

    def start_task(
        self, work: Coroutine[Any, Any, None], ended: Callable[[BaseException | None], None]
    ) -> _ThreadsafeCancel:
        """Start a task on the loop, which is running here. `ended` gets its error, if any."""
        self._thread_id = threading.get_ident()
        task = start_task(work)
        self._tasks.add(task)

        def is_done(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            ended(None if done.cancelled() else done.exception())

        task.add_done_callback(is_done)
        return _ThreadsafeCancel(task)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Run a receiver's awaitable on the loop; waits on this thread for the result."""
        result, error = self.spawn(_outcome(awaitable)).result()
        if error is not None:
            raise error
        return result

    def spawn(self, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
        """Run a receiver's awaitable on the loop; returns its future."""
        loop = self.start()

        async def finish() -> Any:
            return await awaitable

        spawn = partial(asyncio.run_coroutine_threadsafe, finish(), loop)
        return spawn() if self._context is None else self._context.copy().run(spawn)

    def spawn_logged(self, awaitable: Awaitable[Any]) -> None:
        """The same; its error is logged, as those of other receivers are."""
        self.spawn(finish_logged(awaitable))

    def has_current_task(self) -> bool:
        """Whether the caller is a handler's task on the running event loop."""
        return asyncio.current_task() in self._tasks

    def cancel(self) -> None:
        """Cancel all tasks."""
        if self._loop is not None:
            for task in list(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    def wait_ended(self) -> None:
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
