"""Operations on all messages of a key."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from lisa.admin import limits as admin_limits
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import check_key
from lisa.core.model.lanes import MAX_COUNT, MAX_WEIGHT, KeyLimits
from lisa.core.store.inspection import FoundMessage, State
from lisa.core.store.keyed import KeyFlows, KeyOutcome, KeyPage
from lisa.core.transitions.change import Cancelled, Rescheduled
from lisa.gateway.access import Scope
from lisa.gateway.api.messages import GroupStateAnswer, group_state
from lisa.gateway.api.operations import KEY as PATH
from lisa.gateway.api.operations import NO_GROUP, NO_TOPIC, TOPIC, Call, Operations
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import (
    KEY,
    OF_LIMITS,
    Answer,
    AnswerWithId,
    Cursor,
    Instant,
    Limit,
    Milliseconds,
    Name,
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
    """Paging of a list."""

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


class LimitsQuery(Request):
    """In which group the limits apply."""

    group: Annotated[
        Name | None, Meta(description="Of this group only. Default: of all groups.")
    ] = None


class LimitsRequest(Request):
    """Limits of a key, in place of those of its topic. What is omitted stays that of the topic."""

    rate: Annotated[str, Meta(description="`2/s`, or `5 per 90s, burst 3`.")] | None = None
    concurrency: (
        Annotated[int, Meta(ge=1, le=MAX_COUNT, description="Maximum messages ready or in flight.")]
        | None
    ) = None
    weight: (
        Annotated[
            int, Meta(ge=1, le=MAX_WEIGHT, description="Share of the turns with option `fair`.")
        ]
        | None
    ) = None


class LimitsAnswer(Answer):
    """The limits that were set for a key; null for those that it does not have.

    `group` is null if they apply to all groups.
    """

    key: str
    group: str | None
    rate: str | None
    concurrency: int | None
    weight: int | None


class LimitsChangedAnswer(LimitsAnswer):
    """The limits of a key, and whether this call changed them."""

    changed: bool


class LimitedKeysAnswer(Answer):
    """A page of keys with limits: those for all groups, then by group; `cursor` null at the end."""

    topic: str
    keys: list[LimitsAnswer]
    cursor: str | None


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


@operations.add("GET", f"{TOPIC}/limits", "A page.", problems=NO_TOPIC)
async def list_limits(call: Call[KeyQuery, None]) -> LimitedKeysAnswer:
    """List the keys of a topic that have limits."""
    await require_topic(call.gateway, call.topic)
    found = await call.gateway.store.drive(
        admin_limits.limited_keys(
            call.gateway.store,
            call.topic,
            cursor=decode_cursor(call.query.cursor, OF_LIMITS),
            limit=call.query.limit,
        )
    )
    return LimitedKeysAnswer(
        topic=call.topic,
        keys=[LimitsAnswer(**_limits(*each)) for each in found.keys],
        cursor=encode_cursor(found.cursor),
    )


@operations.add("GET", f"{PATH}/limits", "The limits of the key.", problems=NO_TOPIC)
async def get_limits(call: Call[LimitsQuery, None]) -> LimitsAnswer:
    """Get the limits of a key.

    Only those that were set for the key itself; the others are the options of the topic.
    """
    await require_topic(call.gateway, call.topic)
    group = call.query.group
    found = await call.gateway.ask(admin_limits.limits_of, call.topic, call.key, group)
    return LimitsAnswer(**_limits(call.key, group, found))


@operations.add(
    "PUT", f"{PATH}/limits", "The limits are set.", scope=Scope.OPERATE, problems=NO_GROUP
)
async def set_limits(call: Call[LimitsQuery, LimitsRequest]) -> LimitsChangedAnswer:
    """Set the limits of a key.

    They replace all that were set before for this key, and for this group. Those of a group take
    precedence over those of all groups.
    """
    given = KeyLimits.parse(call.body.rate, call.body.concurrency, call.body.weight)
    if given == KeyLimits():
        raise invalid("give rate, concurrency or weight; to remove the limits, use DELETE")
    return await _limited(call, given)


@operations.add(
    "DELETE", f"{PATH}/limits", "The key has no limits.", scope=Scope.OPERATE, problems=NO_GROUP
)
async def remove_limits(call: Call[LimitsQuery, None]) -> LimitsChangedAnswer:
    """Remove the limits of a key.

    The options of the topic apply again.
    """
    return await _limited(call, KeyLimits())


async def _limited(call: Call[LimitsQuery, Any], given: KeyLimits) -> LimitsChangedAnswer:
    await require_topic(call.gateway, call.topic)
    group = call.query.group
    changed = await call.gateway.ask(admin_limits.set_limits, call.topic, call.key, given, group)
    return LimitsChangedAnswer(**_limits(call.key, group, given), changed=changed)


def _limits(key: str, group: str | None, limits: KeyLimits) -> dict[str, Any]:
    rate = limits.rate and str(limits.rate)
    return {
        "key": key,
        "group": group,
        "rate": rate,
        "concurrency": limits.concurrency,
        "weight": limits.weight,
    }
