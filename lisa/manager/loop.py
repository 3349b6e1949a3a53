"""Runs a service over all topics: each at its own instant, on a few threads.

An error concerns the topic it came from: the others go on, and that one is tried again after a
pause that grows. While the server is away nothing runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lisa.core.errors import LisaError, ServerUnavailable
from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.patience import LONGEST_AWAY_S
from lisa.manager.agenda import Agenda
from lisa.manager.punctual import wake_on_time
from lisa.manager.troubles import Troubles

__all__ = ["Loop", "Outcome", "Service"]

Outcome = float | LisaError | None
"""When to look again (an instant of `time.monotonic`), never unless hurried, or what went wrong."""

LEAVE_S = 6.0  # a little above the socket time-out: a call that hangs ends by then

log = logging.getLogger(__name__)


class Service(Protocol):
    """One step over a few topics."""

    def step(self, topics: Sequence[str]) -> Sequence[Outcome]:
        """When to look at each topic again, or what went wrong with it."""


class Loop:
    """Threads that call `service.step` with what is due, at most `batch` topics together.

    `reachable` is clear while the server is away; `suspect` is called when it seems to be.
    """

    def __init__(
        self,
        name: str,
        service: Service,
        *,
        reachable: threading.Event,
        suspect: Callable[[], None],
        workers: int = 1,
        batch: int = 1,
    ) -> None:
        self.name = name
        self.agenda = Agenda()
        self.troubles = Troubles(name)
        self.seconds = Spread(STEP_SECONDS)
        self._service = service
        self._reachable = reachable
        self._suspect = suspect
        self._workers = workers
        self._batch = batch
        self._threads: list[threading.Thread] = []
        self._leaving = False

    def start(self) -> None:
        """Begin."""
        for number in range(self._workers):
            name = f"lisa-{self.name}-{number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Finish the step that runs, and end."""
        self.close()
        ends = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def close(self) -> None:
        """Begin nothing new."""
        self._leaving = True
        self.agenda.close()

    @property
    def alive(self) -> bool:
        """Whether every thread still runs."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        wake_on_time()
        topics = self.agenda.take(self._batch)
        while topics:
            while not self._reachable.wait(0.2):
                if self._leaving:
                    return
            outcomes: Sequence[Outcome | Exception]
            began = time.monotonic()
            try:
                outcomes = self._service.step(topics)
            except Exception as error:  # noqa: BLE001  whatever it was, the other topics go on
                outcomes = [error] * len(topics)
            self.seconds.observe(time.monotonic() - began)
            settled = [
                (topic, self._settled(topic, outcome))
                for topic, outcome in zip(topics, outcomes, strict=True)
            ]
            topics = self.agenda.exchange(settled, self._batch)

    def _settled(self, topic: str, outcome: Outcome | Exception) -> float | None:
        if not isinstance(outcome, Exception):
            self.troubles.passed(topic)
            return outcome
        away = isinstance(outcome, ServerUnavailable)
        if away:
            self._suspect()
        quietly = away and not self._reachable.is_set()
        pause = self.troubles.failed(topic, outcome, quietly=quietly)
        return time.monotonic() + (min(pause, LONGEST_AWAY_S) if away else pause)
