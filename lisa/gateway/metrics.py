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
from lisa.core.store.store import AsyncStore
from lisa.gateway.access import Scope
from lisa.gateway.context import GatewayContext


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The route of `/metrics`. With several workers, adds the service that shares their numbers."""
    shared = None if gateway.numbers is None else Shared(gateway.numbers)
    if shared is not None:
        gateway.add_service(partial(_write, gateway, shared), "metrics")
    reading, lock = Reading(), asyncio.Lock()

    async def metrics(request: Request) -> Response:
        gateway.require(request, Scope.OPERATE)
        async with lock:
            topics = reading.get()
            if topics is None:
                topics = reading.keep(*await _read_topics(gateway.store))
        accept = request.headers.get("accept", "")
        # Formatting thousands of lines is slow, so use a thread to keep the event loop free.
        page = await asyncio.to_thread(_render, gateway, shared, topics, accept)
        return Response(page.body, page.status, media_type=page.content_type)

    return [Route(METRICS, metrics)]


async def _read_topics(store: AsyncStore) -> tuple[Numbers | LisaError, float]:
    """The metrics of the topics, or why they cannot be read; and when the reading started."""
    began = time.monotonic()
    try:
        return await store.drive(topic_metrics.read(store)), began
    except LisaError as error:
        return error, began


def _render(
    gateway: GatewayContext, shared: Shared | None, topics: Numbers, accept: str
) -> StatusResponse:
    from lisa.core.metrics.page import metrics_page

    if shared is None:
        return metrics_page("gateway", [_own(gateway), topics], accept)
    # Written before responding, so that another worker's next page never shows lower counts.
    shared.write(partial(_own, gateway))
    return metrics_page("gateway", [shared.read(), topics], accept)


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


def _own(gateway: GatewayContext) -> Numbers:
    numbers = gateway.meter.numbers() | of_process()
    shares = gateway.shares
    waiting = shares.polls.total + shares.streams.total + shares.stalled.total
    put(numbers, "lisa_gateway_requests_active", shares.requests.total + waiting)
    put(numbers, "lisa_gateway_requests_stalled", shares.stalled.total)
    put(numbers, "lisa_gateway_pulls_waiting", shares.polls.total)
    put(numbers, "lisa_gateway_streams_open", shares.streams.total)
    put(numbers, "lisa_gateway_buffered_bytes", shares.buffered.total)
    put(numbers, "lisa_gateway_deliveries_total", gateway.broker.handed_out, "handed_out")
    put(numbers, "lisa_gateway_deliveries_total", gateway.broker.given_back, "given_back")
    return numbers
