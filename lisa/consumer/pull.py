"""Pull deliveries for programs with their own loop: `Consumer.pull`, `AsyncConsumer.pull`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import MaxConnectionsError

from lisa.consumer.signal_queue import SignalSender
from lisa.core.delivery.group_resolution import declared_again, join, wait_for_group, was_emptied
from lisa.core.delivery.source import (
    CUT_SHORT,
    LOOK_AGAIN_S,
    MOST,
    Delivered,
    GroupSource,
    Taken,
)
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import GroupRemoved, InvalidMessage, LisaError
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.sharding import Topic, own_shard, topic_of
from lisa.core.redis.errors import ClientError, passes, translated
from lisa.core.redis.flow import Command, Flow, Link, Pause
from lisa.core.store import presence
from lisa.core.store.manager_watch import ManagerWatch
from lisa.core.store.store import Store
from lisa.core.transitions.release import Release

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""Longest wait of a blocking read; its connection's socket timeout allows for it."""

D = TypeVar("D")


class _Read(NamedTuple):
    """A blocking read, which needs a connection of its own."""

    link: Link
    command: Command

    def run(self, _link: object) -> Any:
        return self.link.execute(self.command)

    def arun(self, _link: object) -> Any:
        return self.link.execute(self.command)


class Puller(Generic[D]):
    """Pulls for one consumer, as flows. Threads or tasks may share it.

    waiting: the connection for reads that block, for up to `LONGEST_WAIT_S`.
    wanted: the group to declare, or "" for the topic's only group.
    new_delivery: makes a delivery for the caller; the second argument is its ack timeout in ms.
    """

    def __init__(
        self,
        store: Store,
        waiting: Link,
        wanted: str,
        name: str,
        signal_sender: SignalSender,
        *,
        new_delivery: Callable[[Delivered, int | None], D],
    ) -> None:
        self._store = store
        self._waiting = waiting
        self._wanted = wanted
        self._name = name
        self._signal_sender = signal_sender
        self._new_delivery = new_delivery
        self._sources: dict[str, GroupSource] = {}
        self._removed: dict[str, str] = {}
        self._announced: dict[str, float] = {}
        self._watch = ManagerWatch(store)
        self._looked: dict[Topic, float] = {}

    def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> Flow[list[D]]:
        """Up to `batch` deliveries; waits up to `wait` for the first. Raises LisaError."""
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST:
            raise InvalidMessage(f"a pull takes 1 to {MOST} messages, not {batch!r}")
        timeout_ms = None if ack_timeout is None else _checked_timeout_ms(ack_timeout)
        name, ends = Topic(topic), time.monotonic() + wait.total_seconds()
        while True:
            source = yield from self._source(name, ends)
            if source is None:
                return (yield from self._nothing(name, ""))
            try:
                found = yield from self._pull(source, batch, ends, timeout_ms)
            except GroupRemoved:
                yield from self._group_removed(name, source.group)
            else:
                return found or (yield from self._nothing(name, source.group))

    def _nothing(self, topic: Topic, group: str) -> Flow[list[D]]:
        """Return no deliveries; warn if messages are overdue because no manager runs."""
        now = time.monotonic()
        if now - self._looked.get(topic, -math.inf) >= presence.BEAT.total_seconds():
            self._looked[topic] = now
            yield from self._watch.look([(topic, group)])
        return []

    def _pull(
        self, source: GroupSource, batch: int, ends: float, timeout_ms: int | None
    ) -> Flow[list[D]]:
        while True:
            taken = yield from source.take(batch, timeout_ms)
            if taken.entries:
                found = yield from self._opened(source, taken, batch, timeout_ms)
                if found:
                    return found
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return []
            if not taken.entries:
                yield from self._wait(source, taken, left_s)

    def _opened(
        self, source: GroupSource, taken: Taken, batch: int, timeout_ms: int | None
    ) -> Flow[list[D]]:
        """Deliveries for the caller. Releases entries beyond `batch` or `AHEAD_BYTES`."""
        try:
            opened = yield from source.open(taken, taken.entries[:batch], timeout_ms)
            self._signal_sender.fire_unfit((yield from source.settle_unfit(opened)))
            left = [(entry.id, entry.entry) for entry in taken.entries[len(opened) :]]
            if left:
                yield from self._release(source, left)
        except CUT_SHORT:
            source.repeat(taken)
            raise
        return [
            self._new_delivery(one, timeout_ms)
            for one in opened
            if one is not None and one.is_for_handler
        ]

    def _release(self, source: GroupSource, receipts: list[tuple[str, str]]) -> Flow[None]:
        try:
            yield from self._store.run_by_id(Release(source.topic, source.group, receipts))
        except LisaError as error:
            log.warning(
                "topic %s: %d messages could not be released and return after their ack timeout: "
                "%s",
                source.topic,
                len(receipts),
                error,
            )

    def _wait(self, source: GroupSource, taken: Taken, left_s: float) -> Flow[None]:
        """Wait until a stream of the group has a new entry, or the time is up."""
        pause_s, command = source.wait_for(taken.empty, left_s)
        if command is None:
            yield Pause(pause_s)
            return
        try:
            yield _Read(self._waiting, command)
        except MaxConnectionsError:  # a limit in the server's URL
            yield Pause(min(LOOK_AGAIN_S, left_s))
        except ClientError as error:
            # The next pull is retried with patience, and raises if the server stays unavailable.
            if not passes(error):
                raise translated(error, self._store.where) from error

    def _group_removed(self, topic: Topic, group: str) -> Flow[None]:
        self._sources.pop(topic, None)
        if not (yield from was_emptied(self._store, own_shard(topic), self._name, group)):
            self._removed[topic] = group  # this consumer must not declare it again
        for shard in list(self._announced):  # other threads may pull
            if topic_of(shard) == topic:
                self._announced.pop(shard, None)

    @property
    def looks(self) -> set[Any]:
        """The running threads or tasks that check for a manager."""
        return self._watch.running

    def leave(self, store: Store) -> list[Flow[None]]:
        """Flows for the given store: release what is left, and remove this consumer's records."""
        sources, shards = list(self._sources.values()), list(self._announced)
        self._announced.clear()
        return [
            *(one.give_back(store) for one in sources if one.may_hold_some),
            *(presence.leave_consumer(store, shard, self._name) for shard in shards),
        ]

    def _source(self, topic: Topic, ends: float) -> Flow[GroupSource | None]:
        source = self._sources.get(topic)
        if source is None:
            group = yield from (
                self._removed_group(topic, ends)
                if topic in self._removed
                else self._group(topic, ends)
            )
            if group is None:
                return None
            announce = partial(self._announce, group)
            source = GroupSource(self._store, topic, group, self._name, announce)
            source = self._sources.setdefault(topic, source)  # another pull may have been faster
        return source

    def _group(self, topic: Topic, ends: float) -> Flow[str | None]:
        return wait_for_group(
            self._store,
            own_shard(topic),
            self._name,
            partial(join, self._store, own_shard(topic), self._wanted),
            lambda: ends - time.monotonic(),
            announced=lambda _: self._announced.update({topic: -math.inf}),
            is_patient=False,
        )

    def _removed_group(self, topic: Topic, ends: float) -> Flow[str]:
        """The removed group, once it is declared again. Raises GroupRemoved."""
        before = self._removed[topic]
        while True:
            group = yield from declared_again(self._store, own_shard(topic), before, self._wanted)
            if group:
                self._removed.pop(topic, None)
                return group
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise GroupRemoved(f"group {before!r} was removed from topic {topic!r}")
            yield Pause(min(LOOK_AGAIN_S, left_s))

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
