"""The standard services, health and reflection, which need no token.

Their calls have limits of their own, with a share for each address, so that strangers take no place
from calls with a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from lisa.gateway.rpc.transport import client_of
from lisa.gateway.shares import Crowded, Shares

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service. A watcher that does not read delays no other."""

    def __init__(self, shares: Shares, names: tuple[str, ...]) -> None:
        self._shares = shares
        self._names = ("", *names)
        self._status = SERVING
        self._news = asyncio.Event()

    def report(self, status: Any) -> None:
        """Report this status of all services to all clients."""
        self._status = status
        self._news.set()
        self._news = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
        """The status of a service."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The status of a service, now and whenever it changes."""
        async with _counted(self._shares, context):
            shown = None
            while True:
                news = self._news
                status = self._status if request.service in self._names else _UNKNOWN
                if status != shown:
                    shown = status
                    yield health_pb2.HealthCheckResponse(status=status)
                else:
                    await news.wait()


class ReflectionService(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """The reflection service."""

    def __init__(self, shares: Shares, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self._shares = shares

    async def ServerReflectionInfo(  # noqa: N802  the method's name
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        """Answers to questions about the services."""
        async with _counted(self._shares, context):
            async for answer in super().ServerReflectionInfo(request_iterator, context):
                yield answer


def add(server: Any, shares: Shares, name: str) -> HealthService:
    """Add both services to a server whose own service has this name."""
    service = HealthService(shares, (name,))
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    names = (name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        ReflectionService(shares, names), server
    )
    return service


@asynccontextmanager
async def _counted(shares: Shares, context: Any) -> AsyncIterator[None]:
    """Count a call for its client's address, or end the call with UNAVAILABLE."""
    peer = client_of(context.peer())
    client = shares.of_address(peer[0] if peer else "", is_known=False)
    with shares.calls.taken(client):
        try:
            shares.calls.check(client)
        except Crowded as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        yield
