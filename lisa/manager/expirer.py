"""End messages past their ttl or too late for their late policy, and fire their signals.

The late policy `collapse` needs to know newer occurrences of a schedule. A script reads only keys
that it was given, so the manager names the ids that may be newer. Of these the script checks which
ones wait; what was promoted stays promoted, so a read before suffices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import InvalidMessage, LisaError
from lisa.core.model.late import LateAction, split_policy
from lisa.core.model.recurring.definition import MOST_CAUGHT_UP, Record
from lisa.core.model.recurring.ticks import is_overdue, ticks_between
from lisa.core.model.sharding import KEY_END, topic_of
from lisa.core.store.schedules import get_records, tick_all
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.upkeep import Expire, Expired
from lisa.manager.signal_queue import SignalQueue

_OCCURRENCE = re.compile(rf"(?:[^{KEY_END}]+{KEY_END})?(.+)@(-?\d+)", re.DOTALL)
_RAN = ("acked", "purged")
MOST_NAMED = 3
"""Newer waiting occurrences that a call names for one message; a single one suffices."""

_MOVED = (Expired.EXPIRED, Expired.SKIPPED, Expired.GARBAGE)


class Expirer:
    """Ends messages for the promoter, which comes across them, and the sweeper."""

    def __init__(self, store: SyncStore, signals: SignalQueue) -> None:
        self.moved = Tally()
        self._store = store
        self._signals = signals
        self.unanswered: dict[str, list[tuple[Expire, list[Inspection]]]] = {}
        """Calls without a reply, by topic. They may have ended messages, so `end` repeats them."""

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self.unanswered.pop(topic, None)

    def end(self, topic: str, ids: Sequence[str]) -> list[Expired]:
        """End the messages that are past their ttl or too late, and not in flight.

        ids: as `exact_text` decodes them. Drops those that are not UTF-8: another program wrote
            them, and no message has them.

        Returns the outcomes in no particular order. Raises LisaError.
        """
        self._repeat(topic)
        ids, foreign = _split(ids)
        outcomes = [Expired.ORPHAN] * len(foreign)
        if foreign:
            keys = self._store.keys.topic(topic)
            for zset in (keys.waiting, keys.expiry):
                self._store.ask("ZREM", zset, *foreign)
        listening = self._signals.listens_to_ends(topic)
        for part in chunks(ids, self._store.batch_size(topic, Inspect)):
            before = self._store.call(Inspect(topic, part)) if listening else []
            newer = _newer_occurrences(self._store, topic, part)
            outcomes += self._run(Expire(topic, part, newer), before)
        return outcomes

    def _repeat(self, topic: str) -> None:
        owed = self.unanswered.pop(topic, [])
        while owed:
            try:
                self._run(*owed.pop())
            except LisaError:
                self.unanswered[topic] += owed
                raise

    def _run(self, call: Expire, before: list[Inspection]) -> list[Expired]:
        try:
            ended = self._store.call(call)
        except LisaError:
            self.unanswered.setdefault(call.topic, []).append((call, before))
            raise
        for message_id, outcome, inspection in zip(call.ids, ended, before, strict=False):
            if outcome in _MOVED:
                self._signals.ended(call.topic, message_id, inspection, outcome)
        for kind in _MOVED:
            self.moved.add(ended.count(kind), kind.value)
        return ended


def _split(ids: Sequence[str]) -> tuple[list[str], list[bytes]]:
    """Ids of messages, and members of other programs that are not UTF-8."""
    own: list[str] = []
    foreign: list[bytes] = []
    for message_id in ids:
        try:
            message_id.encode()
        except UnicodeEncodeError:
            foreign.append(message_id.encode("utf-8", "surrogateescape"))
        else:
            own.append(message_id)
    return own, foreign


def _newer_occurrences(
    store: SyncStore, shard: str, ids: Sequence[str]
) -> Sequence[Sequence[str] | None]:
    """For each id, newer occurrences of its schedule that wait; None if one was promoted.

    Empty if no policy of these messages is `collapse`. Lets the schedules create first what they
    owe, so that the newest occurrence exists. Raises LisaError.
    """
    found = {
        message_id: match for message_id in ids if (match := _OCCURRENCE.fullmatch(message_id))
    }
    collapsing = _collapsing(store, shard, list(found)) if found else ()
    if not collapsing:
        return ()
    ticks: dict[str, dict[str, int]] = {}
    for message_id in collapsing:
        ticks.setdefault(found[message_id][1], {})[message_id] = int(found[message_id][2])
    newer: dict[str, Sequence[str] | None] = {}
    key = store.keys.topic(shard).waiting
    now_ms = store.drive(store.server_time_ms(key))
    records = _records(store, topic_of(shard), list(ticks), now_ms)
    for name, own in ticks.items():
        newer |= _of_schedule(store, shard, name, own, record=records.get(name), now_ms=now_ms)
    return [newer.get(message_id, ()) for message_id in ids]


def _collapsing(store: SyncStore, shard: str, ids: Sequence[str]) -> Sequence[str]:
    keys = store.keys.topic(shard)
    topics = store.ask("HGET", keys.options, "late")
    own = store.ask("HMGET", keys.policy, *ids)
    collapse = f",{LateAction.COLLAPSE}"

    def policy(stored: bytes | None) -> str:
        late = split_policy(text(stored)).late if stored else None
        return late or (text(topics) if topics else "")

    return [
        message_id
        for message_id, mine in zip(ids, own, strict=True)
        if policy(mine).endswith(collapse)
    ]


def _records(
    store: SyncStore, topic: str, names: Sequence[str], now_ms: int
) -> Mapping[str, Record]:
    """The schedules' records, after they created what they owe.

    Without unreadable ones, which the scheduler reports.
    """
    records = store.drive(get_records(store, topic, names))
    overdue = [name for name, record in records.items() if is_overdue(record, now_ms)]
    if overdue:
        store.drive(tick_all(store, topic, overdue, now_ms))
        records |= store.drive(get_records(store, topic, overdue))
    return records


def _of_schedule(
    store: SyncStore,
    shard: str,
    name: str,
    own: Mapping[str, int],
    *,
    record: Record | None,
    now_ms: int,
) -> dict[str, Sequence[str] | None]:
    """The answer for the occurrences `own` of one schedule, id -> tick."""
    topic, waiting, promoted = topic_of(shard), dict(own), set[int]()
    layout = store.known_layout(topic)
    if record is not None:
        try:
            ticks = ticks_between(record, min(own.values()), now_ms, MOST_CAUGHT_UP)
        except InvalidMessage:  # a zone that this machine does not know; the scheduler reports it
            ticks = []
        named = {record.definition.occurrence_id(name, tick): tick for tick in ticks}
        for message_id, seen in _inspected(store, shard, list(named)).items():
            has_run = seen.tombstone is not None and seen.tombstone.state in _RAN
            is_due = seen.waiting_due_ms is not None and seen.waiting_due_ms <= now_ms
            # The script of another shard cannot check it.
            is_elsewhere = layout is not None and layout.shard_for(topic, message_id) != shard
            if seen.group_states or has_run or (is_due and is_elsewhere):
                promoted.add(named[message_id])
            elif is_due:
                waiting[message_id] = named[message_id]
    newest = sorted(waiting, key=lambda message_id: -waiting[message_id])
    last = max(promoted, default=None)
    return {
        message_id: None
        if last is not None and last > tick
        else [other for other in newest if waiting[other] > tick][:MOST_NAMED]
        for message_id, tick in own.items()
    }


def _inspected(store: SyncStore, shard: str, ids: Sequence[str]) -> dict[str, Inspection]:
    seen: dict[str, Inspection] = {}
    for part in chunks(ids, store.batch_size(shard, Inspect)):
        call = Inspect(topic_of(shard), part, bodies=False)
        seen |= zip(part, store.call_by_id(call), strict=True)
    return seen
