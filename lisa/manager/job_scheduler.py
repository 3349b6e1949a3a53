"""APScheduler's scheduler, for machines whose clock is set while it runs."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

STEP = timedelta(seconds=1)
"""A smaller change of the clock only shifts the next runs."""

LONGEST_WAIT_S = 1.0
"""Longest wait until a step is noticed that came while the next wait was computed."""


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
            self._move_jobs(now, self._started - before)
        wait_s: float | None = super()._process_jobs()
        return None if wait_s is None else min(wait_s, LONGEST_WAIT_S)

    def _move_jobs(self, now: datetime, step: timedelta) -> None:
        """Move intervals along with the clock; compute the next times of cron expressions again."""
        for job in self.get_jobs():
            if isinstance(job.trigger, IntervalTrigger):
                at = job.next_run_time + step
            elif job.next_run_time <= now:
                at = now
            else:
                at = job.trigger.get_next_fire_time(None, now)
            job.modify(next_run_time=at)
