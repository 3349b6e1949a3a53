"""Messages as they stand, and what may be changed of one."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from lisa.admin.messages import State
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.reschedule import Rescheduled
from lisa.gateway.native.models.base import (
    Answer,
    Cursor,
    Instant,
    Limit,
    Milliseconds,
    Name,
    Request,
    one_of,
)
from lisa.producer.found import State as FoundState

__all__ = [
    "CancelAnswer", "ListQuery", "ListedMessage", "MessageAnswer", "MessagesAnswer",
    "PlaceAnswer", "RescheduleAnswer", "RescheduleRequest",
]  # fmt: skip


class ListQuery(Request):
    """Which messages are listed."""

    state: State = State.WAITING
    group: Annotated[Name | None, Meta(description="By default all groups.")] = None
    due_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class ListedMessage(Answer):
    """One message in one place, without its body."""

    id: str
    state: State
    group: Annotated[str | None, Meta(description="Null while it waits.")]
    due_ms: Annotated[
        int | None, Meta(description="Of the present or next attempt; in garbage, of its death.")
    ]
    attempts: Annotated[int, Meta(description="Those that failed.")]
    consumer: str | None
    idle_ms: int | None
    reason: Annotated[str | None, Meta(description="Why it last failed.")]
    expires_ms: int | None


class MessagesAnswer(Answer):
    """A page of messages; `cursor` is null at the end."""

    messages: list[ListedMessage]
    cursor: str | None


class PlaceAnswer(Answer):
    """How one group has a message."""

    state: FoundState
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Those begun, the present one among them.")]
    consumer: str | None
    idle_ms: int | None
    reason: str | None


class MessageAnswer(PlaceAnswer):
    """A message as it stands. One that is settled has neither body nor headers left."""

    id: str
    topic: str
    headers: dict[str, str]
    groups: dict[str, PlaceAnswer]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class CancelAnswer(Answer):
    """The message will not be handled."""

    id: str
    outcome: Annotated[str, one_of(Cancelled.CANCELLED)]


class RescheduleRequest(Request):
    """A new due time: exactly one of the two."""

    due_ms: Instant | None = None
    delay_ms: Milliseconds | None = None


class RescheduleAnswer(Answer):
    """The message has its new due time."""

    id: str
    outcome: Annotated[str, one_of(Rescheduled.RESCHEDULED)]
