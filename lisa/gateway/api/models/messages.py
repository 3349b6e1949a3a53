"""Models for inspecting, cancelling and rescheduling messages."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from lisa.admin.messages import LiveState
from lisa.core.store.inspection import State as FoundState
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.reschedule import Rescheduled
from lisa.gateway.api.models.base import (
    Answer,
    BusinessDays,
    Cursor,
    Fold,
    Instant,
    Limit,
    Milliseconds,
    Name,
    Request,
    WallTime,
    one_of,
)


class ListQuery(Request):
    """Filters for listing messages."""

    state: LiveState = LiveState.WAITING
    group: Annotated[Name | None, Meta(description="Defaults to all groups.")] = None
    due_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


CONSUMER = "The consumer that holds the message. Null unless it is in flight."
IDLE = "Time since the delivery or its last extension. Null unless the message is in flight."
DEFERRALS = (
    "How often the message was deferred since its last failure, without counting an attempt."
)
TRACEBACK = "In garbage: where the handler raised, at most the last 2 KiB. Else null."


class ListedMessage(Answer):
    """One message in one group, without its body."""

    id: str
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


class MessageAnswer(GroupStateAnswer):
    """The current state of a message. A settled message has neither body nor headers."""

    id: str
    topic: str
    headers: dict[str, str]
    groups: dict[str, GroupStateAnswer]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class CancelAnswer(Answer):
    """The message is cancelled and will not be delivered."""

    id: str
    outcome: Annotated[str, one_of(Cancelled.CANCELLED)]


class RescheduleRequest(Request):
    """A new due time. Exactly one of `due_ms`, `delay_ms` and `at_local`.

    Outside the window of the message or of its topic, it moves to the next opening.
    """

    due_ms: Instant | None = None
    delay_ms: Milliseconds | None = None
    at_local: WallTime | None = None
    tz: Annotated[
        str | None,
        Meta(description="Time zone of `at_local`; by default that of the message's own window."),
    ] = None
    fold: Fold | None = None
    business_days: BusinessDays | None = None


class RescheduleAnswer(Answer):
    """The message has the new due time."""

    id: str
    outcome: Annotated[str, one_of(Rescheduled.RESCHEDULED)]
