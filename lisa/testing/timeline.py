"""Moves the test's clock from event to event, and runs what is due at each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from lisa.core.model.clock import MAX_DUE_MS, duration_ms, human, ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.sharding import Shard, own_shard, topics_of
from lisa.core.redis.flow import Flow
from lisa.core.store.store import SyncStore
from lisa.testing.clocked_server import CACHED_US, ClockedServer
from lisa.testing.handler_runs import HandlerRuns
from lisa.testing.manager_steps import ManagerSteps
from lisa.testing.producer_watch import ProducerWatch

MOST_AT_ONCE = 10_000
"""The most messages that are handled at one instant; more are taken for an endless loop."""


BEYOND_END = "the clock cannot go beyond the year 9999"


class Timeline:
    """The clock of one test, with the manager and the consumers that follow it.

    followers: called with each new time, in epoch milliseconds.
    """

    def __init__(self, server: ClockedServer, store: SyncStore, start_ms: int) -> None:
        self._server = server
        self._store = store
        self._is_running = False
        self.now_ms = start_ms
        self.followers: list[Callable[[int], object]] = []
        self.watch = ProducerWatch(server.url, store.keys.prefix, self._now)
        self.runs = HandlerRuns(store, self._now, self._just_before)
        self.manager = ManagerSteps(store, self._now)
        server.set_time(start_ms * 1000)

    def _now(self) -> int:
        return self.now_ms

    def run_to(self, target_ms: int) -> Flow[None]:
        """Run everything up to an instant, each event at its own time. Raises LisaError."""
        if target_ms < self.now_ms and (self.watch.sent or self._store.drive(self._store.shards())):
            raise ConfigError(
                f"the clock shows {ms_datetime(self.now_ms)} and cannot go back to "
                f"{ms_datetime(target_ms)}, because messages were sent"
            )
        if target_ms > MAX_DUE_MS:
            raise ConfigError(BEYOND_END)
        yield from self._run(target_ms)
        self._set(target_ms)

    def run_until_idle(self, within: timedelta) -> Flow[None]:
        """Run all events; the clock stops at the last. Raises LisaError if `within` ends first."""
        next_ms = yield from self._run(self.now_ms + duration_ms(within))
        if next_ms is not None:
            raise LisaError(
                f"not idle after {human(duration_ms(within))}: the next event is at "
                f"{ms_datetime(next_ms)}; pass a longer `within`, or use `advance`"
            )

    def join(self) -> None:
        """Declare the groups that the attached consumers name. Raises LisaError."""
        self.manager.join(self.shards(), self.runs.wanted())

    def shards(self) -> list[Shard]:
        """All topics and shards that the test uses, sorted by name. Raises LisaError."""
        listed = set(self._store.drive(self._store.shards()))
        known = self.watch.topics | {topic for topic, _ in self.runs.wanted()}
        return sorted(listed | {own_shard(topic) for topic in topics_of(known | listed)})

    def _set(self, now_ms: int) -> None:
        if now_ms != self.now_ms:
            self._server.set_time(now_ms * 1000)
            self.now_ms = now_ms
            for follower in self.followers:
                follower(now_ms)

    @contextmanager
    def _just_before(self) -> Iterator[None]:
        """Let the server round its time up, rather than down, to the present millisecond.

        The pause before a retry begins at the time rounded up.
        """
        self._server.set_time(self.now_ms * 1000 - CACHED_US)
        try:
            yield
        finally:
            self._server.set_time(self.now_ms * 1000)

    def _run(self, target_ms: int) -> Flow[int | None]:
        """Run all events up to an instant; returns the next one after it, or None."""
        if self._is_running:
            raise ConfigError("a handler cannot move the clock that runs it")
        self._is_running = True
        try:
            while True:
                next_ms = yield from self._settle()
                if next_ms is None or next_ms > target_ms:
                    return next_ms
                self._set(next_ms)
        finally:
            self._is_running = False

    def _settle(self) -> Flow[int | None]:
        """Run everything that is due now; returns the next instant, None if there is none."""
        handled, is_stuck = 0, False
        while True:
            due = self.manager.look(self.shards(), self.runs.wanted())
            if self.manager.step(due):
                continue
            if not due.ready or is_stuck:
                return due.next_ms
            before = handled
            for (topic, group), count in due.ready.items():
                delivered = yield from self._deliver(topic, group, count)
                handled += delivered
                self._check(handled, topic)
            is_stuck = handled == before

    def _deliver(self, topic: str, group: str, most: int) -> Flow[int]:
        count = 0
        while count < most and (handled := (yield from self.runs.deliver(topic, group))):
            count += handled
        return count

    def _check(self, handled: int, topic: str) -> None:
        if handled > MOST_AT_ONCE:
            raise LisaError(
                f"more than {MOST_AT_ONCE} messages were handled at one instant, the last of topic "
                f"{topic!r}: a handler probably sends to its own topic without a delay"
            )
