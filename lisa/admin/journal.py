"""The state of a topic's journal: its length and the progress of each archive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lisa.admin.reading import ask_all, counted
from lisa.core.model.stream import entry_fields, entry_ms
from lisa.core.redis.flow import Flow
from lisa.core.store.replies import pairs
from lisa.core.store.store import Store, grouped
from lisa.core.transitions.journal import archive_records


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveProgress:
    """The progress of one archive, which has stored every event up to number `number`.

    behind: number of events that it has not archived yet.
    reported_ms: when the archive last reported its progress, in epoch milliseconds.
    """

    name: str
    entry: str
    number: int
    reported_ms: int
    behind: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The journal of one topic.

    events: number of events in the journal.
    first, last: numbers of the oldest and newest event; None without events, or if split.
    since_ms: time of the oldest event.
    written: number of events ever written.
    lost: events that were trimmed before any archive had stored them.
    failed: events that could not be written.
    """

    topic: str
    on: bool
    events: int
    first: int | None
    last: int | None
    since_ms: int | None
    written: int
    lost: int
    failed: int
    archives: tuple[ArchiveProgress, ...]


def journal(store: Store, topic: str) -> Flow[Journal]:
    """The state of a topic's journal. A journal that was never on has no events or archives.

    In a topic split into shards, each shard has its own journal; counts are summed and the event
    numbers are None.
    """
    parts: list[Journal] = []
    for shard in (yield from counted(store, [topic]))[topic]:
        parts += [(yield from _journal(store, shard))]
    if len(parts) == 1:
        return parts[0]
    archives = grouped((archive.name, archive) for part in parts for archive in part.archives)
    return Journal(
        topic=topic,
        on=parts[0].on,
        events=sum(part.events for part in parts),
        first=None,
        last=None,
        since_ms=min((part.since_ms for part in parts if part.since_ms is not None), default=None),
        written=sum(part.written for part in parts),
        lost=sum(part.lost for part in parts),
        failed=sum(part.failed for part in parts),
        archives=tuple(_whole(own) for _, own in sorted(archives.items())),
    )


def _whole(parts: list[ArchiveProgress]) -> ArchiveProgress:
    least = min(parts, key=lambda one: one.reported_ms)
    return replace(
        least, number=sum(part.number for part in parts), behind=sum(part.behind for part in parts)
    )


def _journal(store: Store, topic: str) -> Flow[Journal]:
    keys = store.keys.topic(topic)
    on, length, oldest, newest, counters, records = yield from ask_all(
        store,
        [
            ("HGET", keys.options, "journal"),
            ("XLEN", keys.events),
            ("XRANGE", keys.events, "-", "+", "COUNT", 1),
            ("XREVRANGE", keys.events, "+", "-", "COUNT", 1),
            ("HMGET", keys.stats, "journaled", "journal_lost", "journal_failed"),
            ("HGETALL", keys.archived),
        ],
    )
    written, lost, failed = (int(value or 0) for value in counters or (0, 0, 0))
    last = _number(newest)
    return Journal(
        topic=topic,
        on=on == b"1",
        events=length or 0,
        first=_number(oldest),
        last=last,
        since_ms=entry_ms(oldest[0][0]) if oldest else None,
        written=written,
        lost=lost,
        failed=failed,
        archives=tuple(
            ArchiveProgress(name=name, behind=max(0, written - one.number), **one._asdict())
            for name, one in archive_records(pairs(records or [])).items()
        ),
    )


def forget(store: Store, topic: str, archive: str) -> Flow[bool]:
    """Stop keeping events for an archive; returns whether the archive was known."""
    removed = 0
    for shard in (yield from counted(store, [topic]))[topic]:
        removed += yield from store.command("HDEL", store.keys.topic(shard).archived, archive)
    return removed > 0


def _number(entries: list[Any] | None) -> int | None:
    number = entry_fields(entries[0][1]).get(b"n") if entries else None
    return None if number is None else int(number)
