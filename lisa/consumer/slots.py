"""Slots limit how many handlers run at the same time, with round-robin between topics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lisa.core.daemon.threads import begin_round, rest

Grant = Callable[[], None]


class Slots:
    """A fixed number of slots shared by all topics.

    For each claim, `grant` is called once, immediately or when a slot becomes free. Free slots go
    round-robin to the claimants, however many claims each has. `grant` must not block or claim.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._lock = threading.Lock()
        self._claims: dict[Grant, int] = {}
        self._all_free = threading.Event()
        self._all_free.set()

    @property
    def waiting(self) -> bool:
        """Whether any claim is waiting."""
        return bool(self._claims)

    def claim(self, grant: Grant, times: int = 1) -> None:
        """Claim slots; calls `grant` once per slot."""
        with self._lock:
            while times and self.free:
                self.free -= 1
                times -= 1
                grant()
            if times:
                self._claims[grant] = self._claims.get(grant, 0) + times
            if self.free < self.size:
                self._all_free.clear()

    def release(self) -> None:
        """Free a slot, or pass it to the next waiting claim."""
        with self._lock:
            if not self._claims:
                self.free += 1
                if self.free == self.size:
                    self._all_free.set()
                return
            grant = next(iter(self._claims))
            left = self._claims.pop(grant) - 1
            if left:
                self._claims[grant] = left
            grant()

    def withdraw(self, grant: Grant) -> int:
        """Cancel waiting claims and return their number. Granted slots stay granted."""
        with self._lock:
            return self._claims.pop(grant, 0)

    def wait_all_free(self, timeout_s: float) -> bool:
        """Wait until all slots are free; returns False after `timeout_s`."""
        return self._all_free.wait(min(timeout_s, threading.TIMEOUT_MAX))


class TopicSlots:
    """At most `size` of the slots that all topics share, for the claims of one topic.

    A claim waits for one of its own slots first, then for a shared one.
    """

    def __init__(self, shared: Slots, size: int) -> None:
        self.size = min(size, shared.size)
        self._shared = shared
        self._own = Slots(self.size)

    @property
    def free(self) -> int:
        """The number of slots that a claim would get now."""
        return min(self._own.free, self._shared.free)

    @property
    def waiting(self) -> bool:
        """Whether any claim of any topic is waiting."""
        return self._own.waiting or self._shared.waiting

    def claim(self, grant: Grant, times: int = 1) -> None:
        """Claim slots; calls `grant` once per slot."""
        self._own.claim(_Passing(self._shared, grant), times)

    def release(self) -> None:
        """Free a slot, or pass it to the next waiting claim."""
        self._shared.release()
        self._own.release()

    def withdraw(self, grant: Grant) -> int:
        """Cancel waiting claims and return their number. Granted slots stay granted."""
        waiting = self._own.withdraw(_Passing(self._shared, grant))
        # After that, because an own slot that becomes free would be claimed from the shared ones.
        passed = self._shared.withdraw(grant)
        for _ in range(passed):
            self._own.release()
        return waiting + passed


@dataclass(frozen=True, slots=True)
class _Passing:
    """Claims a shared slot; equal for all claims of one `grant`."""

    shared: Slots
    grant: Grant

    def __call__(self) -> None:
        self.shared.claim(self.grant)


AnySlots = Slots | TopicSlots


TURN_S = 0.005
"""How long a thread keeps a slot for further messages, although other claims wait."""


class SlotClaim:
    """A slot claim that one thread waits for.

    since: when the slot was granted, as `time.monotonic`.
    """

    def __init__(self, slots: AnySlots) -> None:
        self._slots = slots
        self._woken = threading.Event()
        self._granted = False
        self.since = 0.0

    def take(self, is_over: Callable[[], bool]) -> bool:
        """Wait for a slot; returns False, without a slot, once `is_over` is true (see `wake`)."""
        self._slots.claim(self._grant)
        while not self._granted:
            if is_over():
                self._slots.withdraw(self._grant)
                if not self._granted:
                    return False
            else:
                self._woken.wait()
                self._woken.clear()
        self._granted = False
        return True

    def take_free(self) -> bool:
        """Take a slot if one is free; never waits."""
        self._slots.claim(self._grant)
        if not self._granted:
            self._slots.withdraw(self._grant)
        is_taken, self._granted = self._granted, False
        return is_taken

    def take_at_rest(self, is_over: Callable[[], bool]) -> bool:
        """The same, for a service thread between two rounds."""
        rest()
        is_taken = self.take(is_over)
        begin_round()
        return is_taken

    def release(self) -> None:
        """Free the slot."""
        self._slots.release()

    def yield_slot(self, is_over: Callable[[], bool]) -> bool:
        """Let waiting claims go first, then take a slot again."""
        self._slots.release()
        return self.take(is_over)

    def wake(self) -> None:
        """Make a waiting `take` check `is_over` again."""
        self._woken.set()

    def _grant(self) -> None:
        self.since = time.monotonic()
        self._granted = True
        self._woken.set()
