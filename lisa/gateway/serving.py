"""Runs a gateway process, alone or as one of several on a shared port."""

from __future__ import annotations

import asyncio
import logging
import mmap
import resource
import signal
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lisa.core.daemon.process_signals import handler_of, stopping
from lisa.core.daemon.status import HEALTH
from lisa.core.model.errors import ConfigError
from lisa.core.settings import GatewaySettings
from lisa.gateway import push
from lisa.gateway.access import Access
from lisa.gateway.app import create_app
from lisa.gateway.context import GatewayContext
from lisa.gateway.shares import Client

MOST_HEAD_BYTES = 64 * 1024
"""Maximum size of request line and headers, plus any body bytes in the same read."""

log = logging.getLogger("lisa.gateway")
BACKLOG = 2048

SPARE_CONNECTIONS = 2_000
"""Idle connections allowed in addition to active requests."""

KEEP_ALIVE_S = 75
"""Longer than common clients' keep-alive, so that no connection closes during a request."""

OWN_FILES = 100
"""Open files other than clients' connections: Redis, pushes, logs."""


class _Bounded(HttpToolsProtocol):
    """A connection that closes if its client is too slow, or has too many connections.

    Beyond its address's share, a new connection replaces the address's oldest one that waits for a
    request.

    waiting: by address, the connections that wait for a request, the oldest first.
    """

    _address: Client
    _is_counted = True
    _is_excess = False
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    _head_bytes = 0

    def __init__(
        self, gateway: GatewayContext, waiting: dict[str, dict[_Bounded, None]], **options: Any
    ) -> None:
        super().__init__(**options)
        self._shares = gateway.shares
        self._meter = gateway.meter
        self._waiting = waiting
        # How long a client may take to send a complete head, and to read pending data.
        self._timeout_s = gateway.settings.gateway_server.request_timeout.total_seconds()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        connections = self._shares.connections
        self._address = self._shares.of_address(self.client[0] if self.client else "")
        connections.take(self._address)
        self._wait()
        if connections.is_over(self._address):
            oldest = next(iter(self._waiting[self._address.name]))
            if oldest is not self:
                oldest.replaced()
        self._is_excess = connections.is_over(self._address)

    def _wait(self) -> None:
        """Note that the connection waits for a request."""
        self._waiting.setdefault(self._address.name, {})[self] = None

    def _work(self) -> None:
        """Note that the connection has a request, or has ended."""
        if waiting := self._waiting.get(self._address.name):
            waiting.pop(self, None)
            if not waiting:
                del self._waiting[self._address.name]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        if self._running is not None and not self._running.response_complete:
            # Uvicorn marks only the last of several pipelined requests.
            self._running.disconnected = True
            self._running.message_event.set()
        self._uncount()
        super().connection_lost(exc)

    def replaced(self) -> None:
        """Close the connection, which waits for a request, in favour of a newer one."""
        self._uncount()
        self._reject(b"503 Service Unavailable")

    def _uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._shares.connections.give(self._address)
            self._work()

    def send_400_response(self, msg: str) -> None:
        self._meter.malformed += 1
        super().send_400_response(msg)
        self._start_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_timer()
        elif self._is_counted and self.cycle.response_complete:  # no further request was received
            self._wait()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._work()
        self._is_excess = self._is_excess and self._shares.connections.is_over(self._address)
        # Health checks are answered even at the limit on connections.
        is_health = self.url == HEALTH.encode()
        most = 0 if self._is_excess else self.config.limit_concurrency
        self.limit_concurrency = None if is_health else most
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        awaited = self._timer
        super().data_received(data)
        if self._timer is None:
            return
        self._head_bytes = len(data) + (self._head_bytes if self._timer is awaited else 0)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._reject(b"431 Request Header Fields Too Large")

    def _start_timer(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self._timeout_s, self._reject, b"408 Request Timeout")

    def _start_write_timer(self) -> None:
        """Abort the connection if its client reads too slowly. A closing one waits for it, too."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._timeout_s, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject(self, status: bytes) -> None:
        """Close the connection; send the status if a request was started."""
        self._stop_timer()
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._head_bytes and not busy and not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self.transport.close()
        self._start_write_timer()


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
    gateway = GatewayContext(settings, shared=shared, numbers=numbers, most_connections=most)
    server = uvicorn.Server(_config(gateway))
    opening = asyncio.ensure_future(gateway.open())
    loop = asyncio.get_running_loop()

    def stop(number: int, _frame: FrameType | None) -> None:
        """Stop the server, and answer waiting pulls; on a second SIGINT, wait for nothing."""
        server.force_exit |= server.should_exit and number == signal.SIGINT
        server.should_exit = True
        loop.call_soon_threadsafe(gateway.stop_waiting if opening.done() else opening.cancel)

    server.handle_exit = stop  # type: ignore[assignment, method-assign]
    for number in stopping():
        signal.signal(number, stop)
    with suppress(asyncio.CancelledError):
        await opening
        log.info("gateway %s started; its server is %s", gateway.name, gateway.store.where)
    await server.serve(sockets=[listening])
    log.info("gateway %s stopped", gateway.name)


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


def _config(gateway: GatewayContext) -> uvicorn.Config:
    bounds = gateway.settings.gateway_server
    protocol: Any = partial(_Bounded, gateway, {})
    return uvicorn.Config(
        create_app(gateway),
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        limit_concurrency=gateway.most_connections,
        timeout_graceful_shutdown=max(1, round(bounds.grace.total_seconds())),
    )
