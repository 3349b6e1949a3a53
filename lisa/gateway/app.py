"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.daemon.status import HEALTH
from lisa.core.model.errors import LisaError
from lisa.gateway import api, metrics, page, push
from lisa.gateway.compat import camellia, delay_queue, mykit
from lisa.gateway.context import GatewayContext
from lisa.gateway.limits_middleware import LimitsMiddleware
from lisa.gateway.problems import HANDLERS, problem_of


def create_app(hub: GatewayContext) -> Starlette:
    """An ASGI application with all interfaces. It closes the hub when it stops."""
    interfaces = (api, camellia, mykit, delay_queue, push, metrics, page)
    routes: list[BaseRoute] = [Route(HEALTH, _health(hub))]
    for interface in interfaces:
        routes += interface.routes(hub)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        hub.start_services()
        try:
            yield
        finally:
            await hub.close()

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(LimitsMiddleware, hub)],
        exception_handlers=HANDLERS,
    )


def _health(hub: GatewayContext) -> Callable[[Request], Awaitable[Response]]:
    async def health(_request: Request) -> Response:
        """200 if the background services run and Redis responds, else 503."""
        content: dict[str, object] = {"status": "ok", "name": hub.name, "pulls": hub.broker.waiting}
        try:
            await hub.store.drive(hub.store.command("PING"))
        except LisaError as error:
            content |= {"status": "failing", "fault": problem_of(error).detail}
        if faults := hub.faults():
            content |= {"status": "failing", "faults": faults}
        body = msgspec.json.encode(content) + b"\n"
        status = 200 if content["status"] == "ok" else 503
        return Response(body, status, media_type="application/json")

    return health
