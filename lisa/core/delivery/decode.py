"""Decodes an opened entry into a message, and builds the settlement of its delivery."""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

from lisa.core.model.envelope import UnknownFormat, decode_content, fence_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.lateness import kept_ms, letter
from lisa.core.model.message import Message
from lisa.core.model.stream import Entry
from lisa.core.transitions.ack import NO_LATENESS, Settlement

log = logging.getLogger("lisa")

_new = tuple.__new__


class Undecodable(NamedTuple):
    """Why a message cannot be decoded, and how to fail it: for good, or by its policy (None)."""

    reason: str
    delay: Literal["discard"] | None


def unpack(
    topic: str, group: str, entry: Entry, data: bytes, state: Any = None
) -> tuple[Message, Undecodable | None]:
    """The message of an entry, and why its body cannot be decoded; None if it can.

    A message that cannot be decoded has None as its body. In a rolling deployment another process
    may know a form that this one does not. `state` is that of the consumer.
    """
    _, message_id, due_ms, attempt, *_ = entry
    fault: Undecodable | None = None
    try:
        body, headers = decode_content(data)
    except InvalidMessage as error:
        body, headers = None, {}
        fault = Undecodable(str(error), None if isinstance(error, UnknownFormat) else "discard")
        said = "topic %s: message %s, attempt %d, cannot be read: %s"
        log.warning(said, topic, message_id, attempt, error)
    return Message(
        id=message_id,
        topic=topic,
        group=group,
        body=body,
        due_ms=due_ms,
        attempt=attempt,
        headers=headers,
        state=state,
    ), fault


def settlement_of(message: Message, entry: str, data: bytes, handed_us: int) -> Settlement:
    """The settlement of a delivery at `handed_us`, in microseconds of Redis's clock."""
    due_ms, attempt = message.due_ms, message.attempt
    late, late_ms = NO_LATENESS, 0
    if attempt == 1:
        late_us = handed_us - due_ms * 1000
        late, late_ms = letter(late_us), kept_ms(late_us)
    # tuple.__new__ takes half as long as the named tuple's constructor.
    return _new(Settlement, (message.id, entry, fence_of(data), due_ms, attempt, late, late_ms))
