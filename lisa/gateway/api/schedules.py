"""Operations on schedules of recurring messages."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.lanes import MAX_COST
from lisa.core.model.late import late_text
from lisa.core.model.recurring.definition import (
    MIN_EVERY_MS,
    MIN_LATE_MS,
    MOST_OCCURRENCES,
    CatchUp,
    Dst,
    Overlap,
    Record,
    body_of,
)
from lisa.core.model.recurring.ticks import ticks_after
from lisa.core.store import schedules
from lisa.core.store.schedules import ScheduleInfo
from lisa.core.store.store import AsyncStore
from lisa.gateway.access import Scope
from lisa.gateway.api.operations import (
    NO_TOPIC,
    TOPIC,
    Call,
    Operations,
    Problems,
    in_turns,
)
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import (
    Answer,
    AnswerWithId,
    Instant,
    Late,
    Milliseconds,
    NoFields,
    OwnId,
    Request,
    Retries,
    Slack,
    Ttl,
    read_body,
    read_policy,
    response_body,
    unknown_cursor,
)
from lisa.gateway.problems import ErrorResponse

MOST_TICKS = 1_000

Moment = Annotated[
    str,
    Meta(
        max_length=64,
        description="ISO 8601, as in `2026-12-24T09:00`; in the zone `tz` unless it has an offset.",
    ),
]

MOST_BACKFILLED = 10_000
"""A range without a limit could fill the server, and its work would outlive the request."""

SCHEDULES = f"{TOPIC}/schedules"
SCHEDULE = f"{SCHEDULES}/{{name}}"


class ScheduleRequest(Request):
    """A schedule's definition: the message, and either `cron` or `every_ms`."""

    body: Annotated[
        Raw | UnsetType,
        Meta(description="Any JSON value. Exactly one of `body` and `body_base64`."),
    ] = UNSET
    body_base64: Annotated[str | None, Meta(description="A binary body in base64.")] = None
    cron: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        Meta(description="A cron pattern, such as `0 9 * * 1-5` or `@daily`."),
    ] = None
    every_ms: Annotated[
        Milliseconds | None,
        Meta(description=f"An interval of at least {MIN_EVERY_MS} ms, counted from `start`."),
    ] = None
    tz: Annotated[
        Annotated[str, Meta(max_length=64)] | None,
        Meta(description="The time zone of the pattern, such as `Europe/Berlin`; default UTC."),
    ] = None
    dst: Annotated[
        Dst,
        Meta(description="A time that a change of the clock skips fires right after it, or not."),
    ] = Dst.VIXIE
    start: Moment | None = None
    until: Moment | None = None
    count: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_OCCURRENCES)] | None,
        Meta(description="Maximum number of occurrences."),
    ] = None
    jitter_ms: Annotated[
        Milliseconds | None, Meta(description="Each occurrence is due up to this much later.")
    ] = None
    catch_up: Annotated[
        Annotated[str, Meta(max_length=32)],
        Meta(description="Ticks missed while no manager ran: none, one, all or all(max=20)."),
    ] = CatchUp.ONE.value
    max_late_ms: Annotated[
        Milliseconds | None,
        Meta(description=f"No tick is caught up later than this; at least {MIN_LATE_MS} ms."),
    ] = None
    overlap: Annotated[
        Overlap, Meta(description="What a tick does while an earlier occurrence is unfinished.")
    ] = Overlap.ALLOW
    template: Annotated[
        bool, Meta(description="Fill `${tick}`, `${previous}` and `${count}` into the body.")
    ] = False
    headers: dict[str, str] | None = None
    ttl_ms: Ttl | None = None
    retry: Retries | None = None
    late: Annotated[
        Late | None,
        Meta(description="The late policy of each occurrence, such as 'collapse after 10m'."),
    ] = None
    key: Annotated[OwnId | None, Meta(description="The key of each occurrence.")] = None
    cost: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_COST)] | None,
        Meta(description="What each occurrence costs of a rate and of a turn; default 1."),
    ] = None
    slack_ms: Annotated[
        Slack | None, Meta(description="How much later each occurrence may start without harm.")
    ] = None
    if_version: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Change only this version of the schedule; 0: only create it."),
    ] = None


class ScheduleAnswer(Answer):
    """A schedule. `version` counts its changes, `created` its occurrences."""

    topic: str
    name: str
    version: int
    paused: bool
    next_ms: Annotated[int | None, Meta(description="The next tick; null if paused or ended.")]
    last_ms: Annotated[int | None, Meta(description="The tick of the latest occurrence.")]
    created: int
    cron: str | None
    every_ms: int | None
    tz: str
    dst: Dst
    start_ms: int | None
    until_ms: int | None
    count: int | None
    jitter_ms: int
    catch_up: CatchUp
    max_caught_up: int
    max_late_ms: int | None
    overlap: Overlap
    template: bool
    headers: dict[str, str]
    ttl_ms: int | None
    retry: str | None
    late: str | None
    key: str | None
    cost: int | None
    slack_ms: int | None
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class ScheduleChangedAnswer(Answer):
    """Whether the request changed anything."""

    name: str
    changed: bool


class RunAnswer(AnswerWithId, kw_only=True):
    """The id of the occurrence."""

    name: str


class BackfillRequest(Request):
    """The range of ticks, both ends included."""

    from_ms: Instant
    to_ms: Instant


class BackfillAnswer(Answer):
    """How many occurrences were created, and how many were known already."""

    name: str
    created: int
    known: int


class NextQuery(Request):
    """How many ticks to list."""

    count: Annotated[int, Meta(ge=1, le=MOST_TICKS)] = 5


class NextTicksAnswer(Answer):
    """Ticks in epoch milliseconds."""

    name: str
    ticks_ms: list[int]


class SchedulesQuery(Request):
    """Paging of the schedules."""

    cursor: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9]{1,20}$")] | None,
        Meta(description="The `cursor` of the previous page; omit it for the first page."),
    ] = None


class AllSchedulesQuery(Request):
    """Paging of the schedules of all topics."""

    cursor: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9]{1,20}@.+$", max_length=256)] | None,
        Meta(description="The `cursor` of the previous page; omit it for the first page."),
    ] = None


class SchedulesAnswer(Answer):
    """A page of schedules; `cursor` is null on the last page."""

    schedules: list[ScheduleAnswer]
    cursor: str | None


async def count_backfilled(store: AsyncStore, record: Record, from_ms: int, to_ms: int) -> int:
    """The number of past ticks in a range, both ends included. Raises InvalidMessage."""
    schedules.check_range(from_ms, to_ms)
    now_ms = await store.drive(store.server_time_ms())
    ticks = ticks_after(record, from_ms - 1, min(to_ms, now_ms))
    count = 0
    async for _ in in_turns(islice(ticks, MOST_BACKFILLED + 1)):
        count += 1
    if count > MOST_BACKFILLED:
        raise InvalidMessage(
            f"the range has more than {MOST_BACKFILLED:,} ticks; choose a shorter one, or use "
            "lisa schedules backfill"
        )
    return count


NO_SCHEDULE: Problems = {404: "The topic or the schedule is unknown."}
FULL: Problems = {429: "The topic has reached its `capacity`."}

operations = Operations("Schedules")


@operations.add("GET", SCHEDULES, "A page.", problems=NO_TOPIC)
async def list_schedules(call: Call[SchedulesQuery, None]) -> SchedulesAnswer:
    """List a topic's schedules.

    In no particular order. A page may be short or empty; continue until `cursor` is null.
    """
    cursor = call.query.cursor
    if cursor is not None and not schedules.is_cursor(cursor):
        raise unknown_cursor(cursor)
    records, following = await call.gateway.ask(schedules.record_page, call.topic, cursor)
    if not records and cursor is None:
        await require_topic(call.gateway, call.topic)
    shown = [_schedule(ScheduleInfo.of(call.topic, *record)) for record in records.items()]
    return SchedulesAnswer(schedules=shown, cursor=following)


@operations.add("GET", "/v1/schedules", "A page.")
async def list_all_schedules(call: Call[AllSchedulesQuery, None]) -> SchedulesAnswer:
    """List the schedules of all allowed topics.

    In the order of the topics. A page may be short or empty; continue until `cursor` is null.
    """
    cursor = call.query.cursor
    if cursor is not None and not schedules.is_cursor(cursor.partition("@")[0]):
        raise unknown_cursor(cursor)
    topics = await call.gateway.ask(schedules.scheduled_topics)
    seen = [topic for topic in topics if call.token.sees(topic)]
    page = await call.gateway.ask(schedules.page_of_topics, seen, cursor)
    shown = [
        _schedule(ScheduleInfo.of(topic, name, record))
        for topic, records in page.records.items()
        for name, record in records.items()
    ]
    return SchedulesAnswer(schedules=shown, cursor=page.cursor)


@operations.add("GET", SCHEDULE, "The schedule.", problems=NO_SCHEDULE)
async def get_schedule(call: Call[NoFields, None]) -> ScheduleAnswer:
    """Get a schedule."""
    found = await _known(call)
    return _schedule(ScheduleInfo.of(call.topic, call.path["name"], found))


_change = partial(operations.add, scope=Scope.PRODUCE, is_audited=True, problems=NO_SCHEDULE)
"""Declares an operation that changes a schedule."""


@_change(
    "PUT",
    SCHEDULE,
    "The schedule has this definition.",
    problems={409: "The schedule has another version than `if_version`."},
)
async def set_schedule(call: Call[NoFields, ScheduleRequest]) -> ScheduleChangedAnswer:
    """Create or change a schedule.

    Its occurrences are ordinary messages with the id `name@<tick>`, the tick in epoch milliseconds,
    after the `key` if there is one. Repeating the request changes nothing. Another definition
    replaces the waiting occurrence, too.
    """
    wanted = call.body
    try:
        changed = await call.gateway.sender.schedule(
            call.path["name"],
            topic=call.topic,
            body=read_body(wanted.body, wanted.body_base64),
            **_options(wanted),
        )
    except InvalidMessage as error:  # its text names options; the request's fields have a unit
        text = re.sub(r"\b(every|jitter|max_late|ttl)(?=[=:]|$)", r"\1_ms", str(error))
        raise InvalidMessage(text) from error
    return ScheduleChangedAnswer(name=call.path["name"], changed=changed)


def _options(request: ScheduleRequest) -> dict[str, Any]:
    """The options of `Producer.schedule` in a request. Raises ErrorResponse."""
    given = msgspec.structs.asdict(request)
    del given["body"], given["body_base64"]
    for name in [name for name in given if name.endswith("_ms")]:
        value = given.pop(name)
        given[name.removesuffix("_ms")] = None if value is None else f"{value}ms"
    return {**given, "retry": read_policy(request.retry)}


@_change("DELETE", SCHEDULE, "The schedule is removed with its waiting occurrence.")
async def remove_schedule(call: Call[NoFields, None]) -> ScheduleChangedAnswer:
    """Remove a schedule."""
    with suppress(InvalidMessage):  # a record that cannot be read is removed, too
        await _known(call)
    changed = await call.gateway.sender.remove_schedule(call.topic, call.path["name"])
    return ScheduleChangedAnswer(name=call.path["name"], changed=changed)


@_change("POST", f"{SCHEDULE}/pause", "The schedule is paused.")
async def pause_schedule(call: Call[NoFields, None]) -> ScheduleChangedAnswer:
    """Pause a schedule.

    Removes the waiting occurrence.
    """
    await _known(call)
    changed = await call.gateway.sender.pause_schedule(call.topic, call.path["name"])
    return ScheduleChangedAnswer(name=call.path["name"], changed=changed)


@_change("POST", f"{SCHEDULE}/resume", "The schedule runs.")
async def resume_schedule(call: Call[NoFields, None]) -> ScheduleChangedAnswer:
    """Resume a schedule.

    Continues with the next tick; ticks during the pause are not caught up.
    """
    await _known(call)
    changed = await call.gateway.sender.resume_schedule(call.topic, call.path["name"])
    return ScheduleChangedAnswer(name=call.path["name"], changed=changed)


@_change("POST", f"{SCHEDULE}/run", "The occurrence is due now.", problems={**NO_SCHEDULE, **FULL})
async def run_schedule(call: Call[NoFields, None]) -> RunAnswer:
    """Run a schedule now.

    Creates an occurrence besides those of the ticks.
    """
    await _known(call)
    made = await call.gateway.sender.run_schedule(call.topic, call.path["name"])
    return RunAnswer(name=call.path["name"], id=made)


@_change(
    "POST", f"{SCHEDULE}/backfill", "The occurrences are due now.", problems={**NO_SCHEDULE, **FULL}
)
async def backfill_schedule(call: Call[NoFields, BackfillRequest]) -> BackfillAnswer:
    """Create the occurrences of past ticks.

    The range may contain at most 10,000 past ticks. Occurrences that exist, or existed within the
    topic's `retention`, are not created again.
    """
    from_ms, to_ms = call.body.from_ms, call.body.to_ms
    await count_backfilled(call.gateway.store, await _known(call), from_ms, to_ms)
    start, end = ms_datetime(from_ms), ms_datetime(to_ms)
    created, known = await call.gateway.sender.backfill_schedule(
        call.topic, call.path["name"], start, end
    )
    return BackfillAnswer(name=call.path["name"], created=created, known=known)


@operations.add(
    "GET",
    f"{SCHEDULE}/next",
    "The ticks; fewer than asked for if the schedule ends before.",
    problems=NO_SCHEDULE,
)
async def next_ticks(call: Call[NextQuery, None]) -> NextTicksAnswer:
    """List the next ticks of a schedule."""
    record, store = await _known(call), call.gateway.store
    now_ms = await store.drive(store.server_time_ms(store.keys.topic(call.topic).schedules))
    ticks = schedules.upcoming(record, now_ms, call.query.count)
    shown = [tick async for tick in in_turns(ticks)]
    return NextTicksAnswer(name=call.path["name"], ticks_ms=shown)


async def _known(call: Call[Any, Any]) -> Record:
    name = call.path["name"]
    found = await call.gateway.ask(schedules.get_record, call.topic, name)
    if found is None:
        await require_topic(call.gateway, call.topic)
        raise ErrorResponse(
            404, "unknown-schedule", f"topic {call.topic!r} has no schedule {name!r}"
        )
    return found


def _schedule(schedule: ScheduleInfo) -> ScheduleAnswer:
    defined = schedule.definition
    shared = ScheduleAnswer.__struct_fields__
    fields = {
        name: value for name, value in msgspec.structs.asdict(defined).items() if name in shared
    }
    return ScheduleAnswer(
        **{
            **fields,
            "topic": schedule.topic,
            "name": schedule.name,
            "version": schedule.version,
            "paused": schedule.is_paused,
            "next_ms": schedule.next_ms,
            "last_ms": schedule.last_ms,
            "created": schedule.made,
            "cron": defined.cron or None,
            "every_ms": defined.every_ms or None,
            "count": defined.most,
            "retry": defined.policy,
            "late": late_text(defined.late),
            **response_body(body_of(defined)),
        }
    )
