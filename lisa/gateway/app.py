"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from lisa.core.daemon.status import HEALTH
from lisa.core.model.errors import LisaError
from lisa.core.redis.errors import FULL
from lisa.core.store.presence import write_refusal
from lisa.gateway import api, metrics, page, push
from lisa.gateway.base_path import BasePath
from lisa.gateway.compat import camellia, delay_queue, mykit
from lisa.gateway.context import GatewayContext
from lisa.gateway.limits import LimitsMiddleware
from lisa.gateway.problems import problem_of

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def create_app(gateway: GatewayContext) -> Starlette:
    """An ASGI application with all interfaces. It closes the gateway when it stops."""
    interfaces = (api, camellia, mykit, delay_queue, push, metrics, page)
    routes: list[BaseRoute] = [Route(HEALTH, _health(gateway))]
    for interface in interfaces:
        routes += interface.routes(gateway)
    routes.append(Route("/{path:path}/", _without_slash, methods=METHODS))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        gateway.start_services()
        try:
            async with AsyncExitStack() as stack:
                if gateway.settings.grpc.port is not None:
                    from lisa.gateway.rpc.server import serving  # needs the extra grpc

                    await stack.enter_async_context(serving(gateway))
                yield
        finally:
            await gateway.close()

    bounds = gateway.settings.gateway_server
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(ProxyHeadersMiddleware, list(bounds.trusted_proxies)),
            *([Middleware(BasePath, bounds.base_path)] if bounds.base_path else []),
            Middleware(LimitsMiddleware, gateway),
        ],
        exception_handlers={HTTPException: page.on_http_error(gateway)},
    )
    app.router.redirect_slashes = False  # its redirects contain the request's Host and scheme
    return app


async def _without_slash(request: Request) -> Response:
    """Redirect to the path without trailing slashes; without a host, so it works behind a proxy."""
    path = "/" + request.scope["raw_path"].decode("ascii", "replace").strip("/")
    return RedirectResponse(f"{path}?{request.url.query}" if request.url.query else path)


def _health(gateway: GatewayContext) -> Callable[[Request], Awaitable[Response]]:
    async def health(_request: Request) -> Response:
        """200 if the background services run and Redis responds, else 503."""
        pulls = gateway.shares.polls.total
        content: dict[str, object] = {"status": "ok", "name": gateway.name, "pulls": pulls}
        try:
            await gateway.store.drive(gateway.store.command("PING"))
            refusal = await gateway.ask(write_refusal, gateway.store.keys.managers)
            if refusal is not None:
                # A full server can be drained; nothing works on one that takes no write.
                state, name = ("ok", "warning") if refusal == FULL else ("failing", "fault")
                content |= {"status": state, name: f"Redis {refusal.cause} and refuses writes"}
        except LisaError as error:
            content |= {"status": "failing", "fault": problem_of(error).detail}
        if faults := gateway.faults():
            content |= {"status": "failing", "faults": faults}
        body = msgspec.json.encode(content) + b"\n"
        status = 200 if content["status"] == "ok" else 503
        return Response(body, status, media_type="application/json")

    return health
