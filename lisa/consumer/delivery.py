"""One delivery, in the hands of who has a loop of their own."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from lisa.core.clock import duration_ms
from lisa.core.errors import InvalidMessage
from lisa.core.message import Message
from lisa.core.transitions.ack import Settlement

if TYPE_CHECKING:
    from lisa.consumer.pull import Puller

__all__ = ["Delivery"]


class Delivery:
    """One message in the caller's hands: `.message`'s attributes, and what to do with it.

    Unsettled it goes back when its ack timeout ends; `extend` starts that time anew. Each call
    raises LisaError.
    """

    def __init__(
        self, puller: Puller, message: Message, settlement: Settlement, ack_timeout_ms: int | None
    ) -> None:
        self._puller = puller
        self.message = message
        self._settlement = settlement
        self._ack_timeout_ms = ack_timeout_ms

    @property
    def id(self) -> str:
        """The message's id."""
        return self.message.id

    @property
    def topic(self) -> str:
        """Its topic."""
        return self.message.topic

    @property
    def group(self) -> str:
        """The group that it was taken for."""
        return self.message.group

    @property
    def body(self) -> Any:
        """What was sent: JSON values, str or bytes."""
        return self.message.body

    @property
    def due(self) -> datetime:
        """The due time, aware, UTC."""
        return self.message.due

    @property
    def due_ms(self) -> int:
        """The due time in epoch milliseconds."""
        return self.message.due_ms

    @property
    def attempt(self) -> int:
        """1, 2, ..."""
        return self.message.attempt

    @property
    def headers(self) -> dict[str, str]:
        """The headers, text to text."""
        return self.message.headers

    def __repr__(self) -> str:
        return f"<Delivery of {self.id!r} on {self.topic!r}, attempt {self.attempt}>"

    def ack(self) -> str:
        """It is handled: `acked`, `late` (the lease had ended), `stale` or `repeated`."""
        return self._puller.ack(self.message, self._settlement)

    def retry(self, *, delay: timedelta | None = None, reason: str = "") -> str:
        """It failed: `retrying`, `dead` (attempts used up), or `stale` if no longer held."""
        wait_ms = None if delay is None else _checked_ms(delay)
        return self._puller.fail(
            self.message, self._settlement, reason or "the puller asked for a retry", wait_ms
        )

    def discard(self, reason: str = "") -> str:
        """Give it up, to garbage: `dead`, or `stale` if no longer held."""
        return self._puller.fail(
            self.message, self._settlement, reason or "the puller discarded it", "discard"
        )

    def extend(self) -> bool:
        """Start its ack timeout anew; False if it is no longer held."""
        return self._puller.extend(self.message, self._settlement, self._ack_timeout_ms)

    def release(self) -> bool:
        """Give it back, unhandled, no attempt counted; False if it is no longer held."""
        return self._puller.release(self.message, self._settlement)


def _checked_ms(delay: timedelta) -> int:
    if delay < timedelta(0):
        raise InvalidMessage(f"a retry's delay cannot be negative: {delay}")
    return duration_ms(delay)
