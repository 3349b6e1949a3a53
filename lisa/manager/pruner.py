"""Keeps the journals bounded: behind what every archive has taken, else at `journal_max`.

An archive follows a topic, not its places: while it reports on one of them, the journal of another
that it has not come to yet stays whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.shards import base
from lisa.core.store import SyncStore, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.prune import ARCHIVE_HOLDS_MS, NOT_AN_ARCHIVE, RECORD, Prune
from lisa.manager.lookout import ask_all

__all__ = ["Pruner"]

MOST_CALLS = 1000
"""One run takes no more calls for a topic; what is left waits for the next."""

log = logging.getLogger(__name__)


class Pruner:
    """Works through the topics that have a journal."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._reporting: dict[str, frozenset[str]] = {}
        """By topic, since the last `pick`: a round looks at the places of a topic once."""

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those that have any event. Raises ServerUnavailable."""
        self._reporting.clear()
        replies = ask_all(
            self._store, [("XLEN", self._store.keys.topic(topic).events) for topic in topics]
        )
        return [topic for topic, held in zip(topics, replies, strict=True) if held != 0]

    def step(self, topic: str) -> None:
        """One bounded run over one place of a topic. Raises LisaError."""
        lost = 0
        records = self._store.ask("HKEYS", self._store.keys.topic(topic).archived)
        archives = [name for name in map(text, records) if not name.startswith(NOT_AN_ARCHIVE)]
        if not self._reporting_on(base(topic)).issubset(archives):
            return
        for _ in range(MOST_CALLS):
            done = self._store.call(Prune(topic, archives))
            lost += done.lost
            if not done.more:
                break
        if lost:
            log.warning(
                "topic %s: %d events that no archive had taken went from its journal, which has "
                "no room for more (journal_max)", topic, lost, extra={"topic": topic},
            )  # fmt: skip

    def _reporting_on(self, topic: str) -> frozenset[str]:
        """The archives that are waited for in a topic which is, or was, split."""
        if topic not in self._reporting:
            self._reporting[topic] = frozenset(self._look(topic))
        return self._reporting[topic]

    def _look(self, topic: str) -> set[str]:
        store = self._store
        places = store.drive(store.layout(topic)).counted(topic)
        if len(places) == 1:
            return set()  # of its one place the script itself judges
        since_ms = store.drive(store.server_time_us()) // 1000 - ARCHIVE_HOLDS_MS
        replies = store.drive(
            store.commands([("HGETALL", store.keys.topic(place).archived) for place in places])
        )
        found: set[str] = set()
        for reply in replies:
            for name, record in pairs(reply).items():
                told = RECORD.fullmatch(text(record))
                if told and int(told[3]) > since_ms and not text(name).startswith(NOT_AN_ARCHIVE):
                    found.add(text(name))
        return found
