"""Middleware that limits the number, size and duration of requests.

At capacity, the gateway rejects new requests immediately with 503 and Retry-After; it never queues
them. Each request body is read completely, within a time limit, before the request is handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.gateway.access import Unauthorized, is_local_name
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import RETRY_AFTER_S, ErrorResponse, problem_of
from lisa.gateway.request_metrics import GONE, RequestOutcome, set_failure_reason

MOST_ANONYMOUS_BYTES = 64 * 1024
"""Maximum body without a bearer token, which suffices for the web page's forms."""

READING = frozenset(("GET", "HEAD", "OPTIONS"))
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class LimitsMiddleware:
    """ASGI middleware that enforces the gateway's limits and adds security headers."""

    def __init__(self, app: ASGIApp, hub: GatewayContext) -> None:
        self._app = app
        self._hub = hub
        self._bounds = hub.settings.gateway_server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hub = self._hub
        answer = hub.meter.begin()
        send_answer = _with_headers(send, answer)
        hub.active += 1
        held = 0
        try:
            self._check(scope)
            body = await self._read(scope, receive)
            held = len(body)
            await self._app(scope, _replaying(body, receive), send_answer)
        except _Disconnected:
            return
        except Exception as error:
            if answer.code != GONE:  # the response has already started
                raise
            await problem_of(error).response()(scope, receive, send_answer)
        finally:
            hub.active -= 1
            hub.buffered -= held
            hub.meter.end(scope, answer)

    def _check(self, scope: Scope) -> None:
        hub, headers = self._hub, dict(scope["headers"])
        if hub.active - hub.held > self._bounds.max_requests:
            raise _full("requests", f"{self._bounds.max_requests} requests are already running")
        if hub.buffered > self._bounds.max_buffered_bytes:
            raise _full_of_bytes()
        host = headers.get(b"host", b"").decode("latin-1")
        if hub.access.is_open and not is_local_name(host):
            raise ErrorResponse(
                403, "host", f"this gateway accepts the host localhost only, not {host!r}"
            )
        if scope["method"] not in READING:
            reject_foreign(scope)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body and count its bytes as buffered. Raises ErrorResponse."""
        hub = self._hub
        limit = self._max_bytes(scope)
        if _length(scope["headers"]) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._bounds.request_timeout.total_seconds()):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    chunk: bytes = message.get("body", b"")
                    size += len(chunk)
                    hub.buffered += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    if hub.buffered > self._bounds.max_buffered_bytes:
                        raise _full_of_bytes()
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except BaseException as error:
            hub.buffered -= size
            if not isinstance(error, TimeoutError):
                raise
            limit_s = self._bounds.request_timeout.total_seconds()
            raise ErrorResponse(
                408,
                "timeout",
                f"the request took more than {limit_s:g} s to arrive",
                headers={"Connection": "close"},
            ) from None

    def _max_bytes(self, scope: Scope) -> int:
        """The body limit. It is lower without a token, so that strangers cannot fill the memory."""
        connection = HTTPConnection(scope)
        try:
            self._hub.token(connection, compat=True)
        except Unauthorized:
            return min(self._bounds.max_body_bytes, MOST_ANONYMOUS_BYTES)
        return self._bounds.max_body_bytes


class _Disconnected(Exception):
    """The client disconnected before its request was complete."""


def _full(reason: str, detail: str) -> ErrorResponse:
    set_failure_reason(reason)
    return ErrorResponse(503, "crowded", detail, headers={"Retry-After": RETRY_AFTER_S})


def _full_of_bytes() -> ErrorResponse:
    return _full("bytes", "the limit on buffered request and response bytes is reached")


def _too_large(limit: int) -> ErrorResponse:
    return ErrorResponse(
        413,
        "too-large",
        f"a request body may have at most {limit} bytes",
        headers={"Connection": "close"},
    )


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def reject_foreign(scope: Scope) -> None:
    """Reject a request that a page of another site sent, by the browser's headers.

    Raises ErrorResponse.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if headers.get(b"sec-fetch-site") in _FOREIGN or _is_of_another_host(origin, host):
        raise ErrorResponse(
            403, "origin", f"cross-site request from {origin or 'another site'} rejected"
        )


_FOREIGN = (b"cross-site", b"same-site")


def _is_of_another_host(origin: str, host: str) -> bool:
    try:
        return bool(origin) and urlsplit(origin).netloc != host
    except ValueError:
        return True


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A receive channel that returns the buffered body once, then the original's messages."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_headers(send: Send, answer: RequestOutcome) -> Send:
    """A send channel that adds default security headers and records the response's head."""

    async def send_answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            known = {name.lower() for name, _ in headers}
            headers += [pair for pair in SAFE_HEADERS if pair[0] not in known]
            message = {**message, "headers": headers}
            answer.starts(message)
        await send(message)

    return send_answer
