"""The readers of a consumer: one for each shard of each topic that it reads."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial

from lisa.consumer.keyed_pool import KeyedPool
from lisa.consumer.options import WantedTopic
from lisa.consumer.reader import Reader
from lisa.consumer.shutdown import ShutdownCalls, give_back
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread, longest_round_s
from lisa.core.model.errors import LisaError
from lisa.core.model.options import HANDLER_SUFFIX
from lisa.core.model.sharding import PLAIN, Shard, Topic, topic_of
from lisa.core.store.presence import handler_name
from lisa.core.store.store import SyncStore, chunks

log = logging.getLogger("lisa.consumer")


class ReaderSet:
    """Starts and stops readers as topics are added and removed, and as their shards change.

    new_reader: creates the reader of a shard for a group (or ""), under a consumer name.
    """

    def __init__(
        self,
        store: SyncStore,
        name: str,
        new_reader: Callable[[Shard, str, str], Reader],
    ) -> None:
        self._store = store
        self._name = name
        self._new_reader = new_reader
        self._wanted: dict[tuple[Topic, str], WantedTopic] = {}
        self._shards: dict[tuple[Topic, str], set[Shard]] = {}
        self._readers: dict[Subscription, Reader] = {}
        self._by_topic: dict[str, list[Subscription]] = {}
        longest_s = longest_round_s(store.connection.address.socket_timeout_s)
        self._pool: KeyedPool[WantedTopic] = KeyedPool("lisa-follow", longest_s=longest_s)
        self._lock = threading.Lock()
        self.is_open = False

    def __len__(self) -> int:
        return len(self._readers)

    def subscriptions(self) -> list[Subscription]:
        """The subscriptions of all readers."""
        return list(self._readers)

    def items(self) -> list[tuple[Subscription, Reader]]:
        """All subscriptions with their readers."""
        return list(self._readers.items())

    def threads(self) -> list[ServiceThread]:
        """The threads that must be alive now."""
        reading = [
            thread
            for sub, one in self.items()
            if not sub.closing.is_set()
            for thread in one.threads()
        ]
        return [*reading, *self._pool.threads()]

    def open(self, all_wanted: Iterable[WantedTopic]) -> None:
        """Start the readers of topics, and those of `take` from now on."""
        self.is_open = True
        for wanted in all_wanted:
            self.take(wanted)

    def close(self) -> dict[Subscription, Reader]:
        """Close all subscriptions, start no more readers, and return the readers."""
        with self._lock:
            self.is_open = False
            readers = dict(self._readers)
        for sub in readers:
            sub.close()
        return readers

    def end_pool(self) -> None:
        """End the threads that read layouts."""
        self._pool.close()

    def has_ended(self, sub: Subscription) -> bool:
        """Whether a subscription's reader has stopped."""
        reader = self._readers.get(sub)
        return reader is not None and reader.ended.is_set()

    def remove(self, sub: Subscription) -> None:
        """Forget a subscription whose reader has stopped."""
        with self._lock:
            if self._readers.pop(sub, None) is not None:
                self._by_topic[sub.topic].remove(sub)

    def take(self, wanted: WantedTopic) -> None:
        """Start a reader for each shard of a topic, unless the topic is read already."""
        with self._lock:
            self._wanted.setdefault((wanted.topic, wanted.group or ""), wanted)
        for shard in self._shards_of(wanted.topic):
            self._read_shard(wanted, shard)

    def _shards_of(self, topic: Topic) -> list[Shard]:
        return (self._store.known_layout(topic) or PLAIN).active(topic)

    def follow(self) -> None:
        """Start readers for new shards and stop readers of removed shards.

        Raises LisaError at the end if a node does not answer. On a cluster, reads the layouts of
        all topics concurrently, because a node may hang.
        """
        with self._lock:
            all_wanted = list(self._wanted.values())
        together = 1 if self._store.has_nodes else max(1, len(all_wanted))
        failed: list[LisaError] = []
        parts = list(chunks(all_wanted, together))
        for some in parts[1:]:
            self._pool.start(some[0], partial(self._follow_some, some, failed))
        for some in parts[:1]:
            self._follow_some(some, failed)
        self._pool.wait()
        if failed:
            raise failed[0]

    def _follow_some(self, some: Sequence[WantedTopic], failed: list[LisaError]) -> None:
        try:
            self._store.drive(self._store.layouts([wanted.topic for wanted in some]))
        except LisaError as error:
            failed.append(error)
            return
        for wanted in some:
            self._follow_one(wanted)

    def _follow_one(self, wanted: WantedTopic) -> None:
        topic, group = wanted.topic, wanted.group or ""
        shards = self._shards_of(topic)
        with self._lock:
            known = set(self._shards.get((topic, group), ()))
        added = [one for one in shards if one not in known]
        if added and self._is_declared(topic, group, known):
            try:
                for shard in added:
                    self._read_shard(wanted, shard)
            except RuntimeError as error:  # the thread limit is reached
                log.warning("topic %s: cannot read all shards, trying again: %s", topic, error)
                return
        for shard in known.difference(shards):
            self._leave_shard(shard, group)

    def _is_declared(self, topic: str, wanted: str, known: Container[Shard]) -> bool:
        """Whether the group still exists: a new reader would declare a removed group again.

        The readers of former shards may have lost the group only because their keys were deleted.
        """
        readers = [
            one
            for one in self.subscriptions()
            if one.shard in known and one.wanted == wanted and not one.closing.is_set()
        ]
        if any(not one.membership.is_removed for one in readers):
            return True
        lost = {one.group for one in readers}
        return bool(lost) and not lost.isdisjoint(self._store.drive(self._store.groups(topic)))

    def _leave_shard(self, shard: Shard, group: str) -> None:
        """Stop reading a removed shard; the heartbeat removes the subscription."""
        with self._lock:
            self._shards.get((topic_of(shard), group), set()).discard(shard)
            left = {
                sub: one
                for sub, one in self._readers.items()
                if sub.shard == shard and sub.wanted == group
            }
        for sub in left:
            sub.close()
        _interrupt(left.values())

    def _read_shard(self, wanted: WantedTopic, shard: Shard) -> None:
        """Start a shard's reader, unless there is one. Raises RuntimeError at the thread limit."""
        group = wanted.group or ""
        with self._lock:
            is_wanted = (wanted.topic, group) in self._wanted
            known = self._by_topic.setdefault(wanted.topic, [])
            is_read = any(
                one.shard == shard and not one.closing.is_set() and one.wanted == group
                for one in known
            )
            if not self.is_open or not is_wanted or is_read:
                return
            name = handler_name(wanted.name) if wanted.name else self._name
            if any(one.shard == shard and one.name == name for one in known):
                # An earlier subscription still holds deliveries under this name; to a reader with
                # the same name they would be entries whose reply was lost.
                name = f"{self._name}-{secrets.token_hex(3)}{HANDLER_SUFFIX}"
            self._shards.setdefault((wanted.topic, group), set()).add(shard)
            reader = self._new_reader(shard, group, name)
            reader.sub.pause(paused=any(one.is_paused_here for one in known if one.wanted == group))
            self._readers[reader.sub] = reader
            known.append(reader.sub)
            try:
                reader.start()
            except RuntimeError:
                self._shards[wanted.topic, group].discard(shard)
                del self._readers[reader.sub]
                known.remove(reader.sub)
                raise

    def unsubscribe(self, topic: str) -> None:
        """Stop reading a topic and release unstarted deliveries.

        The heartbeat removes the subscriptions once their handlers have finished.
        """
        with self._lock:
            self._wanted = {key: one for key, one in self._wanted.items() if key[0] != topic}
            self._shards = {key: one for key, one in self._shards.items() if key[0] != topic}
            readers = {sub: one for sub, one in self._readers.items() if sub.topic == topic}
        for sub in readers:
            sub.close()
        end_reading(readers, ShutdownCalls(self._store))

    def pause(self, topic: str | None, *, paused: bool) -> None:
        """Pause or resume reading in this consumer; `topic=None` means all topics."""
        with self._lock:  # readers started later copy the state of existing readers
            readers = {sub: one for sub, one in self._readers.items() if topic in (None, sub.topic)}
            for sub in readers:
                sub.pause(paused=paused)
        _interrupt(readers.values())


def end_reading(readers: Mapping[Subscription, Reader], last: ShutdownCalls) -> None:
    """Stop closed readers and release their unstarted deliveries."""
    taken = {sub: sub.withdraw() for sub in readers}
    last.make(lambda: _interrupt(readers.values()))
    give_back(taken, last)
    ends = time.monotonic() + last.left_s()
    for reader in readers.values():
        if not reader.is_current:
            last.make(partial(reader.end, ends, is_answered=last.is_answered))
    give_back({sub: sub.withdraw() for sub in readers}, last)


def join_readers(readers: Iterable[Reader], last: ShutdownCalls) -> None:
    """Wait for readers to stop that ran a handler when `end_reading` returned."""
    ends = time.monotonic() + last.left_s()
    for reader in readers:
        if not reader.sub.leases.running():
            reader.ended.wait(max(0.0, ends - time.monotonic()))


def _interrupt(readers: Iterable[Reader]) -> bool:
    """Interrupt readers; returns False, and asks the server no further, if it does not answer."""
    readers = list(readers)
    for reader in readers:
        reader.wake()
    return all(reader.interrupt() for reader in readers)
