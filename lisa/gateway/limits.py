"""Middleware that limits the number, size and duration of requests.

At capacity, the gateway rejects new requests immediately with 503 and Retry-After; it never queues
them. Each request body is read completely, within a time limit, before the request is handled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.core.daemon.status import HEALTH
from lisa.gateway import audit
from lisa.gateway.access import EVERYTHING, Unauthorized, client_of, is_forwarded, is_local_name
from lisa.gateway.context import COPIES, GatewayContext, arrival
from lisa.gateway.problems import ClientDisconnected, ErrorResponse, problem_of
from lisa.gateway.request_metrics import GONE, RequestOutcome, face_of, is_pull
from lisa.gateway.shares import Client, Crowded, Holding, current

LARGE_BYTES = 64 * 1024
"""Response bodies above this size count as buffered, and are written in parts of this size.

Uvicorn waits between two writes until the client reads, but not after the last one.
"""

SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class ResponseChannel:
    """An ASGI send channel that adds default security headers and records the response's head.

    A large response to GET becomes 503 if it does not fit into the limit on buffered bytes, or into
    the client's share.
    Metrics are only counted, since they show the limit. So are responses to other methods, whose
    requests may have changed something. Pulls are counted by their response (see `long_poll`).
    """

    def __init__(
        self,
        hub: GatewayContext,
        client: Client,
        scope: Scope,
        send: Send,
        outcome: RequestOutcome,
    ) -> None:
        self._shares = hub.shares
        self._scope = scope
        self._send = send
        self._outcome = outcome
        self._held = Holding(hub.shares.buffered, client)
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send a message. A response that waits until its client reads counts as stalled."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            size = content_length(message.get("headers", ()))
            if size > LARGE_BYTES and not is_pull(self._scope):
                self._held.grow(size)
                try:
                    if self._may_refuse():
                        self._held.check()
                except Crowded as error:
                    self._held.end()
                    await self._refuse(error)
                    return
            message = _with_headers(message)
            self._outcome.starts(message)
        for part in self._parts(message):
            await self._pass(part)

    def close(self) -> None:
        """Stop counting the body, which is written but for its last part."""
        self._held.end()

    def _may_refuse(self) -> bool:
        return self._scope["method"] == "GET" and face_of(self._scope["path"]) != "metrics"

    def _parts(self, message: Message) -> Iterable[Message]:
        body: bytes = message.get("body", b"")
        if len(body) <= LARGE_BYTES or self._scope.get("http_version") == "2":  # gRPC waits itself
            return [message]
        starts = range(0, len(body), LARGE_BYTES)
        is_last_of_all = not message.get("more_body", False)
        return (
            {
                **message,
                "body": body[start : start + LARGE_BYTES],
                "more_body": not (is_last_of_all and start == starts[-1]),
            }
            for start in starts
        )

    async def _refuse(self, error: Crowded) -> None:
        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await problem_of(error).response()(self._scope, receive, self)
        self._is_refused = True

    async def _pass(self, message: Message) -> None:
        # A stream is counted as such. Calls of gRPC have no connections of their own to wait on.
        is_counted = self._outcome.is_stream or self._scope.get("http_version") == "2"
        with nullcontext() if is_counted else self._shares.stalling():
            await self._send(message)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The length of a body by its headers; 0 if they do not tell it."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _with_headers(message: Message) -> Message:
    headers = list(message.get("headers", ()))
    known = {name.lower() for name, _ in headers}
    headers += [pair for pair in SAFE_HEADERS if pair[0] not in known]
    return {**message, "headers": headers}


MOST_ANONYMOUS_BYTES = 64 * 1024
"""Maximum body without a bearer token, which suffices for the web page's forms."""

READING = frozenset(("GET", "HEAD", "OPTIONS"))


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
        client, max_bytes = self._client(scope)
        current.set(client)
        send_answer = ResponseChannel(hub, client, scope, send, answer)
        hub.shares.requests.take(client)
        buffered = Holding(hub.shares.buffered, client)
        try:
            self._check(scope, client)
            body = await self._read(scope, receive, max_bytes, buffered)
            arrival.set((asyncio.current_task(), asyncio.get_running_loop().time()))
            await self._app(scope, _replaying(body, receive), send_answer)
        except ClientDisconnected:
            return
        except Exception as error:
            if answer.code != GONE:  # the response has already started
                raise
            buffered.end()  # before the response, which may wait for the rest of the request
            response = problem_of(error).response()
            if isinstance(error, _BodyTooLarge) and error.is_arriving:
                await self._answer_early(response, scope, receive, send_answer)
            else:
                await response(scope, receive, send_answer)
        finally:
            hub.shares.requests.give(client)
            buffered.end()
            send_answer.close()
            hub.meter.end(scope, answer)

    def _check(self, scope: Scope, client: Client) -> None:
        hub = self._hub
        host = _host(scope)
        if scope["path"] != HEALTH:
            hub.shares.requests.check(client)
            hub.shares.buffered.check(client)
        if hub.access.is_open and not is_local_name(host):
            raise ErrorResponse(
                403, "host", f"this gateway accepts the host localhost only, not {host!r}"
            )
        if hub.access.is_open and is_forwarded(scope["headers"]):
            raise ErrorResponse(
                403, "host", "a gateway without tokens refuses requests that a proxy passes on"
            )
        if scope["method"] not in READING:
            reject_foreign(scope)

    async def _read(self, scope: Scope, receive: Receive, limit: int, buffered: Holding) -> bytes:
        """Read the whole body, and count its bytes, then its copies, as buffered.

        Raises ErrorResponse and Crowded.
        """
        if content_length(scope["headers"]) > limit:
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
                    buffered.grow(len(chunk))
                    if size > limit:
                        raise _BodyTooLarge(limit, is_arriving=message.get("more_body", False))
                    is_last = not message.get("more_body", False)
                    if is_last:
                        buffered.grow(size * (COPIES - 1))
                    if size:
                        buffered.check()
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

    def _client(self, scope: Scope) -> tuple[Client, int]:
        """The client of a request, and the limit on its body.

        The limit is lower without a token, so that strangers cannot fill the memory.
        """
        shares, most = self._hub.shares, self._bounds.max_body_bytes
        connection = HTTPConnection(scope)
        address = client_of(connection)
        try:
            token = self._hub.token(connection, compat=True)
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


def _host(scope: Scope) -> str:
    """The Host header. Raises ErrorResponse unless there is exactly one (RFC 9112, section 3.2).

    HTTP/1.0 needs none, and calls of gRPC have none.
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    needed = scope.get("http_version") == "1.1"
    if len(hosts) > 1 or (needed and not hosts) or not all(map(_HOST.match, hosts)):
        found = ", ".join(map(repr, hosts)) or "none"
        text = f"a request needs one Host header with a host name, not {found}"
        raise ErrorResponse(400, "host", text, headers={"Connection": "close"})
    return "".join(hosts)


_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*\Z")


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
