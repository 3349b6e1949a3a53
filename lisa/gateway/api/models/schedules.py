"""Models for schedules of recurring messages."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, UnsetType

from lisa.core.model.recurring.definition import (
    MIN_EVERY_MS,
    MIN_LATE_MS,
    MOST_OCCURRENCES,
    CatchUp,
    Dst,
    Overlap,
)
from lisa.gateway.api.models.base import (
    Answer,
    Instant,
    Late,
    Milliseconds,
    Request,
    Retries,
    Ttl,
)

MOST_TICKS = 1_000

Moment = Annotated[
    str,
    Meta(
        max_length=64,
        description="ISO 8601, as in `2026-12-24T09:00`; in the zone `tz` unless it has an offset.",
    ),
]


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
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class ScheduleChangedAnswer(Answer):
    """Whether the request changed anything."""

    name: str
    changed: bool


class RunAnswer(Answer):
    """The id of the occurrence."""

    name: str
    id: str


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
