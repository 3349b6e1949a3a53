"""What every request passes before a face sees it: bounds of size, time and number.

Nothing waits in a queue without bound: who comes while the gateway is full is told at once to come
again, with 503 and Retry-After. A request is read whole before it is looked at, within its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.gateway.access import Unauthorized, is_local_name
from lisa.gateway.hub import Hub
from lisa.gateway.meter import GONE, Answer, because
from lisa.gateway.problems import RETRY_AFTER_S, Problem, problem_of

__all__ = ["Doorman", "is_foreign"]

MOST_ANONYMOUS_BYTES = 64 * 1024
"""A request without a token, where tokens are asked for: the page's forms, which bring a cookie."""

READING = frozenset(("GET", "HEAD", "OPTIONS"))
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class Doorman:
    """ASGI middleware; the hub is known once the application has started."""

    def __init__(self, app: ASGIApp, hub: Hub) -> None:
        self._app = app
        self._hub = hub
        self._bounds = hub.settings.gateway_server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or turn it away."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hub = self._hub
        answer = hub.meter.begin()
        guarded = _guarded(send, answer)
        hub.active += 1
        held = 0
        try:
            self._check(scope)
            body = await self._read(scope, receive)
            held = len(body)
            await self._app(scope, _replaying(body, receive), guarded)
        except _Gone:
            return
        except Exception as error:
            if answer.code != GONE:  # the head of an answer is out already
                raise
            await problem_of(error).response()(scope, receive, guarded)
        finally:
            hub.active -= 1
            hub.buffered -= held
            hub.meter.end(scope, answer)

    def _check(self, scope: Scope) -> None:
        hub, headers = self._hub, dict(scope["headers"])
        if hub.active - hub.held > self._bounds.max_requests:
            raise _full("requests", f"{self._bounds.max_requests} requests are at work")
        if hub.buffered > self._bounds.max_buffered_bytes:
            raise _full("bytes", "too much is being sent and answered at once")
        host = headers.get(b"host", b"").decode("latin-1")
        if hub.access.is_open and not is_local_name(host):
            raise Problem(403, "host", f"this gateway answers to localhost only, not to {host!r}")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if scope["method"] not in READING and is_foreign(origin, host, headers):
            raise Problem(403, "origin", f"a page of {origin or 'another site'} may not do this")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; from now on its bytes count as buffered. Raises Problem."""
        hub = self._hub
        most = self._most(scope)
        if _length(scope["headers"]) > most:
            raise _too_large(most)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._bounds.request_timeout.total_seconds()):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    chunk: bytes = message.get("body", b"")
                    size += len(chunk)
                    hub.buffered += len(chunk)
                    if size > most:
                        raise _too_large(most)
                    if hub.buffered > self._bounds.max_buffered_bytes:
                        raise _full("bytes", "too much is being sent and answered at once")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except BaseException as error:
            hub.buffered -= size
            if not isinstance(error, TimeoutError):
                raise
            limit = self._bounds.request_timeout.total_seconds()
            raise Problem(408, "timeout", f"the request took more than {limit:g} s to arrive",
                          headers={"Connection": "close"}) from None  # fmt: skip

    def _most(self, scope: Scope) -> int:
        """How large a body may be: who shows no token is not to fill the memory."""
        connection = HTTPConnection(scope)
        try:
            self._hub.token(connection, compat=True)
        except Unauthorized:
            return min(self._bounds.max_body_bytes, MOST_ANONYMOUS_BYTES)
        return self._bounds.max_body_bytes


class _Gone(Exception):
    """The client left before its request was whole."""


def _full(reason: str, what: str) -> Problem:
    because(reason)
    return Problem(503, "crowded", what, headers={"Retry-After": RETRY_AFTER_S})


def _too_large(most: int) -> Problem:
    return Problem(413, "too-large", f"a request has at most {most} bytes here",
                   headers={"Connection": "close"})  # fmt: skip


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def is_foreign(origin: str, host: str, headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says that another site's page sent this."""
    if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        return True
    try:
        return bool(origin) and urlsplit(origin).netloc != host
    except ValueError:
        return True


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body once, then what the client does next."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _guarded(send: Send, answer: Answer) -> Send:
    """Adds the headers that every answer carries, unless it has its own; takes note of it."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            known = {name.lower() for name, _ in headers}
            headers += [pair for pair in SAFE_HEADERS if pair[0] not in known]
            message = {**message, "headers": headers}
            answer.starts(message)
        await send(message)

    return guarded
