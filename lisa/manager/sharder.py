"""Keeps topics that are split whole: what their shards were told, and which are done with.

A change of the number is put through by whoever makes it; this repeats that, so that one who died
half-way leaves nothing undone, and lets an older number go once its shards are empty.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.clock import duration_ms
from lisa.core.shards import Layout, base
from lisa.core.spread import spread
from lisa.core.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.place import Place

__all__ = ["Sharder"]

log = logging.getLogger(__name__)


class Sharder:
    """Looks at topics, not at their places: of those it is given it picks the former."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those that are split, or were. Raises ServerUnavailable."""
        names = [topic for topic in topics if base(topic) == topic]
        layouts = self._store.drive(self._store.layouts(names))
        return [topic for topic, layout in zip(names, layouts, strict=True) if layout.number]

    def step(self, topic: str) -> None:
        """Put through what a topic says, and look at its older shards. Raises LisaError."""
        layout = self._store.drive(spread(self._store, topic))
        for count in layout.older:
            self._let_go(topic, layout, count)

    def _let_go(self, topic: str, layout: Layout, count: int) -> None:
        """Forget an older number of shards, once no settled id of theirs counts any more.

        They take no new messages, so what is empty stays empty; the first who sees it notes when.
        """
        places = Layout(layout.number, count).current(topic)
        mark = f"emptied:{count}"
        options, keys = self._store.keys.topic(topic).options, self._store.keys.topic
        seen = self._store.ask("HGET", options, mark)
        if not all(map(self._is_empty, places)):
            if seen is not None:
                self._store.call(Configure(topic, {mark: None}))
            return
        now_ms = self._store.drive(self._store.server_time_us()) // 1000
        if seen is None:
            self._store.call(Configure(topic, {mark: str(now_ms)}))
            seen = now_ms
        retention = self._store.drive(self._store.options(topic)).retention
        lasting = [int(self._store.ask("HGET", keys(place).options, "lasting") or 0)
                   for place in places]  # fmt: skip
        if now_ms < max(int(seen) + duration_ms(retention), *lasting):
            return
        self._store.call(Place(topic, "forget", layout.number, count))
        log.info("topic %s: nothing is left of its %d older shards", topic, count,
                 extra={"topic": topic})  # fmt: skip

    def _is_empty(self, place: str) -> bool:
        keys = self._store.keys.topic(place)
        holding = [keys.waiting]
        for group in self._store.drive(self._store.groups(place)):
            own = keys.group(group)
            holding += [own.entries, own.retry, own.garbage]
        return not self._store.ask("EXISTS", *holding)
