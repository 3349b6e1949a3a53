"""Warns when a handler blocks the event loop, or all threads of the process."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType

from lisa.consumer.subscription import Subscription

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
