"""Actions on schedules from the web page."""

from __future__ import annotations

from datetime import tzinfo

from starlette.responses import Response

from lisa.core.model.clock import datetime_ms, ms_datetime, parse_moment, zone_of
from lisa.core.model.errors import InvalidMessage, ScheduleChanged, TopicFull
from lisa.core.model.recurring.definition import Record, check_name
from lisa.core.store import schedule_reads
from lisa.gateway.access import Scope
from lisa.gateway.backfills import count_backfilled
from lisa.gateway.page import schedule_forms
from lisa.gateway.page.rendering import link, message_link
from lisa.gateway.page.schedules import known
from lisa.gateway.page.verbs import Done, FormAction, Verb
from lisa.gateway.problems import problem_of


def _name(action: FormAction) -> str:
    return check_name(action.fields.get("schedule", ""))


async def _record(action: FormAction) -> Record:
    """The schedule of a form. Raises ErrorResponse 404."""
    store, name = action.visit.hub.store, _name(action)
    found = await store.drive(schedule_reads.get_record(store, action.topic, name))
    return known(found, action.topic, name)


async def _pause(action: FormAction) -> Done:
    await _record(action)
    sender, is_pause = action.visit.hub.sender, action.verb == "schedule_pause"
    change = sender.pause_schedule if is_pause else sender.resume_schedule
    await change(action.topic, _name(action))
    return Done(f"{action.verb}d")


async def _run(action: FormAction) -> Done:
    await _record(action)
    made = await action.visit.hub.sender.run_schedule(action.topic, _name(action))
    return Done("schedule_run", back=message_link(action.topic, made))


async def _remove(action: FormAction) -> Done:
    await _record(action)
    await action.visit.hub.sender.remove_schedule(action.topic, _name(action))
    return Done("schedule_removed", back=link("topics", action.topic, "schedules"))


async def _named(action: FormAction) -> tuple[str, int]:
    await _record(action)
    return _name(action), 1


async def _backfill(action: FormAction) -> Done:
    record = await _record(action)
    from_ms, to_ms = _range(action, record)
    await count_backfilled(action.visit.hub.store, record, from_ms, to_ms)
    created, duplicates = await action.visit.hub.sender.backfill_schedule(
        action.topic, _name(action), ms_datetime(from_ms), ms_datetime(to_ms)
    )
    return Done("schedule_backfilled", created, created + duplicates)


async def _to_backfill(action: FormAction) -> tuple[str, int]:
    record = await _record(action)
    from_ms, to_ms = _range(action, record)
    count = await count_backfilled(action.visit.hub.store, record, from_ms, to_ms)
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
        version = schedule_forms.version_of(fields)
        stored = (await _record(action)).definition if version else None
        changed = await visit.hub.sender.schedule(
            name,
            topic=action.topic,
            if_version=version,
            **schedule_forms.options_of(fields, stored),
        )
    except (InvalidMessage, ScheduleChanged, TopicFull) as error:
        return schedule_forms.page(visit, action.topic, fields, problem_of(error))
    back = link("topics", action.topic, "schedule", name=name)
    return Done("schedule_saved" if changed else "schedule_same", back=back)


VERBS = {
    "schedule_pause": Verb(Scope.PRODUCE, _pause),
    "schedule_resume": Verb(Scope.PRODUCE, _pause),
    "schedule_run": Verb(Scope.PRODUCE, _run),
    "schedule_save": Verb(Scope.PRODUCE, _save),
    "schedule_remove": Verb(
        Scope.PRODUCE,
        _remove,
        "Remove schedule",
        "Its waiting message is removed, too. This cannot be undone.",
        _named,
    ),
    "schedule_backfill": Verb(
        Scope.PRODUCE,
        _backfill,
        "Create",
        "They become due immediately. Messages that exist already are not repeated.",
        _to_backfill,
    ),
}
