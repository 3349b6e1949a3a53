"""Creates the occurrences of schedules at their ticks.

Each topic with schedules has a sorted set of next ticks; a step reads only what is due in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import InvalidMessage, LisaError, Misplaced
from lisa.core.store.schedules import scheduled_topics, tick_all
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text
from lisa.core.transitions.schedule import ScheduleOutcome
from lisa.manager.bulk_reads import Turns, ask_each, head_command, head_ms
from lisa.manager.loop import NextDue
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicLog

BATCH = 32
"""Schedules of one topic per round trip."""

TOO_EARLY_S = 0.002
"""Pause before a tick that is due by the local clock, but not by the server's."""

UNREADABLE_MS = 60_000
"""How long a schedule that cannot be computed is left alone, so that others go on."""

log = logging.getLogger(__name__)


class Scheduler:
    """Handles what is due of each topic's schedules."""

    def __init__(self, store: SyncStore, clock: ServerClock) -> None:
        self.moved = Tally()
        self._store = store
        self._clock = clock
        self._turns = Turns()

    def listed(self) -> list[str]:
        """The topics that have schedules. Raises LisaError."""
        return self._store.drive(scheduled_topics(self._store))

    def poll(self, topics: Sequence[str]) -> dict[str, float]:
        """The instant of the next tick of some of the topics, from plain reads. Raises LisaError.

        A safety net in case an announcement was lost. Each call covers the next page of topics.
        """
        part = self._turns.next(topics)
        heads = {topic: [head_command(self._store.keys.topic(topic).ticks)] for topic in part}
        return {
            topic: self._clock.instant(due_ms)
            for topic, (head,) in ask_each(self._store, heads).items()
            if (due_ms := head_ms(head)) is not None
        }

    def step(self, topics: Sequence[str]) -> list[NextDue]:
        """Handle what is due of each topic; returns when each topic is due next.

        Raises LisaError.
        """
        return [self._step(topic) for topic in topics]

    def _step(self, topic: str) -> NextDue:
        key, now_ms = self._store.keys.topic(topic).ticks, self._clock.now_ms()
        found = self._store.ask("ZRANGEBYSCORE", key, "-inf", now_ms, "LIMIT", 0, BATCH)
        if found:
            self._advance(topic, list(map(text, found)))
        return time.monotonic() if len(found) == BATCH else self._next(topic)

    def _advance(self, topic: str, names: Sequence[str]) -> None:
        """Handle the due schedules. Raises an error that concerns the whole topic."""
        flow = tick_all(self._store, topic, names, self._clock.now_ms())
        failed: LisaError | None = None
        for name, result in zip(names, self._store.drive(flow), strict=True):
            if isinstance(result, ScheduleOutcome):
                self.moved.add(result.outcomes.count("a"), "scheduled")
            elif isinstance(result, InvalidMessage):
                self._leave_alone(topic, name, result)
            elif isinstance(result, LisaError) and not isinstance(result, Misplaced):
                failed = result
        if failed is not None:
            raise failed

    def _leave_alone(self, topic: str, name: str, error: LisaError) -> None:
        TopicLog(log, topic).error("schedule %s: %s; trying again in a minute", name, error)
        at_ms = self._clock.now_ms() + UNREADABLE_MS
        self._store.ask("ZADD", self._store.keys.topic(topic).ticks, "XX", at_ms, name)

    def _next(self, topic: str) -> float | None:
        """When the topic's earliest tick is due; None if there is none."""
        head = head_ms(self._store.ask(*head_command(self._store.keys.topic(topic).ticks)))
        if head is None:
            self._unlist(topic)
            return None
        return max(self._clock.instant(head), time.monotonic() + TOO_EARLY_S)

    def _unlist(self, topic: str) -> None:
        """Remove a topic without schedules and wall times from the list.

        The topic stays if it gets one meanwhile.
        """
        keys = self._store.keys.topic(topic)
        if self._store.ask("EXISTS", keys.schedules, keys.local):
            return
        self._store.ask("ZREM", self._store.keys.scheduled, topic)
        if self._store.ask("EXISTS", keys.schedules, keys.local):
            self._store.ask("ZADD", self._store.keys.scheduled, self._clock.now_ms(), topic)
