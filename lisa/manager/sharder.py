"""Keeps topics that are split whole: what their shards were told, and which are done with.

A change of the number is put through by whoever makes it; this repeats that, so that one who died
half-way leaves nothing undone, and lets an older number go once its shards are empty. Where a
topic's node was lost with the last change, shards are listed of which the topic knows nothing: they
are its own again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from lisa.core import removal
from lisa.core.clock import duration_ms
from lisa.core.keys import TopicKeys
from lisa.core.options import TopicOptions
from lisa.core.shards import MOST_SHARDS, Layout, base, bases, count_of
from lisa.core.spread import Seen, look, renumber, spread
from lisa.core.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.place import Place
from lisa.manager.lookout import ask_all

__all__ = ["Sharder"]

log = logging.getLogger(__name__)


class Sharder:
    """Looks at topics, not at their places: of those it is given it picks the former."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._sound: set[str] = set()
        """Of these nothing was lost when they were picked: their next step need not ask."""

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those that are split, or were, or cannot be told. Raises ServerUnavailable."""
        names = bases(topics)
        replies = ask_all(
            self._store,
            [("HGET", self._store.keys.topic(topic).options, "layout") for topic in names],
        )
        layouts = {topic: Layout.read(reply) for topic, reply in zip(names, replies, strict=True)
                   if not isinstance(reply, Exception)}  # fmt: skip
        for topic, layout in layouts.items():
            self._store.learn_layout(topic, layout)
        lost = {
            base(one) for one in _lost((one for one in topics if base(one) in layouts), layouts)
        }
        split = {topic for topic, layout in layouts.items() if layout.number}
        self._sound.difference_update(lost)
        self._sound.update(split - lost)
        return [topic for topic in names if topic not in layouts or topic in split | lost]

    def step(self, topic: str) -> None:
        """Put through what a topic says, and look at its older shards. Raises LisaError."""
        if topic in self._sound:
            self._sound.discard(topic)
        else:
            self._adopt(topic)
        layout = self._store.drive(spread(self._store, topic))
        for count in layout.older:
            self._let_go(topic, layout, count)

    def _adopt(self, topic: str) -> None:
        listed = [one for one in self._store.drive(self._store.places()) if base(one) == topic]
        layout = self._store.drive(self._store.layout(topic))  # it is written before they are
        if lost := _lost(listed, {topic: layout}):
            counts = sorted(set(map(count_of, lost)))
            log.warning("topic %s: its server lost what it knew of shards by %s; they are drained",
                        topic, " and ".join(map(str, counts)), extra={"topic": topic})  # fmt: skip
            self._store.drive(renumber(self._store, topic, layout.number))

    def _let_go(self, topic: str, layout: Layout, count: int) -> None:
        """Forget an older number of shards, once no settled id of theirs counts any more.

        They take no new messages, so what is empty stays empty; the first who sees it notes when.
        """
        places = Layout(layout.number, count).current(topic)
        own, *seen = self._store.drive(look(self._store, [topic, *places]))
        mark = f"emptied:{count}"
        since = own.options.get(mark)
        if self._holds_any(places, seen):
            if since is not None:
                self._store.call(Configure(topic, {mark: None}))
            return
        now_ms = self._store.drive(self._store.server_time_us()) // 1000
        if since is None:
            self._store.call(Configure(topic, {mark: str(now_ms)}))
            since = str(now_ms)
        retention = duration_ms(TopicOptions.from_hash(own.options).retention)
        lasting = [int(one.options.get("lasting", 0)) for one in seen]
        if now_ms < max(int(since) + retention, *lasting):
            return
        self._store.call(Place(topic, "forget", layout.number, (count,)))
        log.info("topic %s: nothing is left of its %d older shards", topic, count,
                 extra={"topic": topic})  # fmt: skip

    def _holds_any(self, places: Sequence[str], seen: Sequence[Seen]) -> bool:
        found = self._store.drive(self._store.commands(
            [("EXISTS", *_holding(self._store.keys.topic(place), one))
             for place, one in zip(places, seen, strict=True)]
        ))  # fmt: skip
        return any(found)


def _holding(keys: TopicKeys, seen: Seen) -> list[str]:
    """The keys that hold messages."""
    # What a removal that was cut short left is messages, though nobody declares the group.
    groups = removal.marked(seen.options).union(seen.groups)
    own = [keys.group(group) for group in sorted(groups)]
    return [keys.waiting, *(key for one in own for key in (one.entries, one.retry, one.garbage))]


def _lost(places: Iterable[str], layouts: Mapping[str, Layout]) -> list[str]:
    """The places that are none of their topic's, by its layout, but of a number there may be."""
    counted = {topic: set(layout.counted(topic)) for topic, layout in layouts.items()}
    return [
        place for place in places
        if place not in counted[base(place)]
        and count_of(place) <= MOST_SHARDS
        and place in Layout(shards=count_of(place)).current(base(place))
    ]  # fmt: skip
