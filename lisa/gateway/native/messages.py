"""One message: look at it, take it back, move it; and lists of many."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
from starlette.responses import Response

from lisa.admin.messages import Row, State, list_messages
from lisa.core.clock import duration_ms
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.reschedule import Rescheduled
from lisa.gateway.native.bodies import written_body
from lisa.gateway.native.cursors import read_cursor, written_cursor
from lisa.gateway.native.models import (
    CancelAnswer,
    ListedMessage,
    ListQuery,
    MessageAnswer,
    MessagesAnswer,
    NoFields,
    PlaceAnswer,
    RescheduleAnswer,
    RescheduleRequest,
)
from lisa.gateway.native.operations import Call, answer, invalid
from lisa.gateway.problems import Problem
from lisa.producer.found import FoundInGroup, FoundMessage
from lisa.producer.found import State as Stands

__all__ = ["cancel", "fire", "get", "list_", "listed", "reschedule", "unknown"]


def unknown(topic: str, message_id: str) -> Problem:
    """Nothing is known of this id."""
    return Problem(
        404, "unknown-message", f"nothing is known of message {message_id!r} on topic {topic!r}",
        id=message_id,
    )  # fmt: skip


async def list_(call: Call[ListQuery, None]) -> Response:
    """Messages in one state, a page of them."""
    query, store = call.query, call.hub.store
    page = await store.drive(
        list_messages(
            store, call.topic, query.state, group=query.group, due_before_ms=query.due_before_ms,
            cursor=read_cursor(query.cursor, is_stream=query.state in _IN_STREAM),
            limit=query.limit,
        )
    )  # fmt: skip
    rows = [listed(row) for row in page.rows]
    return answer(MessagesAnswer(messages=rows, cursor=written_cursor(page.cursor)))


_IN_STREAM = (State.READY, State.IN_FLIGHT)


def listed(row: Row) -> ListedMessage:
    """One row of a list."""
    return msgspec.convert(row, ListedMessage, from_attributes=True)


async def get(call: Call[NoFields, None]) -> Response:
    """A message as it stands."""
    found = await call.hub.sender.get(call.topic, call.id)
    if found is None:
        raise unknown(call.topic, call.id)
    return answer(_message(found))


def _message(found: FoundMessage) -> MessageAnswer:
    body, base64 = written_body(found.body)
    place = _place(found)
    return MessageAnswer(
        id=found.id, topic=found.topic, state=place.state, due_ms=place.due_ms,
        attempts=place.attempts, consumer=place.consumer, idle_ms=place.idle_ms,
        reason=place.reason, headers=found.headers,
        groups={name: _place(one) for name, one in found.groups.items()},
        body=msgspec.UNSET if found.state in _SETTLED else body, body_base64=base64,
    )  # fmt: skip


_SETTLED = (Stands.ACKED, Stands.CANCELLED, Stands.EXPIRED, Stands.PURGED)


def _place(found: FoundInGroup) -> PlaceAnswer:
    return PlaceAnswer(
        state=found.state,
        due_ms=found.due_ms,
        attempts=found.attempts,
        consumer=found.consumer,
        idle_ms=None if found.idle is None else duration_ms(found.idle),
        reason=found.reason,
    )


async def cancel(call: Call[NoFields, None]) -> Response:
    """Take a message back for good, unless it is in flight or done."""
    truth = await call.hub.sender.cancel(call.topic, call.id)
    if truth is not Cancelled.CANCELLED:
        raise _refused(call, "cancelled", truth)
    return answer(CancelAnswer(id=call.id, outcome=truth))


async def reschedule(call: Call[NoFields, RescheduleRequest]) -> Response:
    """Give a message a new due time."""
    delay_ms, due_ms = call.body.delay_ms, call.body.due_ms
    if (delay_ms is None) == (due_ms is None):
        raise invalid("give either due_ms or delay_ms")
    delay = None if delay_ms is None else timedelta(milliseconds=delay_ms)
    truth = await call.hub.sender.reschedule(call.topic, call.id, delay=delay, at_ms=due_ms)
    return _rescheduled(call, truth)


async def fire(call: Call[NoFields, None]) -> Response:
    """Make a message due now."""
    return _rescheduled(call, await call.hub.sender.fire_now(call.topic, call.id))


def _rescheduled(call: Call[NoFields, RescheduleRequest | None], truth: Rescheduled) -> Response:
    if truth is not Rescheduled.RESCHEDULED:
        raise _refused(call, "moved", truth)
    return answer(RescheduleAnswer(id=call.id, outcome=truth))


_WHY = {
    "in_flight": "a consumer has it in its hands",
    "done": "a group is through with it",
}


def _refused(call: Call[NoFields, Any], wanted: str, truth: Cancelled | Rescheduled) -> Problem:
    if truth in (Cancelled.UNKNOWN, Rescheduled.UNKNOWN):
        return unknown(call.topic, call.id)
    return Problem(
        409, truth.value.replace("_", "-"),
        f"message {call.id!r} was not {wanted}: {_WHY[truth]}", id=call.id, outcome=truth.value,
    )  # fmt: skip
