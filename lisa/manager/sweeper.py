"""Periodic cleanup.

Ends expired messages, forgets dead consumers, purges old garbage, unlists idle topics, finishes
interrupted group removals, and deletes the records of dead managers and relays.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lisa.core.metrics.numbers import Tally
from lisa.core.model.clock import duration_ms, human
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard
from lisa.core.redis.flow import Command
from lisa.core.store import group_removal, presence
from lisa.core.store.paging import readable
from lisa.core.store.presence import ConsumerPresence, write_refusal
from lisa.core.store.registration import IDLE_AFTER_MS
from lisa.core.store.replies import pairs
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import exact_text, text
from lisa.core.transitions.garbage import Purge
from lisa.core.transitions.groups import Forget
from lisa.core.transitions.upkeep import Expired
from lisa.manager.bulk_reads import ask_each
from lisa.manager.expirer import Expirer
from lisa.manager.topic_log import TopicLog

PAGE = 200
MOST_PAGES = 100
"""The most pages per list in one run; the next run continues."""
MOST_CALLS = 500
"""The most calls in one run to settle the messages of removed groups."""

RELAY_KEPT_MS = duration_ms(timedelta(days=1))
"""How long the record of a dead relay is kept if no other relay serves its table."""

log = logging.getLogger(__name__)


class Sweeper:
    """Cleans up one topic per step.

    configured: whether a topic is in the configuration; such topics are never unlisted.
    stopped: checked during long work; true ends the work early.
    doubts_clock: whether the server's clock may be wrong; then no garbage is purged.
    is_list_there: whether the node that holds the list of topics answers.
    """

    def __init__(
        self,
        store: SyncStore,
        expirer: Expirer,
        configured: Callable[[str], bool],
        *,
        stopped: Callable[[], bool] = lambda: False,
        doubts_clock: Callable[[], bool] = lambda: False,
        is_list_there: Callable[[], bool] = lambda: True,
    ) -> None:
        self.moved = Tally()
        self._refused = -math.inf
        self._store = store
        self._expirer = expirer
        self._configured = configured
        self._stopped = stopped
        self._doubts_clock = doubts_clock
        self._is_list_there = is_list_there

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Topics that may need a step. Raises ServerUnavailable.

        Also updates the known groups of the topics, in case announcements were lost.
        """
        if not topics:
            return []
        is_list_there = self._is_list_there()  # a topic stays while the list cannot be read
        found = ask_each(self._store, {topic: self._questions(topic) for topic in topics})
        long_ago = self._now_ms(topics[0]) - IDLE_AFTER_MS if is_list_there else -math.inf
        return [
            topic for topic, replies in found.items() if self._is_worth_it(topic, replies, long_ago)
        ]

    def _questions(self, topic: str) -> list[Command]:
        keys = self._store.keys.topic(topic)
        names = self._store.known_groups(topic) or ()
        own = [keys.group(name) for name in names]
        return [
            ("EXISTS", keys.expiry, keys.consumers, *[group.garbage for group in own]),
            ("EXISTS", *self._keys_in_use(topic, names)),
            ("ZSCORE", self._store.keys.topics, topic),
            ("HKEYS", keys.groups),
            ("HKEYS", keys.options),
            *[
                ("XINFO", "CONSUMERS", group.ready, name)
                for group, name in zip(own, names, strict=True)
            ],
        ]

    def _is_worth_it(self, topic: str, replies: Sequence[Any], long_ago: float) -> bool:
        if any(isinstance(reply, Exception) for reply in replies):
            return True
        aging, used, seen, declared, options, *consumers = replies
        groups = tuple(sorted(text(name) for name in declared))
        if groups != self._store.known_groups(topic):
            self._store.drive(self._store.groups(topic))
            return True
        is_left = not used and _is_idle(seen, long_ago) and not self._configured(topic)
        return bool(aging or any(consumers) or group_removal.marked(options) or is_left)

    def step(self, topic: str) -> bool:
        """Clean up one topic; returns whether the topic is idle and not listed any more.

        Raises LisaError.
        """
        now_ms = self._now_ms(topic)
        self.expire(topic, now_ms)
        records = self._store.drive(presence.consumers(self._store, topic))
        alive = {record.name for record in self._running(topic, records, now_ms)}
        gone = [record for record in records if record.name not in alive]
        self._finish_removals(topic)
        groups = self._store.drive(self._store.groups(topic))
        for group in groups:
            try:
                self._forget(topic, group, alive, gone)
                self._purge(topic, group, now_ms)
            except LisaError as error:
                if isinstance(error, ServerUnavailable) or self._has(topic, group):
                    raise  # else the group was removed, or the shard deleted, meanwhile
        for record in gone:
            if record.group not in groups:  # no group has pending entries of this consumer
                self._store.drive(presence.leave_consumer(self._store, topic, record.name))
        return not self._configured(topic) and self._unregister(topic, groups, now_ms)

    def _has(self, topic: str, group: str) -> bool:
        return group in self._store.drive(self._store.groups(topic))

    def expire(self, topic: str, now_ms: int) -> int:
        """End messages past their ttl, except those in flight; returns how many ended."""
        expiry, ended, passed = self._store.keys.topic(topic).expiry, 0, 0
        for _ in range(MOST_PAGES):
            found = self._store.ask("ZRANGEBYSCORE", expiry, "-inf", now_ms, "LIMIT", passed, PAGE)
            if not found:
                break
            outcomes = self._expirer.end(topic, [exact_text(message_id) for message_id in found])
            # Skip the messages that stay in the list; those that ended were removed from it.
            stays = (Expired.IN_FLIGHT, Expired.NOT_DUE, Expired.KEPT)
            passed += sum(outcome in stays for outcome in outcomes)
            ended += outcomes.count(Expired.EXPIRED)
        if ended:
            TopicLog(log, topic).info("ended %d messages past their ttl", ended)
        return ended

    def _finish_removals(self, topic: str) -> None:
        groups = self._store.drive(group_removal.being_removed(self._store, topic))
        work = group_removal.Work(calls=MOST_CALLS, stopped=self._stopped)
        for group in sorted(groups):
            flow = group_removal.finish(
                self._store, Shard(topic), group, group_removal.ABANDONED_MS, work
            )
            found = self._store.drive(flow)
            if found and (found.settled or found.is_done):
                TopicLog(log, topic, group).warning(
                    "%s an interrupted removal of the group: %d messages settled",
                    "finished" if found.is_done else "continued",
                    found.settled,
                )

    def managers(self) -> bool:
        """Delete the records of dead managers; returns whether there were any. Raises LisaError."""
        now_ms = self._store.drive(self._store.server_time_ms(self._store.keys.managers))
        records = self._store.drive(presence.managers(self._store))
        alive = presence.alive(records, now_ms)
        is_refused = self._refuses_heartbeats(self._store.keys.managers)
        for record in records:
            if record not in alive and not is_refused:
                self._store.drive(presence.leave_manager(self._store, record.name))
        if not is_refused:
            self._relays(now_ms)
        return len(alive) < len(records)

    def _relays(self, now_ms: int) -> None:
        """Delete the records of dead relays, after a day if no other relay serves the table."""
        records = self._store.drive(presence.relays(self._store))
        alive = presence.alive(records, now_ms)
        served = {record.table for record in alive}
        for record in records:
            if record not in alive and (
                record.table in served or record.seen_ms < now_ms - RELAY_KEPT_MS
            ):
                self._store.drive(presence.leave_relay(self._store, record.name))

    def _running(
        self, topic: str, records: list[ConsumerPresence], now_ms: int
    ) -> list[ConsumerPresence]:
        """The records of consumers that may be running."""
        alive = presence.alive(records, now_ms)
        if len(alive) < len(records) and self._refuses_heartbeats(
            self._store.keys.topic(topic).consumers
        ):
            return records
        return alive

    def _refuses_heartbeats(self, key: str) -> bool:
        """Whether no heartbeat can be written, or could a moment ago; then silence says nothing."""
        if self._store.drive(write_refusal(self._store, key)):
            self._refused = time.monotonic()
        return time.monotonic() - self._refused < 2 * presence.BEAT.total_seconds()

    def _forget(
        self, topic: str, group: str, alive: set[str], gone: list[ConsumerPresence]
    ) -> None:
        ready = self._store.keys.topic(topic).group(group).ready
        known = self._store.ask("XINFO", "CONSUMERS", ready, group)
        names = {text(pairs(info)[b"name"]) for info in known}
        names |= {record.name for record in gone if record.group == group}
        for part in chunks(sorted(names - alive), PAGE):
            forgotten = self._store.call(Forget(topic, group, part, presence.GONE_AFTER_MS))
            if forgotten:
                TopicLog(log, topic, group).info("forgot consumers %s", ", ".join(forgotten))

    def _purge(self, topic: str, group: str, now_ms: int) -> None:
        keep_ms = duration_ms(self._store.drive(self._store.options(topic)).garbage_keep)
        garbage = self._store.keys.topic(topic).group(group).garbage
        if self._doubts_clock():
            return
        # Purging cannot be undone, so the age counts by the server's and this machine's clock.
        before_ms, purged = min(now_ms, int(time.time() * 1e3)) - keep_ms, 0
        for _ in range(MOST_PAGES):
            found = self._store.ask("ZRANGEBYSCORE", garbage, "-inf", before_ms, "LIMIT", 0, PAGE)
            ids, foreign = readable(found)
            if foreign:  # another program wrote them; no message has them
                self._store.ask("ZREM", garbage, *foreign)
            count = len(foreign)
            for part in chunks(ids, self._store.batch_size(topic, Purge)):
                done = self._store.call(Purge(topic, group, part, before_ms))
                count += done.count(True)
            purged += count
            if count == 0:
                break
        if purged:
            self.moved.add(purged, "purged")
            TopicLog(log, topic, group).warning(
                "purged %d garbage messages older than %s", purged, human(keep_ms)
            )

    def _unregister(self, topic: str, groups: tuple[str, ...], now_ms: int) -> bool:
        if not self._is_list_there():
            return False
        seen = self._store.ask("ZSCORE", self._store.keys.topics, topic)
        if not _is_idle(seen, now_ms - IDLE_AFTER_MS) or self._is_used(topic, groups):
            return False
        if self._store.ask("ZREM", self._store.keys.topics, topic):
            TopicLog(log, topic).info("unlisted, because the topic is idle")
        return True

    def relist_if_used(self, topic: str) -> bool:
        """List a topic again if it got messages while it was unlisted; returns whether it did.

        Call this after all services have forgotten the topic. Raises LisaError.
        """
        used = self._is_used(topic, self._store.drive(self._store.groups(topic)))
        if used:
            self._store.drive(self._store.register([topic]))
        else:
            self._store.forget(topic)
        return used

    def _is_used(self, topic: str, groups: tuple[str, ...]) -> bool:
        return bool(self._store.ask("EXISTS", *self._keys_in_use(topic, groups)))

    def _keys_in_use(self, topic: str, groups: tuple[str, ...]) -> list[str]:
        """Keys that exist only while the topic has messages, events, consumers or schedules."""
        keys = self._store.keys.topic(topic)
        found = [keys.waiting, keys.consumers, keys.events, keys.schedules]
        for group in groups:
            own = keys.group(group)
            found += [own.entries, own.retry, own.garbage, keys.lanes(group).parked]
        return found

    def _now_ms(self, topic: str) -> int:
        key = self._store.keys.topic(topic).waiting
        return self._store.drive(self._store.server_time_ms(key))


def _is_idle(seen: Any, long_ago: float) -> bool:
    """Whether no client has registered the topic since, or another manager has unlisted it."""
    return long_ago > -math.inf if seen is None else float(seen) < long_ago
