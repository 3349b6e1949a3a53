"""The topics of a shared reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from lisa.consumer.inflight import Held
from lisa.consumer.stream_reader import StreamReader
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread
from lisa.core.delivery.opening import StreamRead
from lisa.core.model.stream import Entry

NO_THREAD_S = 0.1
"""The pause after a thread could not be started; meanwhile, the other topics are read."""


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

    def receive(
        self, entries: Sequence[Entry], read: StreamRead, startable: int
    ) -> tuple[list[Held], bool]:
        """Open at least `startable` entries; returns deliveries, and whether the topic may stay.

        If it may not, its own thread opens the rest.
        """

    def take_back(self, why: Return) -> bool:
        """Read on the topic's own thread again; returns False if no thread can be started."""

    def begin(self) -> bool:
        """Join the group and let a reader read the topic.

        Returns False, to be called again, if the server does not answer or no thread can start.
        """


class Members:
    """The topics of a shared reader, and those that are about to join or to leave it.

    Any thread calls `join` and `give_back`; the reader's own calls the other methods.

    current: the topics to read.
    is_over: whether the last topic has left; no others are accepted.
    """

    def __init__(self, most: int) -> None:
        self.current: set[Member] = set()
        self.is_over = False
        self._most = most
        self._lock = threading.Lock()
        self._joining: list[Member] = []
        self._leaving: dict[Member, Return] = {}
        self._returning: dict[Member, Return] = {}
        self._return_at = 0.0

    def __len__(self) -> int:
        return len(self.current)

    @property
    def is_changed(self) -> bool:
        """Whether topics are to join or to leave."""
        return bool(self._joining or self._leaving)

    def join(self, member: Member, holder: Holder) -> bool:
        """Let a topic join; returns False if these members are complete or over."""
        with self._lock:
            if self.is_over or len(self.current) + len(self._joining) >= self._most:
                return False
            member.given_to(holder)
            self._joining.append(member)
        return True

    def give_back(self, members: Iterable[Member], why: Return) -> None:
        """Let topics leave."""
        with self._lock:
            for member in members:
                self._leaving[member] = why if why.failed else self._leaving.get(member, why)

    def regroup(self) -> None:
        """Make the changes to `current`."""
        with self._lock:
            joining, self._joining = self._joining, []
            leaving, self._leaving = self._leaving, {}
            self.current.update(joining)
            for member in joining:  # what was asked of it before it joined
                if member.sub.is_interrupted():
                    leaving.setdefault(member, Return())
            leaving = {one: why for one, why in leaving.items() if one in self.current}
            self.current -= leaving.keys()
        self._returning |= leaving
        self._return_at = 0.0

    def let_return(self) -> bool:
        """Return leaving topics to their own threads; returns False once no topic is left.

        A topic whose thread cannot be started is not read until it can.
        """
        if self._returning and time.monotonic() >= self._return_at:
            self._return_at = time.monotonic() + NO_THREAD_S
            for member, why in list(self._returning.items()):
                if member.take_back(why):
                    del self._returning[member]
        if self._returning and not self.current:
            time.sleep(NO_THREAD_S)
        with self._lock:
            self.is_over = not (self.current or self._returning or self.is_changed)
        return not self.is_over
