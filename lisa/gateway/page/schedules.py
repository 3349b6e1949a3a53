"""The pages of schedules: lists, one schedule with its ticks, its form, and actions on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lisa.admin.schedules import PastTick, is_late, past
from lisa.admin.search import BODY_BYTES
from lisa.core.model.clock import datetime_ms, in_one_unit, ms_datetime, parse_moment, zone_of
from lisa.core.model.errors import InvalidMessage, ScheduleChanged, TopicFull
from lisa.core.model.late import late_text
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    CatchUp,
    Dst,
    Overlap,
    Record,
    ScheduleDefinition,
    body_of,
    check_name,
)
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.redis.flow import Flow
from lisa.core.store import schedules
from lisa.core.store.store import Store
from lisa.gateway.access import Scope
from lisa.gateway.api.schedules import count_backfilled
from lisa.gateway.page import attention
from lisa.gateway.page.messages import MOST_EDITED, edited_body
from lisa.gateway.page.rendering import format_body, link, message_link
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import Done, FormAction, PageRequest, Verb
from lisa.gateway.problems import ErrorResponse, problem_of

PER_PAGE = 100
TICKS = 10
READ_S = 2.0

NO_RETRIES = "none"

TEXTS = ("cron", "every", "tz", "start", "until", "jitter", "max_late", "ttl", "late", "slack")
"""Fields that a schedule takes as text; empty ones are unset."""


class ScheduleRow(NamedTuple):
    """One schedule of the list, and its latest tick.

    is_late: whether a tick has come that a running manager would have handled.
    """

    topic: str
    name: str
    record: Record
    last: PastTick | None
    is_late: bool


class _Listed(NamedTuple):
    rows: list[ScheduleRow]
    cursor: str | None
    total: int
    now_ms: int


async def show_list(visit: PageRequest) -> Response:
    """A page of a topic's schedules."""
    line = await require_topic(visit)
    return await _list(visit, [line.topic], line.topic)


async def show_all(visit: PageRequest) -> Response:
    """A page of the schedules of all topics that the visitor may see."""
    found = await visit.snapshots.ask(READ_S, schedules.scheduled_topics)
    return await _list(visit, [topic for topic in found if visit.token.sees(topic)], None)


async def _list(visit: PageRequest, topics: Sequence[str], topic: str | None) -> Response:
    snapshot = await visit.snapshots.current()
    cursor = visit.query.get("cursor", "")
    cursor = cursor if schedules.is_cursor(cursor.partition("@")[0]) else ""
    listed = await visit.snapshots.ask(READ_S, _listed, tuple(topics), cursor or None)
    lines = [snapshot.lines[name] for name in topics if name in snapshot.lines]
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
    sizes = yield from store.commands(
        [("HLEN", store.keys.topic(name).schedules) for name in topics]
    )
    page = yield from schedules.page_of_topics(store, topics, cursor, PER_PAGE)
    rows: list[ScheduleRow] = []
    for topic, records in page.records.items():
        latest = yield from past(store, topic, records, now_ms, 1)
        rows += [
            ScheduleRow(
                topic, name, record, next(iter(latest[name]), None), is_late(record, now_ms)
            )
            for name, record in sorted(records.items())
        ]
    rows.sort(key=lambda row: not row.is_late)
    return _Listed(rows, page.cursor, sum(sizes), now_ms)


async def show(visit: PageRequest) -> Response:
    """The page of one schedule."""
    topic, name = visit.topic(), check_name(visit.query.get("name", ""))
    record, latest, now_ms = await visit.ask(READ_S, _one, topic, name)
    defined = record.definition
    upcoming = [] if record.is_paused else schedules.upcoming(record, now_ms, TICKS)
    return visit.page(
        "schedule.html",
        topic=topic,
        name=name,
        record=record,
        defined=defined,
        upcoming=[(tick, in_zone(tick, defined)) for tick in upcoming],
        latest=latest,
        body=format_body(defined.kind, defined.encoded_body, most=BODY_BYTES),
        now_ms=now_ms,
        is_late=is_late(record, now_ms),
        in_zone=in_zone,
    )


def _one(store: Store, topic: str, name: str) -> Flow[tuple[Record, list[PastTick], int]]:
    """A schedule, its latest ticks, and the server's time. Raises ErrorResponse 404."""
    now_ms = yield from store.server_time_ms(store.keys.topic(topic).schedules)
    record = yield from _known(store, topic, name)
    latest = yield from past(store, topic, {name: record}, now_ms, TICKS)
    return record, latest[name], now_ms


def _known(store: Store, topic: str, name: str) -> Flow[Record]:
    """A schedule. Raises ErrorResponse 404 if there is none."""
    record = yield from schedules.get_record(store, topic, name)
    if record is None:
        raise ErrorResponse(404, "unknown-schedule", f"topic {topic!r} has no schedule {name!r}")
    return record


def in_zone(tick_ms: int, definition: ScheduleDefinition) -> str:
    """An instant in the schedule's zone, with weekday and offset."""
    return f"{ms_datetime(tick_ms).astimezone(zone_of(definition.tz)):%a %Y-%m-%d %H:%M:%S %z}"


_headers_decoder = msgspec.json.Decoder(dict[str, str])


async def show_form(visit: PageRequest) -> Response:
    """The form: of a schedule if the address names one, else of a new one."""
    topic = (await require_topic(visit)).topic
    visit.require_actions()
    visit.token.require(Scope.PRODUCE, topic)
    name = visit.query.get("name", "")
    if not name:
        return form_page(visit, topic, {"version": "0", **fields_of(ScheduleDefinition())})
    record = await visit.gateway.ask(_known, topic, name)
    fields = {"schedule": name, "version": str(record.version), **fields_of(record.definition)}
    return form_page(visit, topic, fields)


def form_page(
    visit: PageRequest, topic: str, fields: Mapping[str, str], fault: ErrorResponse | None = None
) -> Response:
    """The form with some values. fault: why the last attempt changed nothing."""
    return visit.page(
        "schedule_form.html",
        fault.status if fault else 200,
        topic=topic,
        fields=fields,
        fault=fault.detail if fault else "",
        is_new=fields.get("version") == "0",
        choices={"dst": list(Dst), "overlap": list(Overlap), "catch_up": list(CatchUp)},
        most_caught_up=MOST_CAUGHT_UP,
    )


def fields_of(defined: ScheduleDefinition) -> dict[str, str]:
    """The values of the form's fields; without those that a form cannot hold."""
    zone, retry = zone_of(defined.tz), defined.policy

    def instant(ms: int | None) -> str:
        return "" if ms is None else ms_datetime(ms).astimezone(zone).isoformat()

    return {
        "cron": defined.cron,
        "every": exact_duration(defined.every_ms),
        "tz": defined.tz,
        "dst": defined.dst,
        "start": instant(defined.start_ms),
        "until": instant(defined.until_ms),
        "count": "" if defined.most is None else str(defined.most),
        "jitter": exact_duration(defined.jitter_ms),
        "catch_up": defined.catch_up,
        "max": str(defined.max_caught_up),
        "max_late": exact_duration(defined.max_late_ms),
        "overlap": defined.overlap,
        "template": "yes" if defined.template else "",
        "headers": msgspec.json.encode(defined.headers).decode() if defined.headers else "",
        "ttl": exact_duration(defined.ttl_ms),
        "retry": "" if retry is None else str(RetryPolicy.decode(retry)) or NO_RETRIES,
        "late": late_text(defined.late) or "",
        "message_key": defined.key or "",
        "cost": "" if defined.cost is None else str(defined.cost),
        "slack": "" if defined.slack_ms is None else in_one_unit(defined.slack_ms),
        **_body_fields(defined.kind, defined.body),
    }


def _body_fields(kind: str, body: str) -> dict[str, str]:
    if kind == "b" or len(body.encode("utf-8", "replace")) > MOST_EDITED:
        return {}
    if kind == "j":
        indented = msgspec.json.format(body.encode(), indent=2).decode()
        body = indented if len(indented) <= MOST_EDITED else body
    return {"kind": kind, "body": body}


def options_of(fields: Mapping[str, str], stored: ScheduleDefinition | None) -> dict[str, Any]:
    """The options of `Producer.schedule` for a form; `stored` provides a body that it leaves out.

    Raises InvalidMessage.
    """
    given: dict[str, Any] = {name: fields.get(name, "").strip() or None for name in TEXTS}
    retry = fields.get("retry", "").strip()
    catch_up = fields.get("catch_up") or CatchUp.ONE
    if catch_up == CatchUp.ALL:
        catch_up = f"all(max={fields.get('max') or MOST_CAUGHT_UP})"
    return {
        **given,
        "dst": fields.get("dst") or Dst.VIXIE,
        "count": _number("count", fields.get("count", "")),
        "catch_up": catch_up,
        "overlap": fields.get("overlap") or Overlap.ALLOW,
        "template": fields.get("template") == "yes",
        "headers": _headers(fields.get("headers", "")),
        "key": fields.get("message_key") or None,
        "cost": _number("cost", fields.get("cost", "")),
        "retry": {"": None, NO_RETRIES: ""}.get(retry, retry),
        "body": _body(fields, stored),
    }


def exact_duration(ms: int | None) -> str:
    """A duration as one number with the largest unit that expresses it exactly; empty for none."""
    return in_one_unit(ms) if ms else ""


def _number(name: str, text: str) -> int | None:
    text = text.strip()
    if text and not (text.isdecimal() and text.isascii() and len(text) <= 12):
        raise InvalidMessage(f"{name} is a number, not {text!r}")
    return int(text) if text else None


def _headers(text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    try:
        return _headers_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidMessage(
            f'the headers are a JSON object with text values, as in {{"source": "shop"}}: {error}'
        ) from None


def _body(fields: Mapping[str, str], stored: ScheduleDefinition | None) -> Any:
    if "body" in fields:
        return edited_body(fields.get("kind", "j"), fields["body"])
    if stored is None:
        raise InvalidMessage("the form has no body")
    return msgspec.Raw(stored.encoded_body) if stored.kind == "j" else body_of(stored)


def _name(action: FormAction) -> str:
    return check_name(action.fields.get("schedule", ""))


async def _record(action: FormAction) -> Record:
    """The schedule of a form. Raises ErrorResponse 404."""
    return await action.visit.gateway.ask(_known, action.topic, _name(action))


async def _pause(action: FormAction) -> Done:
    await _record(action)
    sender, is_pause = action.visit.gateway.sender, action.verb == "schedule_pause"
    change = sender.pause_schedule if is_pause else sender.resume_schedule
    await change(action.topic, _name(action))
    return Done(f"{action.verb}d")


async def _run(action: FormAction) -> Done:
    await _record(action)
    made = await action.visit.gateway.sender.run_schedule(action.topic, _name(action))
    return Done("schedule_run", back=message_link(action.topic, made))


async def _remove(action: FormAction) -> Done:
    await _record(action)
    await action.visit.gateway.sender.remove_schedule(action.topic, _name(action))
    return Done("schedule_removed", back=link("topics", action.topic, "schedules"))


async def _named(action: FormAction) -> tuple[str, int]:
    await _record(action)
    return _name(action), 1


async def _backfill(action: FormAction) -> Done:
    record = await _record(action)
    from_ms, to_ms = _range(action, record)
    await count_backfilled(action.visit.gateway.store, record, from_ms, to_ms)
    created, duplicates = await action.visit.gateway.sender.backfill_schedule(
        action.topic, _name(action), ms_datetime(from_ms), ms_datetime(to_ms)
    )
    return Done("schedule_backfilled", created, created + duplicates)


async def _to_backfill(action: FormAction) -> tuple[str, int]:
    record = await _record(action)
    from_ms, to_ms = _range(action, record)
    count = await count_backfilled(action.visit.gateway.store, record, from_ms, to_ms)
    return f"{count:,} {'message' if count == 1 else 'messages'} of {_name(action)}", count


def _range(action: FormAction, record: Record) -> tuple[int, int]:
    """The range of ticks in a form, in the schedule's zone. Raises InvalidMessage."""
    zone = zone_of(record.definition.tz)
    return _instant(action, "from", zone), _instant(action, "to", zone)


def _instant(action: FormAction, name: str, zone: tzinfo) -> int:
    text = action.fields.get(name, "")
    try:
        found = datetime_ms(parse_moment(text), zone)
        ms_datetime(found)  # in UTC, the first and the last hours of all years are out of range
    except (OverflowError, ValueError):
        raise InvalidMessage(f"{text!r} is not a time; write it as in 2026-12-24T09:00") from None
    return found


async def _save(action: FormAction) -> Done | Response:
    """Create or change the schedule; show the form again if it cannot be."""
    fields, visit = action.fields, action.visit
    name = fields["schedule"] = fields.get("schedule", "").strip()
    try:
        version = _number("version", fields.get("version", ""))
        if version is None:
            raise InvalidMessage("the form has no version: reload the page")
        stored = (await _record(action)).definition if version else None
        changed = await visit.gateway.sender.schedule(
            name,
            topic=action.topic,
            if_version=version,
            **options_of(fields, stored),
        )
    except (InvalidMessage, ScheduleChanged, TopicFull) as error:
        return form_page(visit, action.topic, fields, problem_of(error))
    back = link("topics", action.topic, "schedule", name=name)
    return Done("schedule_saved" if changed else "schedule_same", back=back)


VERBS = {
    "schedule_pause": Verb("pauseSchedule", _pause),
    "schedule_resume": Verb("resumeSchedule", _pause),
    "schedule_run": Verb("runSchedule", _run),
    "schedule_save": Verb("setSchedule", _save),
    "schedule_remove": Verb(
        "removeSchedule",
        _remove,
        "Remove schedule",
        "Its waiting message is removed, too. This cannot be undone.",
        _named,
    ),
    "schedule_backfill": Verb(
        "backfillSchedule",
        _backfill,
        "Create",
        "They become due immediately. Messages that exist already are not repeated.",
        _to_backfill,
    ),
}
