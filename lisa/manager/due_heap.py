"""A heap of topics by due instant, shared by a few threads.

One waiting thread, the leader, sleeps until the earliest instant; the others sleep until they are
needed, so an instant wakes one thread only. A thread that puts topics back and takes more becomes
the leader if it can, so the work of one topic stays on one thread. This is the leader-follower
pattern of Java's `DelayQueue`. Instants are `time.monotonic` seconds.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Mapping

NEVER = float("inf")
SAME_S = 0.001
"""`bring_forward` ignores an instant that is earlier by no more than this."""


class DueHeap:
    """Topics and the instant at which each is due next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        self._asleep: list[float] = []  # until when each waiting thread sleeps
        self._closed = False
        self._at: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, topic: str) -> bool:
        """Add a topic, due now; returns False if the heap has it already."""
        with self._lock:
            if topic in self._at or topic in self._taken:
                return False
            self._schedule(topic, time.monotonic())
            self._wake_if_earlier()
            return True

    def remove(self, topic: str) -> None:
        """Remove a topic, even while a thread has taken it."""
        with self._lock:
            self._at.pop(topic, None)
            self._taken.pop(topic, None)

    def topics(self) -> list[str]:
        """All topics of the heap."""
        with self._lock:
            return [*self._at, *self._taken]

    def schedule_now(self, topic: str) -> None:
        """Make a topic due now; a taken topic becomes due again when it is put back."""
        with self._lock:
            self._bring_forward(topic, time.monotonic(), 0.0)
            self._wake_if_earlier()

    def schedule_all_now(self) -> None:
        """Make every topic due now."""
        with self._lock:
            now = time.monotonic()
            for topic in [*self._at, *self._taken]:
                self._bring_forward(topic, now, 0.0)
            self._wake_if_earlier()

    def bring_forward(self, instants: Mapping[str, float]) -> None:
        """Make each topic due at the given instant, unless it is due earlier."""
        with self._lock:
            for topic, at in instants.items():
                self._bring_forward(topic, at, SAME_S)
            self._wake_if_earlier()

    def take(self, most: int) -> list[str]:
        """Wait until a topic is due and return up to `most` due topics, the longest due first.

        No other thread gets these topics until they are put back. Empty once the heap is closed.
        """
        with self._lock:
            return self._take(most)

    def put_back(self, topic: str, at: float | None) -> None:
        """Put back a taken topic, due at an instant; None means only after `schedule_now`."""
        with self._lock:
            self._put_back(topic, at)
            self._wake_if_earlier()

    def exchange(self, looked_at: Iterable[tuple[str, float | None]], most: int) -> list[str]:
        """Put topics back and take others, preferably on this thread, in one step."""
        with self._lock:
            for topic, at in looked_at:
                self._put_back(topic, at)
            return self._take(most)

    def overdue_s(self) -> float:
        """Seconds that the earliest due topic has waited for a thread; 0 if none is due."""
        with self._lock:
            return max(0.0, time.monotonic() - self._head())

    def close(self) -> None:
        """Wake all waiting threads; `take` returns an empty list from now on."""
        with self._lock:
            self._closed = True
            self._wakes.notify_all()

    def _take(self, most: int) -> list[str]:
        while not self._closed:
            now, head = time.monotonic(), self._head()
            if head <= now:
                return self._pop_due(now, most)
            until = head if head < min(self._asleep, default=NEVER) else NEVER
            self._asleep.append(until)
            try:
                self._wakes.wait(
                    None if until == NEVER else min(until - now, threading.TIMEOUT_MAX)
                )
            finally:
                self._asleep.remove(until)
        return []

    def _wake_if_earlier(self) -> None:
        """Wake a thread if no waiting thread wakes in time for the head of the heap."""
        if self._asleep and self._head() < min(self._asleep):
            self._wakes.notify()

    def _put_back(self, topic: str, at: float | None) -> None:
        requested = self._taken.pop(topic, None)
        if requested is not None:
            self._schedule(topic, min(requested, NEVER if at is None else at))

    def _bring_forward(self, topic: str, at: float, margin: float) -> None:
        if topic in self._taken:
            self._taken[topic] = min(self._taken[topic], at)
        elif self._at.get(topic, at) > at + margin:
            self._schedule(topic, at)

    def _schedule(self, topic: str, at: float) -> None:
        self._at[topic] = at
        if at == NEVER:
            return
        heapq.heappush(self._heap, (at, topic))
        if len(self._heap) > 2 * len(self._at) + 64:
            # Rescheduled topics leave outdated entries in the heap.
            self._heap = [(instant, name) for name, instant in self._at.items() if instant < NEVER]
            heapq.heapify(self._heap)

    def _head(self) -> float:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def _pop_due(self, now: float, most: int) -> list[str]:
        due: list[str] = []
        while len(due) < most and self._head() <= now:
            _, topic = heapq.heappop(self._heap)
            del self._at[topic]
            self._taken[topic] = NEVER
            due.append(topic)
        self._wake_if_earlier()
        return due
