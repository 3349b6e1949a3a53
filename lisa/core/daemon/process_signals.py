"""Signals of a process: those that stop a role, also while it starts, and what forked children get.

A daemon's main thread waits in a `Mailbox` for events and signals.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

STOPPING = (signal.SIGTERM, signal.SIGINT)

_replaced: dict[int, Any] = {}

T = TypeVar("T")


def stopping() -> tuple[signal.Signals, ...]:
    """The signals that stop a role: SIGHUP, too, unless the program handles or ignores it.

    A terminal that closes sends SIGHUP; `nohup` makes a program ignore it.
    """
    is_free = handler_of(signal.SIGHUP) == signal.SIG_DFL
    return (*STOPPING, signal.SIGHUP) if is_free else STOPPING


def exit_on_signals(numbers: Iterable[signal.Signals]) -> None:
    """Exit with 0 on these signals until the role sets its own handlers.

    As process 1 of a container, a program never sees a signal for which it has no handler: a role
    that is stopped while it starts would run on until it is killed.
    """
    for number in numbers:
        before = signal.signal(number, _exit)
        if before != _exit:
            _replaced[number] = before


def handler_of(number: int) -> Any:
    """A signal's handler, apart from that of `exit_on_signals`."""
    handler = signal.getsignal(number)
    return _replaced[number] if handler == _exit else handler


def _exit(*_: object) -> NoReturn:
    # Not sys.exit: an import, such as that of handlers, may catch any exception.
    os._exit(0)


_former: dict[int, Any] = {}
_forking = threading.local()


@contextmanager
def not_inherited(former: Mapping[int, Any]) -> Iterator[None]:
    """Give children that are forked meanwhile the `former` handlers, by signal.

    A handler of messages may fork, as `multiprocessing.Pool` does on Linux. With the signal
    handlers of its parent, the child would survive SIGTERM. Through the wakeup file descriptor,
    which the two share, the signal could stop the parent.
    """
    _former.update(former)
    try:
        yield
    finally:
        for number in former:
            _former.pop(number, None)


def _block() -> None:
    """Delay signals until the child has its handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(_former))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    if _former:
        signal.set_wakeup_fd(-1)
    for number, handler in _former.items():
        signal.signal(number, handler)
    _former.clear()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_child)


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
        before = {number: handler_of(number) for number in numbers}
        for number in numbers:
            signal.signal(number, lambda number, _: handle(number))
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
