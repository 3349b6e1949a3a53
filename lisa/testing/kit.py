"""The test kit: one test's view of a server whose clock moves from event to event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Self, TypeVar

from lisa.admin import topics
from lisa.admin.messages import LiveState, list_messages
from lisa.consumer.consumer import BaseConsumer
from lisa.core.model.clock import (
    MAX_DUE_MS,
    datetime_ms,
    duration_ms,
    human,
    ms_datetime,
    option_duration,
)
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys
from lisa.core.model.message import Message
from lisa.core.model.sharding import Shard, Topic, own_shard, topics_of
from lisa.core.model.windows.placing import using_clock
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Flow, adrive, awaiting, blocking, drive
from lisa.core.store.inspection import FoundMessage, found
from lisa.core.store.paging import PAGE
from lisa.core.store.store import SyncStore
from lisa.core.transitions.inspect import Inspect
from lisa.producer.producer import AsyncProducer, Producer
from lisa.testing.clocked_server import CACHED_US, ClockedServer
from lisa.testing.handler_runs import HandlerRuns
from lisa.testing.manager_steps import ManagerSteps
from lisa.testing.records import Attempt, ProducerWatch, SentMessage

MOST_AT_ONCE = 10_000
"""The most messages that are handled at one instant; more are taken for an endless loop."""


BEYOND_END = "the clock cannot go beyond the year 9999"

T = TypeVar("T")
NOTHING = timedelta(0)
A_YEAR = timedelta(days=366)
LIVE = [state for state in LiveState if state is not LiveState.GARBAGE]


class _Kit:
    """What the kits for blocking tests and for tests on an event loop share.

    The clock of one test, with the manager and the consumers that follow it.
    """

    def __init__(self, server: ClockedServer) -> None:
        server.clear()
        self._server = server
        self._store = SyncStore(Connection(Address(server.url)), Keys.of(None))
        self._store.drive(self._store.check_schema())
        self._is_running = False
        self._followers: list[Callable[[datetime], object]] = []
        self._now_ms = time.time_ns() // 1_000_000
        self._watch = ProducerWatch(
            server.url, self._store.keys.prefix, self._shown_ms, self._just_before
        )
        self._runs = HandlerRuns(self._store, self._shown_ms, self._just_before)
        self._manager = ManagerSteps(self._store, self._shown_ms)
        server.set_time(self._now_ms * 1000)
        self._watch.start()
        self._clock = ExitStack()
        self._clock.enter_context(using_clock(self._shown_ms))

    def _shown_ms(self) -> int:
        return self._now_ms

    @property
    def url(self) -> str:
        """The URL of the test's server."""
        return self._store.connection.address.url

    @property
    def now(self) -> datetime:
        """The time that the test's clock shows, aware, UTC, in whole milliseconds."""
        return ms_datetime(self._now_ms)

    def attach(self, consumer: BaseConsumer) -> None:
        """Run the handlers of a consumer of the application, which must not be started.

        They serve the consumer's groups, or a topic's only group if it names none. Its lifespan is
        entered before the first message, and left at the end. The handlers' timeouts do not apply,
        and a batch handler gets the messages that are ready. Raises ConfigError for anything else.
        """
        if not isinstance(consumer, BaseConsumer):
            raise ConfigError(f"attach takes a Consumer or an AsyncConsumer, not {consumer!r}")
        self._runs.attach(consumer)
        self._manager.join(self._shards(), self._runs.wanted())

    def follow(self, follower: Callable[[datetime], object]) -> None:
        """Call a function with each new time, such as `traveller.move_to` of time-machine.

        It is called with the present time first.
        """
        self._followers.append(follower)
        follower(self.now)

    def configure(self, topic: str, **options: object) -> None:
        """Set options of a topic, such as `retry_delays="10s,1m"`. Raises ConfigError."""
        self._store.drive(topics.set_options(self._store, topic, options))

    def sent(self, topic: str | None = None) -> list[SentMessage]:
        """What this process sent to the test's server since the test began, in order."""
        return [message for message in self._watch.sent if topic in (None, message.topic)]

    def handled(self, topic: str | None = None) -> list[Message]:
        """The messages that were handled successfully, in order."""
        return [attempt.message for attempt in self.attempts(topic) if attempt.outcome == "handled"]

    def attempts(self, topic: str | None = None) -> list[Attempt]:
        """All attempts to handle messages, in order, with their times and outcomes."""
        return [
            attempt for attempt in self._runs.attempts if topic in (None, attempt.message.topic)
        ]

    def waiting(self, topic: str | None = None) -> list[FoundMessage]:
        """The messages that are still to be handled, by due time; between attempts, too."""
        live = [message for state in LIVE for message in self._found(topic, state)]
        return sorted(live, key=lambda message: (message.due_ms or 0, message.topic, message.id))

    def garbage(self, topic: str | None = None) -> list[FoundMessage]:
        """The dead messages with their reasons, by time of death."""
        return sorted(
            self._found(topic, LiveState.GARBAGE), key=lambda message: message.due_ms or 0
        )

    def _found(self, topic: str | None, state: LiveState) -> list[FoundMessage]:
        names = topics_of(self._shards()) if topic is None else [Topic(topic)]
        found_here: list[FoundMessage] = []
        for name in names:
            cursor: str | None = ""
            while cursor is not None:
                flow = list_messages(self._store, name, state, cursor=cursor or None, limit=PAGE)
                page = self._store.drive(flow)
                cursor = page.cursor
                for row in page.rows:
                    (seen,) = self._store.call_by_id(Inspect(name, [row.id]))
                    message = found(name, row.id, seen)
                    found_here += [message] if message is not None else []
        return found_here

    def _advance(
        self,
        by: timedelta | str = NOTHING,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> Flow[None]:
        """Move the clock forward and run everything that becomes due, each event at its own time.

        Events are due messages, retries, expired leases and ends of a ttl; what a handler sends is
        an event, too. The durations add up; without any, only what is due now runs. `by` may be
        text, as in `"1h30m"`. Raises LisaError, and ConfigError for an invalid or negative
        duration.
        """
        if not isinstance(by, timedelta):
            by = option_duration("by", by)
        try:
            total = by + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except OverflowError:
            raise ConfigError(BEYOND_END) from None
        if total < NOTHING:
            raise ConfigError(f"the clock cannot go back by {-total}")
        return self._run_to(self._now_ms + duration_ms(total))

    def _travel_to(self, moment: datetime) -> Flow[None]:
        """Move the clock to an aware datetime, like `advance`.

        Before the first message is sent, it may be in the past. Raises LisaError, and ConfigError
        for anything else, and for the past.
        """
        if not isinstance(moment, datetime):
            raise ConfigError(f"travel_to takes an aware datetime, not {moment!r}")
        if moment.utcoffset() is None:
            raise ConfigError(f"{moment.isoformat()} names no time zone; use an aware datetime")
        return self._run_to(datetime_ms(moment))

    def _run_until_idle(self, *, within: timedelta | str = A_YEAR) -> Flow[None]:
        """Run all events until none is left; the clock stops at the last.

        Raises LisaError, also if events are left after `within`, and ConfigError.
        """
        limit_ms = duration_ms(option_duration("within", within))
        next_ms = yield from self._run(self._now_ms + limit_ms)
        if next_ms is not None:
            raise LisaError(
                f"not idle after {human(limit_ms)}: the next event is at {ms_datetime(next_ms)}; "
                "pass a longer `within`, or use `advance`"
            )

    def _run_to(self, target_ms: int) -> Flow[None]:
        """Run everything up to an instant, each event at its own time. Raises LisaError."""
        if target_ms < self._now_ms and (
            self._watch.sent or self._store.drive(self._store.shards())
        ):
            raise ConfigError(
                f"the clock shows {ms_datetime(self._now_ms)} and cannot go back to "
                f"{ms_datetime(target_ms)}, because messages were sent"
            )
        if target_ms > MAX_DUE_MS:
            raise ConfigError(BEYOND_END)
        yield from self._run(target_ms)
        self._set(target_ms)

    def _shards(self) -> list[Shard]:
        """All topics and shards that the test uses, sorted by name. Raises LisaError."""
        listed = set(self._store.drive(self._store.shards()))
        known = self._watch.topics | {topic for topic, _ in self._runs.wanted()}
        return sorted(listed | {own_shard(topic) for topic in topics_of(known | listed)})

    def _set(self, now_ms: int) -> None:
        if now_ms != self._now_ms:
            self._server.set_time(now_ms * 1000)
            self._now_ms = now_ms
            for follower in self._followers:
                follower(self.now)

    @contextmanager
    def _just_before(self) -> Iterator[None]:
        """Let the server round its time up, rather than down, to the present millisecond.

        The pause before a retry begins at the time rounded up.
        """
        self._server.set_time(self._now_ms * 1000 - CACHED_US)
        try:
            yield
        finally:
            self._server.set_time(self._now_ms * 1000)

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
            due = self._manager.look(self._shards(), self._runs.wanted())
            if self._manager.step(due):
                continue
            if not due.ready or is_stuck:
                if due.promote:  # the gate of lanes has found when it opens
                    due = self._manager.look(self._shards(), self._runs.wanted())
                return due.next_ms
            before = handled
            for (topic, group), count in due.ready.items():
                delivered = yield from self._deliver(topic, group, count)
                handled += delivered
                self._check(handled, topic)
            is_stuck = handled == before

    def _deliver(self, topic: str, group: str, most: int) -> Flow[int]:
        count = 0
        while count < most and (handled := (yield from self._runs.deliver(topic, group))):
            count += handled
        return count

    def _check(self, handled: int, topic: str) -> None:
        if handled > MOST_AT_ONCE:
            raise LisaError(
                f"more than {MOST_AT_ONCE} messages were handled at one instant, the last of topic "
                f"{topic!r}: a handler probably sends to its own topic without a delay"
            )

    def _close(self) -> None:
        self._clock.close()
        self._watch.stop()
        self._store.close()


class LisaTestKit(_Kit):
    """A test's producer, manager and consumers on a real server whose clock the test sets.

    A context manager. It deletes all data of the server, and its clock starts at the machine's
    time. `async def` handlers run on an event loop of the kit, so its methods raise ConfigError
    where one runs already.

    server: a `ClockedServer` that runs.
    """

    advance = blocking(_Kit._advance)  # noqa: SLF001  flows of the class above
    travel_to = blocking(_Kit._travel_to)  # noqa: SLF001
    run_until_idle = blocking(_Kit._run_until_idle)  # noqa: SLF001

    def __init__(self, server: ClockedServer) -> None:
        super().__init__(server)
        self._runner: asyncio.Runner | None = None

    @cached_property
    def producer(self) -> Producer:
        """A producer for the test's server."""
        return Producer(self.url)

    def close(self) -> None:
        """End the test: leave lifespans, close connections and the event loop."""
        try:
            drive(self._runs.leave(), self._wait)
        finally:
            self.producer.close()
            self._close()
            if self._runner is not None:
                self._runner.close()

    def _drive(self, flow: Flow[T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return drive(flow, self._wait)
        raise ConfigError("an event loop runs already: use `async_lisa`, and await its methods")

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_finished(awaitable))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLisaTestKit(_Kit):
    """`LisaTestKit` for tests on an event loop, which `async def` handlers share.

    An asynchronous context manager. `advance`, `travel_to` and `run_until_idle` are coroutines;
    `producer` is an `AsyncProducer`.
    """

    advance = awaiting(_Kit._advance)  # noqa: SLF001  flows of the class above
    travel_to = awaiting(_Kit._travel_to)  # noqa: SLF001
    run_until_idle = awaiting(_Kit._run_until_idle)  # noqa: SLF001

    @cached_property
    def producer(self) -> AsyncProducer:
        """A producer for the test's server."""
        return AsyncProducer(self.url)

    async def close(self) -> None:
        """End the test: leave lifespans and close all connections."""
        try:
            await self._drive(self._runs.leave())
        finally:
            await self.producer.close()
            self._close()

    async def _drive(self, flow: Flow[T]) -> T:
        return await adrive(flow, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _finished(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
