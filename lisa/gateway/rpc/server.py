"""Starts and stops the gRPC server of one gateway process."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.settings import GatewaySettings, GrpcSettings
from lisa.gateway.context import GatewayContext
from lisa.gateway.limits_middleware import LimitsMiddleware
from lisa.gateway.rpc import standard
from lisa.gateway.rpc.consume import CLOSE_S
from lisa.gateway.rpc.methods import SERVICE, RpcApp, path_of
from lisa.gateway.rpc.transport import Exchange, answer
from lisa.gateway.shares import MOST_STREAMS, SPARE_CALLS

CHECK_EACH_S = 1.0
"""How often the health service checks whether the gateway works."""

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
async def serving(hub: GatewayContext) -> AsyncIterator[None]:
    """Serve calls while the context is open, or until the gateway starts to stop."""
    calls: set[asyncio.Task[Any]] = set()
    server, service = _server(hub, calls)
    await server.start()
    hub.run_task(_report_health(hub, service), "the gRPC health service")
    stopping = asyncio.create_task(_stop_when_asked(hub, server, service, calls))
    try:
        yield
    finally:
        hub.stopping.set()
        await stopping


async def _stop_when_asked(
    hub: GatewayContext,
    server: Any,
    service: standard.HealthService,
    calls: set[asyncio.Task[Any]],
) -> None:
    """Refuse new calls as soon as the gateway stops, and let running ones finish in time."""
    await hub.stopping.wait()
    service.report(standard.NOT_SERVING)
    # Streams end by themselves after `grace`; the rest of the time is for their last message.
    grace_s = hub.settings.gateway_server.grace.total_seconds() + CLOSE_S
    ending = asyncio.create_task(server.stop(grace_s))
    while calls and not ending.done():
        await asyncio.wait({ending, *calls}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(None)  # ends watches of the health service
    await ending
    if calls:  # the library does not wait for handlers that it has cancelled
        await asyncio.wait(calls)


def _server(
    hub: GatewayContext, calls: set[asyncio.Task[Any]]
) -> tuple[Any, standard.HealthService]:
    """The server and its health service."""
    bounds = hub.settings.gateway_server
    most, timeout_s = hub.most_connections, bounds.request_timeout.total_seconds()
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
    server.add_generic_rpc_handlers((_handlers(hub, calls),))
    service = standard.add(server, hub.shares, SERVICE.full_name)
    _listen(server, hub.settings)
    return server, service


def _listen(server: Any, settings: GatewaySettings) -> None:
    host, tls = settings.gateway_server.host.strip("[]"), settings.grpc
    address = f"[{host}]:{tls.port}" if ":" in host else f"{host}:{tls.port}"
    if tls.tls_cert_file is None or tls.tls_key_file is None:
        server.add_insecure_port(address)
        return
    pair = (tls.tls_key_file.read_bytes(), tls.tls_cert_file.read_bytes())
    server.add_secure_port(address, grpc.ssl_server_credentials([pair]))


def _handlers(hub: GatewayContext, calls: set[asyncio.Task[Any]]) -> Any:
    """The handlers of all methods, which run as requests through the limits middleware."""
    proxies = list(hub.settings.gateway_server.trusted_proxies)
    limited: Any = LimitsMiddleware(RpcApp(hub), hub)
    app: Any = ProxyHeadersMiddleware(limited, proxies)
    timeout_s = hub.settings.gateway_server.request_timeout.total_seconds()

    def handler(method: Any) -> Any:
        path, kind = path_of(method.name), GetMessageClass(method.output_type)

        async def handle(_requests: Any, context: Any) -> None:
            if (task := asyncio.current_task()) is not None:
                calls.add(task)
                task.add_done_callback(calls.discard)
            await answer(app, Exchange(path, kind, context, timeout_s))

        return grpc.stream_stream_rpc_method_handler(handle)

    methods = {one.name: handler(one) for one in SERVICE.methods}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)


async def _report_health(hub: GatewayContext, service: standard.HealthService) -> None:
    """Keep the health service up to date: serving if Redis responds and all services run."""
    while not hub.stopping.is_set():
        try:
            await hub.store.drive(hub.store.command("PING"))
            works = not hub.faults()
        except LisaError:
            works = False
        works = works and not hub.stopping.is_set()
        service.report(standard.SERVING if works else standard.NOT_SERVING)
        await asyncio.sleep(CHECK_EACH_S)
