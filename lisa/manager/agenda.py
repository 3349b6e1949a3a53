"""What is to be looked at when: one heap of instants over all topics, shared by a few threads.

One waiting thread at a time, the leader, sleeps until the earliest instant; the others sleep until
they are needed. So an instant wakes one thread, not all. (The pattern is that of Java's
`DelayQueue`.) Instants are those of `time.monotonic`, in seconds.
"""

from __future__ import annotations

import heapq
import threading
import time

__all__ = ["Agenda"]

NEVER = float("inf")


class Agenda:
    """Topics and the instant at which each is next due for a look."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._lock = lock
        self._leader_wakes = threading.Condition(lock)
        self._follower_wakes = threading.Condition(lock)
        self._led = False
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
            return True

    def remove(self, topic: str) -> None:
        """Look at a topic no more."""
        with self._lock:
            self._at.pop(topic, None)
            self._taken.pop(topic, None)

    def hurry(self, topic: str) -> None:
        """Look at a topic now; if it is being looked at, then again right after."""
        with self._lock:
            self._hurry(topic, time.monotonic())

    def hurry_all(self) -> None:
        """Look at every topic now."""
        with self._lock:
            now = time.monotonic()
            for topic in [*self._at, *self._taken]:
                self._hurry(topic, now)

    def take(self, most: int) -> list[str]:
        """Wait until something is due; up to `most` due topics, the longest due first.

        Nobody else is given them until `put_back`. Empty once the agenda is closed.
        """
        with self._lock:
            while not self._closed:
                wait = self._head() - time.monotonic()
                if wait <= 0:
                    return self._pop_due(most)
                if self._led:
                    self._follower_wakes.wait()
                    continue
                self._led = True
                try:
                    self._leader_wakes.wait(min(wait, threading.TIMEOUT_MAX))
                finally:
                    self._led = False
            return []

    def put_back(self, topic: str, at: float | None) -> None:
        """Look at a topic that was taken again at an instant, or (None) when it is hurried."""
        with self._lock:
            hurried = self._taken.pop(topic, None)
            if hurried is not None:
                self._schedule(topic, min(hurried, NEVER if at is None else at))

    def overdue_s(self) -> float:
        """For how long the earliest due topic has been waiting for a thread; 0 if none is."""
        with self._lock:
            return max(0.0, time.monotonic() - self._head())

    def close(self) -> None:
        """Let every waiting thread go."""
        with self._lock:
            self._closed = True
            self._leader_wakes.notify_all()
            self._follower_wakes.notify_all()

    def _hurry(self, topic: str, now: float) -> None:
        if topic in self._taken:
            self._taken[topic] = now
        elif self._at.get(topic, now) > now:
            self._schedule(topic, now)

    def _schedule(self, topic: str, at: float) -> None:
        was_head = self._head()
        self._at[topic] = at
        if at == NEVER:
            return
        heapq.heappush(self._heap, (at, topic))
        if len(self._heap) > 2 * len(self._at) + 64:
            # A topic that is hurried often leaves its later instants behind.
            self._heap = [(instant, name) for name, instant in self._at.items() if instant < NEVER]
            heapq.heapify(self._heap)
        if at < was_head:
            (self._leader_wakes if self._led else self._follower_wakes).notify()

    def _head(self) -> float:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def _pop_due(self, most: int) -> list[str]:
        now, due = time.monotonic(), list[str]()
        while len(due) < most and self._head() <= now:
            _, topic = heapq.heappop(self._heap)
            del self._at[topic]
            self._taken[topic] = NEVER
            due.append(topic)
        if self._head() < NEVER:
            self._follower_wakes.notify()
        return due
