"""Pull on the application's event loop (`AsyncConsumer.pull`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from lisa.consumer.delivery import AsyncDelivery
from lisa.consumer.options import ConsumerOptions
from lisa.consumer.pull import LONGEST_WAIT_S, Puller
from lisa.consumer.shutdown import SHUTDOWN_CALLS_S
from lisa.consumer.signal_queue import SignalSender
from lisa.consumer.tasks import finish_logged
from lisa.core.model.errors import LisaError
from lisa.core.model.signals import Signals
from lisa.core.redis.connection import AsyncConnection
from lisa.core.store.presence import unique_name
from lisa.core.store.store import AsyncStore


class AsyncPuller:
    """Runs one consumer's pulls on one event loop, over its own connections."""

    def __init__(self, options: ConsumerOptions, signals: Signals) -> None:
        self._store = AsyncStore(AsyncConnection(options.address), options.keys, who="consumer")
        self._blocking_reads = AsyncConnection(options.address.blocking_for(LONGEST_WAIT_S))
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        sender, name = SignalSender(signals, self._spawn), unique_name(options.name)
        self._puller = Puller(
            self._store,
            self._blocking_reads,
            options.group or "",
            name,
            sender,
            new_delivery=partial(AsyncDelivery, self._store, sender, name),
        )

    async def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> AsyncIterator[AsyncDelivery]:
        """The deliveries of one pull; releases those that the caller does not reach.

        Raises RuntimeError in another event loop than that of the first pull.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "this AsyncConsumer belongs to the event loop of its first pull, and this is "
                "another one: create a consumer in each loop, or stop() it at the loop's end"
            )
        self._loop = loop
        found = await self._store.drive(self._puller.pull(topic, batch, wait, ack_timeout))
        found.reverse()
        try:
            while found:
                yield found.pop()
        finally:
            for delivery in found:
                self._spawn(_release(delivery))

    async def close(self) -> None:
        """Finish releases, remove this consumer's records and close the connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUTDOWN_CALLS_S)
        with suppress(LisaError, TimeoutError):  # managers delete records that are left behind
            async with asyncio.timeout(SHUTDOWN_CALLS_S):
                for flow in self._puller.leave(self._store):
                    await self._store.drive(flow)
        for task in [*self._tasks, *self._puller.looks]:
            task.cancel()
        await self._store.close()
        await self._blocking_reads.close()

    def _spawn(self, awaitable: Awaitable[Any]) -> None:
        task = asyncio.create_task(finish_logged(awaitable))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _release(delivery: AsyncDelivery) -> None:
    with suppress(LisaError):  # then it is redelivered when its ack timeout ends
        await delivery.release()
