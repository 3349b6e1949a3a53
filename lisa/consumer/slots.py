"""Slots bound how many handlers run; who wants one gets it in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Slots", "Turn"]

Grant = Callable[[], None]


class Slots:
    """So many slots for all topics together.

    A claim is answered by calling `grant` once, with a slot, at once or later: round robin over
    those who claim, however many claims each has. `grant` must neither block nor claim.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._lock = threading.Lock()
        self._line: dict[Grant, int] = {}
        self._all_free = threading.Event()
        self._all_free.set()

    @property
    def waiting(self) -> bool:
        """Whether anyone stands in line."""
        return bool(self._line)

    def claim(self, grant: Grant, times: int = 1) -> None:
        """Ask for slots."""
        with self._lock:
            while times and self.free:
                self.free -= 1
                times -= 1
                grant()
            if times:
                self._line[grant] = self._line.get(grant, 0) + times
            if self.free < self.size:
                self._all_free.clear()

    def leave(self) -> None:
        """Give a slot back: to the next in line, if any."""
        with self._lock:
            if not self._line:
                self.free += 1
                if self.free == self.size:
                    self._all_free.set()
                return
            grant = next(iter(self._line))
            left = self._line.pop(grant) - 1
            if left:
                self._line[grant] = left
            grant()

    def withdraw(self, grant: Grant) -> None:
        """Leave the line. What was granted before stays granted."""
        with self._lock:
            self._line.pop(grant, None)

    def wait_all_free(self, timeout_s: float) -> bool:
        """Wait until no handler runs; whether that came about in time."""
        return self._all_free.wait(timeout_s)


class Turn:
    """One thread's own claim, which it waits for."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._woken = threading.Event()
        self._granted = False

    def take(self, is_over: Callable[[], bool]) -> bool:
        """Wait for a slot; False, without one, once `is_over` says so (see `wake`)."""
        self._slots.claim(self._grant)
        while True:
            self._woken.wait()
            self._woken.clear()
            if self._granted:
                self._granted = False
                return True
            if is_over():
                self._slots.withdraw(self._grant)
                if not self._granted:
                    return False

    def leave(self) -> None:
        """Give the slot back."""
        self._slots.leave()

    def pass_on(self, is_over: Callable[[], bool]) -> bool:
        """Let whoever waits go first, then take a slot again."""
        self._slots.leave()
        return self.take(is_over)

    def wake(self) -> None:
        """Make a waiting `take` look at its `is_over` again."""
        self._woken.set()

    def _grant(self) -> None:
        self._granted = True
        self._woken.set()
