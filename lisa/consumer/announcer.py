"""Writes the presence records by which managers and operators see a consumer."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from lisa.consumer.inflight import Held
from lisa.consumer.subscription import Subscription
from lisa.core.delivery.group_resolution import is_emptied
from lisa.core.model.options import TopicOptions
from lisa.core.model.sharding import own_shard
from lisa.core.redis.flow import Command
from lisa.core.store import presence
from lisa.core.store.manager_watch import LAST_LOOK_S, ManagerWatch
from lisa.core.store.replies import microseconds, pairs
from lisa.core.store.store import SyncStore
from lisa.core.transitions.forget import Forget


class Announcer:
    """Used by the heartbeat's threads; one thread at a time for each subscription."""

    def __init__(
        self,
        store: SyncStore,
        concurrency: int,
        subscriptions: Callable[[], Iterable[Subscription]] = tuple,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._concurrency = concurrency
        self._started_ms = int(time.time() * 1000)
        self._written: dict[Subscription, float] = {}
        self._watch = ManagerWatch(store)

    def is_due(self, sub: Subscription, now: float) -> bool:
        """Whether a presence record must be renewed."""
        return self._written.get(sub, -math.inf) + presence.BEAT.total_seconds() <= now

    def announce(self, sub: Subscription) -> bool:
        """Renew a presence record that is due; returns whether it was. Raises LisaError."""
        now = time.monotonic()
        if not self.is_due(sub, now):
            return False
        self._write(sub)
        self._written[sub] = now
        return True

    def announce_together(self, subs: Sequence[Subscription]) -> None:
        """Renew records in two round trips, of topics without shards. Raises LisaError.

        What is not as expected is left to `announce`: a first or a lost record, and any error.
        """
        subs = [
            one for one in subs if one.membership.is_announced and one.shard == own_shard(one.topic)
        ]
        if not subs:
            return
        keys, ask, now = self._store.keys, self._store.commands_once, time.monotonic()
        hashes = [keys.topic(sub.shard).consumers for sub in subs]
        exists = [("HEXISTS", key, sub.name) for key, sub in zip(hashes, subs, strict=True)]
        asked = ask([("TIME",), ("GET", keys.schema), *exists])
        clock, schema, *known = self._store.drive(asked)
        if schema is None or isinstance(schema, Exception) or isinstance(clock, Exception):
            return
        subs = [sub for sub, is_known in zip(subs, known, strict=True) if is_known == 1]
        seen_ms = microseconds(clock) // 1_000
        commands: list[Command] = []
        for sub in subs:
            topic = keys.topic(sub.shard)
            record = msgspec.json.encode(self._record(sub, seen_ms))
            commands += ("HSET", topic.consumers, sub.name, record), ("HGETALL", topic.options)
        replies = iter(self._store.drive(ask(commands)) if subs else ())
        self._store.drive(self._store.register([sub.shard for sub in subs]))
        for sub, written, options in zip(subs, replies, replies, strict=True):
            if not isinstance(written, Exception) and not isinstance(options, Exception):
                self._use(sub, TopicOptions.from_hash(pairs(options)))
                self._written[sub] = now
        self._store.drive(self._watch.look([(sub.shard, sub.group) for sub in subs]))

    def _write(self, sub: Subscription) -> None:
        """Renew the presence record, list the topic and read its options. Raises LisaError."""
        member = sub.membership
        if member.is_former_shard():
            return
        if member.is_announced and self._store.drive(is_emptied(self._store, sub.shard, sub.name)):
            member.record_missing()
        record = self._record(sub)
        self._store.drive(presence.announce_consumer(self._store, record, sub.shard))
        member.record_written()
        self._store.drive(self._store.register([sub.shard]))
        self._use(sub, self._store.drive(self._store.options(sub.shard)))
        self._store.drive(self._watch.look([(sub.shard, sub.group)]))

    def _record(self, sub: Subscription, seen_ms: int = 0) -> presence.ConsumerPresence:
        running, degradation = sub.leases.running(), sub.stats.degradation
        return presence.ConsumerPresence(
            name=sub.name,
            topic=sub.topic,
            group=sub.group,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            seen_ms=seen_ms,
            concurrency=self._concurrency,
            running=len(running),
            held=len(sub.leases.held),
            handled=sub.stats.handled,
            state=sub.state,
            error=degradation.error,
            failing_ms=degradation.failing_ms,
            busy_ms=self._busy_ms(sub, running),
        )

    def _busy_ms(self, sub: Subscription, running: Sequence[Held]) -> int:
        """How long no handler has been free for this topic, and none has begun another message."""
        if sub.slots.free:
            return 0
        if len(running) < sub.slots.size:  # those of other topics have the rest
            running = [held for one in self._subscriptions() for held in one.leases.running()]
        began = max((held.started for held in running), default=time.monotonic())
        return max(0, round((time.monotonic() - began) * 1000))

    @staticmethod
    def _use(sub: Subscription, options: TopicOptions) -> None:
        sub.leases.use_ack_timeout(options.ack_timeout.total_seconds())

    def last_look(self, subscriptions: Iterable[Subscription]) -> None:
        """Warn if messages are overdue because no manager runs; takes a quarter of a second."""
        ends = time.monotonic() + LAST_LOOK_S
        for sub in subscriptions:
            self._store.drive(self._watch.last_look(sub.shard, sub.group))
            if time.monotonic() > ends:
                return

    def leave(self, sub: Subscription) -> None:
        """Delete the presence record and the consumer. Raises LisaError."""
        self._written.pop(sub, None)
        self._store.drive(presence.leave_consumer(self._store, sub.shard, sub.name))
        if sub.group:
            self._store.call(Forget(sub.shard, sub.group, [sub.name], 0))
