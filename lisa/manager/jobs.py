"""The cron side: what APScheduler runs, and when.

No tick is dropped for being late, several late ones become one, and no job runs beside itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, timedelta
from typing import Any

from lisa.core.errors import ServerUnavailable
from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.store import chunks
from lisa.manager.cron import parse_trigger
from lisa.manager.lookout import PAGE
from lisa.manager.troubles import Troubles

__all__ = ["Jobs"]

log = logging.getLogger(__name__)


class Jobs:
    """Named jobs, each with a schedule; they run only while the server is reachable."""

    def __init__(
        self,
        reachable: threading.Event,
        suspect: Callable[[], None],
        topics: Callable[[], list[str]],
    ) -> None:
        self._reachable = reachable
        self._suspect = suspect
        self._topics = topics
        self._jobs: dict[str, tuple[Any, Callable[[], None]]] = {}
        self._scheduler: Any = None
        self.troubles: dict[str, Troubles] = {}
        self.seconds: dict[str, Spread] = {}
        self._stopped = threading.Event()

    def add(self, name: str, schedule: str | timedelta, work: Callable[[], None]) -> None:
        """Run `work` on a schedule. Raises ConfigError for a schedule that cannot be."""
        zone = UTC if isinstance(schedule, timedelta) else None
        self._jobs[name] = (parse_trigger(schedule, zone=zone), work)
        self.troubles[name] = Troubles(name)
        self.seconds[name] = Spread(STEP_SECONDS)

    def add_for_each(
        self,
        name: str,
        schedule: str | timedelta,
        pick: Callable[[Sequence[str]], Sequence[str]],
        work: Callable[[str], object],
    ) -> None:
        """Run `work` for one topic after the other; an error of one never stops the next.

        `pick` is given a page of topics, and says which of them `work` is worth the while for.
        """

        def each() -> None:
            for page in chunks(self._topics(), PAGE):
                for topic in pick(page):
                    if self._stopped.is_set() or not self._reachable.is_set():
                        return
                    self._run(name, topic, lambda topic=topic: work(topic))  # type: ignore[misc]

        self.add(name, schedule, each)

    def start(self) -> None:
        """Begin."""
        from apscheduler.executors.pool import ThreadPoolExecutor
        from apscheduler.schedulers.background import BackgroundScheduler

        quiet = logging.getLogger(f"{__name__}.scheduler")
        quiet.setLevel(logging.ERROR)  # it warns whenever a job takes longer than its interval
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(len(self._jobs))},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            logger=quiet,
            timezone=UTC,
        )
        for name, (trigger, work) in self._jobs.items():
            self._scheduler.add_job(
                self._tick, trigger, args=(name, work), id=name, name=f"lisa-{name}"
            )
        self._scheduler.start()

    def stop(self) -> None:
        """Finish the jobs that run, topic by topic, and end."""
        self._stopped.set()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.shutdown(wait=True)

    def _tick(self, name: str, work: Callable[[], None]) -> None:
        if self._reachable.is_set() and not self._stopped.is_set():
            began = time.monotonic()
            self._run(name, "", work)
            self.seconds[name].observe(time.monotonic() - began)

    def _run(self, name: str, topic: str, work: Callable[[], object]) -> None:
        troubles = self.troubles[name]
        try:
            work()
        except Exception as error:  # noqa: BLE001  told, and the next topic goes on
            away = isinstance(error, ServerUnavailable)
            if away:
                self._suspect()
            troubles.failed(topic, error, quietly=away and not self._reachable.is_set())
        else:
            troubles.passed(topic)
