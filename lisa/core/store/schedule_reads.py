"""Reads schedules, as flows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.definition import Record, ScheduleDefinition
from lisa.core.model.recurring.ticks import ticks_after
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text

PAGE = 500

MOST_TICKS = 10_000
"""The most ticks that `next_ticks` computes: half a second's work."""
TOPICS_PER_PAGE = 500
_CURSOR = re.compile("[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """A schedule as it is stored.

    next_ms: the next tick in epoch ms; None if it is paused or has none left. made: occurrences
    created so far. last_ms: the tick of the latest of them.
    """

    topic: str
    name: str
    version: int
    definition: ScheduleDefinition
    is_paused: bool
    next_ms: int | None
    made: int
    last_ms: int | None

    @property
    def next(self) -> datetime | None:
        """The next tick, aware, UTC."""
        return None if self.next_ms is None else ms_datetime(self.next_ms)

    @property
    def last(self) -> datetime | None:
        """The tick of the latest occurrence, aware, UTC."""
        return None if self.last_ms is None else ms_datetime(self.last_ms)

    @classmethod
    def of(cls, topic: str, name: str, record: Record) -> ScheduleInfo:
        """The public view of a record."""
        return cls(
            topic=topic,
            name=name,
            version=record.version,
            definition=record.definition,
            is_paused=record.is_paused,
            next_ms=record.tick,
            made=record.made,
            last_ms=record.latest,
        )


class SchedulePage(NamedTuple):
    """Some schedules, and the cursor of the next page; None at the end."""

    schedules: list[ScheduleInfo]
    cursor: str | None


def get(store: Store, topic: str, name: str) -> Flow[ScheduleInfo | None]:
    """One schedule; None if there is none of that name."""
    record = yield from get_record(store, topic, name)
    return None if record is None else ScheduleInfo.of(topic, name, record)


def get_record(store: Store, topic: str, name: str) -> Flow[Record | None]:
    """The record of one schedule; None if there is none of that name. Raises InvalidMessage."""
    stored = yield from store.command("HGET", store.keys.topic(topic).schedules, name)
    return None if stored is None else Record.decode(stored)


def record_page(
    store: Store, topic: str, cursor: str | None = None, count: int = PAGE
) -> Flow[tuple[dict[str, Record], str | None]]:
    """Some of a topic's records by name, and the cursor of the next page; None at the end.

    In no particular order; unreadable records are left out. count: about how many.
    """
    key = store.keys.topic(topic).schedules
    reply = yield from store.command("HSCAN", key, cursor or "0", "COUNT", count)
    following, flat = text(reply[0]), reply[1]
    records: dict[str, Record] = {}
    for name, stored in zip(flat[::2], flat[1::2], strict=True):
        with suppress(InvalidMessage):
            records[text(name)] = Record.decode(stored)
    return records, None if following == "0" else following


def is_cursor(cursor: str) -> bool:
    """Whether the server accepts a cursor of `record_page`: an unsigned number of 64 bits."""
    return _CURSOR.fullmatch(cursor) is not None and int(cursor) < 1 << 64


def page(store: Store, topic: str, cursor: str | None = None) -> Flow[SchedulePage]:
    """Some of a topic's schedules, in no particular order; see `record_page`."""
    records, following = yield from record_page(store, topic, cursor)
    return SchedulePage(
        [ScheduleInfo.of(topic, name, record) for name, record in records.items()], following
    )


def list_all(store: Store, topic: str) -> Flow[list[ScheduleInfo]]:
    """All schedules of a topic, sorted by name."""
    found_: dict[str, ScheduleInfo] = {}
    cursor: str | None = None
    while True:
        some = yield from page(store, topic, cursor)
        found_ |= {one.name: one for one in some.schedules}
        cursor = some.cursor
        if cursor is None:
            return [found_[name] for name in sorted(found_)]


class RecordPage(NamedTuple):
    """Some schedules by topic and name, and the cursor of the next page; None at the end."""

    records: dict[str, dict[str, Record]]
    cursor: str | None


def page_of_topics(
    store: Store, topics: Sequence[str], cursor: str | None = None, count: int = PAGE
) -> Flow[RecordPage]:
    """Some schedules of several topics, in the order of the topics; see `record_page`.

    Looks at `TOPICS_PER_PAGE` topics at most. A cursor is that of a topic, `@`, and its name.
    """
    position, _, first = (cursor or "").partition("@")
    found: dict[str, dict[str, Record]] = {}
    total = 0
    for i, topic in enumerate(sorted(one for one in topics if one >= first)):
        if i >= TOPICS_PER_PAGE or total >= count:
            return RecordPage(found, f"0@{topic}")
        at = position if topic == first else None
        found[topic], following = yield from record_page(store, topic, at, count)
        total += len(found[topic])
        if following is not None:
            return RecordPage(found, f"{following}@{topic}")
    return RecordPage(found, None)


def upcoming(record: Record, now_ms: int, count: int) -> Iterator[int]:
    """The next ticks: at most `count`, and at most as many as the schedule may still create."""
    most = record.definition.most
    if most is not None:
        count = min(count, most - record.made + record.is_made)
    return islice(ticks_after(record, now_ms), max(0, count))


def next_ticks(store: Store, topic: str, name: str, count: int) -> Flow[list[int]]:
    """The next ticks of a schedule, in epoch ms. Raises InvalidMessage, also if there is none."""
    if type(count) is not int or not 1 <= count <= MOST_TICKS:
        raise InvalidMessage(f"count is a number from 1 to {MOST_TICKS:,}, not {count!r}")
    record = known((yield from get_record(store, topic, name)), topic, name)
    now_ms = yield from store.server_time_ms(store.keys.topic(topic).schedules)
    return list(upcoming(record, now_ms, count))


def scheduled_topics(store: Store) -> Flow[list[str]]:
    """The topics that may have schedules."""
    reply = yield from store.command("ZRANGE", store.keys.scheduled, 0, -1)
    return [text(one) for one in reply]


def check_range(from_ms: int, to_ms: int) -> None:
    """Check the range of a backfill. Raises InvalidMessage."""
    if to_ms < from_ms:
        first, last = (ms_datetime(one).isoformat() for one in (from_ms, to_ms))
        raise InvalidMessage(f"a backfill from {first} to {last} ends before it begins")


def known(record: Record | None, topic: str, name: str) -> Record:
    """The record, or raise InvalidMessage if there is none."""
    if record is None:
        raise InvalidMessage(f"topic {topic!r} has no schedule {name!r}")
    return record
