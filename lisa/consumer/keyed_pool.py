"""A thread pool that runs one task per key: one blocked key does not block the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

from lisa.core.daemon.threads import LONGEST_S, ServiceThread, begin_round, grow, rest, unforeseen

K = TypeVar("K", bound=Hashable)


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

    def start(self, one: K, work: Callable[[], object]) -> None:
        """Run a task for a key without a running task; does nothing once the pool is closed.

        At the limit of threads an empty pool runs the task on the caller's thread.
        """
        with self._changed:
            if self._is_closed:
                return
            self._busy.add(one)
            if (number := len(self._threads) + 1) <= len(self._busy):
                thread = ServiceThread(f"{self._name}-{number}", self._serve, self._longest_s)
                grow(self._threads, thread)
            is_given = bool(self._threads)
            if is_given:
                self._work.put((one, work))
        if not is_given:
            self._do(one, work)

    def is_busy(self, one: K) -> bool:
        """Whether a task of the key runs or waits."""
        return one in self._busy

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

    def _do(self, one: K, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  logged; the thread continues with other tasks
            unforeseen(self._name, error)
        finally:
            with self._changed:
                self._busy.discard(one)
                self._changed.notify_all()
        self._ended(one)
