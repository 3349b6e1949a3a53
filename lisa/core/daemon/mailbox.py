"""A queue in which a daemon's main thread waits for events and signals."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from lisa.core.daemon.forks import not_inherited
from lisa.core.daemon.stop_signals import handler_of

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue read on the main thread, which any thread and any signal handler may write to.

    The kernel may deliver a signal to any thread. Python then runs the handler on the main thread
    but does not wake it if it waits for a lock or a queue. A byte in a pipe, written by Python's
    own C handler, does wake it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)

    def post(self, item: T) -> None:
        """Add an item."""
        self._queue.put(item)
        with suppress(BlockingIOError):  # a full pipe wakes the reader anyway
            os.write(self._waker, b"\0")

    def get(self, within_s: float | None = None) -> T:
        """Wait for the next item. Raises `queue.Empty` if none comes within the given time."""
        ends = None if within_s is None else time.monotonic() + within_s
        while True:
            left_s = None if ends is None else max(0.0, ends - time.monotonic())
            try:
                return self._queue.get_nowait()
            except Empty:
                if left_s == 0:
                    raise
            select.select([self._wake], [], [], left_s)
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)

    @contextmanager
    def handling_signals(
        self, handle: Callable[[int], object], numbers: Collection[int]
    ) -> Iterator[None]:
        """Call `handle` with each signal of `numbers`; it may `post`. On the main thread only.

        The signals may be blocked before, so that none is lost.
        """
        fd = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        before = {one: handler_of(one) for one in numbers}
        for one in numbers:
            signal.signal(one, lambda number, _: handle(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            with not_inherited(before):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd)

    def __del__(self) -> None:
        # Not earlier: a late `post` would write to a reused file descriptor.
        os.close(self._wake)
        os.close(self._waker)
