"""Remove foreign entries from ready streams, and repair messages whose entry was deleted.

The store itself declares a missing stream or group again when a call finds it missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import GroupRemoved
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.upkeep import Mend, Trim, Trimmed
from lisa.manager.bulk_reads import ask_each, group_keys
from lisa.manager.topic_log import TopicLog

WINDOW = 200
MOST_WINDOWS = 50
"""The most windows of a group in one run; the next run continues there."""

log = logging.getLogger(__name__)


class Trimmer:
    """Checks the ready streams of a topic's groups. Never removes unread or in-flight messages."""

    def __init__(self, store: SyncStore) -> None:
        self.moved = Tally()
        self._store = store
        self._entry_cursors: dict[tuple[str, str], str] = {}
        self._index_cursors: dict[tuple[str, str], str] = {}

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Topics with entries in a group's stream or index. Raises ServerUnavailable."""
        sizes = {
            topic: [
                command
                for own in group_keys(self._store, topic)
                for command in (("XLEN", own.ready), ("HLEN", own.entries))
            ]
            for topic in topics
        }
        return [topic for topic, held in ask_each(self._store, sizes).items() if any(held)]

    def step(self, topic: str) -> None:
        """Check up to 50 windows of each group of a topic. Raises LisaError."""
        for group in self._store.drive(self._store.groups(topic)):
            try:
                last = self._trim(topic, group)
                if last.entries < last.indexed:
                    self._mend(topic, group)
            except GroupRemoved:
                continue

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        for cursors in (self._entry_cursors, self._index_cursors):
            for key in [key for key in cursors if key[0] == topic]:
                cursors.pop(key, None)

    def _trim(self, topic: str, group: str) -> Trimmed:
        removed, start = 0, self._entry_cursors.pop((topic, group), "-")
        for _ in range(MOST_WINDOWS):
            result = self._store.call(Trim(topic, group, start, WINDOW))
            removed += result.removed
            if result.cursor is None:
                break
            start = result.cursor
        else:
            self._entry_cursors[topic, group] = start
        if removed:
            self.moved.add(removed, "trimmed")
            TopicLog(log, topic, group).warning(
                "removed %d foreign entries from its stream", removed
            )
        return result

    def _mend(self, topic: str, group: str) -> None:
        """Find and repair the ids in the index whose stream entry is missing."""
        entries = self._store.keys.topic(topic).group(group).entries
        cursor = self._index_cursors.pop((topic, group), "0")
        mended = 0
        for _ in range(MOST_WINDOWS):
            reply, flat = self._store.ask("HSCAN", entries, cursor, "COUNT", WINDOW)
            ids = [text(field) for field in flat[::2]]
            for part in chunks(ids, self._store.batch_size(topic, Mend)):
                mended += sum(bool(faults) for faults in self._store.call(Mend(topic, part)))
            cursor = text(reply)
            if cursor == "0":
                break
        else:
            self._index_cursors[topic, group] = cursor
        if mended:
            self.moved.add(mended, "mended")
            TopicLog(log, topic, group).warning(
                "made %d messages due again, because their stream entry was missing", mended
            )
