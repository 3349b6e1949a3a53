"""The test kit: one test's view of a server whose clock it controls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Self, TypeVar

from lisa.admin import topics
from lisa.admin.messages import LiveState, list_messages
from lisa.consumer.base import BaseConsumer
from lisa.core.model.clock import datetime_ms, duration_ms, ms_datetime, option_duration
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic, topics_of
from lisa.core.model.windows.placing import using_clock
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Flow, adrive, awaiting, blocking, drive
from lisa.core.store.inspection import FoundMessage, found
from lisa.core.store.paging import PAGE
from lisa.core.store.store import SyncStore
from lisa.core.transitions.inspect import Inspect
from lisa.producer.producer import AsyncProducer, Producer
from lisa.testing.clocked_server import ClockedServer
from lisa.testing.records import Attempt, SentMessage
from lisa.testing.timeline import BEYOND_END, Timeline

T = TypeVar("T")

NOTHING = timedelta(0)
A_YEAR = timedelta(days=366)
LIVE = (LiveState.WAITING, LiveState.RETRY, LiveState.READY, LiveState.IN_FLIGHT)


class _Kit:
    """What the kits for blocking tests and for tests on an event loop share."""

    def __init__(self, server: ClockedServer) -> None:
        server.clear()
        self._store = SyncStore(Connection(Address(server.url)), Keys.of(None))
        self._store.drive(self._store.check_schema())
        self._timeline = Timeline(server, self._store, time.time_ns() // 1_000_000)
        self._timeline.watch.start()
        self._clock = ExitStack()
        self._clock.enter_context(using_clock(lambda: self._timeline.now_ms))

    @property
    def url(self) -> str:
        """The URL of the test's server."""
        return self._store.connection.address.url

    @property
    def now(self) -> datetime:
        """The time that the test's clock shows, aware, UTC, in whole milliseconds."""
        return ms_datetime(self._timeline.now_ms)

    def attach(self, consumer: BaseConsumer) -> None:
        """Run the handlers of a consumer of the application, which must not be started.

        They serve the consumer's groups, or a topic's only group if it names none. Its lifespan is
        entered before the first message, and left at the end. The handlers' timeouts do not apply,
        and a batch handler gets the messages that are ready. Raises ConfigError for anything else.
        """
        if not isinstance(consumer, BaseConsumer):
            raise ConfigError(f"attach takes a Consumer or an AsyncConsumer, not {consumer!r}")
        self._timeline.runs.attach(consumer)
        self._timeline.join()

    def follow(self, follower: Callable[[datetime], object]) -> None:
        """Call a function with each new time, such as `traveller.move_to` of time-machine.

        It is called with the present time first.
        """
        self._timeline.followers.append(lambda now_ms: follower(ms_datetime(now_ms)))
        follower(self.now)

    def configure(self, topic: str, **options: object) -> None:
        """Set options of a topic, such as `retry_delays="10s,1m"`. Raises ConfigError."""
        self._store.drive(topics.set_options(self._store, topic, options))

    def sent(self, topic: str | None = None) -> list[SentMessage]:
        """What this process sent to the test's server since the test began, in order."""
        return [one for one in self._timeline.watch.sent if topic in (None, one.topic)]

    def handled(self, topic: str | None = None) -> list[Message]:
        """The messages that were handled successfully, in order."""
        return [one.message for one in self.attempts(topic) if one.outcome == "handled"]

    def attempts(self, topic: str | None = None) -> list[Attempt]:
        """All attempts to handle messages, in order, with their times and outcomes."""
        return [one for one in self._timeline.runs.attempts if topic in (None, one.message.topic)]

    def waiting(self, topic: str | None = None) -> list[FoundMessage]:
        """The messages that are still to be handled, by due time; between attempts, too."""
        live = [one for state in LIVE for one in self._found(topic, state)]
        return sorted(live, key=lambda one: (one.due_ms or 0, one.topic, one.id))

    def garbage(self, topic: str | None = None) -> list[FoundMessage]:
        """The dead messages with their reasons, by time of death."""
        return sorted(self._found(topic, LiveState.GARBAGE), key=lambda one: one.due_ms or 0)

    def _found(self, topic: str | None, state: LiveState) -> list[FoundMessage]:
        names = topics_of(self._timeline.shards()) if topic is None else [Topic(topic)]
        found_here: list[FoundMessage] = []
        for name in names:
            cursor: str | None = ""
            while cursor is not None:
                flow = list_messages(self._store, name, state, cursor=cursor or None, limit=PAGE)
                page = self._store.drive(flow)
                cursor = page.cursor
                for row in page.rows:
                    (seen,) = self._store.call_by_id(Inspect(name, [row.id]))
                    one = found(name, row.id, seen)
                    found_here += [one] if one is not None else []
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
        return self._timeline.run_to(self._timeline.now_ms + duration_ms(total))

    def _travel_to(self, moment: datetime) -> Flow[None]:
        """Move the clock to an aware datetime, like `advance`.

        Before the first message is sent, it may be in the past. Raises LisaError, and ConfigError
        for anything else, and for the past.
        """
        if not isinstance(moment, datetime):
            raise ConfigError(f"travel_to takes an aware datetime, not {moment!r}")
        if moment.utcoffset() is None:
            raise ConfigError(f"{moment.isoformat()} names no time zone; use an aware datetime")
        return self._timeline.run_to(datetime_ms(moment))

    def _run_until_idle(self, *, within: timedelta | str = A_YEAR) -> Flow[None]:
        """Run all events until none is left; the clock stops at the last.

        Raises LisaError, also if events are left after `within`, and ConfigError.
        """
        return self._timeline.run_until_idle(option_duration("within", within))

    def _close(self) -> None:
        self._clock.close()
        self._timeline.watch.stop()
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
            drive(self._timeline.runs.leave(), self._wait)
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
            await self._drive(self._timeline.runs.leave())
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
