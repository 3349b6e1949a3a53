"""What a handler is to see of an opened entry, and what its settlement will need."""

from __future__ import annotations

from typing import NamedTuple

from lisa.core.envelope import Envelope, decode_body, decode_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.lateness import letter
from lisa.core.message import Message
from lisa.core.stream import Entry
from lisa.core.transitions.ack import NO_LATENESS, Settlement

__all__ = ["Unpacked", "unpack"]

_UNREADABLE = Envelope("", "", "", {}, b"")


class Unpacked(NamedTuple):
    """One delivery; `fault` says why its message cannot be read, empty if it can."""

    envelope: Envelope
    message: Message
    settlement: Settlement
    fault: str


def unpack(topic: str, group: str, entry: Entry, data: bytes, now_us: int) -> Unpacked:
    """Take an envelope apart that was handed over at `now_us`, by Redis's clock.

    A message that cannot be read has None for its body.
    """
    entry_id, message_id, due_ms, attempt = entry
    envelope, body, fault = _UNREADABLE, None, ""
    try:
        envelope = decode_envelope(data)
        body = decode_body(envelope.kind, envelope.body)
    except InvalidMessage as error:
        fault = str(error)
    late = letter(now_us - due_ms * 1000) if attempt == 1 else NO_LATENESS
    return Unpacked(
        envelope,
        Message(
            id=message_id, topic=topic, group=group, body=body, due_ms=due_ms, attempt=attempt,
            headers=envelope.headers,
        ),
        Settlement(message_id, entry_id, envelope.fence, due_ms, attempt, late),
        fault,
    )  # fmt: skip
