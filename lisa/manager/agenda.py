"""What is to be looked at when: one heap of instants over all topics, shared by a few threads.

Of the threads that wait, one sleeps until the earliest instant, the others until they are needed:
an instant wakes one thread, not all. Whoever brings topics back and asks for more becomes that
sleeper itself where it can, so one topic's work stays on one thread. (The pattern grew from the
leader and followers of Java's `DelayQueue`.) Instants are those of `time.monotonic`, in seconds.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Mapping

__all__ = ["Agenda"]

NEVER = float("inf")
SAME_S = 0.001
"""Two instants for one topic that lie no further apart are the same to a mere glance."""


class Agenda:
    """Topics and the instant at which each is next due for a look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        self._asleep: list[float] = []  # until when each waiting thread sleeps
        self._closed = False
        self._at: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, topic: str) -> bool:
        """Look at a topic now and from now on; answers whether it is new."""
        with self._lock:
            if topic in self._at or topic in self._taken:
                return False
            self._schedule(topic, time.monotonic())
            self._cover()
            return True

    def remove(self, topic: str) -> None:
        """Look at a topic no more."""
        with self._lock:
            self._at.pop(topic, None)
            self._taken.pop(topic, None)

    def hurry(self, topic: str) -> None:
        """Look at a topic now; if it is being looked at, then again right after."""
        with self._lock:
            self._bring_forward(topic, time.monotonic(), 0.0)
            self._cover()

    def hurry_all(self) -> None:
        """Look at every topic now."""
        with self._lock:
            now = time.monotonic()
            for topic in [*self._at, *self._taken]:
                self._bring_forward(topic, now, 0.0)
            self._cover()

    def bring_forward(self, instants: Mapping[str, float]) -> None:
        """Look at each topic at the instant given, unless that was to be done earlier anyway."""
        with self._lock:
            for topic, at in instants.items():
                self._bring_forward(topic, at, SAME_S)
            self._cover()

    def take(self, most: int) -> list[str]:
        """Wait until something is due; up to `most` due topics, the longest due first.

        Nobody else is given them until they are put back. Empty once the agenda is closed.
        """
        with self._lock:
            return self._take(most)

    def put_back(self, topic: str, at: float | None) -> None:
        """Look at a topic that was taken again at an instant, or (None) when it is hurried."""
        with self._lock:
            self._put_back(topic, at)
            self._cover()

    def exchange(self, looked_at: Iterable[tuple[str, float | None]], most: int) -> list[str]:
        """Put topics back and take others, without waking a thread for what this one can do."""
        with self._lock:
            for topic, at in looked_at:
                self._put_back(topic, at)
            return self._take(most)

    def overdue_s(self) -> float:
        """For how long the earliest due topic has been waiting for a thread; 0 if none is."""
        with self._lock:
            return max(0.0, time.monotonic() - self._head())

    def close(self) -> None:
        """Let every waiting thread go."""
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

    def _cover(self) -> None:
        """Wake a thread if none that waits would wake in time for the head."""
        if self._asleep and self._head() < min(self._asleep):
            self._wakes.notify()

    def _put_back(self, topic: str, at: float | None) -> None:
        hurried = self._taken.pop(topic, None)
        if hurried is not None:
            self._schedule(topic, min(hurried, NEVER if at is None else at))

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
            # A topic that is hurried often leaves its later instants behind.
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
        self._cover()
        return due
