"""Keep sharded topics consistent: finish interrupted changes and remove former shards.

The process that changes a topic's number of shards applies the change itself. The sharder repeats
this work, in case that process died, and removes an older shard count once its shards are empty.
If a failover lost the change of the layout, the list names shards that the layout does not know;
the sharder adds them to the layout again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.model.clock import duration_ms
from lisa.core.model.options import TopicOptions
from lisa.core.model.sharding import (
    PLAIN,
    Layout,
    Shard,
    Topic,
    count_of,
    own_shard,
    topic_of,
    topics_of,
)
from lisa.core.store.reshard import (
    hold_messages,
    lost_shards,
    renumber,
    spread,
    states_of,
    unnamed,
)
from lisa.core.store.store import SyncStore, grouped
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.set_layout import SetLayout
from lisa.manager.bulk_reads import ask_all
from lisa.manager.shard_cleaner import ShardCleaner
from lisa.manager.topic_log import TopicLog

log = logging.getLogger(__name__)


class Sharder:
    """Checks the layout of one topic per step. Works on topics, not on single shards."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._cleaner = ShardCleaner(store)
        self._intact: set[Topic] = set()
        """Topics whose layout was complete at the last `pick`; their next step need not check."""

    def pick(self, topics: Sequence[Shard]) -> list[Topic]:
        """Topics that are or were sharded, or whose layout is unreadable.

        Raises ServerUnavailable.
        """
        names = topics_of(topics)
        replies = ask_all(
            self._store,
            [("HGET", self._store.keys.topic(topic).options, "layout") for topic in names],
        )
        layouts = {
            topic: Layout.read(reply)
            for topic, reply in zip(names, replies, strict=True)
            if not isinstance(reply, Exception)
        }
        for topic, layout in layouts.items():
            self._store.learn_layout(topic, layout)
        shards = grouped((topic_of(shard), shard) for shard in topics)
        lost = {topic for topic, layout in layouts.items() if unnamed(shards[topic], topic, layout)}
        split = {topic for topic, layout in layouts.items() if layout.number}
        self._intact.difference_update(lost)
        self._intact.update(split - lost)
        return [topic for topic in names if topic not in layouts or topic in split | lost]

    def forget(self, shard: str) -> None:
        """Drop the state of a removed topic."""
        self._intact.discard(topic_of(shard))

    def step(self, topic: Topic) -> None:
        """Apply a topic's layout to its shards, and clean up its older shards. Raises LisaError."""
        self._cleaner.finish(topic)
        if topic in self._intact:
            self._intact.discard(topic)
        else:
            self._adopt(topic)
        layout = self._store.drive(spread(self._store, topic))
        self._cleaner.step(topic, layout)  # before the loop: the next step deletes what it forgets
        for count in layout.older:
            self._forget_older(topic, layout, count)

    def _adopt(self, topic: Topic) -> None:
        listed = self._store.drive(self._store.shards())
        if lost := self._store.drive(lost_shards(self._store, topic, listed)):
            counts = sorted(set(map(count_of, lost)))
            TopicLog(log, topic).warning(
                "the server lost the layout with %s shards; these shards will be drained",
                " and ".join(map(str, counts)),
            )
            known = self._store.known_layout(topic) or PLAIN
            self._store.drive(renumber(self._store, topic, known.number, lost))

    def _forget_older(self, topic: Topic, layout: Layout, count: int) -> None:
        """Remove an older shard count from the layout once its shards are no longer needed.

        Older shards take no new messages, so an empty shard stays empty. The first manager that
        finds them empty records the time. Their settled ids count for deduplication until the
        topic's `retention` has passed since then.
        """
        shards = Layout(layout.number, count).current(topic)
        own, *seen = self._store.drive(states_of(self._store, [own_shard(topic), *shards]))
        mark = f"emptied:{count}"
        since = own.options.get(mark)
        if any(self._store.drive(hold_messages(self._store, shards, seen))):
            if since is not None:
                self._store.call(Configure(topic, {mark: None}))
            return
        key = self._store.keys.topic(topic).options
        now_ms = self._store.drive(self._store.server_time_ms(key))
        if since is None:
            self._store.call(Configure(topic, {mark: str(now_ms)}))
            since = str(now_ms)
        retention = duration_ms(TopicOptions.from_hash(own.options).retention)
        lasting = [int(one.options.get("lasting", 0)) for one in seen]
        if now_ms < max(int(since) + retention, *lasting):
            return
        self._store.call(SetLayout(topic, "forget", layout.number, (count,)))
        TopicLog(log, topic).info("its %d older shards are empty", count)
