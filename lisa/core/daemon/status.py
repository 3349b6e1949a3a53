"""A small web server for daemons: the health page, and pages that a role adds.

It answers GET and HEAD for the given pages only, on its own threads.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from lisa.core.daemon.threads import unforeseen
from lisa.core.model.addresses import listen_address
from lisa.core.model.errors import ConfigError

HEALTH = "/healthz"
SLOW_CLIENT_S = 5.0


class StatusResponse(NamedTuple):
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


def health_page(content: Mapping[str, object]) -> StatusResponse:
    """A health report as JSON; 200 if its `status` is "ok", else 503."""
    status = 200 if content["status"] == "ok" else 503
    body = msgspec.json.encode(content) + b"\n"
    return StatusResponse(status, "application/json", body)


class StatusServer:
    """Serves `pages`, a function per path, on `HOST:PORT`; port 0 selects a free one.

    A port alone is a port of 127.0.0.1.
    """

    def __init__(
        self, address: str | int, pages: Mapping[str, Callable[[], StatusResponse]]
    ) -> None:
        host, _, port = listen_address(address).rpartition(":")
        self._host, self._wanted_port = host.strip("[]"), int(port)
        self._pages = dict(pages)
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """The port in use; for port 0, known once started."""
        return self._server.server_address[1] if self._server else self._wanted_port

    def start(self) -> None:
        """Listen and serve. Raises ConfigError if the address is not available."""
        try:
            self._server = _Server((self._host, self._wanted_port), self._pages)
        except OSError as error:
            where = f"{self._host}:{self._wanted_port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="lisa-status", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop serving. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], pages: Mapping[str, Callable[[], StatusResponse]]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind resolves the host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "lisa", self.server_address[1]

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


def _made(make: Callable[[], StatusResponse]) -> StatusResponse:
    try:
        return make()
    except Exception as error:  # noqa: BLE001  logged; the server would close the connection
        unforeseen("status page", error)
        return StatusResponse(500, "text/plain", b"unexpected error; see the log\n")


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = SLOW_CLIENT_S
    server: _Server

    def version_string(self) -> str:
        return "lisa"

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        page = _made(make) if make else StatusResponse(404, "text/plain", b"no such page\n")
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET  # noqa: N815  the name that http.server expects

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""
