"""Batched delivery: messages that are due together, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import overload

from lisa.consumer.held import Held, Verdict, verdict_of
from lisa.core.errors import InvalidMessage
from lisa.core.message import Message

__all__ = ["Batch", "Collector"]


class Batch(Sequence[Message]):
    """The messages of one call.

    All are acked if the handler returns, all are retried if it raises, apart from those that
    `fail` set aside.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._failed: dict[str, Verdict] = {}

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}, {len(self._failed)} failed>"

    def fail(self, message: Message, error: BaseException | str) -> None:
        """Set one message aside: it is retried, or as a `Retry` or `Discard` says.

        Raises InvalidMessage for a message of another batch.
        """
        if not any(one is message for one in self._messages):
            raise InvalidMessage(f"message {message.id!r} is not one of this batch")
        self._failed[message.id] = verdict_of(error)

    def verdict(self, message: Message) -> Verdict | None:
        """What `fail` said about a message; None if nothing."""
        return self._failed.get(message.id)


class Collector:
    """Gathers deliveries until a batch is full, or until its first has waited long enough."""

    def __init__(self, size: int, within_s: float) -> None:
        self.size = size
        self._within_s = within_s
        self._gathered: list[Held] = []
        self._ends = 0.0

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, deliveries: Sequence[Held]) -> None:
        """Take in deliveries, the oldest first."""
        if deliveries and not self._gathered:
            self._ends = time.monotonic() + self._within_s
        self._gathered += deliveries

    def left_s(self) -> float | None:
        """How long the gathered ones may wait for more; None if there are none."""
        return max(0.0, self._ends - time.monotonic()) if self._gathered else None

    def ready(self) -> list[list[Held]]:
        """The batches to hand out now; the last may be short, if its time is up."""
        size, found = self.size, []
        while len(self._gathered) >= size:
            found.append(self._gathered[:size])
            self._gathered = self._gathered[size:]
            self._ends = time.monotonic() + self._within_s
        if self._gathered and time.monotonic() >= self._ends:
            found.append(self.take())
        return found

    def take(self) -> list[Held]:
        """All that is gathered, whatever its time."""
        gathered, self._gathered = self._gathered, []
        return gathered
