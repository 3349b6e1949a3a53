"""Operations on all messages of a key."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from lisa.core.model.errors import LisaError
from lisa.core.model.keys import check_key
from lisa.core.store.inspection import FoundMessage, State
from lisa.core.store.keyed import KeyFlows, KeyOutcome, KeyPage
from lisa.core.transitions.change import Cancelled, Rescheduled
from lisa.gateway.access import Scope
from lisa.gateway.api.messages import GroupStateAnswer, group_state
from lisa.gateway.api.operations import KEY as PATH
from lisa.gateway.api.operations import NO_TOPIC, Call, Operations
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import (
    KEY,
    Answer,
    AnswerWithId,
    Cursor,
    Instant,
    Limit,
    Milliseconds,
    NoFields,
    Request,
    Shift,
    decode_cursor,
    encode_cursor,
    invalid,
    one_of,
)
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import problem_of

_STATES = [state for state in State if state is not State.WAITING]


class KeyQuery(Request):
    """Paging of a key's messages."""

    cursor: Cursor | None = None
    limit: Limit = 100


class KeyedMessage(GroupStateAnswer, kw_only=True):
    """The current state of a message of the key, without its body."""

    id: str
    key: Annotated[str, Meta(description=KEY.partition(" Omitted")[0])]
    groups: dict[str, GroupStateAnswer]


class KeyAnswer(Answer):
    """A page of the key's live messages. `count` is that of all pages; `cursor` null at the end."""

    topic: str
    key: str
    count: int
    messages: list[KeyedMessage]
    cursor: str | None


class KeyedOutcome(AnswerWithId, kw_only=True):
    """What was done to one message."""

    outcome: Annotated[
        str, one_of(*dict.fromkeys([*map(str, Cancelled), *map(str, Rescheduled), *_STATES]))
    ]


class KeyChangedAnswer(Answer):
    """The outcome of each message, as that of the same change of a single one.

    `changed` counts the messages that were changed. With `shift_ms`, the outcome of a message that
    does not wait is its state.
    """

    topic: str
    key: str
    changed: int
    results: list[KeyedOutcome]


class RescheduleKeyRequest(Request):
    """A new due time, or by how much waiting messages move. Exactly one of the fields.

    Outside the window of a message or of its topic, it moves to the next opening.
    """

    due_ms: Instant | None = None
    delay_ms: Milliseconds | None = None
    shift_ms: Annotated[
        Shift | None,
        Meta(description="Later by this, or earlier if negative; also text such as `-30m`."),
    ] = None


operations = Operations("Keys")


async def page_of(
    gateway: GatewayContext, topic: str, key: str, cursor: str | None = None, limit: int = 100
) -> KeyPage:
    """A page of a key's live messages. Raises LisaError."""
    flows = KeyFlows(gateway.store, topic, check_key(key), gateway.store.run)
    return await gateway.store.drive(flows.page(cursor, limit))


@operations.add("GET", PATH, "A page.", problems=NO_TOPIC)
async def list_key(call: Call[KeyQuery, None]) -> KeyAnswer:
    """List the messages of a key.

    Live messages only; each page is sorted by due time. A page may be short; continue until
    `cursor` is null.
    """
    query = call.query
    page = await page_of(
        call.gateway, call.topic, call.key, decode_cursor(query.cursor), query.limit
    )
    if not page.total:
        await require_topic(call.gateway, call.topic)
    return KeyAnswer(
        topic=call.topic,
        key=call.key,
        count=page.total,
        messages=[_keyed(call.key, message) for message in page.messages],
        cursor=encode_cursor(page.cursor),
    )


def _keyed(key: str, found: FoundMessage) -> KeyedMessage:
    return KeyedMessage(
        **asdict(group_state(found)),
        id=found.id,
        key=key,
        groups={name: group_state(group) for name, group in found.groups.items()},
    )


_change = partial(
    operations.add, path=PATH, scope=Scope.PRODUCE, is_audited=True, problems=NO_TOPIC
)
"""Declares an operation that changes all messages of a key."""


@_change("DELETE", answers="The outcome of each message.")
async def cancel_key(call: Call[NoFields, None]) -> KeyChangedAnswer:
    """Cancel all messages of a key.

    All messages sent before the request are among them. Up to about 60 messages change in one step,
    more in several. After an error, repeat the request: it continues.
    """
    return await _changed(call, call.gateway.sender.cancel_key(call.topic, call.key))


@_change("PATCH", answers="The outcome of each message.")
async def reschedule_key(call: Call[NoFields, RescheduleKeyRequest]) -> KeyChangedAnswer:
    """Reschedule all messages of a key.

    In the same steps as for a cancellation. A repeated request with `shift_ms` moves again.
    """
    given = {
        name: value
        for name in ("due_ms", "delay_ms", "shift_ms")
        if (value := getattr(call.body, name)) is not None
    }
    if len(given) != 1:
        raise invalid("give one of due_ms, delay_ms and shift_ms")
    ((name, value),) = given.items()
    due = {"at_ms": value} if name == "due_ms" else {name[:-3]: timedelta(milliseconds=value)}
    moved = call.gateway.sender.reschedule_key(call.topic, call.key, **due)
    return await _changed(call, moved)


@_change("POST", path=f"{PATH}/fire", answers="The outcome of each message.")
async def fire_key(call: Call[NoFields, None]) -> KeyChangedAnswer:
    """Make all messages of a key due now."""
    return await _changed(call, call.gateway.sender.fire_key(call.topic, call.key))


async def _changed(
    call: Call[NoFields, Any], change: Awaitable[Sequence[KeyOutcome]]
) -> KeyChangedAnswer:
    """The answer of a change. Raises ErrorResponse, which says how many messages were changed."""
    try:
        outcomes = await change
    except LisaError as error:
        if not error.outcomes:
            raise
        problem = problem_of(error)
        problem.detail += f"; messages of the key that were handled before: {len(error.outcomes)}"
        raise problem from error
    if not outcomes:
        await require_topic(call.gateway, call.topic)
    done = (Cancelled.CANCELLED, Rescheduled.RESCHEDULED)
    return KeyChangedAnswer(
        topic=call.topic,
        key=call.key,
        changed=sum(each.outcome in done for each in outcomes),
        results=[KeyedOutcome(id=each.id, outcome=each.outcome) for each in outcomes],
    )
