"""A message as a handler sees it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from lisa.core.clock import ms_datetime
from lisa.core.envelope import decode_content

__all__ = ["Message"]


class Message(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """One message of one topic, as it was handed out to one group.

    `body` is what was sent (JSON values, str or bytes), or an instance of the handler's `model`.
    `due_ms` is epoch milliseconds: for the first attempt the due time that the producer gave, for
    a later one the due time of that retry. `attempt` counts 1, 2, ... . `reason` and `next_due_ms`
    are set on what `message_retrying` and `message_dead` carry.
    """

    id: str
    topic: str
    group: str
    body: Any
    due_ms: int
    attempt: int = 1
    headers: dict[str, str] = {}
    reason: str | None = None
    next_due_ms: int | None = None

    @property
    def due(self) -> datetime:
        """The due time, aware, UTC."""
        return ms_datetime(self.due_ms)

    @classmethod
    def from_envelope(
        cls, data: bytes, *, message_id: str, topic: str, group: str, due_ms: int, attempt: int
    ) -> Message:
        """Decode an envelope and its body. Raises InvalidMessage with the reason."""
        body, headers = decode_content(data)
        return cls(
            id=message_id, topic=topic, group=group, body=body, due_ms=due_ms, attempt=attempt,
            headers=headers,
        )  # fmt: skip
