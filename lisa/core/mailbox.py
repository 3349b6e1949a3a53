"""Where a daemon's main thread waits for what it is to do."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ["STOPPING", "Mailbox"]

T = TypeVar("T")

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Mailbox(Generic[T]):
    """A queue to be read on the main thread, which any thread and any signal handler may write to.

    The kernel may hand a signal to any thread. Python then runs the handler on the main thread,
    but does not wake it: whoever waits on a lock or a queue there sleeps on. A byte in a pipe,
    written by Python's own C handler, does wake it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)

    def post(self, item: T) -> None:
        """Put an item in."""
        self._queue.put(item)
        with suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._waker, b"\0")

    def get(self) -> T:
        """Wait for the next item."""
        while True:
            with suppress(Empty):
                return self._queue.get_nowait()
            select.select([self._wake], [], [])
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Have signals wake `get`. On the main thread only."""
        before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def __del__(self) -> None:
        # Not before: a late `post` would write into whatever has the number by then.
        os.close(self._wake)
        os.close(self._waker)
