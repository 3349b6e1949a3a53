"""Scheduled jobs, run by APScheduler.

A late tick still runs its job, several late ticks run it once, and a job never runs twice at the
same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, timedelta
from typing import Any, TypeVar

from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.model.sharding import Shard
from lisa.core.store.store import chunks
from lisa.manager.bulk_reads import PAGE
from lisa.manager.cron import parse_trigger
from lisa.manager.nodes import NodeStatus
from lisa.manager.topic_errors import TopicErrors

log = logging.getLogger(__name__)

Name = TypeVar("Name", bound=str)

EXECUTOR = "lisa"
LONGEST_S = 600.0
"""How long a job may process one topic before it counts as stalled."""


class Jobs:
    """Named jobs with schedules. Jobs run only while a node is available.

    nodes: tells which topics are available.
    shards: returns the shards that the named job covers now.
    """

    def __init__(
        self,
        nodes: NodeStatus,
        shards: Callable[[str], list[Shard]],
    ) -> None:
        self._nodes = nodes
        self._shards = shards
        self._jobs: dict[str, tuple[Any, Callable[[], None]]] = {}
        self._scheduler: Any = None
        self._thread: threading.Thread | None = None
        """The scheduler's thread, from `start` to `stop`."""
        self.topic_errors: dict[str, TopicErrors] = {}
        self.seconds: dict[str, Spread] = {}
        self._stopped = threading.Event()
        self._began: dict[str, float] = {}

    def add(self, name: str, schedule: str | timedelta, work: Callable[[], None]) -> None:
        """Run `work` on a schedule. Raises ConfigError if the schedule is invalid."""
        zone = UTC if isinstance(schedule, timedelta) else None
        self._jobs[name] = (parse_trigger(schedule, zone=zone), work)
        self.topic_errors[name] = TopicErrors(name)
        self.seconds[name] = Spread(STEP_SECONDS)

    def add_for_each(
        self,
        name: str,
        schedule: str | timedelta,
        pick: Callable[[Sequence[Shard]], Sequence[Name]],
        work: Callable[[Name], object],
    ) -> None:
        """Run `work` for each name in turn; an error in one does not stop the others.

        `pick` takes a page of shards and returns the shards or topics that may need work.
        """

        def each() -> None:
            for page in chunks(self._shards(name), PAGE):
                for topic in pick([one for one in page if self._nodes.is_available(one)]):
                    if self._stopped.is_set() or not self._nodes.is_any_available:
                        return
                    if self._nodes.is_available(topic):
                        self._run(name, topic, lambda topic=topic: work(topic))  # type: ignore[misc]

        self.add(name, schedule, each)

    def start(self) -> None:
        """Start the scheduler."""
        from apscheduler.executors.pool import ThreadPoolExecutor

        from lisa.manager.job_scheduler import JobScheduler

        # APScheduler warns when a job outlasts its interval, and reports each run. An executor with
        # a name of its own has a logger of its own; the program's other schedulers keep theirs.
        quiet = logging.getLogger(f"{__name__}.scheduler")
        for logger in (quiet, logging.getLogger(f"apscheduler.executors.{EXECUTOR}")):
            logger.setLevel(logging.ERROR)
        self._scheduler = JobScheduler(
            executors={EXECUTOR: ThreadPoolExecutor(len(self._jobs))},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            logger=quiet,
            timezone=UTC,
        )
        for name, (trigger, work) in self._jobs.items():
            self._scheduler.add_job(
                self._tick,
                trigger,
                args=(name, work),
                id=name,
                name=f"lisa-{name}",
                executor=EXECUTOR,
            )
        self._scheduler.start()
        self._thread = self._scheduler._thread  # noqa: SLF001  no public way to check the thread

    def stop(self) -> None:
        """Finish the topics that running jobs process, then end the scheduler."""
        self._stopped.set()
        self._thread = None
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.shutdown(wait=True)

    def forget(self, topic: str) -> None:
        """Drop the errors of a removed topic."""
        for errors in self.topic_errors.values():
            errors.forget(topic)

    def faults(self) -> list[str]:
        """Faults of the scheduler and its jobs, as text."""
        now = time.monotonic()
        faults = [
            f"job {name} has been processing one topic for {now - began:.0f} s"
            for name, began in list(self._began.items())
            if now - began > LONGEST_S
        ]
        thread = self._thread
        if thread is not None and not thread.is_alive():
            faults.append("the scheduler's thread has ended")
        return faults

    def _tick(self, name: str, work: Callable[[], None]) -> None:
        if self._nodes.is_any_available and not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._run(name, "", work)
            finally:
                self._began.pop(name, None)
            self.seconds[name].observe(time.monotonic() - began)

    def _run(self, name: str, topic: str, work: Callable[[], object]) -> None:
        errors = self.topic_errors[name]
        self._began[name] = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001  logged; the next topic follows
            errors.failed_at(self._nodes, topic, error)
        else:
            errors.passed(topic)
