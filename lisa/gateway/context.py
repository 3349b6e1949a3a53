"""The state that all interfaces of one gateway process share."""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.requests import HTTPConnection

from lisa.core.daemon.threads import RESTART_AFTER_S, unforeseen
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import check_topic
from lisa.core.redis.address import SHORTEST_REPLY_S, Address
from lisa.core.redis.connection import AsyncConnection
from lisa.core.redis.flow import Flow
from lisa.core.settings import GatewaySettings
from lisa.core.store import presence
from lisa.core.store.batcher import Batcher
from lisa.core.store.store import AsyncStore, caller
from lisa.gateway.access import (
    EVERYTHING,
    Access,
    Scope,
    Token,
    is_local,
)
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pulls import BEAT_S, PullBroker
from lisa.gateway.settling import ReceiptSettler
from lisa.gateway.shares import Meter, Shares
from lisa.producer import GatewayProducer

READ_EVERY_S = 5.0

log = logging.getLogger("lisa.gateway")

ROLE = "gateway"
"""Prefix of gateway names, also as consumers that hold messages for clients."""

SHARED_BYTES = 64
"""Bytes of memory shared by all workers of a gateway; Camellia's health check uses the first 16."""

SLACK_S = 10.0
"""Socket timeout of a blocking read, in addition to its block time."""

OWN_ERROR_S = 0.25
"""How much longer than `patience` a request waits, so that a failed call reports its own error."""

COPIES = 4
"""Bytes of memory for each byte of a body: it is held as read, decoded and encoded.

Measured with bodies of 1 MB while Redis hangs: 2.8 to 3.4.
"""


class RedisClock:
    """The server's time: exact by request, or estimated from the last reading.

    Before the first reading, the estimate is this machine's time.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._asking: Batcher[None, None, int] = Batcher(
            self._ask, lambda _key, items: sum(1 for _ in items)
        )
        self._ahead_us = time.time_ns() // 1000 - _elapsed_us()

    async def now_us(self) -> int:
        """The server's time in microseconds, read after this call. Raises LisaError."""
        return await self._asking.call(None, None)

    def about_us(self) -> int:
        """The server's time in microseconds, estimated from the last reading."""
        return _elapsed_us() + self._ahead_us

    def about_ms(self) -> int:
        """The server's time in milliseconds, estimated from the last reading."""
        return self.about_us() // 1000

    async def follow(self) -> None:
        """Read the server's time regularly, until cancelled."""
        while True:
            with suppress(LisaError):  # the estimate continues
                await self.now_us()
            await asyncio.sleep(READ_EVERY_S)

    async def _ask(self, _key: None, items: Sequence[None], known: list[int | None]) -> None:
        began_us = _elapsed_us()
        now_us = await self._store.drive(self._store.server_time_us())
        self._ahead_us = now_us - (began_us + _elapsed_us()) // 2
        known += [now_us] * len(items)


def _elapsed_us() -> int:
    """Microseconds of a clock that is never set."""
    return time.monotonic_ns() // 1000


arrival: ContextVar[tuple[asyncio.Task[Any] | None, float]] = ContextVar("arrival")
"""The task of a request, and when the request was complete, in the event loop's time.

Tasks that a request starts inherit the variable, and may outlive the request.
"""

Service = Callable[[], Coroutine[Any, Any, None]]
P = ParamSpec("P")
T = TypeVar("T")


async def gather_parts(parts: Iterable[Awaitable[T]]) -> list[T | LisaError | ErrorResponse]:
    """Run the parts of the current request concurrently, until the request's deadline.

    Returns each result, or the error that its part raised.
    """
    _, arrived = arrival.get((None, math.inf))

    async def run(part: Awaitable[T]) -> T | LisaError | ErrorResponse:
        arrival.set((asyncio.current_task(), arrived))
        try:
            return await part
        except (LisaError, ErrorResponse) as error:
            return error

    return await asyncio.gather(*map(run, parts))


class GatewayContext:
    """Connections, tokens, waiting pulls and background tasks of one gateway process."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        shared: mmap.mmap | None = None,
        numbers: Path | None = None,
        most_connections: int | None = None,
    ) -> None:
        self.settings = settings
        self.most_connections = most_connections  # to each port; None: no limit
        self.shared = shared if shared is not None else mmap.mmap(-1, SHARED_BYTES)
        self.numbers = numbers  # directory of all workers' metrics; None with one worker
        self.meter = Meter()
        self.access = Access.of(settings.gateway_server)
        patience_s = settings.gateway_server.patience.total_seconds()
        self.address = Address.from_settings(settings.redis).answering_within(patience_s)
        self.name = presence.unique_name(ROLE)
        self.sender = GatewayProducer(
            self.address,
            prefix=settings.prefix,
            patience=settings.gateway_server.patience,
            durability=settings.gateway_server.durability,
            deadline=self.deadline,
            reply_timeout=self.reply_timeout,
        )
        self.store = self.sender.store
        self.clock = RedisClock(self.store)
        self.settler = ReceiptSettler(self.store, self.deadline)
        self._watching = AsyncConnection(self.address.blocking_for(BEAT_S + SLACK_S))
        self.groups = {topic: names[0] for topic, names in settings.topics().items() if names}
        """The group to use for a topic with several groups if a request names none."""
        self.broker = PullBroker(self.store, self._watching, name=self.name, groups=self.groups)
        self._tasks: set[asyncio.Task[None]] = set()
        self._services: dict[str, Service] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.add_service(self.clock.follow, "the server's clock")
        self.shares = Shares(settings.gateway_server, most_connections)
        self.stopping = asyncio.Event()

    def deadline(self) -> float | None:
        """When the current request fails if Redis hangs, in the event loop's time.

        None outside requests, such as for pushes.
        """
        within_s = self.reply_timeout()
        return None if within_s is None else arrival.get()[1] + within_s

    def reply_timeout(self) -> float | None:
        """How long the current request waits for a reply of Redis, in seconds.

        None outside requests, such as for pushes, and in the tasks of pulls and event streams.
        """
        task, _ = arrival.get((None, 0.0))
        if task is None or task is not asyncio.current_task():
            return None
        patience_s = self.settings.gateway_server.patience.total_seconds()
        return max(patience_s, SHORTEST_REPLY_S) + OWN_ERROR_S

    async def ask(
        self, flow: Callable[Concatenate[Any, P], Flow[T]], *args: P.args, **options: P.kwargs
    ) -> T:
        """Run a flow on the gateway's store. Raises LisaError."""
        return await self.store.drive(flow(self.store, *args, **options))

    async def open(self) -> None:
        """Check that this version supports the server's schema, unless the server is unavailable.

        Raises ConfigError if it does not.
        """
        try:
            await self.store.drive(self.store.check_schema())
        except ServerUnavailable as error:
            log.warning("starting without the server, trying again: %s", error)

    def token(self, connection: HTTPConnection, *, compat: bool = False) -> Token:
        """The token of a request, which acts on its behalf from now on. Raises Unauthorized.

        `compat`: the path belongs to a compatible API, which may be open to local clients.
        """
        token = EVERYTHING
        if not (compat and self.access.is_compat_open and is_local(connection)):
            token = self.access.identify(connection.headers.get("authorization"))
        act_for(token)
        return token

    def require(
        self,
        connection: HTTPConnection,
        scope: Scope | None,
        topic: str | None = None,
        *,
        compat: bool = False,
    ) -> Token:
        """The token of a request, if it allows a scope (None: any) on a topic (None: all).

        Raises Unauthorized, Forbidden or InvalidMessage.
        """
        token = self.token(connection, compat=compat)
        if topic is not None:
            check_topic(topic)
        token.require(scope, topic)
        return token

    def add_service(self, work: Service, name: str) -> None:
        """Add a background service, which runs until the gateway stops, again if it raises."""
        self._services[name] = work

    def start_services(self) -> None:
        """Start all background services."""
        for name, work in self._services.items():
            self._running[name] = self.run_task(self._restarting(work, name), name)

    @staticmethod
    async def _restarting(work: Service, name: str) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  logged; other services continue
                unforeseen(name, error)
            else:
                return
            await asyncio.sleep(RESTART_AFTER_S)

    def faults(self) -> list[str]:
        """Messages about background services that have ended."""
        return [f"{name} has ended" for name, task in self._running.items() if task.done()]

    def run_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a background task until it ends or the gateway stops."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)

    def stop_waiting(self) -> None:
        """Answer all waiting pulls and end all streams of deliveries, because the gateway stops."""
        self.stopping.set()
        self.broker.stop_waiting()

    async def close(self) -> None:
        """Cancel background tasks, finish pending settlements, and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        with suppress(LisaError):
            await self.broker.close()
        await self.settler.finish()
        await self._watching.close()
        await self.sender.close()


def act_for(token: Token) -> None:
    """Let the journal name the token in the events of this request; none if tokens are not used."""
    caller.set("" if token is EVERYTHING else token.name)
