"""Removes what is foreign from ready streams, and puts right what a foreign hand took out.

A stream or a group that is gone is declared again by the store as soon as a call meets it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.errors import GroupRemoved
from lisa.core.metrics.numbers import Tally
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.trim import Trim, Trimmed
from lisa.manager.lookout import ask_all

__all__ = ["Trimmer"]

WINDOW = 200
MOST_WINDOWS = 50
"""One run looks at no more windows of a group; the next goes on there."""

log = logging.getLogger(__name__)


class Trimmer:
    """Works through a topic's groups, never by length: nothing unread or in flight is touched."""

    def __init__(self, store: SyncStore) -> None:
        self.moved = Tally()
        self._store = store
        self._entry_cursors: dict[tuple[str, str], str] = {}
        self._index_cursors: dict[tuple[str, str], str] = {}

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those with anything in a group's stream or index. Raises ServerUnavailable."""
        places = [(topic, group) for topic in topics for group in self._store.known_groups(topic)
                  or ()]  # fmt: skip
        questions: list[tuple[str, str]] = []
        for topic, group in places:
            keys = self._store.keys.topic(topic).group(group)
            questions += [("XLEN", keys.ready), ("HLEN", keys.entries)]
        replies = ask_all(self._store, questions)
        return list(dict.fromkeys(
            place[0] for place, *held in zip(places, replies[::2], replies[1::2], strict=True)
            if held != [0, 0]
        ))  # fmt: skip

    def step(self, topic: str) -> None:
        """One bounded run over every group of a topic. Raises LisaError."""
        for group in self._store.drive(self._store.groups(topic)):
            try:
                last = self._trim(topic, group)
                if last.entries < last.indexed:
                    self._mend(topic, group)
            except GroupRemoved:
                continue

    def forget(self, topic: str) -> None:
        """Keep nothing of a topic that is gone."""
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
            log.warning(
                "topic %s, group %s: removed %d foreign entries from its stream",
                topic, group, removed, extra={"topic": topic, "group": group},
            )  # fmt: skip
        return result

    def _mend(self, topic: str, group: str) -> None:
        """Fewer entries than the index names: find the ids whose entries are gone."""
        entries = self._store.keys.topic(topic).group(group).entries
        cursor = self._index_cursors.pop((topic, group), "0")
        mended = 0
        for _ in range(MOST_WINDOWS):
            reply, flat = self._store.ask("HSCAN", entries, cursor, "COUNT", WINDOW)
            ids = [text(field) for field in flat[::2]]
            for some in chunks(ids, self._store.batch_size(topic, Mend)):
                mended += sum(bool(said) for said in self._store.call(Mend(topic, some)))
            cursor = text(reply)
            if cursor == "0":
                break
        else:
            self._index_cursors[topic, group] = cursor
        if mended:
            self.moved.add(mended, "mended")
            log.warning(
                "topic %s, group %s: %d messages had lost their stream entry and are due again",
                topic, group, mended, extra={"topic": topic, "group": group},
            )  # fmt: skip
