"""Run a service for every topic when the topic is due, on a few threads.

An error affects only its own topic, which is retried with a growing pause. A topic whose node is
unavailable is postponed without a call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from lisa.core.daemon.threads import LONGEST_S, ServiceThread, begin_round, rest
from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.model.backoff import LONGEST_AWAY_S, longest_after
from lisa.core.model.errors import LisaError
from lisa.manager.due_heap import DueHeap
from lisa.manager.nodes import NodeStatus
from lisa.manager.timer_slack import wake_on_time
from lisa.manager.topic_errors import TopicErrors

Outcome = float | LisaError | None
"""When the topic is due next (`time.monotonic`), None until `schedule_now`, or an error."""

PUT_OFF_S = 5.0
"""Longest delay of a postponed topic. Normally the node's return schedules the topic earlier."""

LEAVE_S = 6.0  # slightly longer than the socket timeout, which ends a hanging call

log = logging.getLogger(__name__)


class Service(Protocol):
    """One step over a few topics."""

    def step(self, topics: Sequence[str]) -> Sequence[Outcome]:
        """Process the topics; returns one outcome per topic, in the given order."""


class Loop:
    """Threads that call `service.step` with up to `batch` due topics.

    `nodes` tells which topics are available; the loop reports suspected outages to it.
    """

    def __init__(
        self,
        name: str,
        service: Service,
        *,
        nodes: NodeStatus,
        workers: int = 1,
        batch: int = 1,
        longest_s: float = LONGEST_S,
    ) -> None:
        self.name = name
        self.due_heap = DueHeap()
        self.topic_errors = TopicErrors(name)
        self.seconds = Spread(STEP_SECONDS)
        self._service = service
        self._nodes = nodes
        self._workers = workers
        self._batch = batch
        self._longest_s = longest_s
        self._threads: list[ServiceThread] = []

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._workers):
            name = f"lisa-{self.name}-{number}"
            thread = ServiceThread(name, self._work, self._longest_s)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Finish running steps and wait up to 6 s for the threads to end."""
        self.close()
        ends = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def close(self) -> None:
        """Start no further steps."""
        self.due_heap.close()

    def threads(self) -> list[ServiceThread]:
        """The loop's threads, for health checks."""
        return list(self._threads)

    def _work(self) -> None:
        wake_on_time()
        topics = self.due_heap.take(self._batch)
        while topics:
            begin_round()
            here = [topic for topic in topics if self._nodes.is_available(topic)]
            at = time.monotonic() + PUT_OFF_S
            settled: list[tuple[str, float | None]] = [
                (topic, at) for topic in topics if topic not in here
            ]
            try:
                settled += [(topic, self._settled(topic, one)) for topic, one in self._step(here)]
            except BaseException:
                for topic in topics:  # no other thread can take them until they are put back
                    self.due_heap.put_back(topic, time.monotonic() + LONGEST_AWAY_S)
                raise
            rest()
            topics = self.due_heap.exchange(settled, self._batch)

    def _step(self, topics: Sequence[str]) -> list[tuple[str, Outcome | Exception]]:
        if not topics:
            return []
        began = time.monotonic()
        try:
            return list(zip(topics, self._service.step(topics), strict=True))
        except Exception as error:  # noqa: BLE001  the loop must survive any error of a service
            return [(topic, error) for topic in topics]
        finally:
            self.seconds.observe(time.monotonic() - began)

    def _settled(self, topic: str, outcome: Outcome | Exception) -> float | None:
        if not isinstance(outcome, Exception):
            self.topic_errors.passed(topic)
            return outcome
        pause = self.topic_errors.failed_at(self._nodes, topic, outcome)
        return time.monotonic() + min(pause, longest_after(outcome))
