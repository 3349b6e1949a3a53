"""Which consumers and managers there are, and which of them are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lisa.core import presence
from lisa.core.flow import Flow
from lisa.core.presence import ConsumerPresence, ManagerPresence
from lisa.core.store import Store

__all__ = ["Seen", "consumers", "managers"]


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
    for topic in names:
        records = yield from presence.consumers(store, topic)
        found += [_seen(record, now_us) for record in records]
    return found


def managers(store: Store) -> Flow[list[Seen]]:
    """All managers."""
    now_us = yield from store.server_time_us()
    records = yield from presence.managers(store)
    return [_seen(record, now_us) for record in records]


def _seen(record: ConsumerPresence | ManagerPresence, now_us: int) -> Seen:
    silent_ms = max(0, now_us // 1000 - record.seen_ms)
    return Seen(record, silent_ms, silent_ms < presence.GONE_AFTER.total_seconds() * 1000)
