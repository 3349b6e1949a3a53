"""The gRPC server of one gateway process."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.settings import GatewaySettings, GrpcSettings
from lisa.gateway.api import OPERATIONS
from lisa.gateway.api.operations import Call, Operation
from lisa.gateway.api.types import convert_fields, read_json
from lisa.gateway.context import GatewayContext
from lisa.gateway.limits import LimitsMiddleware
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.rpc import lisa_pb2
from lisa.gateway.rpc.consume import CLOSE_S, consume
from lisa.gateway.rpc.transport import Exchange, answer, client_of, parse, request_fields
from lisa.gateway.shares import MOST_STREAMS, SPARE_CALLS, Crowded, Shares

SERVICE = lisa_pb2.DESCRIPTOR.services_by_name["Lisa"]
CONSUME = "Consume"
"""The only method without an operation of the HTTP API."""

_encoder = msgspec.json.Encoder(enc_hook=lambda _error: None)  # null for a message in `failed`

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

CHECK_EACH_S = 1.0
"""How often the health service checks whether the gateway works."""


def path_of(method: str) -> str:
    """The path of a method's requests."""
    return f"/{SERVICE.full_name}/{method}"


def method_of(operation: Operation) -> str:
    """The name of an operation's method."""
    return operation.name[0].upper() + operation.name[1:]


def rpc_app(gateway: GatewayContext) -> ASGIApp:
    """An ASGI application whose requests have Protobuf bodies, and its responses JSON."""
    operations = {path_of(method_of(operation)): operation for operation in OPERATIONS}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["path"] == path_of(CONSUME):
            await consume(gateway, request, send)
            return
        response = await _perform(gateway, operations[scope["path"]], request)
        await response(scope, receive, send)

    return app


async def _perform(gateway: GatewayContext, operation: Operation, request: Request) -> Response:
    """Read and carry out a call of an operation. Raises ErrorResponse and others."""
    message = await request.receive()  # the limits middleware has buffered the body
    kind = GetMessageClass(SERVICE.methods_by_name[method_of(operation)].input_type)
    fields = request_fields(parse(kind, message["body"]))
    path = {name: fields.pop(name, "") for name in operation.parameters}
    token = gateway.require(request, operation.scope, path.get("topic"))
    in_query = operation.query.__struct_fields__
    given = {name: fields.pop(name) for name in in_query if name in fields}
    query = convert_fields("the query", given, operation.query, strict=False)
    body = None
    if operation.body is not None:
        body = read_json(operation.decoder, _encoder.encode(fields))
    messages = enumerate(fields.get("messages", ()))
    failed = {index: message for index, message in messages if isinstance(message, ErrorResponse)}
    return await operation.perform(Call(gateway, request, token, path, query, body, failed))


_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service. A watcher that does not read delays no other."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._names = ("", SERVICE.full_name)
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


_PING_MS = 30_000
_PING_TIMEOUT_MS = 10_000
_SHORTEST_PING_MS = 1_000
_IDLE_MS = 300_000


def reserve(settings: GatewaySettings) -> socket.socket:
    """Bind the port of the settings without listening, so that all workers can share it.

    Raises ConfigError if the port is in use, or the certificate is not usable.
    """
    host, port = settings.gateway_server.host.strip("[]"), settings.grpc.port or 0
    if settings.grpc.tls_cert_file is not None:
        _check_certificate(settings.grpc)
    try:
        # Without SO_REUSEPORT, bind fails if another process uses the port.
        with _bound(host, port, socket.SO_REUSEADDR) as probe:
            port = probe.getsockname()[1]
        return _bound(host, port, socket.SO_REUSEPORT)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _bound(host: str, port: int, option: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def _check_certificate(settings: GrpcSettings) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(settings.tls_cert_file), settings.tls_key_file)
    except OSError as error:  # includes SSLError
        raise ConfigError(
            f"grpc.tls-cert-file {settings.tls_cert_file} and tls-key-file "
            f"{settings.tls_key_file} cannot be used: {error}"
        ) from None


@asynccontextmanager
async def serving(gateway: GatewayContext) -> AsyncIterator[None]:
    """Serve calls while the context is open, or until the gateway starts to stop."""
    calls: set[asyncio.Task[Any]] = set()
    server, service = _server(gateway, calls)
    await server.start()
    gateway.run_task(_report_health(gateway, service), "the gRPC health service")
    stopping = asyncio.create_task(_stop_when_asked(gateway, server, service, calls))
    try:
        yield
    finally:
        gateway.stopping.set()
        await stopping


async def _stop_when_asked(
    gateway: GatewayContext,
    server: Any,
    service: HealthService,
    calls: set[asyncio.Task[Any]],
) -> None:
    """Refuse new calls as soon as the gateway stops, and let running ones finish in time."""
    await gateway.stopping.wait()
    service.report(NOT_SERVING)
    # Streams end by themselves after `grace`; the rest of the time is for their last message.
    grace_s = gateway.settings.gateway_server.grace.total_seconds() + CLOSE_S
    ending = asyncio.create_task(server.stop(grace_s))
    while calls and not ending.done():
        await asyncio.wait({ending, *calls}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(None)  # ends watches of the health service
    await ending
    if calls:  # the library does not wait for handlers that it has cancelled
        await asyncio.wait(calls)


def _server(gateway: GatewayContext, calls: set[asyncio.Task[Any]]) -> tuple[Any, HealthService]:
    """The server and its health service."""
    bounds = gateway.settings.gateway_server
    most, timeout_s = gateway.most_connections, bounds.request_timeout.total_seconds()
    limits = () if most is None else (("grpc.max_allowed_incoming_connections", most),)
    server = grpc.aio.server(
        # Each of these has a limit of its own, with shares, which clients reach first.
        maximum_concurrent_rpcs=bounds.max_requests + bounds.max_polls + MOST_STREAMS + SPARE_CALLS,
        options=(
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", bounds.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _SHORTEST_PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.server_handshake_timeout_ms", round(timeout_s * 1000)),
            *limits,
        ),
    )
    server.add_generic_rpc_handlers((_handlers(gateway, calls),))
    service = HealthService(gateway.shares)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        ReflectionService(gateway.shares, names), server
    )
    _listen(server, gateway.settings)
    return server, service


def _listen(server: Any, settings: GatewaySettings) -> None:
    host, tls = settings.gateway_server.host.strip("[]"), settings.grpc
    address = f"[{host}]:{tls.port}" if ":" in host else f"{host}:{tls.port}"
    if tls.tls_cert_file is None or tls.tls_key_file is None:
        server.add_insecure_port(address)
        return
    pair = (tls.tls_key_file.read_bytes(), tls.tls_cert_file.read_bytes())
    server.add_secure_port(address, grpc.ssl_server_credentials([pair]))


def _handlers(gateway: GatewayContext, calls: set[asyncio.Task[Any]]) -> Any:
    """The handlers of all methods, which run as requests through the limits middleware."""
    proxies = list(gateway.settings.gateway_server.trusted_proxies)
    limited: Any = LimitsMiddleware(rpc_app(gateway), gateway)
    app: Any = ProxyHeadersMiddleware(limited, proxies)
    timeout_s = gateway.settings.gateway_server.request_timeout.total_seconds()

    def handler(method: Any) -> Any:
        path, kind = path_of(method.name), GetMessageClass(method.output_type)

        async def handle(_requests: Any, context: Any) -> None:
            if (task := asyncio.current_task()) is not None:
                calls.add(task)
                task.add_done_callback(calls.discard)
            await answer(app, Exchange(path, kind, context, timeout_s))

        return grpc.stream_stream_rpc_method_handler(handle)

    methods = {method.name: handler(method) for method in SERVICE.methods}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)


async def _report_health(gateway: GatewayContext, service: HealthService) -> None:
    """Keep the health service up to date: serving if Redis responds and all services run."""
    while not gateway.stopping.is_set():
        try:
            await gateway.store.drive(gateway.store.command("PING"))
            works = not gateway.faults()
        except LisaError:
            works = False
        works = works and not gateway.stopping.is_set()
        service.report(SERVING if works else NOT_SERVING)
        await asyncio.sleep(CHECK_EACH_S)
