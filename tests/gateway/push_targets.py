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
from typing import Any, Self

import httpx

from lisa import Producer
from tests.gateways import new_topic, state
from tests.servers import connect, wait_until


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
        return [request.id for request in self.received]

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

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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


class PushTopic:
    """A topic with two short retries, whose messages gateways push."""

    def __init__(self, redis_url: str, producer: Producer, **options: str) -> None:
        self.name = new_topic("push")
        self.path = f"/v1/topics/{self.name}/push"
        self._redis_url = redis_url
        self._producer = producer
        self.set(**{"retry_delays": "50,50", **options})

    def another(self) -> PushTopic:
        """Another topic on the same server."""
        return PushTopic(self._redis_url, self._producer)

    def set(self, **options: str) -> None:
        """Write options of the topic to Redis."""
        with connect(self._redis_url) as client:
            client.hset(f"lisa:{{{self.name}}}:options", mapping=options)

    def push_to(self, client: httpx.Client, url: str, **more: Any) -> str:
        """Set the push target; returns the secret if it is new."""
        answer = client.put(self.path, json={"url": url, **more})
        assert answer.is_success, answer.text
        secret: str = answer.json().get("secret", "")
        return secret

    def send(self, body: object = 1, **more: Any) -> str:
        """Send a message; returns its id."""
        return self._producer.send(self.name, body, **more)

    def state(self, message_id: str) -> str | None:
        """The state of a message."""
        return state(self._producer, self.name, message_id)

    def wait_for(self, wanted: str, *ids: str) -> None:
        """Wait until all these messages are in a state."""
        wait_until(lambda: all(self.state(message_id) == wanted for message_id in ids))

    def reason(self, message_id: str) -> str:
        """Why the last attempt failed; empty if none did."""
        found = self._producer.get(self.name, message_id)
        return (found and found.reason) or ""
