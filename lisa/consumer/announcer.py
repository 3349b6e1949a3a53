"""Writes the presence records by which managers and operators see a consumer."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable

from lisa.consumer.subscription import Subscription
from lisa.core.delivery.group_resolution import is_emptied
from lisa.core.store import presence
from lisa.core.store.manager_watch import LAST_LOOK_S, ManagerWatch
from lisa.core.store.store import SyncStore
from lisa.core.transitions.forget import Forget


class Announcer:
    """Used by the heartbeat's threads; one thread at a time for each subscription."""

    def __init__(self, store: SyncStore, concurrency: int) -> None:
        self._store = store
        self._concurrency = concurrency
        self._started_ms = int(time.time() * 1000)
        self._written: dict[Subscription, float] = {}
        self._watch = ManagerWatch(store)

    def announce(self, sub: Subscription) -> bool:
        """Renew a presence record that is due; returns whether it was. Raises LisaError."""
        now = time.monotonic()
        if self._written.get(sub, -math.inf) + presence.BEAT.total_seconds() > now:
            return False
        self._write(sub)
        self._written[sub] = now
        return True

    def _write(self, sub: Subscription) -> None:
        """Renew the presence record, list the topic and read its options. Raises LisaError."""
        member = sub.membership
        if member.is_former_shard():
            return
        if member.is_announced and self._store.drive(is_emptied(self._store, sub.shard, sub.name)):
            member.record_missing()
        record = presence.ConsumerPresence(
            name=sub.name,
            topic=sub.topic,
            group=sub.group,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            concurrency=self._concurrency,
            running=len(sub.leases.running()),
            held=len(sub.leases.held),
            handled=sub.stats.handled,
            state=sub.state,
        )
        self._store.drive(presence.announce_consumer(self._store, record, sub.shard))
        member.record_written()
        self._store.drive(self._store.register([sub.shard]))
        options = self._store.drive(self._store.options(sub.shard))
        sub.leases.use_ack_timeout(options.ack_timeout.total_seconds())
        self._store.drive(self._watch.look(sub.shard, sub.group))

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
