"""Moves pending occurrences and messages with a wall time after a time zone data update.

A topic remembers the version of the data by which its ticks were last checked. A manager with newer
data computes them again, a few pages at a time.
"""

from __future__ import annotations

import logging
import re
import zoneinfo
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from lisa.core.model.recurring.ticks import next_tick
from lisa.core.store import schedules
from lisa.core.store.schedule_reads import record_page
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text
from lisa.manager.local_times import LocalTimes
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicLog

FIELD = "zones"
"""The field of a topic's options hash with the version of the data."""

PAGES = 4
"""Pages of schedules per step, so that a million take some minutes but little of a core."""

log = logging.getLogger(__name__)


@cache
def data_version() -> str:
    """The version of the time zone data, such as `2026a`; empty if it cannot be found out."""
    for folder in map(Path, zoneinfo.TZPATH):
        if folder.is_dir():
            try:
                with (folder / "tzdata.zi").open(encoding="utf-8") as data:
                    found = re.search(r"version (\d{4}[a-z]+)", data.readline())
            except OSError:
                found = None
            return found[1] if found else ""
    try:
        return str(import_module("tzdata").IANA_VERSION)
    except ImportError:
        return ""


class ZoneData:
    """Checks the ticks of each topic once."""

    def __init__(self, store: SyncStore, clock: ServerClock, version: str | None = None) -> None:
        self._store = store
        self._clock = clock
        self._version = data_version() if version is None else version
        self._local_times = LocalTimes(store, clock)
        self._cursors: dict[str, str] = {}
        self._checked: set[str] = set()
        self._done: set[str] = set()
        self._failed: set[str] = set()

    def step(self, topics: Sequence[str]) -> list[str]:
        """Check some pages of the next topic that is not checked yet. Raises LisaError.

        Returns the topics without remaining wall-time messages.
        """
        emptied = self._local_times.clean(topics)
        self._check(topics)
        return emptied

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._local_times.forget(topic)
        self._cursors.pop(topic, None)
        for topics in (self._checked, self._done, self._failed):
            topics.discard(topic)

    def _check(self, topics: Sequence[str]) -> None:
        if not self._version:
            return
        self._done.intersection_update(topics)
        left = [one for one in topics if one not in self._done]
        if self._failed.issuperset(left):
            self._failed.clear()
        for topic in left:
            if topic not in self._failed:
                self._failed.add(topic)  # an error must not keep the topics after it waiting
                self._check_topic(topic)
                self._failed.discard(topic)
                return

    def _check_topic(self, topic: str) -> None:
        key = self._store.keys.topic(topic).options
        if text(self._store.ask("HGET", key, FIELD) or b"") >= self._version:
            self._done.add(topic)
            return
        for _ in range(PAGES):
            if self._check_page(topic) and self._local_times.check_page(topic):
                self._store.ask("HSET", key, FIELD, self._version)
                self._checked.discard(topic)
                self._done.add(topic)
                return

    def _check_page(self, topic: str) -> bool:
        """Check one page of schedules; returns whether all are checked."""
        if topic in self._checked:
            return True
        flow = record_page(self._store, topic, self._cursors.pop(topic, None))
        records, cursor = self._store.drive(flow)
        now_ms = self._clock.now_ms()
        for name, record in records.items():
            definition, tick = record.definition, record.tick
            if not definition.cron or tick is None or tick <= now_ms or record.is_queued:
                continue
            if next_tick(definition, record.made_ms, now_ms) != tick:
                self._store.drive(schedules.align(self._store, topic, name))
                TopicLog(log, topic).info(
                    "schedule %s: moved, because the time zone data changed", name
                )
        if cursor is None:
            self._checked.add(topic)
            return True
        self._cursors[topic] = cursor
        return False
