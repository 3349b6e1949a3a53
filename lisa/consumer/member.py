"""A topic that a shared reader reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lisa.consumer.inflight import Held
from lisa.consumer.stream_reader import StreamReader
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread
from lisa.core.delivery.opening import StreamRead
from lisa.core.model.stream import Entry


class Return(NamedTuple):
    """Why a topic goes back to its own thread.

    failed: a read of it failed.
    busy: the topic has more messages than a shared reader should read.
    """

    failed: bool = False
    busy: bool = False


class Holder(Protocol):
    """What reads a topic instead of its own thread: a `SharedReader`.

    is_handling: whether the thread runs handlers, or waits for a slot for them.
    """

    thread: ServiceThread
    is_handling: bool

    @property
    def is_reading(self) -> bool:
        """Whether a read is running."""

    @property
    def is_failing(self) -> bool:
        """Whether the last read failed."""

    def leave(self, member: Member) -> None:
        """Give a topic back to its own thread after the running read."""

    def interrupt(self) -> bool:
        """End a running read. Returns False if the server does not answer."""


class Member(Protocol):
    """The reader of a topic, while a `SharedReader` reads for it.

    stream: keeps what the topic's own thread needs if the topic comes back.
    """

    sub: Subscription
    stream: StreamReader

    def given_to(self, holder: Holder) -> None:
        """Called before the holder reads the topic."""

    def receive(self, entries: Sequence[Entry], read: StreamRead) -> tuple[list[Held], bool]:
        """Open entries; returns the deliveries, and whether the topic may stay.

        If it may not, its own thread opens the rest.
        """

    def take_back(self, why: Return) -> bool:
        """Continue on a thread of its own; returns False if no thread can be started."""

    def begin(self) -> bool:
        """Join the group, then be read; returns False to be called again.

        So if the server does not answer, or if no thread can be started.
        """
