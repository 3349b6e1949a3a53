"""Runs a gateway process, alone or as one of several on a shared port."""

from __future__ import annotations

import asyncio
import logging
import mmap
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from lisa.core.daemon.stop_signals import handler_of, stopping
from lisa.core.model.errors import ConfigError
from lisa.core.settings import GatewaySettings
from lisa.gateway import push
from lisa.gateway.access import Access
from lisa.gateway.app import create_app
from lisa.gateway.context import GatewayContext
from lisa.gateway.protocol import bounded

log = logging.getLogger("lisa.gateway")

BACKLOG = 2048
SPARE_CONNECTIONS = 2_000
"""Idle connections allowed in addition to active requests."""

KEEP_ALIVE_S = 75
"""Longer than common clients' keep-alive, so that no connection closes during a request."""


OWN_FILES = 100
"""Open files other than clients' connections: Redis, pushes, logs."""


def listen(settings: GatewaySettings) -> socket.socket:
    """Open the listening socket.

    Raises ConfigError if the address is in use, or is public and no tokens are configured, or if
    nothing can be pushed.
    """
    push.check_settings(settings)
    access = Access.of(settings.gateway_server)
    if readers := access.reading_producers:
        log.warning(
            "tokens with the scope produce alone may read messages only until version 0.3 (%s): "
            "add the scope read if they need it, then set producers-read: false",
            ", ".join(readers),
        )
    host, port = settings.gateway_server.host.strip("[]"), settings.gateway_server.port
    if access.is_open:
        log.warning(
            "no tokens are configured: every program that reaches %s:%d may send, read and change "
            "messages; do not put a proxy in front of it",
            host,
            port,
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listening


def serve(
    settings: GatewaySettings,
    listening: socket.socket,
    shared: mmap.mmap | None = None,
    numbers: Path | None = None,
) -> None:
    """Serve requests until SIGTERM, SIGINT or SIGHUP. Raises LisaError.

    shared: memory shared by all workers. numbers: directory for all workers' metrics. Both are None
    in a single process.
    """
    import uvloop

    before = {number: handler_of(number) for number in stopping()}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listening, shared, numbers))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listening.close()


async def _serve(
    settings: GatewaySettings,
    listening: socket.socket,
    shared: mmap.mmap | None,
    numbers: Path | None,
) -> None:
    # The gateway logs start and stop itself; a warning for each bad request would fill the log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_summarise_cancelled)
    most = _most_connections(settings)
    hub = GatewayContext(settings, shared=shared, numbers=numbers, most_connections=most)
    server = _UvicornServer(_config(hub), hub)
    opening = asyncio.ensure_future(hub.open())
    loop = asyncio.get_running_loop()

    def stop(_number: int, _frame: FrameType | None) -> None:
        """Stop the server: on SIGHUP, a signal while it opens, or one raised by Uvicorn's end."""
        server.should_exit = True
        loop.call_soon_threadsafe(hub.stop_waiting if opening.done() else opening.cancel)

    for number in stopping():
        signal.signal(number, stop)
    with suppress(asyncio.CancelledError):
        await opening
        log.info("gateway %s started; its server is %s", hub.name, hub.store.where)
    await server.serve(sockets=[listening])
    log.info("gateway %s stopped", hub.name)


def _summarise_cancelled(record: logging.LogRecord) -> bool:
    """Keep one line about the requests that Uvicorn cancels after `grace`, and no tracebacks."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    if record.msg == _UVICORN_CANCELS:
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "%s requests were still running or not read by their clients after `grace`"
    return True


_UVICORN_CANCELS = "Cancel %s running task(s), timeout graceful shutdown exceeded"


def _most_connections(settings: GatewaySettings) -> int:
    """The limit on connections of each port. Raises the soft limit on open files to the hard limit.

    Beyond it HTTP clients get 503, and gRPC closes connections; beyond the limit on open files, all
    connections would be reset, also those for health checks.
    """
    bounds, ports = settings.gateway_server, 1 if settings.grpc.port is None else 2
    wanted = bounds.max_requests + bounds.max_polls
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = hard
    if hard == resource.RLIM_INFINITY:
        goal = max(soft, ports * (wanted + SPARE_CONNECTIONS) + OWN_FILES)
    with suppress(ValueError, OSError):  # some systems have a lower limit for each process
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
        soft = goal
    possible = max(1, (soft - OWN_FILES) // ports)
    if possible < wanted:
        log.warning(
            "the limit of %d open files allows %d connections%s, fewer than max-polls + "
            "max-requests = %d: raise the hard limit (ulimit -Hn, LimitNOFILE) or lower these "
            "settings",
            soft,
            possible,
            " by HTTP and as many by gRPC" if ports > 1 else "",
            wanted,
        )
    return min(possible, wanted + SPARE_CONNECTIONS)


def _config(hub: GatewayContext) -> uvicorn.Config:
    bounds = hub.settings.gateway_server
    return uvicorn.Config(
        create_app(hub),
        http=bounded(bounds.request_timeout.total_seconds(), hub.meter, hub.shares),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        limit_concurrency=hub.most_connections,
        timeout_graceful_shutdown=max(1, round(bounds.grace.total_seconds())),
    )


class _UvicornServer(uvicorn.Server):
    """A Uvicorn server that answers waiting pulls as soon as shutdown starts."""

    def __init__(self, config: uvicorn.Config, hub: GatewayContext) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: stop the server."""
        super().handle_exit(sig, frame)
        asyncio.get_event_loop().call_soon_threadsafe(self._hub.stop_waiting)
