"""The gateway as an ASGI application: a hub, the doorman, and the faces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.errors import LisaError
from lisa.core.status import HEALTH
from lisa.gateway import metrics, native, page, push
from lisa.gateway.compat import camellia, delay_queue, mykit
from lisa.gateway.doorman import Doorman
from lisa.gateway.hub import Hub
from lisa.gateway.problems import HANDLERS, problem_of

__all__ = ["create_app"]


def create_app(hub: Hub) -> Starlette:
    """All faces on one hub. The hub is closed when the application stops."""
    faces = (native, camellia, mykit, delay_queue, push, metrics, page)
    routes: list[BaseRoute] = [Route(HEALTH, _health(hub))]
    for face in faces:
        routes += face.routes(hub)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        push.start(hub)
        metrics.start(hub)
        camellia.start(hub)
        try:
            yield
        finally:
            await hub.close()

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Doorman, hub)],
        exception_handlers=HANDLERS,
    )


def _health(hub: Hub) -> Callable[[Request], Awaitable[Response]]:
    async def health(_request: Request) -> Response:
        """Whether this process works, and reaches the server."""
        content: dict[str, object] = {"status": "ok", "name": hub.name, "pulls": hub.room.waiting}
        try:
            await hub.store.drive(hub.store.command("PING"))
        except LisaError as error:
            content |= {"status": "failing", "fault": problem_of(error).detail}
        body = msgspec.json.encode(content) + b"\n"
        status = 200 if content["status"] == "ok" else 503
        return Response(body, status, media_type="application/json")

    return health
