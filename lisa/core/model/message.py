"""A message as a handler receives it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from lisa.core.model.clock import ms_datetime
from lisa.core.model.sharding import key_of

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # known to type checkers; not needed at runtime

    Body_co = TypeVar("Body_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Body_co = TypeVar("Body_co", covariant=True)


class Message(msgspec.Struct, Generic[Body_co], frozen=True, kw_only=True, weakref=True):
    """One message of one topic, as delivered to one group.

    In annotations, `Message[Order]` has a body of type Order; `Message` alone has any body.

    `body` is the sent value (JSON values, str or bytes), or an instance of the handler's `model`.
    `due_ms` is epoch milliseconds: the producer's due time for the first attempt, the due time of
    the retry for later ones. `attempt` counts from 1. `token` identifies the send: it is the same
    at each delivery, and another one if a message is sent again under the same id. `reason` and
    `next_due_ms` are set only on the messages of `message_retrying` and `message_dead`. `state` is
    what the consumer's lifespan yielded; None for pulled messages. Comparisons and `repr` include
    it.
    """

    id: str
    topic: str
    group: str
    body: Body_co
    due_ms: int
    attempt: int = 1
    headers: dict[str, str] = {}
    token: str = ""
    reason: str | None = None
    next_due_ms: int | None = None
    state: Any = None

    @property
    def key(self) -> str | None:
        """The key with which the message was sent, if any: the first part of its id."""
        return key_of(self.id)

    @property
    def due(self) -> datetime:
        """The due time, aware, UTC."""
        return ms_datetime(self.due_ms)

    @property
    def log_fields(self) -> dict[str, Any]:
        """Topic, group, id, key and attempt: `log.info("...", extra=message.log_fields)`."""
        key = self.key
        return {
            "topic": self.topic,
            "group": self.group,
            "id": self.id,
            **({} if key is None else {"key": key}),
            "attempt": self.attempt,
        }
