"""Which consumers and managers there are, and which of them are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lisa.admin.parts import counted, places
from lisa.admin.reading import ask_all, ask_stream, stream_ids
from lisa.core import presence
from lisa.core.flow import Flow
from lisa.core.presence import ConsumerPresence, ManagerPresence
from lisa.core.store import Store, chunks
from lisa.core.transitions.base import text

__all__ = ["Held", "Seen", "consumers", "held", "managers"]

TOPICS_PER_STEP = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """One role's record; `silent_ms` since its last beat, `alive` unless that is too long."""

    record: ConsumerPresence | ManagerPresence
    silent_ms: int
    alive: bool


def consumers(store: Store, topics: Sequence[str] = ()) -> Flow[list[Seen]]:
    """Consumers of the topics named, or of all that are registered."""
    names = list(topics) or (yield from store.topics())
    now_us = yield from store.server_time_us()
    found: list[Seen] = []
    for some in chunks(names, TOPICS_PER_STEP):
        parts = yield from counted(store, some)
        asked = [(topic, place) for topic in some for place in parts[topic]]
        replies = yield from ask_all(
            store, [("HGETALL", store.keys.topic(place).consumers) for _, place in asked]
        )
        records: dict[tuple[str, str], list[ConsumerPresence]] = {}
        for (topic, _), reply in zip(asked, replies, strict=True):
            for record in presence.consumers_in(reply or []):
                records.setdefault((topic, record.name), []).append(record)
        found += [_seen(presence.whole(parts), now_us) for parts in records.values()]
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """One message that a consumer has in flight, for so long; `id` is None where its entry went."""

    id: str | None
    group: str
    due_ms: int | None
    idle_ms: int


def held(store: Store, topic: str, consumer: str, *, limit: int) -> Flow[list[Held]]:
    """What a consumer of a topic has in flight, in any group, the oldest deliveries first."""
    found: list[Held] = []
    for place in (yield from places(store, topic)):
        found += yield from _held(store, place, consumer, limit=limit)
    return sorted(found, key=lambda one: -one.idle_ms)[:limit]


def _held(store: Store, topic: str, consumer: str, *, limit: int) -> Flow[list[Held]]:
    found: list[Held] = []
    for group in (yield from store.groups(topic)):
        key = store.keys.topic(topic).group(group).ready
        wanted = limit - len(found)
        if wanted <= 0:
            break
        rows = yield from ask_stream(store, "XPENDING", key, group, "-", "+", wanted, consumer)
        if not rows:
            continue
        entries = yield from store.commands([("XRANGE", key, row[0], row[0]) for row in rows])
        for row, items in zip(rows, entries, strict=True):
            _, one, due = stream_ids(items)[0] if items else ("", None, None)
            name = None if one is None else text(one)
            due_ms = int(due) if due is not None and due.isdigit() else None
            found.append(Held(name, group, due_ms, int(row[2])))
    return found


def managers(store: Store) -> Flow[list[Seen]]:
    """All managers."""
    now_us = yield from store.server_time_us()
    records = yield from presence.managers(store)
    return [_seen(record, now_us) for record in records]


def _seen(record: ConsumerPresence | ManagerPresence, now_us: int) -> Seen:
    silent_ms = max(0, now_us // 1000 - record.seen_ms)
    return Seen(record, silent_ms, silent_ms < presence.GONE_AFTER.total_seconds() * 1000)
