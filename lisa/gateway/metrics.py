"""`/metrics`: what the gateway does, and what Redis knows of all topics.

With several workers behind one port a scrape meets any of them, so each leaves its numbers where
the others find them, and whoever is asked answers for all.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.errors import LisaError
from lisa.core.metrics import topics as topic_metrics
from lisa.core.metrics.cache import METRICS, Reading
from lisa.core.metrics.numbers import Numbers, of_process, put
from lisa.core.metrics.sharing import WRITE_EACH_S, Shared
from lisa.core.status import Page
from lisa.gateway.access import Scope
from lisa.gateway.hub import Hub

__all__ = ["routes", "start"]


def routes(hub: Hub) -> list[BaseRoute]:
    """The page."""
    face = _Face(hub)

    async def metrics(request: Request) -> Response:
        hub.require(request, Scope.OPERATE)
        page = await face.page(request.headers.get("accept", ""))
        return Response(page.body, page.status, media_type=page.content_type)

    return [Route(METRICS, metrics)]


def start(hub: Hub) -> None:
    """Leave this worker's numbers for the others, if there are any."""
    if hub.numbers is not None:
        hub.keep_running(_leave(hub, Shared(hub.numbers)), "metrics")


async def _leave(hub: Hub, shared: Shared) -> None:
    await asyncio.to_thread(shared.tidy)
    try:
        while True:
            with suppress(FileNotFoundError):  # the parent is gone, and we shall be told
                await asyncio.to_thread(shared.write, partial(_own, hub))
            await asyncio.sleep(WRITE_EACH_S)
    finally:
        with suppress(FileNotFoundError):
            shared.write(partial(_own, hub))


class _Face:
    """One process's page."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._reading = Reading()
        self._lock = asyncio.Lock()
        self._shared = Shared(hub.numbers) if hub.numbers is not None else None

    async def page(self, accept: str) -> Page:
        """The page as it is now."""
        topics = await self._topics()
        # Thousands of lines take a while to write: on a thread, so that requests are not held up.
        return await asyncio.to_thread(self._written, topics, accept)

    def _written(self, topics: Numbers, accept: str) -> Page:
        from lisa.core.metrics.page import metrics_page

        if self._shared is None:
            return metrics_page("gateway", [_own(self._hub), topics], accept)
        # Left before it is told: no other worker may answer with less than this one did.
        self._shared.write(partial(_own, self._hub))
        return metrics_page("gateway", [self._shared.read(), topics], accept)

    async def _topics(self) -> Numbers:
        async with self._lock:
            known = self._reading.get()
            return await self._renewed() if known is None else known

    async def _renewed(self) -> Numbers:
        began, store = time.monotonic(), self._hub.store
        try:
            return self._reading.keep(await store.drive(topic_metrics.read(store)), began)
        except LisaError as error:
            return self._reading.keep(error, began)


def _own(hub: Hub) -> Numbers:
    numbers = hub.meter.numbers() | of_process()
    put(numbers, "lisa_gateway_requests_active", hub.active)
    put(numbers, "lisa_gateway_pulls_waiting", hub.room.waiting)
    put(numbers, "lisa_gateway_streams_open", hub.streams)
    put(numbers, "lisa_gateway_buffered_bytes", hub.buffered)
    put(numbers, "lisa_gateway_deliveries_total", hub.room.handed_out, "handed_out")
    put(numbers, "lisa_gateway_deliveries_total", hub.room.given_back, "given_back")
    return numbers
