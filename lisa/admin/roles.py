"""Lists consumers, managers and relays, including gone ones, and topics that lack consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

from lisa.admin.reading import ask_all, counted_pairs, pending_entries, shards, stream_ids
from lisa.admin.topics import TopicState
from lisa.core.model.clock import duration_ms, human
from lisa.core.redis.flow import Flow
from lisa.core.store import presence
from lisa.core.store.presence import (
    ConsumerPresence,
    ManagerPresence,
    RelayPresence,
    write_refusal,
    write_refusals,
)
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.base import text

TOPICS_PER_STEP = 100


P = TypeVar("P", ConsumerPresence, ManagerPresence, RelayPresence)

MOST_NAMED = 5

MOST_TOPICS = 1_000
"""Of more topics, consumers are not read."""


_HANDLED = ("acked", "retried", "deferred", "garbage")
"""Counters of messages that a handler had."""


@dataclass(frozen=True, slots=True)
class RolePresence(Generic[P]):
    """A role's presence record; `silent_ms` is the time since its last heartbeat.

    is_unknown: it has no heartbeat, but the server refuses writes, so it may be running.
    """

    record: P
    silent_ms: int
    alive: bool
    is_unknown: bool = False

    @property
    def state(self) -> str:
        """alive, gone or unknown."""
        return "alive" if self.alive else "unknown" if self.is_unknown else "gone"


def consumers(
    store: Store, topics: Sequence[str] = ()
) -> Flow[list[RolePresence[ConsumerPresence]]]:
    """The consumers of the given topics, or of all registered topics."""
    names = list(topics) or (yield from store.topics())
    now_ms = yield from store.server_time_ms()
    found: list[RolePresence[ConsumerPresence]] = []
    keys: list[str] = []
    for part in chunks(names, TOPICS_PER_STEP):
        asked = yield from counted_pairs(store, part)
        replies = yield from ask_all(
            store, [("HGETALL", store.keys.topic(shard).consumers) for _, shard in asked]
        )
        records = grouped(
            ((topic, record.name), record)
            for (topic, _), reply in zip(asked, replies, strict=True)
            for record in presence.records_in(reply or [], ConsumerPresence)
        )
        found += [_seen(presence.whole(parts), now_ms) for parts in records.values()]
        keys += [store.keys.topic(topic).consumers for topic, _ in records]
    return (yield from _judged(store, found, keys))


@dataclass(frozen=True, slots=True)
class InFlightMessage:
    """A message in flight; `id` is None if its entry is gone.

    idle_ms: time since its lease began or was extended.
    """

    id: str | None
    group: str
    due_ms: int | None
    idle_ms: int


def held(store: Store, topic: str, consumer: str, *, limit: int) -> Flow[list[InFlightMessage]]:
    """Messages that a consumer has in flight, in all groups, oldest deliveries first."""
    found: list[InFlightMessage] = []
    for shard in (yield from shards(store, topic)):
        for group in (yield from store.groups(shard)):
            key = store.keys.topic(shard).group(group).ready
            for row, item in (yield from pending_entries(store, key, group, "-", limit, consumer)):
                _, one, due = stream_ids([item])[0] if item else ("", None, None)
                name = None if one is None else text(one)
                due_ms = int(due) if due is not None and due.isdigit() else None
                found.append(InFlightMessage(name, group, due_ms, int(row[2])))
    return sorted(found, key=lambda one: -one.idle_ms)[:limit]


def managers(store: Store) -> Flow[list[RolePresence[ManagerPresence]]]:
    """All managers."""
    now_ms = yield from store.server_time_ms()
    records = yield from presence.managers(store)
    found = [_seen(record, now_ms) for record in records]
    return (yield from _judged(store, found, [store.keys.managers] * len(found)))


BEHIND_MS = duration_ms(timedelta(minutes=1))
"""A row of an outbox that is older than this is late."""


def relays(store: Store) -> Flow[list[RolePresence[RelayPresence]]]:
    """All relays; one that is gone is listed for a day, unless another serves its table."""
    now_ms = yield from store.server_time_ms()
    records = yield from presence.relays(store)
    found = [_seen(record, now_ms) for record in records]
    return (yield from _judged(store, found, [store.keys.relays] * len(found)))


class OutboxTrouble(NamedTuple):
    """A problem of an outbox. `is_late`: its operations are not done."""

    table: str
    title: str
    detail: str
    is_late: bool = True


def outbox_troubles(found: Sequence[RolePresence[RelayPresence]]) -> list[OutboxTrouble]:
    """The problems of the outboxes that relays serve, or have served.

    A failing relay is not reported while another relay of the same table works.
    """
    troubles = []
    for table, seen in sorted(grouped((one.record.table, one) for one in found).items()):
        alive = [one.record for one in seen if one.alive]
        latest = max(alive or [one.record for one in seen], key=lambda record: record.seen_ms)
        rows, age = f"{latest.backlog:,} rows", f"the oldest for {human(latest.age_ms)}"
        if not alive:
            if latest.backlog and not any(one.is_unknown for one in seen):
                detail = f"{rows} waited, {age}, at the last heartbeat: start lisa-relay"
                troubles.append(OutboxTrouble(table, "No relay", detail))
        elif all(record.error for record in alive):
            detail = f"{latest.error} ({latest.name})"
            troubles.append(OutboxTrouble(table, "Relay fails", detail))
        elif latest.age_ms >= BEHIND_MS:
            troubles.append(OutboxTrouble(table, "Relay is behind", f"{rows} wait, {age}"))
        if latest.set_aside:
            detail = f"{latest.set_aside:,}; see lisa outbox list"
            troubles.append(OutboxTrouble(table, "Rows set aside", detail, is_late=False))
    return troubles


def late_warning(store: Store, late_ms: int, what: str = "messages") -> Flow[str | None]:
    """Why messages or schedules are late by that much; None if all is well.

    The server refuses writes, or no manager runs.
    """
    refusal = yield from write_refusal(store, store.keys.managers)
    if refusal is not None:
        return f"{store.where} {refusal.cause} and refuses writes: {refusal.cure}"
    if late_ms < duration_ms(presence.OVERDUE):
        return None
    if any(manager.alive for manager in (yield from managers(store))):
        return None
    return presence.warning(late_ms, what)


def _judged(
    store: Store, found: list[RolePresence[P]], keys: Sequence[str]
) -> Flow[list[RolePresence[P]]]:
    """The roles, those without a heartbeat as unknown if the server of their key refuses writes."""
    silent = [i for i, one in enumerate(found) if not one.alive]
    if silent:
        refusals = yield from write_refusals(store, [keys[i] for i in silent])
        for i, refusal in zip(silent, refusals, strict=True):
            if refusal is not None:
                found[i] = replace(found[i], is_unknown=True)
    return found


def _seen(record: P, now_ms: int) -> RolePresence[P]:
    silent_ms = max(0, now_ms - record.seen_ms)
    return RolePresence(record, silent_ms, silent_ms < presence.GONE_AFTER_MS)


def suspected_names(store: Store, states: Sequence[TopicState]) -> Flow[list[str]]:
    """What is strange about topics, in one line for each kind; nothing for many topics."""
    if not states or len(states) > MOST_TOPICS:
        return []
    seen = yield from consumers(store, [state.topic for state in states])
    consumed = {consumer.record.topic for consumer in seen if consumer.state != "gone"}
    without_group, without_consumer, never_sent = list[str](), list[str](), list[str]()
    for state in states:
        due = state.ready + state.in_flight + state.parked + state.retry
        was_used = (
            due or state.waiting or state.garbage or state.total("sent") or state.total("restored")
        )
        if state.waiting and not state.groups and state.topic not in consumed:
            without_group.append(f"{state.topic} ({state.waiting:,})")
        elif due and not any(map(state.total, _HANDLED)) and state.topic not in consumed:
            without_consumer.append(f"{state.topic} ({due:,})")
        elif not was_used and (state.groups or state.topic in consumed):
            never_sent.append(state.topic)
    kinds = {
        "no group takes the messages of": without_group,
        "no consumer has ever handled the messages of": without_consumer,
        "consumers name a topic that nothing was ever sent to:": never_sent,
    }
    told = ((what, _listed(names)) for what, names in kinds.items() if names)
    return [f"{what} {names}; is the name right?" for what, names in told]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
