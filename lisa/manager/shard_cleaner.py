"""Delete the keys of a topic's former shards once no message refers to them.

The topic takes over their counters in the same transaction as the new layout, and their counter
history merged by minute, so that totals and plots do not change. A shard with a journal is kept
until every archive has read it. The topic stores the journal's last number, and the shard continues
from there if the topic returns to the same number of shards.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from lisa.core.model.sharding import REMOVED, Layout, Shard, Topic, own_shard, shard_suffix
from lisa.core.model.stream import entry_ms
from lisa.core.redis.flow import Command
from lisa.core.store.replies import counters, pairs, summed
from lisa.core.store.reshard import states_of
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.absorb import Absorb
from lisa.core.transitions.base import text
from lisa.core.transitions.clear import Clear
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.prune import archive_records
from lisa.manager.topic_log import TopicLog

PAGE = 200
MERGED_LIVES_MS = 3_600_000
"""Expiry of a merged history that a manager did not finish."""

log = logging.getLogger(__name__)

Sample = tuple[int, int, Mapping[str, int]]
"""Epoch milliseconds, the index of the stream, and the counters."""


class ShardCleaner:
    """Cleans up the former shards of one topic at a time."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store

    def finish(self, topic: Topic) -> None:
        """Delete the remaining keys of shards that were already taken over. Raises LisaError.

        Runs again after all keys were deleted, because another role may have written a key since.
        """
        (own,) = self._store.drive(states_of(self._store, [own_shard(topic)]))
        layout = Layout.read(own.options.get("layout"))
        for field in own.options:
            if field.startswith(REMOVED) and self._clear(topic, layout, field):
                self._store.call(Configure(topic, {field: None}))

    def step(self, topic: Topic, layout: Layout) -> None:
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
        return bool(records) and min(one.number for one in records.values()) >= last

    def _merge_history(self, topic: Topic, shards: Sequence[Shard]) -> str:
        """Write the merged history of a topic and some shards to a new key; returns the key."""
        keys = self._store.keys.topic(topic)
        merged = f"{keys.history}:{secrets.token_hex(8)}"
        streams = [keys.history, *(self._store.keys.topic(shard).history for shard in shards)]
        samples = [self._samples(number, stream) for number, stream in enumerate(streams)]
        for page in chunks(list(_together(samples)), PAGE):
            commands: list[Command] = [
                ("XADD", merged, f"{at_ms}-0", *_fields(sums)) for at_ms, sums in page
            ]
            commands.append(("PEXPIRE", merged, MERGED_LIVES_MS))
            self._store.drive(self._store.commands(commands))
        return merged

    def _samples(self, number: int, stream: str) -> Iterator[Sample]:
        start = "-"
        while page := self._store.ask("XRANGE", stream, start, "+", "COUNT", PAGE):
            for entry, fields in page:
                found = counters(fields)
                if number:
                    found.pop("journaled", None)
                yield entry_ms(entry), number, found
            start = f"({text(page[-1][0])}"

    def _clear(self, topic: Topic, layout: Layout, field: str) -> bool:
        """Delete the keys of one former shard count; returns whether no key is left."""
        shards = Layout(shards=int(field.removeprefix(REMOVED))).current(topic)
        self._store.ask("ZREM", self._store.keys.topics, *shards)
        seen = self._store.drive(states_of(self._store, shards))
        calls = [
            Clear(shard, layout.number, tuple(one.all_groups))
            for shard, one in zip(shards, seen, strict=True)
        ]
        return [self._store.call(one) for one in calls] == [True] * len(calls)


def _together(streams: Sequence[Iterator[Sample]]) -> Iterator[tuple[int, Mapping[str, int]]]:
    """Sums over several streams, at each instant at which any stream has a sample."""
    latest: dict[int, Mapping[str, int]] = {}
    for at_ms, samples in groupby(heapq.merge(*streams, key=itemgetter(0, 1)), itemgetter(0)):
        latest |= {number: found for _, number, found in samples}
        yield at_ms, summed(latest.values())


def _fields(sample: Mapping[str, int]) -> list[str | int]:
    return [part for name in sorted(sample) for part in (name, sample[name])]
