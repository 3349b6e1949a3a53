"""`/metrics`: metrics of the gateway and of all topics.

With several workers on one port, a scrape may reach any of them. Each worker therefore writes its
numbers to a shared directory, and the scraped worker returns the totals.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.daemon.status import StatusResponse
from lisa.core.metrics import topics as topic_metrics
from lisa.core.metrics.numbers import METRICS, Numbers, Reading, of_process, put
from lisa.core.metrics.sharing import WRITE_EACH_S, Shared
from lisa.core.model.errors import LisaError
from lisa.gateway.access import Scope
from lisa.gateway.context import GatewayContext


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The route of `/metrics`. With several workers, adds the service that shares their numbers."""
    endpoint = _MetricsEndpoint(gateway)
    if gateway.numbers is not None:
        gateway.add_service(partial(_write, gateway, Shared(gateway.numbers)), "metrics")

    async def metrics(request: Request) -> Response:
        gateway.require(request, Scope.OPERATE)
        page = await endpoint.page(request.headers.get("accept", ""))
        return Response(page.body, page.status, media_type=page.content_type)

    return [Route(METRICS, metrics)]


async def _write(gateway: GatewayContext, shared: Shared) -> None:
    await asyncio.to_thread(shared.tidy)
    try:
        while True:
            with suppress(FileNotFoundError):  # the parent process has ended and will stop this one
                await asyncio.to_thread(shared.write, partial(_own, gateway))
            await asyncio.sleep(WRITE_EACH_S)
    finally:
        with suppress(FileNotFoundError):
            shared.write(partial(_own, gateway))


class _MetricsEndpoint:
    """The metrics endpoint of one process."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._reading = Reading()
        self._lock = asyncio.Lock()
        self._shared = Shared(gateway.numbers) if gateway.numbers is not None else None

    async def page(self, accept: str) -> StatusResponse:
        """The current metrics page."""
        topics = await self._topics()
        # Formatting thousands of lines is slow, so use a thread to keep the event loop free.
        return await asyncio.to_thread(self._render, topics, accept)

    def _render(self, topics: Numbers, accept: str) -> StatusResponse:
        from lisa.core.metrics.page import metrics_page

        if self._shared is None:
            return metrics_page("gateway", [_own(self._gateway), topics], accept)
        # Written before responding, so that another worker's next page never shows lower counts.
        self._shared.write(partial(_own, self._gateway))
        return metrics_page("gateway", [self._shared.read(), topics], accept)

    async def _topics(self) -> Numbers:
        async with self._lock:
            known = self._reading.get()
            return await self._refresh() if known is None else known

    async def _refresh(self) -> Numbers:
        began, store = time.monotonic(), self._gateway.store
        try:
            return self._reading.keep(await store.drive(topic_metrics.read(store)), began)
        except LisaError as error:
            return self._reading.keep(error, began)


def _own(gateway: GatewayContext) -> Numbers:
    numbers = gateway.meter.numbers() | of_process()
    shares = gateway.shares
    waiting = shares.polls.total + shares.streams.total + shares.stalled
    put(numbers, "lisa_gateway_requests_active", shares.requests.total + waiting)
    put(numbers, "lisa_gateway_requests_stalled", shares.stalled)
    put(numbers, "lisa_gateway_pulls_waiting", shares.polls.total)
    put(numbers, "lisa_gateway_streams_open", shares.streams.total)
    put(numbers, "lisa_gateway_buffered_bytes", shares.buffered.total)
    put(numbers, "lisa_gateway_deliveries_total", gateway.broker.handed_out, "handed_out")
    put(numbers, "lisa_gateway_deliveries_total", gateway.broker.given_back, "given_back")
    return numbers
