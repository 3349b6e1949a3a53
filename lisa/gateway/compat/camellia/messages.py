"""Messages in Camellia's format.

The fields that only Camellia has (send time, ttl, maxRetry) are kept in one header,
`camellia: <produceTime>,<triggerTime>,<ttlMillis>,<maxRetry>`. Fields are null if unknown: messages
sent through another API lack the header, and settled messages have only a tombstone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from lisa.core.model.message import Message
from lisa.core.store.inspection import FoundMessage, State, found
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.compat.answering import text_of

HEADER = "camellia"

WAITING, READY, CONSUMING, CONSUMED, EXPIRED, EXHAUSTED, DELETED = range(1, 8)

_STATUS = {
    State.READY: READY,
    State.IN_FLIGHT: CONSUMING,
    State.GARBAGE: EXHAUSTED,
    State.ACKED: CONSUMED,
    State.CANCELLED: DELETED,
    State.PURGED: DELETED,
    State.SKIPPED: EXPIRED,
}
_ALIVE = (State.WAITING, State.READY, State.IN_FLIGHT, State.RETRY)


class DelayMsg(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """A message in Camellia's field order. Times are epoch milliseconds."""

    topic: str
    msg_id: str
    msg: str | None = None
    produce_time: int | None = None
    trigger_time: int | None = None
    expire_time: int | None = None
    max_retry: int | None = None
    retry: int = 0
    status: int = WAITING


class Origin(NamedTuple):
    """The content of the `camellia` header."""

    produce_ms: int
    trigger_ms: int
    ttl_ms: int
    max_retry: int

    @property
    def header(self) -> dict[str, str]:
        """The message header with this content."""
        return {HEADER: ",".join(map(str, self))}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Origin | None:
        """Parse the header; None if it is missing or not valid."""
        parts = headers.get(HEADER, "").split(",")
        if len(parts) != 4 or not all(one.isascii() and one.isdigit() for one in parts):
            return None
        return cls(*map(int, parts))


def as_sent(topic: str, message_id: str, text: str, origin: Origin, *, is_due: bool) -> DelayMsg:
    """A message that was just accepted."""
    return DelayMsg(
        topic=topic,
        msg_id=message_id,
        msg=text,
        produce_time=origin.produce_ms,
        trigger_time=origin.trigger_ms,
        expire_time=origin.trigger_ms + origin.ttl_ms,
        max_retry=origin.max_retry,
        status=READY if is_due else WAITING,
    )


def as_pulled(message: Message) -> DelayMsg:
    """A message that is being delivered; its `retry` counts this delivery."""
    origin = Origin.of(message.headers)
    due_ms = message.due_ms if message.attempt == 1 else None
    return _with_origin(
        origin,
        due_ms,
        None,
        topic=message.topic,
        msg_id=message.id,
        msg=text_of(message.body),
        retry=message.attempt,
        status=CONSUMING,
    )


def as_found(topic: str, message_id: str, seen: Inspection, now_ms: int) -> DelayMsg | None:
    """A message that was looked up; None if it is unknown."""
    one = found(topic, message_id, seen)
    if one is None:
        return None
    is_live = one.state in (*_ALIVE, State.GARBAGE)
    retry = one.attempts
    if one.state is State.EXPIRED and one.due_ms is not None:
        retry = max(0, retry - 1)  # expired at its delivery, which does not count
    # For a later attempt or a dead message, due_ms is no longer the original due time.
    before = 0 if is_live and one.state is not State.IN_FLIGHT else 1
    is_first = one.attempts <= before and one.state is not State.GARBAGE
    return _with_origin(
        Origin.of(one.headers),
        one.due_ms if is_first else None,
        seen.expires_ms,
        topic=topic,
        msg_id=message_id,
        msg=text_of(one.body) if is_live else None,
        retry=retry,
        status=_status(one, retry, seen.expires_ms, now_ms),
    )


def is_alive(topic: str, message_id: str, seen: Inspection) -> bool:
    """Whether the message may still be delivered, or is in flight."""
    one = found(topic, message_id, seen)
    return one is not None and one.state in _ALIVE


def _with_origin(
    origin: Origin | None, due_ms: int | None, expires_ms: int | None, **known: Any
) -> DelayMsg:
    if origin is None:
        return DelayMsg(trigger_time=due_ms, expire_time=expires_ms, **known)
    if expires_ms is not None:  # set from the due time, unchanged by retries
        due_ms = expires_ms - origin.ttl_ms
    trigger_ms = origin.trigger_ms if due_ms is None else due_ms
    return DelayMsg(
        produce_time=origin.produce_ms,
        trigger_time=trigger_ms,
        expire_time=trigger_ms + origin.ttl_ms,
        max_retry=origin.max_retry,
        **known,
    )


def _status(one: FoundMessage, retry: int, expires_ms: int | None, now_ms: int) -> int:
    # A message past its ttl is not delivered, even before a manager has expired it.
    is_past = expires_ms is not None and expires_ms <= now_ms
    if one.state is State.EXPIRED or (is_past and one.state is not State.IN_FLIGHT):
        return EXHAUSTED if retry else EXPIRED
    if one.state in (State.WAITING, State.RETRY):
        return READY if one.due_ms is not None and one.due_ms <= now_ms else WAITING
    return _STATUS[one.state]
