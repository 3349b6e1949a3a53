"""Long polling: if the client disconnects, its deliveries are released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lisa.gateway.context import COPIES, GatewayContext
from lisa.gateway.problems import ClientDisconnected
from lisa.gateway.pulls import HandedOut
from lisa.gateway.shares import current

D = TypeVar("D")
T = TypeVar("T")


class DeliveryResponse(Response):
    """A response with deliveries, which are released if the response cannot be written."""

    def __init__(
        self,
        gateway: GatewayContext,
        disconnection: asyncio.Task[None],
        deliveries: Sequence[HandedOut],
        content: bytes,
        media_type: str,
    ) -> None:
        super().__init__(content, media_type=media_type)
        self._gateway = gateway
        self._disconnection = disconnection
        self._deliveries = deliveries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response if the client is still connected."""
        buffered, written = self._gateway.shares.buffered, False
        try:
            if not self._disconnection.done():
                with buffered.taken(current.get().client, COPIES * len(self.body)):
                    await super().__call__(scope, receive, send)
                # A complete response also ends this task, but only in the next loop iteration.
                written = not self._disconnection.done()
        finally:
            self._disconnection.cancel()
            if not written:
                self._gateway.broker.give_back(self._deliveries)


async def hold(
    gateway: GatewayContext,
    request: Request,
    pull: Coroutine[Any, Any, list[HandedOut]],
    render: Callable[[list[HandedOut]], bytes],
    media_type: str = "application/json",
) -> Response:
    """Await a pull and return its deliveries as a response.

    If the client disconnects, the pull is cancelled and its deliveries are released without an
    attempt being counted. Raises ClientDisconnected, Crowded, and the errors of the pull.
    """
    current.get().is_pull = True
    disconnection = asyncio.create_task(_disconnected(request))
    waiting = asyncio.create_task(pull)
    try:
        with gateway.shares.waiting(gateway.shares.polls):
            await asyncio.wait({disconnection, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnected
        deliveries = waiting.result()
        content = await on_short_stack(render, deliveries)
    except BaseException:
        disconnection.cancel()
        gateway.broker.give_back(await _end(waiting))
        raise
    return DeliveryResponse(gateway, disconnection, deliveries, content, media_type)


async def on_short_stack(convert: Callable[[D], T], value: D) -> T:
    """Convert a value with bodies; if they are nested too deeply for this stack, in another task.

    Whatever the queue could decode can be encoded there. Otherwise one message would fail all pulls
    of its group.
    """
    try:
        return convert(value)
    except RecursionError:

        async def again() -> T:
            return convert(value)

        return await asyncio.create_task(again())


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(pull: asyncio.Task[list[HandedOut]]) -> list[HandedOut]:
    """Cancel a pull, which releases its deliveries; if it was already done, return them."""
    pull.cancel()
    with suppress(asyncio.CancelledError, Exception):
        return await pull
    return []
