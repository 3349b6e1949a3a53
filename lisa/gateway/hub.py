"""What all faces of one gateway process stand on."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection

from lisa.core import presence
from lisa.core.address import Address
from lisa.core.connection import AsyncConnection
from lisa.core.errors import LisaError, ServerUnavailable
from lisa.core.keys import Keys, check_topic
from lisa.core.settings import GatewaySettings
from lisa.core.store import AsyncStore
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.gateway.access import (
    EVERYTHING,
    Access,
    Forbidden,
    Scope,
    Token,
    is_local_name,
    is_loopback,
)
from lisa.gateway.meter import Meter
from lisa.gateway.settling import Settler
from lisa.gateway.waiting import BEAT_S, WaitingRoom
from lisa.producer import AsyncProducer, Outgoing
from lisa.producer.calls import Single, single, together
from lisa.producer.plan import Plan
from lisa.producer.report import SendOutcome, SendReport

__all__ = ["ROLE", "SHARED_BYTES", "Hub", "Sender"]

log = logging.getLogger("lisa.gateway")

ROLE = "gateway"
"""What the names of gateways begin with, also where they hold messages for clients."""

SHARED_BYTES = 64
"""Memory that all workers of one gateway share; camellia's health takes the first 16."""

SHORTEST_REPLY_S = 0.5
"""What a reply may take at least, however little patience a request has."""

SLACK_S = 10.0
"""What a blocking read may take beyond the time that it waits."""


class Sender(AsyncProducer):
    """A producer whose single sends tell their outcome, and whose store others use, too."""

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> AsyncStore:
        return AsyncStore(AsyncConnection(address), keys, patience, who="gateway")

    @property
    def store(self) -> AsyncStore:
        """The store that it sends through."""
        return self._store

    async def offer(
        self, topic: str, message: Outgoing, on_duplicate: OnDuplicate | str = OnDuplicate.KEEP
    ) -> SendOutcome:
        """Send one message, along with whatever is sent at the same time; its id and outcome.

        Raises LisaError; a known id is an outcome here, also under "reject".
        """
        plan = Plan.of({"on_duplicate": on_duplicate}, None)
        flow = self._send_one(check_topic(topic), plan.on_duplicate, single(plan, message))
        return await self._drive(flow)

    async def offer_many(
        self, topic: str, messages: Sequence[Single], on_duplicate: OnDuplicate
    ) -> tuple[list[SendOutcome], LisaError | None]:
        """Send encoded messages, hundreds a script call: the outcomes, in their order.

        An error comes beside the outcomes of those that were sent before it.
        """
        report = SendReport()
        try:
            await self._drive(
                self._enqueue(check_topic(topic), on_duplicate, together(messages), report)
            )
        except LisaError as error:
            return list(report), error
        return list(report), None


class Hub:
    """One process's connections, tokens and waiting pulls, and its background work."""

    def __init__(
        self,
        settings: GatewaySettings,
        address: Address | None = None,
        *,
        shared: mmap.mmap | None = None,
        numbers: Path | None = None,
    ) -> None:
        self.settings = settings
        self.shared = shared if shared is not None else mmap.mmap(-1, SHARED_BYTES)
        self.numbers = numbers  # where workers leave theirs, if there are several
        self.meter = Meter()
        self.access = Access.of(settings.gateway_server)
        self.address = _answering_within(
            settings.gateway_server.patience.total_seconds(),
            address or Address.from_settings(settings.redis),
        )
        self.name = presence.unique_name(ROLE)
        self.sender = Sender(
            self.address, prefix=settings.prefix, patience=settings.gateway_server.patience,
            durability=settings.gateway_server.durability,
        )  # fmt: skip
        self.store = self.sender.store
        self.settler = Settler(self.store)
        watching = AsyncConnection(self.address.blocking_for(BEAT_S + SLACK_S))
        named = {topic: groups[0] for topic, groups in settings.topics().items() if groups}
        self.room = WaitingRoom(
            self.store, watching, name=self.name,
            most_pulls=settings.gateway_server.max_polls, groups=named,
        )  # fmt: skip
        self._watching = watching
        self._tasks: set[asyncio.Task[None]] = set()
        self.active = 0
        self.streams = 0
        self.buffered = 0

    @property
    def held(self) -> int:
        """Requests that wait for something to happen, and cost next to nothing."""
        return self.room.waiting + self.streams

    async def open(self) -> None:
        """Look whether the server's layout can be read; one that is away is waited for later.

        Raises ConfigError.
        """
        with suppress(ServerUnavailable):
            await self.store.drive(self.store.check_schema())

    def token(self, connection: HTTPConnection, *, compat: bool = False) -> Token:
        """Who asks. Raises Unauthorized.

        `compat`: by an earlier system's path, which may be open to clients on this machine.
        """
        if compat and self.access.is_compat_open:
            client, host = connection.client, connection.headers.get("host", "")
            if (client is None or is_loopback(client.host)) and is_local_name(host):
                return EVERYTHING
        return self.access.identify(connection.headers.get("authorization"))

    def require(
        self,
        connection: HTTPConnection,
        scope: Scope | None,
        topic: str | None = None,
        *,
        compat: bool = False,
    ) -> Token:
        """The same, for one thing to do. Raises Unauthorized, Forbidden, InvalidMessage."""
        token = self.token(connection, compat=compat)
        if topic is not None:
            check_topic(topic)
        if not token.allows(scope, topic):
            of = f" on topic {topic!r}" if topic else ""
            wanted = f"scope {scope}{of}" if scope else f"topic {topic!r}"
            raise Forbidden(f"token {token.name!r} does not allow {wanted}")
        return token

    def keep_running(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run background work until it ends or the gateway does."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)

    def stop_waiting(self) -> None:
        """The gateway is about to stop: answer whoever waits."""
        self.room.stop_waiting()

    async def close(self) -> None:
        """End background work, send what still waits, close the connections."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        with suppress(LisaError):
            await self.room.close()
        await self.settler.finish()
        await self._watching.close()
        await self.sender.close()


def _answering_within(patience_s: float, address: Address) -> Address:
    """The same server, which counts as away once a reply takes longer than a request may wait."""
    within_s = min(address.socket_timeout_s, max(patience_s, SHORTEST_REPLY_S))
    return replace(address, socket_timeout_s=within_s)
