"""Requests that wait, and clients that leave: a delivery is never lost on a dead connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lisa.gateway.hub import Hub
from lisa.gateway.meter import waits
from lisa.gateway.waiting import Delivery

__all__ = ["ClientLeft", "DeliveryResponse", "hold"]


class ClientLeft(Exception):
    """Nobody is there to be answered."""


class DeliveryResponse(Response):
    """An answer that hands messages out: they go back if it cannot be written any more."""

    def __init__(
        self,
        hub: Hub,
        departure: asyncio.Task[None],
        deliveries: Sequence[Delivery],
        content: bytes,
        media_type: str,
        *,
        background: BackgroundTask | None = None,
    ) -> None:
        super().__init__(content, 200, media_type=media_type, background=background)
        self._hub = hub
        self._departure = departure
        self._deliveries = deliveries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it, if the client is still there."""
        self._hub.buffered += len(self.body)
        written = False
        try:
            if not self._departure.done():
                await super().__call__(scope, receive, send)
                # A whole answer ends the watch, too, but not before the loop's next turn.
                written = not self._departure.done()
        finally:
            self._hub.buffered -= len(self.body)
            self._departure.cancel()
            if not written:
                self._hub.room.give_back(self._deliveries)


async def hold(
    hub: Hub,
    request: Request,
    pull: Coroutine[Any, Any, list[Delivery]],
    render: Callable[[list[Delivery]], bytes],
    media_type: str = "application/json",
) -> Response:
    """Wait for deliveries as long as the client does, and answer with them.

    A client that leaves while it waits ends its pull; one that left before the answer could be
    written costs its messages no attempt. Raises what the pull raises.
    """
    waits(request.scope)
    departure = asyncio.create_task(_departure(request))
    waiting = asyncio.create_task(pull)
    try:
        await asyncio.wait({departure, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientLeft
        deliveries = waiting.result()
    except BaseException:
        departure.cancel()
        hub.room.give_back(await _end(waiting))
        raise
    try:
        content = render(deliveries)
    except BaseException:
        departure.cancel()
        hub.room.give_back(deliveries)
        raise
    return DeliveryResponse(hub, departure, deliveries, content, media_type)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(pull: asyncio.Task[list[Delivery]]) -> list[Delivery]:
    """End a pull: what it had been given goes back by itself, unless it had ended before."""
    pull.cancel()
    with suppress(asyncio.CancelledError, Exception):
        return await pull
    return []
