"""Scheduled jobs, run by APScheduler.

A late tick still runs its job, several late ticks run it once, and a job never runs twice at the
same time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, TypeVar

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger
from tzlocal import get_localzone

from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.model.errors import ConfigError
from lisa.core.model.recurring.calendar import CronPattern, next_instant, parse_job_schedule
from lisa.manager.nodes import Nodes
from lisa.manager.topic_log import TopicErrors

Name = TypeVar("Name", bound=str)

EXECUTOR = "lisa"
LONGEST_S = 600.0
"""How long a job may process one topic before it counts as stalled."""

STEP = timedelta(seconds=1)
"""A smaller change of the clock only shifts the next runs."""

LONGEST_WAIT_S = 1.0
"""Longest wait until a step is noticed that came while the next wait was computed."""


class PatternTrigger(BaseTrigger):  # type: ignore[misc]  # the library has no types
    """Fires at the instants of a cron pattern in a time zone."""

    def __init__(self, pattern: CronPattern, zone: tzinfo) -> None:
        self._pattern = pattern
        self._zone = zone

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        """The first instant from `now` on, or after the previous one, however late `now` is."""
        if previous is None:
            after_s = math.ceil(now.timestamp()) - 1
        else:
            after_s = int(min(previous, now).timestamp())
        at_s = next_instant(self._pattern, self._zone, after_s, skips=False)
        return None if at_s is None else datetime.fromtimestamp(at_s, self._zone)


def parse_trigger(text: str | timedelta, *, zone: tzinfo | None = None) -> Any:
    """The APScheduler trigger of a cron expression or an interval .

    `zone` is the time zone of the fields; the default is the machine's. Raises `ConfigError` if the
    text is invalid or all its years have passed; the message names the field and the value.
    """
    schedule = parse_job_schedule(text)
    if isinstance(schedule, timedelta):
        return IntervalTrigger(seconds=schedule.total_seconds(), timezone=zone)
    trigger = PatternTrigger(schedule, zone or get_localzone())
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise ConfigError(f"cron {text!r} never fires again; use a later year")
    return trigger


class JobScheduler(BackgroundScheduler):  # type: ignore[misc]  # the library has no types
    """Runs jobs on when the clock is set.

    APScheduler compares the next times of jobs with the wall clock. After the clock was set back by
    an hour, no job would be due for an hour; after it was set forward by years, APScheduler would
    list every run in between.
    """

    _started: datetime | None = None
    """The wall time at which the monotonic clock was zero, when jobs were last processed."""

    def _process_jobs(self) -> float | None:  # APScheduler's hook for subclasses
        now = datetime.now(UTC)
        before, self._started = self._started, now - timedelta(seconds=time.monotonic())
        if before is not None and abs(self._started - before) > STEP:
            self._move_jobs(now)
        wait_s: float | None = super()._process_jobs()
        return None if wait_s is None else min(wait_s, LONGEST_WAIT_S)

    def _move_jobs(self, now: datetime) -> None:
        """Run interval jobs and due ones now; recompute when the others run, by the new clock."""
        for job in self.get_jobs():
            is_due = isinstance(job.trigger, IntervalTrigger) or job.next_run_time <= now
            at = now if is_due else job.trigger.get_next_fire_time(None, now)
            job.modify(next_run_time=at)


@dataclass(slots=True, eq=False)
class _Job:
    """One job.

    began: when the job began to process the current topic; None while the job does not run.
    """

    name: str
    trigger: Any
    work: Callable[[], None]
    errors: TopicErrors
    seconds: Spread = field(default_factory=lambda: Spread(STEP_SECONDS))
    began: float | None = None


class Jobs:
    """Jobs with schedules. They run only while a node is available.

    nodes: tells which topics are available.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.by_name: dict[str, _Job] = {}
        self._nodes = nodes
        self._scheduler: Any = None
        self._thread: threading.Thread | None = None
        """The scheduler's thread, from `start` to `stop`."""
        self._stopped = threading.Event()

    def add(self, name: str, schedule: str | timedelta, work: Callable[[], None]) -> None:
        """Run `work` on a schedule. Raises ConfigError if the schedule is invalid."""
        zone = UTC if isinstance(schedule, timedelta) else None
        trigger = parse_trigger(schedule, zone=zone)
        self.by_name[name] = _Job(name, trigger, work, TopicErrors(name))

    def add_for_each(
        self,
        name: str,
        schedule: str | timedelta,
        topics: Callable[[], Iterable[Name]],
        work: Callable[[Name], object],
    ) -> None:
        """Run `work` for each of the topics in turn; an error in one does not stop the others."""

        def each() -> None:
            for topic in topics():
                if self._stopped.is_set() or not self._nodes.is_any_available:
                    return
                if self._nodes.is_available(topic):
                    self._run(self.by_name[name], topic, partial(work, topic))

        self.add(name, schedule, each)

    def start(self) -> None:
        """Start the scheduler."""
        # APScheduler warns when a job outlasts its interval, and reports each run. An executor with
        # a name of its own has a logger of its own; the program's other schedulers keep theirs.
        quiet = logging.getLogger(f"{__name__}.scheduler")
        for logger in (quiet, logging.getLogger(f"apscheduler.executors.{EXECUTOR}")):
            logger.setLevel(logging.ERROR)
        self._scheduler = JobScheduler(
            executors={EXECUTOR: ThreadPoolExecutor(len(self.by_name))},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            logger=quiet,
            timezone=UTC,
        )
        for name, job in self.by_name.items():
            self._scheduler.add_job(
                self._tick, job.trigger, args=(job,), id=name, executor=EXECUTOR
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
        for job in self.by_name.values():
            job.errors.forget(topic)

    def faults(self) -> list[str]:
        """Faults of the scheduler and its jobs, as text."""
        now = time.monotonic()
        faults = [
            f"job {job.name} has been processing one topic for {now - at:.0f} s"
            for job in self.by_name.values()
            if (at := job.began) is not None and now - at > LONGEST_S
        ]
        thread = self._thread
        if thread is not None and not thread.is_alive():
            faults.append("the scheduler's thread has ended")
        return faults

    def _tick(self, job: _Job) -> None:
        if self._nodes.is_any_available and not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._run(job, "", job.work)
            finally:
                job.began = None
            job.seconds.observe(time.monotonic() - began)

    def _run(self, job: _Job, topic: str, work: Callable[[], object]) -> None:
        job.began = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001  logged; the next topic follows
            job.errors.failed_at(self._nodes, topic, error)
        else:
            job.errors.passed(topic)
