"""What a handler is to see of an opened entry, and what its settlement will need."""

from __future__ import annotations

from collections.abc import Iterable

from lisa.consumer.held import Held
from lisa.core.envelope import decode_content, fence_of
from lisa.core.errors import InvalidMessage
from lisa.core.lateness import letter
from lisa.core.message import Message
from lisa.core.stream import Entry
from lisa.core.transitions.ack import NO_LATENESS, Settlement

__all__ = ["settlement_of", "settlements_of", "unpack"]

_new = tuple.__new__


def unpack(topic: str, group: str, entry: Entry, data: bytes) -> tuple[Message, str]:
    """The message of an entry, and why it cannot be read: empty if it can.

    A message that cannot be read has None for its body.
    """
    _, message_id, due_ms, attempt = entry
    fault = ""
    try:
        body, headers = decode_content(data)
    except InvalidMessage as error:
        body, headers, fault = None, {}, str(error)
    return Message(
        id=message_id, topic=topic, group=group, body=body, due_ms=due_ms, attempt=attempt,
        headers=headers,
    ), fault  # fmt: skip


def settlement_of(message: Message, entry: str, data: bytes, handed_us: int) -> Settlement:
    """What settles a delivery that was handed over at `handed_us`, by Redis's clock."""
    due_ms, attempt = message.due_ms, message.attempt
    late = NO_LATENESS if attempt != 1 else letter(handed_us - due_ms * 1000)
    # Written by __new__ itself: a named tuple's own costs twice as much.
    return _new(Settlement, (message.id, entry, fence_of(data), due_ms, attempt, late))


def settlements_of(deliveries: Iterable[Held]) -> list[Settlement]:
    """The same for deliveries that are held."""
    return [settlement_of(one.message, one.entry, one.data, one.handed_us) for one in deliveries]
