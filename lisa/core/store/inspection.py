"""The result of `get`: one message and its state in each group."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from lisa.core.model.clock import ms_datetime
from lisa.core.model.envelope import decode_body, decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.sharding import key_of
from lisa.core.transitions.inspect import GroupState, Inspection


class State(StrEnum):
    """A message's state. The last five are final."""

    WAITING = "waiting"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    PARKED = "parked"
    RETRY = "retry"
    GARBAGE = "garbage"
    ACKED = "acked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"
    PURGED = "purged"

    @property
    def is_final(self) -> bool:
        """Whether the message is settled, so that only its tombstone is known."""
        return self in _FINAL


_FINAL = (State.ACKED, State.CANCELLED, State.EXPIRED, State.SKIPPED, State.PURGED)
_FIRST = (State.IN_FLIGHT, State.READY, State.PARKED, State.RETRY, State.GARBAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInGroup:
    """A message's state in one group.

    due_ms: epoch milliseconds of the current or next attempt; for garbage, of its death.
    attempts: attempts begun, including the current one.
    consumer, idle: the consumer that has the message in flight, and for how long.
    deferrals: how often it was deferred since its last failure, without counting an attempt.
    reason: the reason of the last failure or deferral.
    traceback: its traceback without Lisa's own frames, at most the last 2 KiB; only in garbage, and
        only if a handler raised.
    """

    state: State
    due_ms: int | None = None
    attempts: int = 0
    consumer: str | None = None
    idle: timedelta | None = None
    deferrals: int = 0
    reason: str | None = None
    traceback: str | None = None

    @property
    def due(self) -> datetime | None:
        """The due time, aware, UTC."""
        return None if self.due_ms is None else ms_datetime(self.due_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMessage(FoundInGroup):
    """A message and its current state.

    With several groups the top-level fields are those of the group whose state comes first in the
    order in flight, ready, parked, retry, garbage; `groups` has every group. A settled message has
    no body and no headers.

    If the stored body cannot be decoded, `body` is None and `reason` explains why.
    """

    id: str
    topic: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    groups: dict[str, FoundInGroup] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """The key with which the message was sent, if any: the first part of its id."""
        return key_of(self.id)


def found(
    topic: str, message_id: str, seen: Inspection, *, has_body: bool = True
) -> FoundMessage | None:
    """Convert an inspection; None if the id is unknown. has_body: whether the body was read."""
    groups = {held.group: _in_group(held) for held in seen.group_states}
    if not seen.envelope or (seen.waiting_due_ms is None and not groups):
        return _settled(topic, message_id, seen)
    if seen.waiting_due_ms is not None:
        first = FoundInGroup(state=State.WAITING, due_ms=seen.waiting_due_ms)
    else:
        first = min(groups.values(), key=lambda held: _FIRST.index(held.state))
    body, headers, fault = _content(seen.envelope) if has_body else (None, {}, None)
    return FoundMessage(
        id=message_id,
        topic=topic,
        body=body,
        headers=headers,
        groups=groups,
        **asdict(replace(first, reason=first.reason or fault)),
    )


def _in_group(held: GroupState) -> FoundInGroup:
    state = State(held.state)
    begun = held.failed_attempts + (state is State.IN_FLIGHT)
    idle = None if held.idle_ms is None else timedelta(milliseconds=held.idle_ms)
    return FoundInGroup(
        state=state,
        due_ms=held.due_ms,
        attempts=begun,
        consumer=held.consumer,
        idle=idle,
        deferrals=held.deferrals,
        reason=held.reason,
        traceback=held.traceback,
    )


def _settled(topic: str, message_id: str, seen: Inspection) -> FoundMessage | None:
    stone = seen.tombstone
    if stone is None:
        return None
    return FoundMessage(
        id=message_id,
        topic=topic,
        state=State(stone.state),
        due_ms=stone.due_ms,
        attempts=stone.attempts,
    )


def _content(data: bytes) -> tuple[Any, dict[str, str], str | None]:
    try:
        envelope = decode_envelope(data)
        return decode_body(envelope.kind, envelope.body), envelope.headers, None
    except InvalidMessage as error:
        return None, {}, str(error)
