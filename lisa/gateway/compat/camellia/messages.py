"""One message as camellia's clients see it, whoever sent it and wherever it stands.

What only such a client gave (when it sent, its ttl, its maxRetry) travels in one header,
`camellia: <produceTime>,<triggerTime>,<ttlMillis>,<maxRetry>`. A message that came another way has
none, and a settled one is only a tombstone: what cannot be known then is null.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from lisa.core.message import Message
from lisa.core.transitions.inspect import Inspection
from lisa.producer.found import FoundMessage, State, found

__all__ = ["HEADER", "DelayMsg", "Origin", "as_found", "as_pulled", "as_sent", "is_alive"]

HEADER = "camellia"

WAITING, READY, CONSUMING, CONSUMED, EXPIRED, EXHAUSTED, DELETED = range(1, 8)

_STATUS = {
    State.READY: READY,
    State.IN_FLIGHT: CONSUMING,
    State.GARBAGE: EXHAUSTED,
    State.ACKED: CONSUMED,
    State.CANCELLED: DELETED,
    State.PURGED: DELETED,
}
_ALIVE = (State.WAITING, State.READY, State.IN_FLIGHT, State.RETRY)


class DelayMsg(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """The fields, in their order on the wire. Times are epoch milliseconds."""

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
    """What the header holds."""

    produce_ms: int
    trigger_ms: int
    ttl_ms: int
    max_retry: int

    @property
    def header(self) -> dict[str, str]:
        """As it travels with the message."""
        return {HEADER: ",".join(map(str, self))}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Origin | None:
        """Read it; None where there is none, or a foreign hand wrote something else."""
        parts = headers.get(HEADER, "").split(",")
        if len(parts) != 4 or not all(one.isascii() and one.isdigit() for one in parts):
            return None
        return cls(*map(int, parts))


def as_sent(topic: str, message_id: str, text: str, origin: Origin, *, is_due: bool) -> DelayMsg:
    """One that was just accepted."""
    return DelayMsg(
        topic=topic, msg_id=message_id, msg=text, produce_time=origin.produce_ms,
        trigger_time=origin.trigger_ms, expire_time=origin.trigger_ms + origin.ttl_ms,
        max_retry=origin.max_retry, status=READY if is_due else WAITING,
    )  # fmt: skip


def as_pulled(message: Message) -> DelayMsg:
    """One that is being handed out: its `retry` counts this delivery."""
    origin = Origin.of(message.headers)
    due_ms = message.due_ms if message.attempt == 1 else None
    return _with_origin(
        origin, due_ms, None, topic=message.topic, msg_id=message.id, msg=_text(message.body),
        retry=message.attempt, status=CONSUMING,
    )  # fmt: skip


def as_found(topic: str, message_id: str, seen: Inspection, now_ms: int) -> DelayMsg | None:
    """One that was looked up; None if it is unknown."""
    one = found(topic, message_id, seen)
    if one is None:
        return None
    is_live = one.state in (*_ALIVE, State.GARBAGE)
    retry = one.attempts
    if one.state is State.EXPIRED and one.due_ms is not None:
        retry = max(0, retry - 1)  # it was found past its ttl as it was to be handed out
    # Of a later attempt, and of a death, it tells that instant: no longer the first due time.
    before = 0 if is_live and one.state is not State.IN_FLIGHT else 1
    is_first = one.attempts <= before and one.state is not State.GARBAGE
    return _with_origin(
        Origin.of(one.headers), one.due_ms if is_first else None, seen.expires_ms,
        topic=topic, msg_id=message_id, msg=_text(one.body) if is_live else None,
        retry=retry, status=_status(one, retry, seen.expires_ms, now_ms),
    )  # fmt: skip


def is_alive(topic: str, message_id: str, seen: Inspection) -> bool:
    """Whether it may still be handed out, or is being handled."""
    one = found(topic, message_id, seen)
    return one is not None and one.state in _ALIVE


def _with_origin(
    origin: Origin | None, due_ms: int | None, expires_ms: int | None, **known: Any
) -> DelayMsg:
    if origin is None:
        return DelayMsg(trigger_time=due_ms, expire_time=expires_ms, **known)
    if expires_ms is not None:  # a new due time moves it, and outlives every retry
        due_ms = expires_ms - origin.ttl_ms
    trigger_ms = origin.trigger_ms if due_ms is None else due_ms
    return DelayMsg(
        produce_time=origin.produce_ms, trigger_time=trigger_ms,
        expire_time=trigger_ms + origin.ttl_ms, max_retry=origin.max_retry, **known,
    )  # fmt: skip


def _status(one: FoundMessage, retry: int, expires_ms: int | None, now_ms: int) -> int:
    # Past its ttl nobody is given it any more, also before a manager has come by and ended it.
    is_past = expires_ms is not None and expires_ms <= now_ms
    if one.state is State.EXPIRED or (is_past and one.state is not State.IN_FLIGHT):
        return EXHAUSTED if retry else EXPIRED
    if one.state in (State.WAITING, State.RETRY):
        return READY if one.due_ms is not None and one.due_ms <= now_ms else WAITING
    return _STATUS[one.state]


def _text(body: Any) -> str:
    """A body as text: bytes in base64, JSON as its text."""
    if isinstance(body, str):
        return body
    if isinstance(body, bytes):
        return base64.b64encode(body).decode("ascii")
    return msgspec.json.encode(body).decode()
