"""The pages of schedules: a topic's list, and one schedule with its ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.responses import Response

from lisa.admin.schedules import PastTick, is_late, past
from lisa.admin.search import BODY_BYTES
from lisa.core.model.clock import ms_datetime, zone_of
from lisa.core.model.envelope import Envelope
from lisa.core.model.recurring.definition import Record, ScheduleDefinition, check_name
from lisa.core.redis.flow import Flow
from lisa.core.store import schedule_reads
from lisa.core.store.store import Store
from lisa.gateway.page import attention
from lisa.gateway.page.bodies import Body, shown
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.view_context import PageRequest
from lisa.gateway.problems import ErrorResponse

PER_PAGE = 100
TICKS = 10
READ_S = 2.0


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule of the list, and its latest tick."""

    topic: str
    name: str
    record: Record
    last: PastTick | None
    now_ms: int

    @property
    def is_late(self) -> bool:
        """Whether a tick has come that a running manager would have handled."""
        return is_late(self.record, self.now_ms)


class _Listed(NamedTuple):
    rows: list[ScheduleRow]
    cursor: str | None
    total: int
    now_ms: int


class _One(NamedTuple):
    record: Record | None
    latest: list[PastTick]
    now_ms: int


async def show_list(visit: PageRequest) -> Response:
    """A page of a topic's schedules."""
    line = await require_topic(visit)
    return await _list(visit, [line.topic], line.topic)


async def show_all(visit: PageRequest) -> Response:
    """A page of the schedules of all topics that the visitor may see."""
    store = visit.hub.store
    found = await visit.snapshots.flow(
        "scheduled", READ_S, lambda: schedule_reads.scheduled_topics(store)
    )
    return await _list(visit, [topic for topic in found if visit.token.sees(topic)], None)


async def _list(visit: PageRequest, topics: Sequence[str], topic: str | None) -> Response:
    store, snapshot = visit.hub.store, await visit.snapshot()
    cursor = visit.query.get("cursor", "")
    cursor = cursor if schedule_reads.is_cursor(cursor.partition("@")[0]) else ""
    listed = await visit.snapshots.flow(
        ("schedules", cursor, *topics),
        READ_S,
        lambda: _listed(store, topics, cursor or None),
    )
    lines = [snapshot.lines[one] for one in topics if one in snapshot.lines]
    return visit.page(
        "schedules.html",
        topic=topic,
        rows=listed.rows,
        total=listed.total,
        cursor=listed.cursor,
        now_ms=listed.now_ms,
        problems=attention.of_schedules(snapshot, lines),
    )


def _listed(store: Store, topics: Sequence[str], cursor: str | None) -> Flow[_Listed]:
    now_ms = yield from store.server_time_ms()
    sizes = yield from store.commands([("HLEN", store.keys.topic(one).schedules) for one in topics])
    page = yield from schedule_reads.page_of_topics(store, topics, cursor, PER_PAGE)
    rows: list[ScheduleRow] = []
    for topic, records in page.records.items():
        latest = yield from past(store, topic, records, now_ms, 1)
        rows += [
            ScheduleRow(topic, name, records[name], next(iter(latest[name]), None), now_ms)
            for name in sorted(records)
        ]
    rows.sort(key=lambda row: not row.is_late)
    return _Listed(rows, page.cursor, sum(sizes), now_ms)


async def show(visit: PageRequest) -> Response:
    """The page of one schedule."""
    topic, name = visit.topic(), check_name(visit.query.get("name", ""))
    store = visit.hub.store
    if "hx-request" in visit.request.headers:  # refreshes of open pages share a read
        one = await visit.snapshots.flow(
            ("schedule", topic, name), READ_S, lambda: _one(store, topic, name)
        )
    else:
        one = await store.drive(_one(store, topic, name))
    record, now_ms = known(one.record, topic, name), one.now_ms
    upcoming = [] if record.is_paused else schedule_reads.upcoming(record, now_ms, TICKS)
    return visit.page(
        "schedule.html",
        topic=topic,
        name=name,
        record=record,
        defined=record.definition,
        upcoming=[(tick, in_zone(tick, record.definition)) for tick in upcoming],
        latest=one.latest,
        body=body_of(record.definition),
        now_ms=now_ms,
        is_late=is_late(record, now_ms),
        in_zone=in_zone,
    )


def _one(store: Store, topic: str, name: str) -> Flow[_One]:
    now_ms = yield from store.server_time_ms(store.keys.topic(topic).schedules)
    record = yield from schedule_reads.get_record(store, topic, name)
    if record is None:
        return _One(None, [], now_ms)
    latest = yield from past(store, topic, {name: record}, now_ms, TICKS)
    return _One(record, latest[name], now_ms)


def known(record: Record | None, topic: str, name: str) -> Record:
    """The record. Raises ErrorResponse 404 if there is none."""
    if record is None:
        raise ErrorResponse(404, "unknown-schedule", f"topic {topic!r} has no schedule {name!r}")
    return record


def in_zone(tick_ms: int, definition: ScheduleDefinition) -> str:
    """An instant in the schedule's zone, with weekday and offset."""
    return f"{ms_datetime(tick_ms).astimezone(zone_of(definition.tz)):%a %Y-%m-%d %H:%M:%S %z}"


def body_of(definition: ScheduleDefinition) -> Body:
    """The body, or its template, formatted."""
    data = definition.encoded_body
    return shown(Envelope("", "", definition.kind, {}, data), most=BODY_BYTES)
