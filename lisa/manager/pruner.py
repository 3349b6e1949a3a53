"""Trim journals: delete events that every archive has read, and keep at most `journal_max` events.

An archive reads all shards of a topic. While an archive reports on one shard, the journals of the
shards that are still unread are not trimmed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.model.sharding import Shard, Topic, topic_of
from lisa.core.store.replies import pairs
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text
from lisa.core.transitions.journal import ARCHIVE_HOLDS_MS, NOT_AN_ARCHIVE, Prune, archive_records
from lisa.manager.bulk_reads import ask_each
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicLog

MOST_CALLS = 1000
"""The most calls per topic in one run; the next run continues."""

log = logging.getLogger(__name__)


class Pruner:
    """Trims the journals of topics.

    clock: the server's. When it is set forward, archives do not count as stopped because of that.
    """

    def __init__(self, store: SyncStore, clock: ServerClock | None = None) -> None:
        self._store = store
        self._clock = clock or ServerClock()
        self._reporting: dict[Topic, frozenset[str]] = {}
        """Reporting archives by topic, cached until the next `pick`."""

    def pick(self, shards: Sequence[Shard]) -> list[Shard]:
        """Topics whose journal is not empty. Raises ServerUnavailable."""
        self._reporting.clear()
        sizes = {shard: [("XLEN", self._store.keys.topic(shard).events)] for shard in shards}
        return [shard for shard, (held,) in ask_each(self._store, sizes).items() if held != 0]

    def step(self, shard: Shard) -> None:
        """Trim the journal of one shard, with at most 1,000 calls. Raises LisaError."""
        lost = 0
        records = self._store.ask("HKEYS", self._store.keys.topic(shard).archived)
        archives = [name for name in map(text, records) if not name.startswith(NOT_AN_ARCHIVE)]
        if archives and not self._store.has_nodes:  # the clock is that of one node
            self._clock.sample(self._store)
        hold_ms = ARCHIVE_HOLDS_MS + self._clock.forward_ms
        if not self._reporting_on(topic_of(shard), hold_ms).issubset(archives):
            return
        for _ in range(MOST_CALLS):
            done = self._store.call(Prune(shard, archives, hold_ms))
            lost += done.lost
            if not done.more:
                break
        if lost:
            TopicLog(log, shard).warning(
                "deleted %d unarchived events, because the journal is full (journal_max)", lost
            )

    def _reporting_on(self, topic: Topic, hold_ms: int) -> frozenset[str]:
        """The archives that reported recently on any shard of a topic; empty for a single shard."""
        if topic not in self._reporting:
            self._reporting[topic] = frozenset(self._read_reporting(topic, hold_ms))
        return self._reporting[topic]

    def _read_reporting(self, topic: Topic, hold_ms: int) -> set[str]:
        store = self._store
        shards = store.drive(store.layout(topic)).counted(topic)
        if len(shards) == 1:
            return set()  # the script decides for a single shard
        key = store.keys.topic(topic).archived
        since_ms = store.drive(store.server_time_ms(key)) - hold_ms
        replies = store.drive(
            store.commands([("HGETALL", store.keys.topic(shard).archived) for shard in shards])
        )
        return {
            name
            for reply in replies
            for name, record in archive_records(pairs(reply)).items()
            if record.reported_ms > since_ms
        }
