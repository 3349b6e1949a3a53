"""Service threads and a pool of them: they survive exceptions, and record their last round."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
T = TypeVar("T")

RESTART_AFTER_S = 1.0
SLACK_S = 30.0
CALLS = 4
"""Server calls per round that may each take a full socket timeout."""
LONGEST_S = 60.0

_lock = threading.Lock()
_errors = {"total": 0}


def count_unforeseen() -> None:
    """Count an exception that the caller logs."""
    with _lock:
        _errors["total"] += 1


def unforeseen(where: str, error: BaseException) -> None:
    """Log an unexpected exception with its traceback, and count it."""
    count_unforeseen()
    log.error("%s: unexpected error; continuing", where, exc_info=error)


def unforeseen_errors() -> int:
    """The number of unexpected errors in this process."""
    return _errors["total"]


def longest_round_s(socket_timeout_s: float) -> float:
    """How long a round of a service may take before its thread counts as stalled."""
    return SLACK_S + CALLS * socket_timeout_s


class ServiceThread(threading.Thread):
    """A daemon thread that runs `work`, and restarts it if it raises.

    The thread calls `begin` at the start of each round, and `rest` before it waits for work or runs
    user code: a resting thread is healthy for any length of time. After an exception, `is_over`
    decides whether to end instead of restarting.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        longest_s: float = LONGEST_S,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._longest_s = longest_s
        self._is_over = is_over
        self._began: float | None = None
        self._completed = time.monotonic()

    def run(self) -> None:
        """Run the work until it returns."""
        while True:
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001  includes sys.exit() in user code
                unforeseen(self.name, error)
            else:
                return
            self.rest()
            if self._is_over():
                return
            time.sleep(RESTART_AFTER_S)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end; returns immediately if it was never started."""
        if self.ident is not None:
            super().join(timeout)

    def begin(self) -> None:
        """Start a round; completes the previous one."""
        self._completed = self._began = time.monotonic()

    def rest(self) -> None:
        """Complete the round; the next one may start at any time."""
        self._began, self._completed = None, time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last completed round."""
        return time.monotonic() - self._completed

    @property
    def fault(self) -> str | None:
        """The reason why the thread is unhealthy; None if it is healthy."""
        began = self._began
        if self.ident is not None and not self.is_alive():
            return f"thread {self.name} has ended, {self.age_s:.0f} s after its last round"
        if began is not None and (since := time.monotonic() - began) > self._longest_s:
            return f"thread {self.name} has not completed a round for {since:.0f} s"
        return None


def begin_round() -> None:
    """Start a round on the current thread, if it is a service thread."""
    thread = threading.current_thread()
    if isinstance(thread, ServiceThread):
        thread.begin()


def rest() -> None:
    """Mark the current thread as resting, if it is a service thread."""
    thread = threading.current_thread()
    if isinstance(thread, ServiceThread):
        thread.rest()


def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run blocking work on a new thread, in a copy of the caller's context.

    `asyncio.to_thread` would wait for a thread of the event loop's executor, which jobs of the
    application may occupy.
    """
    future, context = concurrent.futures.Future[T](), copy_context()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = context.run(work, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001  the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=run, name="lisa-call").start()
    return asyncio.wrap_future(future)


def grow(threads: list[ServiceThread], thread: ServiceThread) -> None:
    """Add a thread to a pool; at the thread limit, the existing threads do its work."""
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("%s: %s", thread.name, error)
    else:
        threads.append(thread)


def stalled(threads: Iterable[ServiceThread]) -> list[str]:
    """The faults of unhealthy threads, as text."""
    return [fault for thread in threads if (fault := thread.fault) is not None]


class KeyedPool(Generic[K]):
    """Daemon threads that run at most one task per key; one thread for each concurrent task.

    `ended` is called with the key on the task's thread when a task has ended. Only one thread may
    call `start`.
    """

    def __init__(
        self,
        name: str,
        ended: Callable[[K], None] = lambda _: None,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._name = name
        self._longest_s = longest_s
        self._ended = ended
        self._work: SimpleQueue[tuple[K, Callable[[], object]] | None] = SimpleQueue()
        self._threads: list[ServiceThread] = []
        self._busy: set[K] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def start(self, key: K, work: Callable[[], object]) -> None:
        """Run a task for a key without a running task; does nothing once the pool is closed.

        At the limit of threads an empty pool runs the task on the caller's thread.
        """
        with self._changed:
            if self._is_closed:
                return
            self._busy.add(key)
            if (number := len(self._threads) + 1) <= len(self._busy):
                thread = ServiceThread(f"{self._name}-{number}", self._serve, self._longest_s)
                grow(self._threads, thread)
            is_given = bool(self._threads)
            if is_given:
                self._work.put((key, work))
        if not is_given:
            self._do(key, work)

    def is_busy(self, key: K) -> bool:
        """Whether a task of the key runs or waits."""
        return key in self._busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all tasks have ended; returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def threads(self) -> list[ServiceThread]:
        """The pool's threads, for health checks; none once it is closed."""
        return [] if self._is_closed else list(self._threads)

    def close(self) -> None:
        """End the threads once their tasks have ended; does not wait."""
        with self._changed:
            self._is_closed = True
            for _ in self._threads:
                self._work.put(None)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None:
            begin_round()
            self._do(*given)
            rest()

    def _do(self, key: K, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  logged; the thread continues with other tasks
            unforeseen(self._name, error)
        finally:
            with self._changed:
                self._busy.discard(key)
                self._changed.notify_all()
        self._ended(key)
