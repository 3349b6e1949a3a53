"""One gateway process, or several that share a port."""

from __future__ import annotations

import asyncio
import logging
import mmap
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from lisa.core.errors import ConfigError
from lisa.core.settings import GatewaySettings
from lisa.gateway.access import Access
from lisa.gateway.app import create_app
from lisa.gateway.hub import Hub
from lisa.gateway.protocol import bounded

__all__ = ["listen", "serve"]

log = logging.getLogger("lisa.gateway")

BACKLOG = 2048
SPARE_CONNECTIONS = 2_000
"""Connections that may be open while nothing is asked on them."""

KEEP_ALIVE_S = 75
"""Longer than what clients keep connections for, so that none is closed under a request."""


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises ConfigError, also for an open address without tokens."""
    Access.of(settings.gateway_server)
    host, port = settings.gateway_server.host.strip("[]"), settings.gateway_server.port
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
    """Answer requests until SIGTERM or SIGINT. Raises LisaError.

    `shared` is memory that all workers see, `numbers` the directory where they leave what they
    count; without them this process is the only one.
    """
    import uvloop

    before = {number: signal.signal(number, _ignore) for number in _STOPPING}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listening, shared, numbers))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listening.close()


_STOPPING = (signal.SIGTERM, signal.SIGINT)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Uvicorn raises a signal again once it has served out: it has done its work by then."""


async def _serve(
    settings: GatewaySettings,
    listening: socket.socket,
    shared: mmap.mmap | None,
    numbers: Path | None,
) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # this role tells of itself
    hub = Hub(settings, shared=shared, numbers=numbers)
    await hub.open()
    bounds = settings.gateway_server
    config = uvicorn.Config(
        create_app(hub), http=bounded(bounds.request_timeout.total_seconds()), ws="none",
        lifespan="on", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S, backlog=BACKLOG,
        limit_concurrency=bounds.max_requests + bounds.max_polls + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(bounds.grace.total_seconds())),
    )  # fmt: skip
    log.info("gateway %s runs on %s", hub.name, hub.store.where)
    await _Server(config, hub).serve(sockets=[listening])
    log.info("gateway %s has stopped", hub.name)


class _Server(uvicorn.Server):
    """Uvicorn's, which lets go of those who wait before it waits for them."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come: stop."""
        super().handle_exit(sig, frame)
        asyncio.get_event_loop().call_soon_threadsafe(self._hub.stop_waiting)
