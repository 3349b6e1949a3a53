"""Keep sharded topics consistent: finish interrupted changes and remove former shards.

The process that changes a topic's number of shards applies the change itself. The sharder repeats
this work, in case that process died, and removes an older shard count once its shards are empty.
If a failover lost the change of the layout, the list names shards that the layout does not know;
the sharder adds them to the layout again.

The keys of former shards are deleted once no message refers to them. The topic takes over their
counters in the same transaction as the new layout, and their counter history merged by minute, so
that totals and plots do not change. A shard with a journal is kept until every archive has read it.
The topic stores the journal's last number, and the shard continues from there if the topic returns
to the same number of shards.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import LisaError
from lisa.core.model.options import TopicOptions
from lisa.core.model.sharding import (
    PLAIN,
    REMOVED,
    Layout,
    Shard,
    Topic,
    count_of,
    own_shard,
    shard_suffix,
    topic_of,
    topics_of,
)
from lisa.core.model.stream import entry_ms
from lisa.core.store.replies import counters, pairs, summed
from lisa.core.store.reshard import (
    hold_messages,
    lost_shards,
    renumber,
    spread,
    states_of,
    unnamed,
)
from lisa.core.store.store import SyncStore, chunks, grouped
from lisa.core.transitions.journal import archive_records
from lisa.core.transitions.topic import Absorb, Clear, Configure, SetLayout
from lisa.manager.bulk_reads import PAGE, ask_each
from lisa.manager.sampler import samples_of, write_copy
from lisa.manager.topic_log import TopicLog

Sample = tuple[int, int, Mapping[str, int]]
"""Epoch milliseconds, the index of the stream, and the counters."""

log = logging.getLogger(__name__)


class Sharder:
    """Checks the layout of one topic per step. Works on topics, not on single shards.

    announced: topics whose number of shards changed, as announced or found by a check of all.
    """

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self.is_check_due = threading.Event()
        """Whether `changed` checks all topics next, because announcements may be lost."""
        self.announced: dict[Topic, None] = {}
        self._intact: set[Topic] = set()
        """Topics whose layout was complete at the last `pick`; their next step need not check."""

    def pick(self, topics: Sequence[Shard]) -> list[Topic]:
        """Topics that are or were sharded, or whose layout is unreadable.

        Raises ServerUnavailable.
        """
        names, keys = topics_of(topics), self._store.keys
        reads = {topic: [("HGET", keys.topic(topic).options, "layout")] for topic in names}
        layouts = {
            topic: Layout.read(reply)
            for topic, (reply,) in ask_each(self._store, reads).items()
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
        self._finish_removals(topic)
        if topic in self._intact:
            self._intact.discard(topic)
        else:
            self._adopt(topic)
        layout = self._store.drive(spread(self._store, topic))
        self._remove_former(topic, layout)  # before the loop: the next step deletes what it forgets
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
        lasting = [int(state.options.get("lasting", 0)) for state in seen]
        if now_ms < max(int(since) + retention, *lasting):
            return
        self._store.call(SetLayout(topic, "forget", layout.number, (count,)))
        TopicLog(log, topic).info("its %d older shards are empty", count)

    # -- changes that another process may have left incomplete

    def changed(self, shards: Callable[[], Sequence[Shard]]) -> list[Topic]:
        """The topics whose number of shards changed. Raises LisaError.

        shards: those that a check looks at.
        """
        if self.is_check_due.is_set():
            self.is_check_due.clear()
            try:
                for page in chunks(shards(), PAGE):
                    self.announced |= dict.fromkeys(self.pick(page))
            except LisaError:
                self.is_check_due.set()
                raise
        return list(self.announced)

    def finish(self, topic: Topic) -> None:
        """Finish the change of a topic. After an error the topic stays among the changed."""
        self.announced.pop(topic, None)  # before: a later announcement counts
        try:
            self.step(topic)
        except LisaError:
            self.announced[topic] = None
            raise

    # -- former shards

    def _finish_removals(self, topic: Topic) -> None:
        """Delete the remaining keys of shards that were already taken over. Raises LisaError.

        Runs again after all keys were deleted, because another role may have written a key since.
        """
        (own,) = self._store.drive(states_of(self._store, [own_shard(topic)]))
        layout = Layout.read(own.options.get("layout"))
        for field in own.options:
            if field.startswith(REMOVED) and self._clear(topic, layout, field):
                self._store.call(Configure(topic, {field: None}))

    def _remove_former(self, topic: Topic, layout: Layout) -> None:
        """Take over and delete the shards of former shard counts. Raises LisaError."""
        for count in layout.gone:
            if count > 1:  # with one shard, the keys are the topic's own
                self._absorb(topic, layout, count)

    def _absorb(self, topic: Topic, layout: Layout, count: int) -> None:
        shards = Layout(layout.number, count).current(topic)
        stats, journaled = list[Mapping[str, int]](), dict[str, int]()
        for shard in shards:
            counted = dict(self._store.drive(self._store.stats(shard)))
            last = counted.pop("journaled", 0)
            if last and not self._is_archived(shard, last):
                return
            if last:
                journaled[str(shard_suffix(shard))] = last
            stats.append(counted)
        merged = self._merge_history(topic, shards)
        # Unlist them before they leave the layout: a listed shard without a layout counts as lost.
        self._store.ask("ZREM", self._store.keys.topics, *shards)
        call = Absorb(topic, layout.number, count, summed(stats), journaled, merged)
        if self._store.call(call) and self._clear(topic, layout, f"{REMOVED}{count}"):
            TopicLog(log, topic).info("deleted the keys of its former %d shards", count)

    def _is_archived(self, shard: Shard, last: int) -> bool:
        """Whether a shard's journal is empty, or every archive has read it completely."""
        keys = self._store.keys.topic(shard)
        if not self._store.ask("XLEN", keys.events):
            return True
        records = archive_records(pairs(self._store.ask("HGETALL", keys.archived)))
        return bool(records) and min(record.number for record in records.values()) >= last

    def _merge_history(self, topic: Topic, shards: Sequence[Shard]) -> str:
        """Write the merged history of a topic and some shards to a new key; returns the key."""
        keys = self._store.keys.topic
        histories = [keys(topic).history, *(keys(shard).history for shard in shards)]
        streams = [self._samples(number, history) for number, history in enumerate(histories)]
        return write_copy(self._store, histories[0], list(_together(streams)))

    def _samples(self, number: int, history: str) -> Iterator[Sample]:
        for entry, fields in samples_of(self._store, history):
            found = counters(fields)
            if number:
                found.pop("journaled", None)
            yield entry_ms(entry), number, found

    def _clear(self, topic: Topic, layout: Layout, field: str) -> bool:
        """Delete the keys of one former shard count; returns whether no key is left."""
        shards = Layout(shards=int(field.removeprefix(REMOVED))).current(topic)
        self._store.ask("ZREM", self._store.keys.topics, *shards)
        seen = self._store.drive(states_of(self._store, shards))
        calls = [
            Clear(shard, layout.number, tuple(state.all_groups))
            for shard, state in zip(shards, seen, strict=True)
        ]
        return [self._store.call(call) for call in calls] == [True] * len(calls)


def _together(streams: Sequence[Iterator[Sample]]) -> Iterator[tuple[str, list[str | int]]]:
    """Sums over several streams, at each instant at which any stream has a sample."""
    latest: dict[int, Mapping[str, int]] = {}
    for at_ms, samples in groupby(heapq.merge(*streams, key=itemgetter(0, 1)), itemgetter(0)):
        latest |= {number: found for _, number, found in samples}
        sums = summed(latest.values())
        yield f"{at_ms}-0", [part for name in sorted(sums) for part in (name, sums[name])]
