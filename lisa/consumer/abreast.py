"""Works for several at once: whoever hangs holds up nobody else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Abreast"]

log = logging.getLogger("lisa.consumer")

K = TypeVar("K", bound=Hashable)


class Abreast(Generic[K]):
    """Daemon threads, as many as ever were at work together; they work for each once at a time.

    `ended` is told, on the thread, when it is through with one. One thread may `start` work.
    """

    def __init__(self, name: str, ended: Callable[[K], None] = lambda _: None) -> None:
        self._name = name
        self._ended = ended
        self._work: SimpleQueue[tuple[K, Callable[[], object]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy: set[K] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def start(self, one: K, work: Callable[[], object]) -> None:
        """Work for one that is not being worked for; not once it is closed."""
        with self._changed:
            if self._is_closed:
                return
            self._busy.add(one)
            if len(self._busy) > len(self._threads):
                self._grow()
            is_given = bool(self._threads)
            if is_given:
                self._work.put((one, work))
        if not is_given:
            self._do(one, work)

    def _grow(self) -> None:
        thread = threading.Thread(
            target=self._serve, name=f"{self._name}-{len(self._threads) + 1}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the machine gives no more: those that are there do it
            log.warning("%s: %s", self._name, error)
        else:
            self._threads.append(thread)

    def is_at(self, one: K) -> bool:
        """Whether it is being worked for."""
        return one in self._busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all that was started is done; False if it was not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def owns_this_thread(self) -> bool:
        """Whether the caller is such work."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let the threads end; one that hangs ends after that, or with the process."""
        with self._changed:
            self._is_closed = True
            for _ in self._threads:
                self._work.put(None)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None:
            self._do(*given)

    def _do(self, one: K, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s: unforeseen", self._name)
        with self._changed:
            self._busy.discard(one)
            self._changed.notify_all()
        self._ended(one)
