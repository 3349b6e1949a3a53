"""What `get` tells of one message."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from lisa.core.clock import ms_datetime
from lisa.core.envelope import decode_body, decode_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.transitions.inspect import Inspection, Place

__all__ = ["FoundInGroup", "FoundMessage", "State", "found"]


class State(StrEnum):
    """Where a message stands. The last four are final."""

    WAITING = "waiting"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    RETRY = "retry"
    GARBAGE = "garbage"
    ACKED = "acked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PURGED = "purged"


_FIRST = (State.IN_FLIGHT, State.READY, State.RETRY, State.GARBAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInGroup:
    """How one group has a message.

    due_ms: epoch milliseconds of the present or next attempt; in garbage, of its death.
    attempts: those begun, the present one among them.
    consumer, idle: who has it in flight, and since when. reason: why it last failed.
    """

    state: State
    due_ms: int | None = None
    attempts: int = 0
    consumer: str | None = None
    idle: timedelta | None = None
    reason: str | None = None

    @property
    def due(self) -> datetime | None:
        """The due time, aware, UTC."""
        return None if self.due_ms is None else ms_datetime(self.due_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMessage(FoundInGroup):
    """A message as it stands.

    Of several groups it shows the one that has it in the first of in flight, ready, retry and
    garbage; `groups` has each. A settled message has neither body nor headers left.

    Where a foreign hand wrote the body and it cannot be read, it is None and `reason` says why.
    """

    id: str
    topic: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    groups: dict[str, FoundInGroup] = field(default_factory=dict)


def found(topic: str, message_id: str, seen: Inspection) -> FoundMessage | None:
    """Read an inspection; None if the id is unknown."""
    groups = {place.group: _in_group(place) for place in seen.places}
    if not seen.envelope or (seen.waiting_due_ms is None and not groups):
        return _settled(topic, message_id, seen)
    if seen.waiting_due_ms is not None:
        first = FoundInGroup(state=State.WAITING, due_ms=seen.waiting_due_ms)
    else:
        first = min(groups.values(), key=lambda place: _FIRST.index(place.state))
    body, headers, fault = _content(seen.envelope)
    return FoundMessage(
        id=message_id, topic=topic, body=body, headers=headers, groups=groups,
        state=first.state, due_ms=first.due_ms, attempts=first.attempts,
        consumer=first.consumer, idle=first.idle, reason=first.reason or fault,
    )  # fmt: skip


def _in_group(place: Place) -> FoundInGroup:
    state = State(place.state)
    begun = place.failed_attempts + (state is State.IN_FLIGHT)
    idle = None if place.idle_ms is None else timedelta(milliseconds=place.idle_ms)
    return FoundInGroup(
        state=state, due_ms=place.due_ms, attempts=begun,
        consumer=place.consumer, idle=idle, reason=place.reason,
    )  # fmt: skip


def _settled(topic: str, message_id: str, seen: Inspection) -> FoundMessage | None:
    stone = seen.tombstone
    if stone is None:
        return None
    return FoundMessage(
        id=message_id, topic=topic, state=State(stone.state), due_ms=stone.due_ms,
        attempts=stone.attempts,
    )  # fmt: skip


def _content(data: bytes) -> tuple[Any, dict[str, str], str | None]:
    try:
        envelope = decode_envelope(data)
        return decode_body(envelope.kind, envelope.body), envelope.headers, None
    except InvalidMessage as error:
        return None, {}, str(error)
