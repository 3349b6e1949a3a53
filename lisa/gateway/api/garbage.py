"""Operations that list, requeue and purge garbage."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lisa.admin import garbage
from lisa.admin.garbage import GarbageSelection
from lisa.core.model.keys import check_id
from lisa.gateway.access import Scope
from lisa.gateway.api.messages import MessagesAnswer, listed
from lisa.gateway.api.operations import NO_GROUP, TOPIC, Call, Operations
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import (
    MOST_ITEMS,
    Answer,
    Cursor,
    Instant,
    Limit,
    MessageId,
    Name,
    NoFields,
    ReasonText,
    Request,
    decode_cursor,
    encode_cursor,
    invalid,
)

MOST_EXAMINED = 5_000
"""Messages that one request examines at most; its cursor continues from there."""


class GarbageQuery(Request):
    """Filters for listing dead messages."""

    group: Name | None = None
    reason: Annotated[
        ReasonText | None,
        Meta(
            description="Only messages whose reason contains this text, ignoring case. Pages may "
            "then be short or empty; continue until `cursor` is null."
        ),
    ] = None
    died_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class GarbageRequest(Request):
    """The dead messages to act on: those in `ids`, or with `all` every message that matches."""

    ids: Annotated[list[MessageId], Meta(min_length=1, max_length=MOST_ITEMS)] | None = None
    all: bool = False
    group: Annotated[Name | None, Meta(description="Defaults to all groups.")] = None
    reason: ReasonText | None = None
    died_before_ms: Instant | None = None


class GarbageAnswer(Answer):
    """The number of messages changed, and the requested ids that were not in garbage."""

    done: int
    missing: list[str]


operations = Operations("Garbage")


@operations.add("GET", f"{TOPIC}/garbage", "A page, oldest first.", problems=NO_GROUP)
async def list_garbage(call: Call[GarbageQuery, None]) -> MessagesAnswer:
    """List dead messages."""
    query = call.query
    found = await call.gateway.ask(
        garbage.listed,
        _selection(call.topic, query),
        cursor=decode_cursor(query.cursor),
        limit=query.limit,
        most=MOST_EXAMINED,
    )
    rows = [listed(row) for row in found.rows]
    if not rows and query.cursor is None:
        await require_topic(call.gateway, call.topic)
    return MessagesAnswer(messages=rows, cursor=encode_cursor(found.cursor))


@operations.add(
    "POST",
    f"{TOPIC}/garbage:requeue",
    "The messages are due now.",
    scope=Scope.OPERATE,
    problems=NO_GROUP,
)
async def requeue_garbage(call: Call[NoFields, GarbageRequest]) -> GarbageAnswer:
    """Requeue dead messages."""
    return await _act(call, garbage.requeue)


@operations.add(
    "POST",
    f"{TOPIC}/garbage:purge",
    "The messages are deleted.",
    scope=Scope.OPERATE,
    problems=NO_GROUP,
)
async def purge_garbage(call: Call[NoFields, GarbageRequest]) -> GarbageAnswer:
    """Purge dead messages."""
    return await _act(call, garbage.purge)


def _selection(topic: str, given: GarbageQuery | GarbageRequest) -> GarbageSelection:
    return GarbageSelection(
        topic=topic,
        group=given.group,
        died_before_ms=given.died_before_ms,
        reason=given.reason,
    )


async def _act(call: Call[NoFields, GarbageRequest], action: garbage.Action) -> GarbageAnswer:
    wanted = call.body
    if (wanted.ids is None) is not wanted.all:
        raise invalid("give either ids or all: true")
    if wanted.ids is not None and (wanted.reason or wanted.died_before_ms) is not None:
        raise invalid("reason and died_before_ms can only be combined with all: true, not with ids")
    selection, missing = _selection(call.topic, wanted), list[str]()
    if wanted.ids is None:
        done = await call.gateway.ask(garbage.act, selection, action)
    else:
        for message_id in wanted.ids:
            check_id(message_id)
        done, missing = await call.gateway.ask(garbage.act_on, selection, wanted.ids, action)
    if not done:
        await require_topic(call.gateway, call.topic)
    return GarbageAnswer(done=done, missing=missing)
