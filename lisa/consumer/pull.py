"""Pull deliveries for programs with their own loop (`Consumer.pull`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from lisa.consumer.delivery import Delivery
from lisa.consumer.signal_queue import SignalSender
from lisa.core.delivery.group_resolution import declared_again, join, wait_for_group, was_emptied
from lisa.core.delivery.source import (
    LOOK_AGAIN_S,
    MOST,
    GroupSource,
    Taken,
)
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import GroupRemoved, InvalidMessage, LisaError, ServerUnavailable
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.sharding import Topic, own_shard, topic_of
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.errors import ClientError, passes, translated
from lisa.core.redis.flow import Flow
from lisa.core.store import presence
from lisa.core.store.manager_watch import ManagerWatch
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Retried

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""Socket timeout allowance for one blocking read."""


class Puller:
    """Pulls for one consumer. Safe to share between threads."""

    def __init__(
        self,
        store: SyncStore,
        address: Address,
        wanted: str,
        name: str,
        signal_sender: SignalSender,
    ) -> None:
        self._store = store
        self._waiting = Connection(address.blocking_for(LONGEST_WAIT_S))
        self._wanted = wanted
        self._name = name
        self._signal_sender = signal_sender
        self._sources: dict[str, GroupSource] = {}
        self._removed: dict[str, str] = {}
        self._announced: dict[str, float] = {}
        self._watch = ManagerWatch(store)
        self._looked = -math.inf

    def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> list[Delivery]:
        """Up to `batch` deliveries; waits up to `wait` for the first. Raises LisaError."""
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST:
            raise InvalidMessage(f"a pull takes 1 to {MOST} messages, not {batch!r}")
        timeout_ms = None if ack_timeout is None else _checked_timeout_ms(ack_timeout)
        name, ends = Topic(topic), time.monotonic() + wait.total_seconds()
        while True:
            source = self._source(name, ends)
            if source is None:
                return self._nothing(name, "")
            try:
                found = self._pull(source, batch, ends, timeout_ms)
            except GroupRemoved:
                self._group_removed(name, source.group)
            else:
                return found or self._nothing(name, source.group)

    def _nothing(self, topic: Topic, group: str) -> list[Delivery]:
        """No deliveries; warns if that is because no manager runs."""
        now = time.monotonic()
        if now - self._looked >= presence.BEAT.total_seconds():
            self._looked = now
            self._store.drive(self._watch.look(topic, group))
        return []

    def _pull(
        self, source: GroupSource, batch: int, ends: float, timeout_ms: int | None
    ) -> list[Delivery]:
        while True:
            taken = self._store.drive(source.take(batch, timeout_ms))
            if taken.entries:
                found = self._opened(source, taken, batch, timeout_ms)
                if found:
                    return found
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return []
            if not taken.entries:
                self._wait(source, taken, left_s)

    def _opened(
        self, source: GroupSource, taken: Taken, batch: int, timeout_ms: int | None
    ) -> list[Delivery]:
        """Deliveries for the caller. Releases entries beyond `batch` or `AHEAD_BYTES`."""
        try:
            opened = self._store.drive(source.open(taken, taken.entries[:batch], timeout_ms))
        except ServerUnavailable:
            source.repeat(taken)
            raise
        for one, outcome in self._store.drive(source.settle_unfit(opened)):
            if isinstance(outcome, Retried):
                self._signal_sender.fire_failure(one.message, one.fault, outcome)
            elif outcome is not Acked.STALE:
                self._signal_sender.fire(self._signal_sender.expired, one.message)
        found = [
            Delivery(self._store, self._signal_sender, self._name, one, timeout_ms)
            for one in opened
            if one is not None and one.is_for_handler
        ]
        left = [(entry.id, entry.entry) for entry in taken.entries[len(opened) :]]
        if left:
            self._release(source, left)
        return found

    def _release(self, source: GroupSource, receipts: list[tuple[str, str]]) -> None:
        try:
            self._store.call_by_id(Release(source.topic, source.group, receipts))
        except LisaError as error:
            log.warning(
                "topic %s: %d messages could not be released and return after their ack timeout: "
                "%s",
                source.topic,
                len(receipts),
                error,
            )

    def _wait(self, source: GroupSource, taken: Taken, left_s: float) -> None:
        """Wait until a stream of the group has a new entry, or the time is up."""
        pause_s, command = source.wait_for(taken.empty, left_s)
        if command is None:
            time.sleep(pause_s)
            return
        try:
            self._waiting.execute(command)
        except ClientError as error:
            # The next pull is repeated with patience, and raises if the server stays away.
            if not passes(error):
                raise translated(error, self._store.where) from error

    def _group_removed(self, topic: Topic, group: str) -> None:
        self._sources.pop(topic, None)
        if not self._store.drive(was_emptied(self._store, own_shard(topic), self._name, group)):
            self._removed[topic] = group  # must not be declared again from here
        for shard in list(self._announced):  # other threads may pull
            if topic_of(shard) == topic:
                self._announced.pop(shard, None)

    def close(self, store: SyncStore) -> list[Callable[[], None]]:
        """Close the connection.

        Returns one call per shard that removes this consumer's record there, on the given store.
        Each raises LisaError.
        """
        self._waiting.close()
        shards = list(self._announced)
        self._announced.clear()
        return [
            partial(store.drive, presence.leave_consumer(store, shard, self._name))
            for shard in shards
        ]

    def _source(self, topic: Topic, ends: float) -> GroupSource | None:
        source = self._sources.get(topic)
        if source is None:
            group = (
                self._removed_group(topic, ends)
                if topic in self._removed
                else self._group(topic, ends)
            )
            if group is None:
                return None
            source = self._sources[topic] = GroupSource(
                self._store, topic, group, self._name, partial(self._announce, group)
            )
        return source

    def _group(self, topic: Topic, ends: float) -> str | None:
        return self._store.drive(
            wait_for_group(
                self._store,
                own_shard(topic),
                self._name,
                partial(join, self._store, own_shard(topic), self._wanted),
                lambda: ends - time.monotonic(),
                announced=lambda _: self._announced.update({topic: -math.inf}),
                is_patient=False,
            )
        )

    def _removed_group(self, topic: Topic, ends: float) -> str:
        """The removed group, once it is declared again. Raises GroupRemoved."""
        before = self._removed[topic]
        while True:
            group = self._store.drive(
                declared_again(self._store, own_shard(topic), before, self._wanted)
            )
            if group:
                self._removed.pop(topic, None)
                return group
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise GroupRemoved(f"group {before!r} was removed from topic {topic!r}")
            time.sleep(min(LOOK_AGAIN_S, left_s))

    def _announce(self, group: str, shard: str) -> Flow[None]:
        now = time.monotonic()
        if now - self._announced.get(shard, -math.inf) < presence.BEAT.total_seconds():
            return
        self._announced[shard] = now
        record = presence.ConsumerPresence(name=self._name, topic=topic_of(shard), group=group)
        yield from presence.announce_consumer(self._store, record, shard)


def _checked_timeout_ms(value: timedelta) -> int:
    if not MIN_ACK_TIMEOUT <= value <= MAX_ACK_TIMEOUT:
        raise InvalidMessage(f"an ack timeout is {MIN_ACK_TIMEOUT} to {MAX_ACK_TIMEOUT}: {value}")
    return duration_ms(value)
