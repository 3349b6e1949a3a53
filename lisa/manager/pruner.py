"""Keeps the journals bounded: behind what every archive has taken, else at `journal_max`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.store import SyncStore
from lisa.core.transitions.base import text
from lisa.core.transitions.prune import NOT_AN_ARCHIVE, Prune
from lisa.manager.lookout import ask_all

__all__ = ["Pruner"]

MOST_CALLS = 1000
"""One run takes no more calls for a topic; what is left waits for the next."""

log = logging.getLogger(__name__)


class Pruner:
    """Works through the topics that have a journal."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those that have any event. Raises ServerUnavailable."""
        replies = ask_all(
            self._store, [("XLEN", self._store.keys.topic(topic).events) for topic in topics]
        )
        return [topic for topic, held in zip(topics, replies, strict=True) if held != 0]

    def step(self, topic: str) -> None:
        """One bounded run over one topic. Raises LisaError."""
        lost = 0
        records = self._store.ask("HKEYS", self._store.keys.topic(topic).archived)
        archives = [name for name in map(text, records) if not name.startswith(NOT_AN_ARCHIVE)]
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
