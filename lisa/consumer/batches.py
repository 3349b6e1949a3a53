"""Batches: several messages in one call of a handler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import overload

from lisa.consumer.inflight import Held, Verdict, verdict_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Body_co, Message
from lisa.core.model.outcomes import meant_to_be_raised


class Batch(Sequence[Message[Body_co]]):
    """The messages of one call of a batch handler, annotated as in `Batch[Order]`.

    If the handler returns, all messages are acked; if it raises, all are retried. Messages passed
    to `fail` follow their own errors instead.
    """

    def __init__(self, messages: Sequence[Message[Body_co]]) -> None:
        self._messages = messages
        self._failed: dict[str, Verdict] = {}

    @overload
    def __getitem__(self, index: int) -> Message[Body_co]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[Body_co]]: ...
    def __getitem__(self, index: int | slice) -> Message[Body_co] | Sequence[Message[Body_co]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message[Body_co]]:
        return iter(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}, {len(self._failed)} failed>"

    def fail(self, message: Message, error: BaseException | str) -> None:
        """Mark one message as failed, as if the handler had raised `error` for it alone.

        Also for a `Retry`, `Defer` or `Discard`.

        Raises InvalidMessage if the message is not in this batch.
        """
        if not any(one is message for one in self._messages):
            raise InvalidMessage(f"message {message.id!r} is not in this batch")
        self._failed[message.id] = verdict_of(meant_to_be_raised(error) or error)

    def verdict(self, message: Message) -> Verdict | None:
        """The verdict of `fail` on a message, or None."""
        return self._failed.get(message.id)


class Collector:
    """Collects deliveries until a batch is full, or its first delivery has waited `within_s`."""

    def __init__(self, size: int, within_s: float) -> None:
        self.size = size
        self._within_s = within_s
        self._gathered: list[Held] = []
        self._ends = 0.0

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, deliveries: Sequence[Held]) -> None:
        """Add deliveries, the oldest first."""
        if deliveries and not self._gathered:
            self._ends = time.monotonic() + self._within_s
        self._gathered += deliveries

    def left_s(self) -> float | None:
        """Seconds until the collected deliveries must be handed out; None if there are none."""
        return max(0.0, self._ends - time.monotonic()) if self._gathered else None

    def ready(self) -> list[list[Held]]:
        """Remove and return the batches to hand out now; the last may be incomplete."""
        size, found = self.size, []
        while len(self._gathered) >= size:
            found.append(self._gathered[:size])
            self._gathered = self._gathered[size:]
            self._ends = time.monotonic() + self._within_s
        if self._gathered and time.monotonic() >= self._ends:
            found.append(self.take())
        return found

    def take(self) -> list[Held]:
        """Remove and return all collected deliveries."""
        gathered, self._gathered = self._gathered, []
        return gathered
