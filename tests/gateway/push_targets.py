"""A web hook server for tests that records requests and returns configured responses."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass(frozen=True)
class Reply:
    """The response to one request."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    wait: threading.Event | None = None


class Target:
    """A web hook: returns each of `replies` once, then `default`, a Reply or a function."""

    def __init__(self, port: int = 0) -> None:
        self.received: list[Received] = []
        self.replies: deque[Reply] = deque()
        self.default: Reply | Callable[[Received], Reply] = Reply()
        self.at_once = 0
        self.most_at_once = 0
        self.connections = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.received]

    def reply_to(self, request: Received) -> Reply:
        with self._lock:
            self.received.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            reply = self.replies.popleft() if self.replies else self.default
        try:
            found = reply(request) if callable(reply) else reply
            if found.wait is not None:
                found.wait.wait(20)
            return found
        finally:
            with self._lock:
                self.at_once -= 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnects of gateways that were killed or stopped waiting."""


def _handler(target: Target) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            target.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = target.reply_to(Received(self.path, headers, body, time.time()))
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def is_signed(request: Received, secret: str) -> bool:
    """Verify the signature as a receiver must by the Standard Webhooks specification."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join(
        [request.id.encode(), request.headers["webhook-timestamp"].encode(), request.body]
    )
    wanted = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    given = request.headers["webhook-signature"].split(" ")
    return f"v1,{wanted}" in given
