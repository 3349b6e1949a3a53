"""A topic's journal as an operator sees it: how long it is, and how far each archive has come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lisa.admin.parts import counted
from lisa.admin.reading import ask_all, entry_number
from lisa.core.flow import Flow
from lisa.core.store import Store, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.prune import NOT_AN_ARCHIVE, RECORD

__all__ = ["Archived", "Journal", "forget", "journal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Archived:
    """How far one archive has come: every event up to number `number` is safe there.

    `behind` is how many it has not taken yet, `reported_ms` when it last said so.
    """

    name: str
    entry: str
    number: int
    reported_ms: int
    behind: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The events of one topic.

    events: those that are there; the first and last have the numbers `first` and `last`, None
        where there are none, and the first is of `since_ms`.
    written: how many there were in all; `lost` of them went without any archive having them,
        `failed` could not be written.
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
    archives: tuple[Archived, ...]


def journal(store: Store, topic: str) -> Flow[Journal]:
    """Look at a topic's journal; one that was never on has no events and no archives.

    Of a topic that is split each shard writes its own: their events are counted together, and no
    numbers are told.
    """
    parts: list[Journal] = []
    for place in (yield from counted(store, [topic]))[topic]:
        parts += [(yield from _journal(store, place))]
    if len(parts) == 1:
        return parts[0]
    archives: dict[str, list[Archived]] = {}
    for part in parts:
        for one in part.archives:
            archives.setdefault(one.name, []).append(one)
    return Journal(
        topic=topic, on=parts[0].on, events=sum(one.events for one in parts), first=None, last=None,
        since_ms=min((one.since_ms for one in parts if one.since_ms is not None), default=None),
        written=sum(one.written for one in parts), lost=sum(one.lost for one in parts),
        failed=sum(one.failed for one in parts),
        archives=tuple(_whole(own) for _, own in sorted(archives.items())),
    )  # fmt: skip


def _whole(parts: list[Archived]) -> Archived:
    least = min(parts, key=lambda one: one.reported_ms)
    return replace(
        least, number=sum(one.number for one in parts), behind=sum(one.behind for one in parts)
    )


def _journal(store: Store, topic: str) -> Flow[Journal]:
    keys = store.keys.topic(topic)
    on, length, oldest, newest, counters, records = yield from ask_all(store, [
        ("HGET", keys.options, "journal"),
        ("XLEN", keys.events),
        ("XRANGE", keys.events, "-", "+", "COUNT", 1),
        ("XREVRANGE", keys.events, "+", "-", "COUNT", 1),
        ("HMGET", keys.stats, "journaled", "journal_lost", "journal_failed"),
        ("HGETALL", keys.archived),
    ])  # fmt: skip
    written, lost, failed = (int(value or 0) for value in counters or (0, 0, 0))
    last = _number(newest)
    return Journal(
        topic=topic, on=on == b"1", events=length or 0, first=_number(oldest), last=last,
        since_ms=entry_number(text(oldest[0][0]))[0] if oldest else None,
        written=written, lost=lost, failed=failed,
        archives=tuple(_archives(pairs(records or []), written)),
    )  # fmt: skip


def forget(store: Store, topic: str, archive: str) -> Flow[bool]:
    """Wait no longer for an archive that will not come back; whether there was one of that name."""
    removed = 0
    for place in (yield from counted(store, [topic]))[topic]:
        removed += yield from store.command("HDEL", store.keys.topic(place).archived, archive)
    return removed > 0


def _number(entries: list[Any] | None) -> int | None:
    if not entries:
        return None
    flat = entries[0][1]
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    return int(fields[b"n"]) if b"n" in fields else None


def _archives(records: dict[bytes, bytes], written: int) -> list[Archived]:
    found = []
    for name, record in sorted((text(name), text(value)) for name, value in records.items()):
        parts = RECORD.fullmatch(record)
        if name.startswith(NOT_AN_ARCHIVE) or parts is None:
            continue
        entry, number, reported_ms = parts[1], int(parts[2]), int(parts[3])
        found.append(Archived(
            name=name, entry=entry, number=number, reported_ms=reported_ms,
            behind=max(0, written - number),
        ))  # fmt: skip
    return found
