"""Threads that run a service for each topic when the topic is due.

An error affects only its own topic, which is retried with a growing pause. A topic whose node is
unavailable is postponed without a call.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from lisa.core.daemon.threads import LONGEST_S, ServiceThread
from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.model.backoff import LONGEST_AWAY_S, longest_after
from lisa.core.model.errors import LisaError
from lisa.manager.nodes import Nodes
from lisa.manager.topic_log import TopicErrors

NEVER = float("inf")
SAME_S = 0.001
"""`bring_forward` ignores an instant that is earlier by no more than this."""

PUT_OFF_S = 5.0
"""Longest delay of a postponed topic. Normally the node's return schedules the topic earlier."""

LEAVE_S = 6.0  # slightly longer than the socket timeout, which ends a hanging call

_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1_000

NextDue = float | LisaError | None
"""When the topic is due next (`time.monotonic`), None until `schedule_now`, or an error."""


class DueHeap:
    """A heap of topics by the instant at which each is due next, shared by a few threads.

    One waiting thread, the leader, sleeps until the earliest instant; the others sleep until they
    are needed, so an instant wakes one thread only. A thread that puts topics back and takes more
    becomes the leader if it can, so the work of one topic stays on one thread. This is the
    leader-follower pattern of Java's `DelayQueue`. Instants are `time.monotonic` seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        self._asleep: list[float] = []  # until when each waiting thread sleeps
        self._closed = False
        self._at: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, topic: str) -> None:
        """Add a topic, due now, unless the heap has it already."""
        with self._lock:
            if topic not in self._at and topic not in self._taken:
                self._schedule(topic, time.monotonic())
                self._wake_if_earlier()

    def remove(self, topic: str) -> None:
        """Remove a topic, even while a thread has taken it."""
        with self._lock:
            self._at.pop(topic, None)
            self._taken.pop(topic, None)

    def topics(self) -> list[str]:
        """All topics of the heap."""
        with self._lock:
            return [*self._at, *self._taken]

    def schedule_now(self, topics: Iterable[str]) -> None:
        """Make topics due now; a taken topic becomes due again when it is put back."""
        self.bring_forward(dict.fromkeys(topics, time.monotonic()), 0.0)

    def bring_forward(self, instants: Mapping[str, float], margin_s: float = SAME_S) -> None:
        """Make each topic due at the given instant, unless it is due earlier, or hardly later."""
        with self._lock:
            for topic, at in instants.items():
                if topic in self._taken:
                    self._taken[topic] = min(self._taken[topic], at)
                elif self._at.get(topic, at) > at + margin_s:
                    self._schedule(topic, at)
            self._wake_if_earlier()

    def exchange(self, settled: Iterable[tuple[str, float | None]], most: int) -> list[str]:
        """Put topics back; then wait until a topic is due, and take up to `most` due topics.

        settled: taken topics, each with the instant at which it is due next; None means only after
            `schedule_now`.

        Returns the topics that have been due longest. No other thread gets these until they are put
        back. Empty if `most` is 0, or once the heap is closed.
        """
        with self._lock:
            for topic, at in settled:
                requested = self._taken.pop(topic, None)
                if requested is not None:  # else it was removed
                    self._schedule(topic, requested if at is None else min(requested, at))
            return self._take(most)

    def overdue_s(self) -> float:
        """Seconds that the earliest due topic has waited for a thread; 0 if none is due."""
        with self._lock:
            return max(0.0, time.monotonic() - self._head())

    def close(self) -> None:
        """Wake all waiting threads; `exchange` returns an empty list from now on."""
        with self._lock:
            self._closed = True
            self._wakes.notify_all()

    def _take(self, most: int) -> list[str]:
        due: list[str] = []
        while not self._closed and most:
            now, head = time.monotonic(), self._head()
            while head <= now and len(due) < most:
                topic = heapq.heappop(self._heap)[1]
                del self._at[topic]
                self._taken[topic] = NEVER
                due.append(topic)
                head = self._head()
            if due:
                break
            until = head if head < min(self._asleep, default=NEVER) else NEVER
            self._asleep.append(until)
            try:
                self._wakes.wait(
                    None if until == NEVER else min(until - now, threading.TIMEOUT_MAX)
                )
            finally:
                self._asleep.remove(until)
        self._wake_if_earlier()
        return due

    def _wake_if_earlier(self) -> None:
        """Wake a thread if no waiting thread wakes in time for the head of the heap."""
        if self._asleep and self._head() < min(self._asleep):
            self._wakes.notify()

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


Step = Callable[[Sequence[str]], Sequence[NextDue]]
"""Processes a few topics; returns when each is due next, in the given order.

An error that it raises counts for all of them.
"""


class Loop:
    """Threads that call `step` with up to `batch` due topics.

    `nodes` tells which topics are available; the loop reports suspected outages to it.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        *,
        nodes: Nodes,
        workers: int = 1,
        batch: int = 1,
        longest_s: float = LONGEST_S,
    ) -> None:
        self.name = name
        self.due_heap = DueHeap()
        self.topic_errors = TopicErrors(name)
        self.seconds = Spread(STEP_SECONDS)
        self.threads: list[ServiceThread] = []
        """Those that run, for health checks."""
        self._run_step = step
        self._nodes = nodes
        self._workers = workers
        self._batch = batch
        self._longest_s = longest_s

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._workers):
            name = f"lisa-{self.name}-{number}"
            thread = ServiceThread(name, self._work, self._longest_s)
            self.threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Finish running steps and wait up to 6 s for the threads to end."""
        self.due_heap.close()
        ends = time.monotonic() + LEAVE_S
        for thread in self.threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def _work(self) -> None:
        _wake_on_time()
        thread = cast("ServiceThread", threading.current_thread())
        topics = self.due_heap.exchange((), self._batch)
        while topics:
            thread.begin()
            try:
                settled = self._step(topics)
            except BaseException:  # no other thread can take the topics until they are put back
                at = time.monotonic() + LONGEST_AWAY_S
                self.due_heap.exchange([(topic, at) for topic in topics], 0)
                raise
            thread.rest()
            topics = self.due_heap.exchange(settled, self._batch)

    def _step(self, topics: Sequence[str]) -> list[tuple[str, float | None]]:
        """Run the step for the available topics; returns when each topic is due next."""
        began, here = time.monotonic(), self._nodes.available(topics)
        settled: list[tuple[str, float | None]] = []
        if len(here) < len(topics):
            settled += [(topic, began + PUT_OFF_S) for topic in topics if topic not in here]
        due: Sequence[NextDue | Exception] = ()
        if here:
            try:
                due = self._run_step(here)
            except Exception as error:  # noqa: BLE001  the loop must survive any error of a step
                due = [error] * len(here)
            self.seconds.observe(time.monotonic() - began)
        for topic, at in zip(here, due, strict=True):
            if isinstance(at, Exception):
                settled.append((topic, self._retry_at(topic, at)))
            else:
                settled.append((topic, at))
                if self.topic_errors.failures:
                    self.topic_errors.passed(topic)
        return settled

    def _retry_at(self, topic: str, error: Exception) -> float:
        pause_s = self.topic_errors.failed_at(self._nodes, topic, error)
        return time.monotonic() + min(pause_s, longest_after(error))


def _wake_on_time() -> None:
    """Reduce the timer slack of the calling thread from 50 us to 1 us. Linux only.

    By default, Linux wakes a sleeping thread up to 50 us late to batch wake-ups. That is a sixth
    of the duration of a server call.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # an optimisation only
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
