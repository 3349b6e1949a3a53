"""The manager's Prometheus page: its own metrics, and the state of the topics in Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from lisa.core.daemon.status import StatusResponse
from lisa.core.metrics import topics as topic_metrics
from lisa.core.metrics.cache import Reading
from lisa.core.metrics.numbers import Numbers, Tally, add, of_process, put
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.store.store import SyncStore

if TYPE_CHECKING:
    from lisa.manager.jobs import Jobs
    from lisa.manager.loop import Loop

KINDS = (
    "promoted",
    "reclaimed",
    "expired",
    "skipped",
    "garbage",
    "purged",
    "cleared",
    "trimmed",
    "mended",
    "scheduled",
)


def own_numbers(
    loops: Sequence[Loop], jobs: Jobs, *, topics: int, moved: Iterable[Tally], unannounced: int
) -> Numbers:
    """The metrics of one manager's services."""
    numbers: Numbers = {}
    put(numbers, "lisa_manager_topics", topics)
    put(numbers, "lisa_manager_unannounced_total", unannounced)
    for kind in KINDS:
        put(numbers, "lisa_manager_moved_total", 0, kind)
    for tally in moved:
        for labels, count in tally.numbers().items():
            add(numbers, "lisa_manager_moved_total", count, *labels)
    services = [(loop.name, loop.seconds, loop.topic_errors) for loop in loops]
    services += [(name, seconds, jobs.topic_errors[name]) for name, seconds in jobs.seconds.items()]
    for name, seconds, errors in services:
        put(numbers, "lisa_manager_step_seconds", seconds.numbers(), name)
        put(numbers, "lisa_manager_failures_total", errors.total, name)
        put(numbers, "lisa_manager_troubles", len(errors), name)
    for loop in loops:
        put(numbers, "lisa_manager_overdue_seconds", loop.due_heap.overdue_s(), loop.name)
    return numbers


class _Engine(Protocol):
    store: SyncStore

    @property
    def is_reachable(self) -> bool: ...

    def numbers(self) -> Numbers: ...


class MetricsPage:
    """Renders the page on the thread of each HTTP request."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._reading = Reading()
        self._lock = threading.Lock()

    def __call__(self) -> StatusResponse:
        """The current page."""
        # Imported on first use, so that a manager without scrapes does not load it.
        from lisa.core.metrics.page import metrics_page

        return metrics_page("manager", [of_process(), self._engine.numbers(), self._read()])

    def _read(self) -> Numbers:
        with self._lock:
            known = self._reading.get()
            return self._renewed() if known is None else known

    def _renewed(self) -> Numbers:
        began, store = time.monotonic(), self._engine.store
        try:
            if not self._engine.is_reachable:
                raise ServerUnavailable(f"{store.where} does not answer")
            return self._reading.keep(store.drive(topic_metrics.read(store)), began)
        except LisaError as error:
            return self._reading.keep(error, began)
