"""What the test kit and the recording producers remember of messages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import msgspec

from lisa.core.model.clock import ms_datetime
from lisa.core.model.envelope import decode_content
from lisa.core.model.late import late_text, split_policy
from lisa.core.model.message import Message
from lisa.core.transitions.enqueue import Enqueue


class SentMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message that a producer sent.

    delay: the delay that was given; None if the message was sent with `at` or `at_ms`.
    due: the due time, aware, UTC. A recording producer has no clock: None for a delay.
    ttl: the message's own ttl, or None.
    retry: the message's own retry policy as text, or None.
    late: its own late policy as text, or None.
    """

    id: str
    topic: str
    body: Any
    headers: dict[str, str]
    delay: timedelta | None
    due: datetime | None
    ttl: timedelta | None = None
    retry: str | None = None
    late: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to handle a message.

    at: when the handler ran, by the test's clock; aware, UTC.
    outcome: "handled"; "deferred"; "retrying" or "dead" after a failure; "stale" if the message was
        taken away while the handler ran.
    reason: why the attempt failed or was deferred, else "".
    """

    message: Message
    at: datetime
    outcome: str
    reason: str = ""


def sent_by(call: Enqueue, now_ms: int | None = None) -> Iterator[SentMessage]:
    """The messages of a call with the due times that were given for them, at `now_ms` if known."""
    count = len(call.ids)
    nothing = [None] * count
    columns = zip(
        call.ids,
        call.dues if len(call.dues) == count else [*call.dues] * count,
        call.envelopes,
        call.ttls_ms or nothing,
        call.policies or nothing,
        strict=True,
    )
    for message_id, due, envelope, ttl_ms, policy in columns:
        body, headers = decode_content(envelope)
        delay = delay_of(due)
        retry, late = split_policy(policy)
        due_ms = due if now_ms is None else dated(due, now_ms)
        yield SentMessage(
            id=message_id,
            topic=call.topic,
            body=body,
            headers=headers,
            delay=delay,
            due=None if due_ms.startswith("+") else ms_datetime(int(due_ms)),
            ttl=None if ttl_ms is None else timedelta(milliseconds=ttl_ms),
            retry=retry,
            late=late_text(late),
        )


def delay_of(due: str) -> timedelta | None:
    """The delay of a due time for a script, '+<ms>' or epoch ms; None for the latter."""
    return timedelta(milliseconds=int(due[1:])) if due.startswith("+") else None


def dated(due: str, now_ms: int) -> str:
    """A due time for a script in epoch milliseconds; a delay counts from `now_ms`."""
    return str(now_ms + int(due[1:])) if due.startswith("+") else due
