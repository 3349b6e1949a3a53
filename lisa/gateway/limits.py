"""Middleware that limits the number, size and duration of requests.

At capacity, the gateway rejects new requests immediately with 503 and Retry-After; it never queues
them. Each request body is read completely, within a time limit, before the request is handled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.core.daemon.status import HEALTH
from lisa.gateway import audit
from lisa.gateway.access import EVERYTHING, Unauthorized, client_of, is_forwarded, is_local_name
from lisa.gateway.context import COPIES, GatewayContext, arrival
from lisa.gateway.problems import ClientDisconnected, ErrorResponse, problem_of
from lisa.gateway.shares import GONE, Client, RunningRequest, Shares, current, face_of

LARGE_BYTES = 64 * 1024
"""Response bodies above this size count as buffered, and are written in parts of this size.

Uvicorn waits between two writes until the client reads, but not after the last one.
"""

SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}

MOST_ANONYMOUS_BYTES = 64 * 1024
"""Maximum body without a bearer token, which suffices for the web page's forms."""

READING = frozenset(("GET", "HEAD", "OPTIONS"))


class ResponseChannel:
    """An ASGI send channel that adds default security headers and records the response's head."""

    def __init__(self, shares: Shares, scope: Scope, send: Send, request: RunningRequest) -> None:
        self._shares = shares
        self._scope = scope
        self._send = send
        self._request = request

    async def __call__(self, message: Message) -> None:
        """Send a message. A response that waits until its client reads counts as stalled.

        Raises Crowded, which becomes the response, if a large response to GET does not fit into the
        limit on buffered bytes, or into the client's share. Metrics are only counted, since they
        show the limit. So are responses to other methods, whose requests may have changed
        something. Pulls are counted by their response (see `long_poll`).
        """
        request, is_rpc = self._request, self._scope.get("http_version") == "2"
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            size = content_length(headers)
            if size > LARGE_BYTES and not request.is_pull:
                request.hold(size)
                if self._scope["method"] == "GET" and face_of(self._scope["path"]) != "metrics":
                    self._shares.buffered.check(request.client, request.held)
            for name, value in SAFE_HEADERS.items():
                headers.setdefault(name, value)
            request.code = str(message["status"])
            request.is_stream = headers.get("content-type", "").startswith("text/event-stream")
        is_small = len(message.get("body", b"")) <= LARGE_BYTES
        for part in [message] if is_small or is_rpc else _parts(message):
            # A stream is counted as such. Calls of gRPC have no connections of their own.
            is_counted = request.is_stream or is_rpc
            with nullcontext() if is_counted else self._shares.waiting(self._shares.stalled):
                await self._send(part)


def content_length(headers: Headers) -> int:
    """The length of a body by its headers; 0 if they do not tell it."""
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else 0


def _parts(message: Message) -> Iterator[Message]:
    """The parts of a large body."""
    body, more = message["body"], message.get("more_body", False)
    starts = range(0, len(body), LARGE_BYTES)
    for start in starts:
        part = body[start : start + LARGE_BYTES]
        yield {**message, "body": part, "more_body": more or start != starts[-1]}


class LimitsMiddleware:
    """ASGI middleware that enforces the gateway's limits and adds security headers."""

    def __init__(self, app: ASGIApp, gateway: GatewayContext) -> None:
        self._app = app
        self._gateway = gateway
        self._bounds = gateway.settings.gateway_server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shares = self._gateway.shares
        connection = HTTPConnection(scope)
        client, max_bytes = self._client(connection)
        request = RunningRequest(client, shares.buffered)
        current.set(request)
        send_answer = ResponseChannel(shares, scope, send, request)
        shares.requests.take(client)
        try:
            self._check(connection, client)
            body = await self._read(connection, receive, max_bytes, request)
            arrival.set((asyncio.current_task(), asyncio.get_running_loop().time()))
            await self._app(scope, _replaying(body, receive), send_answer)
        except ClientDisconnected:
            return
        except Exception as error:
            if request.code != GONE:  # the response has already started
                raise
            request.drop_held()  # before the response, which may wait for the rest of the request
            response = problem_of(error).response()
            if isinstance(error, _BodyTooLarge) and error.is_arriving:
                await self._answer_early(response, scope, receive, send_answer)
            else:
                await response(scope, receive, send_answer)
        finally:
            shares.requests.give(client)
            request.drop_held()
            self._gateway.meter.count(scope, request)

    def _check(self, connection: HTTPConnection, client: Client) -> None:
        gateway, scope = self._gateway, connection.scope
        host = _host(connection)
        if scope["path"] != HEALTH:
            gateway.shares.requests.check(client)
            gateway.shares.buffered.check(client)
        if gateway.access.is_open and not is_local_name(host):
            raise ErrorResponse(
                403, "host", f"this gateway accepts the host localhost only, not {host!r}"
            )
        if gateway.access.is_open and is_forwarded(connection.headers):
            raise ErrorResponse(
                403, "host", "a gateway without tokens refuses requests that a proxy passes on"
            )
        if scope["method"] not in READING:
            reject_foreign(connection.headers)

    async def _read(
        self, connection: HTTPConnection, receive: Receive, limit: int, request: RunningRequest
    ) -> bytes:
        """Read the whole body, and count its bytes, then its copies, as buffered.

        Raises ErrorResponse and Crowded.
        """
        if content_length(connection.headers) > limit:
            raise _BodyTooLarge(limit, is_arriving=True)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._bounds.request_timeout.total_seconds()):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunk: bytes = message.get("body", b"")
                    size += len(chunk)
                    request.hold(len(chunk))
                    if size > limit:
                        raise _BodyTooLarge(limit, is_arriving=message.get("more_body", False))
                    is_last = not message.get("more_body", False)
                    if is_last:
                        request.hold(size * (COPIES - 1))
                    if size:
                        self._gateway.shares.buffered.check(request.client, request.held)
                    chunks.append(chunk)
                    if is_last:
                        return b"".join(chunks)
        except TimeoutError:
            limit_s = self._bounds.request_timeout.total_seconds()
            raise ErrorResponse(
                408,
                "timeout",
                f"the request took more than {limit_s:g} s to arrive",
                headers={"Connection": "close"},
            ) from None

    async def _answer_early(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the response to a request that still arrives, and drop the rest of the request.

        Many clients send everything before they read. If the connection closed meanwhile, they
        would report a broken connection, and perhaps repeat the request.
        """

        async def send_unfinished(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await response(scope, receive, send_unfinished)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.request_timeout.total_seconds()):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    def _client(self, connection: HTTPConnection) -> tuple[Client, int]:
        """The client of a request, and the limit on its body.

        The limit is lower without a token, so that strangers cannot fill the memory.
        """
        shares, most = self._gateway.shares, self._bounds.max_body_bytes
        address = client_of(connection)
        try:
            token = self._gateway.token(connection, compat=True)
        except Unauthorized as error:
            if "authorization" in connection.headers:
                audit.token_refused(connection, str(error))
            return shares.of_address(address, is_known=False), min(most, MOST_ANONYMOUS_BYTES)
        if token is EVERYTHING:
            return shares.of_address(address), most
        return shares.of_token(token.name), most


class _BodyTooLarge(ErrorResponse):
    """The body is larger than `limit` bytes. `is_arriving`: the client may still send it."""

    def __init__(self, limit: int, *, is_arriving: bool) -> None:
        detail = f"a request body may have at most {limit} bytes"
        super().__init__(413, "too-large", detail, headers={"Connection": "close"})
        self.is_arriving = is_arriving


def _host(connection: HTTPConnection) -> str:
    """The Host header. Raises ErrorResponse unless there is exactly one (RFC 9112, section 3.2).

    HTTP/1.0 needs none, and calls of gRPC have none.
    """
    hosts = connection.headers.getlist("host")
    needed = connection.scope.get("http_version") == "1.1"
    if len(hosts) > 1 or (needed and not hosts) or not all(map(_HOST.match, hosts)):
        found = ", ".join(map(repr, hosts)) or "none"
        text = f"a request needs one Host header with a host name, not {found}"
        raise ErrorResponse(400, "host", text, headers={"Connection": "close"})
    return "".join(hosts)


_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*\Z")


def reject_foreign(headers: Headers) -> None:
    """Reject a request that a page of another site sent, by the browser's headers.

    Raises ErrorResponse.
    """
    origin = headers.get("origin", "")
    try:
        is_of_another_host = bool(origin) and urlsplit(origin).netloc != headers.get("host", "")
    except ValueError:
        is_of_another_host = True
    if is_of_another_host or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ErrorResponse(
            403, "origin", f"cross-site request from {origin or 'another site'} rejected"
        )


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
