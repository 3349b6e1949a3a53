"""Operations that list, inspect, cancel and reschedule messages, and those on garbage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType, defstruct

from lisa.admin import garbage
from lisa.admin import messages as admin
from lisa.admin.garbage import GarbageSelection
from lisa.admin.messages import LiveState
from lisa.admin.why import why
from lisa.core.model.clock import duration_ms
from lisa.core.model.keys import check_id, shown_id
from lisa.core.store.inspection import FoundInGroup
from lisa.core.store.inspection import State as FoundState
from lisa.core.transitions.change import Cancelled, Rescheduled
from lisa.gateway.access import Scope
from lisa.gateway.api.operations import (
    MESSAGE,
    MESSAGES,
    NO_GROUP,
    TOPIC,
    Call,
    Operations,
    Problems,
)
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import (
    IN_ORDER,
    IN_STREAM,
    KEY,
    MOST_ITEMS,
    Answer,
    AnswerWithId,
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
    given_options,
    invalid,
    key_field,
    one_of,
    option_fields,
    response_body,
)
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse
from lisa.producer import DueOptions

CONSUMER = "The consumer that holds the message. Null unless it is in flight."
IDLE = "Time since the delivery or its last extension. Null unless the message is in flight."

DEFERRALS = (
    "How often the message was deferred since its last failure, without counting an attempt."
)
MOST_EXAMINED = 5_000
"""Messages that one request examines at most; its cursor continues from there."""

TRACEBACK = "In garbage: where the handler raised, at most the last 2 KiB. Else null."


class ListQuery(Request):
    """Filters for listing messages."""

    state: LiveState = LiveState.WAITING
    group: Annotated[Name | None, Meta(description="Defaults to all groups.")] = None
    due_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class ListedMessage(AnswerWithId, kw_only=True):
    """One message in one group, without its body."""

    state: LiveState
    group: Annotated[str | None, Meta(description="Null while the message waits.")]
    due_ms: Annotated[
        int | None,
        Meta(description="When the current or next attempt is due; in garbage, when it died."),
    ]
    attempts: Annotated[int, Meta(description="Failed attempts.")]
    deferrals: Annotated[int, Meta(description=DEFERRALS)]
    consumer: Annotated[str | None, Meta(description=CONSUMER)]
    idle_ms: Annotated[int | None, Meta(description=IDLE)]
    reason: Annotated[str | None, Meta(description="The last failure or deferral.")]
    traceback: Annotated[str | None, Meta(description=TRACEBACK)]
    expires_ms: Annotated[
        int | None, Meta(description="When the message's ttl ends. Null without a ttl.")
    ]


class MessagesAnswer(Answer):
    """A page of messages; `cursor` is null at the end."""

    messages: list[ListedMessage]
    cursor: str | None


class GroupStateAnswer(Answer):
    """The state of a message in one group."""

    state: FoundState
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Attempts started, including the current one.")]
    deferrals: Annotated[int, Meta(description=DEFERRALS)]
    consumer: Annotated[str | None, Meta(description=CONSUMER)]
    idle_ms: Annotated[int | None, Meta(description=IDLE)]
    reason: str | None
    traceback: Annotated[str | None, Meta(description=TRACEBACK)]


class MessageAnswer(GroupStateAnswer, kw_only=True):
    """The current state of a message. A settled message has neither body nor headers."""

    id: str
    key: Annotated[str | UnsetType, Meta(description=KEY)] = UNSET
    topic: str
    headers: dict[str, str]
    groups: dict[str, GroupStateAnswer]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class ReasonAnswer(Answer):
    """Why a message is not running in a group; without one, in all groups."""

    group: str | None
    state: str
    sentence: str
    until_ms: Annotated[int | None, Meta(description="When this changes, if that is known.")]


class WhyAnswer(Answer):
    """Why a message is not running now: a sentence for each group that owes it."""

    reasons: list[ReasonAnswer]


class CancelAnswer(AnswerWithId, kw_only=True):
    """The message is cancelled and will not be delivered."""

    outcome: Annotated[str, one_of(Cancelled.CANCELLED)]


if TYPE_CHECKING:
    _DueFields = Request
else:
    _DueFields = defstruct("_DueFields", option_fields(DueOptions), bases=(Request,), kw_only=True)


class RescheduleRequest(_DueFields):
    """A new due time. Exactly one of `due_ms`, `delay_ms` and `at_local`.

    Outside the window of the message or of its topic, it moves to the next opening. Without `tz`,
    a local time is one in the zone of the message's own window.
    """


class RescheduleAnswer(AnswerWithId, kw_only=True):
    """The message has the new due time."""

    outcome: Annotated[str, one_of(Rescheduled.RESCHEDULED)]


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


NO_MESSAGE: Problems = {404: "The message or the topic is unknown."}
REFUSED: Problems = {
    **NO_MESSAGE,
    409: "Nothing was changed, because the message is in flight or done; see `outcome`.",
}

operations = Operations("Messages")


async def unknown(gateway: GatewayContext, topic: str, message_id: str) -> ErrorResponse:
    """The problem for an unknown message id. Raises ErrorResponse if the topic is unknown."""
    await require_topic(gateway, topic)
    return ErrorResponse(
        404,
        "unknown-message",
        f"message {shown_id(message_id)!r} is unknown on topic {topic!r}",
        id=message_id,
    )


@operations.add("GET", MESSAGES, "A page.", problems=NO_GROUP)
async def list_messages(call: Call[ListQuery, None]) -> MessagesAnswer:
    """List messages in one state.

    Sorted by due time; ready and in-flight messages by order of delivery.
    """
    query = call.query
    page = await call.gateway.ask(
        admin.list_messages,
        call.topic,
        query.state,
        group=query.group,
        due_before_ms=query.due_before_ms,
        cursor=decode_cursor(
            query.cursor, IN_STREAM if query.state in _STREAM_STATES else IN_ORDER
        ),
        limit=query.limit,
    )
    rows = msgspec.convert(page.rows, list[ListedMessage], from_attributes=True)
    if not rows and query.cursor is None:
        await require_topic(call.gateway, call.topic)
    return MessagesAnswer(messages=rows, cursor=encode_cursor(page.cursor))


_STREAM_STATES = (LiveState.READY, LiveState.IN_FLIGHT)


@operations.add("GET", MESSAGE, "The current state of the message.", problems=NO_MESSAGE)
async def get_message(call: Call[NoFields, None]) -> MessageAnswer:
    """Get a message.

    A settled message remains visible for the topic's `retention`.
    """
    found = await call.gateway.sender.get(call.topic, call.id)
    if found is None:
        raise await unknown(call.gateway, call.topic, call.id)
    return MessageAnswer(
        **msgspec.structs.asdict(group_state(found)),
        id=found.id,
        key=key_field(found.id),
        topic=found.topic,
        headers=found.headers,
        groups={name: group_state(group) for name, group in found.groups.items()},
        **({} if found.state.is_final else response_body(found.body)),
    )


@operations.add("GET", f"{MESSAGE}/why", "A sentence for each group.", problems=NO_MESSAGE)
async def explain_message(call: Call[NoFields, None]) -> WhyAnswer:
    """Say why a message is not running now.

    Names the instant or the remedy: its due time, a rate, a lane whose slots others hold, a failing
    message before it, its turn, a paused topic, a missing consumer or manager.
    """
    reasons = await call.gateway.ask(why, call.topic, call.id)
    if not reasons:
        raise await unknown(call.gateway, call.topic, call.id)
    return WhyAnswer(reasons=msgspec.convert(reasons, list[ReasonAnswer], from_attributes=True))


def group_state(found: FoundInGroup) -> GroupStateAnswer:
    """The state of a message in one group, or in all, for a response."""
    return GroupStateAnswer(
        state=found.state,
        due_ms=found.due_ms,
        attempts=found.attempts,
        deferrals=found.deferrals,
        consumer=found.consumer,
        idle_ms=None if found.idle is None else duration_ms(found.idle),
        reason=found.reason,
        traceback=found.traceback,
    )


_change = partial(operations.add, scope=Scope.PRODUCE, is_audited=True, problems=REFUSED)
"""Declares an operation that changes a message unless it is in flight or done."""


@_change("DELETE", MESSAGE, "The message will not be delivered.")
async def cancel_message(call: Call[NoFields, None]) -> CancelAnswer:
    """Cancel a message."""
    outcome = await call.gateway.sender.cancel(call.topic, call.id)
    await _check(call, "cancelled", outcome)
    return CancelAnswer(id=call.id, outcome=outcome)


@_change("PATCH", MESSAGE, "The message has the new due time.")
async def reschedule_message(call: Call[NoFields, RescheduleRequest]) -> RescheduleAnswer:
    """Reschedule a message."""
    due = given_options(call.body, DueOptions)
    if not due.keys() & {"delay", "at_ms", "at_local"}:
        raise invalid("give one of due_ms, delay_ms and at_local")
    outcome = await call.gateway.sender.reschedule(call.topic, call.id, **due)
    await _check(call, "rescheduled", outcome)
    return RescheduleAnswer(id=call.id, outcome=outcome)


@_change("POST", f"{MESSAGE}/fire", "The message is due.")
async def fire_message(call: Call[NoFields, None]) -> RescheduleAnswer:
    """Make a message due now."""
    outcome = await call.gateway.sender.fire_now(call.topic, call.id)
    await _check(call, "rescheduled", outcome)
    return RescheduleAnswer(id=call.id, outcome=outcome)


_WHY = {
    "in_flight": "it is in flight",
    "done": "it has ended, or a group has settled it",
}


async def _check(call: Call[NoFields, Any], action: str, outcome: Cancelled | Rescheduled) -> None:
    """Raise ErrorResponse unless the message was changed."""
    if outcome in (Cancelled.CANCELLED, Rescheduled.RESCHEDULED):
        return
    if outcome in (Cancelled.UNKNOWN, Rescheduled.UNKNOWN):
        raise await unknown(call.gateway, call.topic, call.id)
    raise ErrorResponse(
        409,
        outcome.value.replace("_", "-"),
        f"message {shown_id(call.id)!r} was not {action}: {_WHY[outcome]}",
        id=call.id,
        outcome=outcome.value,
    )


garbage_operations = Operations("Garbage")


@garbage_operations.add("GET", f"{TOPIC}/garbage", "A page, oldest first.", problems=NO_GROUP)
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
    rows = msgspec.convert(found.rows, list[ListedMessage], from_attributes=True)
    if not rows and query.cursor is None:
        await require_topic(call.gateway, call.topic)
    return MessagesAnswer(messages=rows, cursor=encode_cursor(found.cursor))


@garbage_operations.add(
    "POST",
    f"{TOPIC}/garbage:requeue",
    "The messages are due now.",
    scope=Scope.OPERATE,
    problems=NO_GROUP,
)
async def requeue_garbage(call: Call[NoFields, GarbageRequest]) -> GarbageAnswer:
    """Requeue dead messages."""
    return await _act(call, garbage.requeue)


@garbage_operations.add(
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
