"""Middleware that limits the number, size and duration of requests.

At capacity, the gateway rejects new requests immediately with 503 and Retry-After; it never queues
them. Each request body is read completely, within a time limit, before the request is handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.core.daemon.status import HEALTH
from lisa.gateway import audit
from lisa.gateway.access import EVERYTHING, Unauthorized, is_forwarded, is_local_name
from lisa.gateway.context import COPIES, GatewayContext, arrival
from lisa.gateway.problems import ErrorResponse, problem_of
from lisa.gateway.request_metrics import GONE
from lisa.gateway.response_channel import ResponseChannel, content_length, full, full_of_bytes

MOST_ANONYMOUS_BYTES = 64 * 1024
"""Maximum body without a bearer token, which suffices for the web page's forms."""

ANONYMOUS_SHARE = 4
"""Requests without a bearer token from one address may use `max-requests` divided by this."""

ARRIVING_SHARE = 2
"""Requests of one client whose bodies are incomplete may use `max-requests` divided by this."""

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
        send_answer = ResponseChannel(hub, scope, send, answer)
        address, client = self._client(scope)
        if address is not None:
            hub.anonymous[address] += 1
        hub.active += 1
        held = 0
        try:
            self._check(scope, address)
            with self._arriving(scope, client):
                body = await self._read(scope, receive, self._max_bytes(address))
            held = self._hold(len(body))
            arrival.set((asyncio.current_task(), asyncio.get_running_loop().time()))
            await self._app(scope, _replaying(body, receive), send_answer)
        except _Disconnected:
            return
        except Exception as error:
            if answer.code != GONE:  # the response has already started
                raise
            response = problem_of(error).response()
            if isinstance(error, _BodyTooLarge) and error.is_arriving:
                await self._answer_early(response, scope, receive, send_answer)
            else:
                await response(scope, receive, send_answer)
        finally:
            hub.active -= 1
            if address is not None:
                hub.anonymous[address] -= 1
                if not hub.anonymous[address]:
                    del hub.anonymous[address]
            hub.buffered -= held
            send_answer.close()
            hub.meter.end(scope, answer)

    def _check(self, scope: Scope, address: str | None) -> None:
        headers = dict(scope["headers"])
        if scope["path"] != HEALTH:
            self._check_capacity(address)
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hub.access.is_open and not is_local_name(host):
            raise ErrorResponse(
                403, "host", f"this gateway accepts the host localhost only, not {host!r}"
            )
        if self._hub.access.is_open and is_forwarded(scope["headers"]):
            raise ErrorResponse(
                403, "host", "a gateway without tokens refuses requests that a proxy passes on"
            )
        if scope["method"] not in READING:
            reject_foreign(scope)

    def _check_capacity(self, address: str | None) -> None:
        hub, most = self._hub, self._bounds.max_requests
        if hub.active - hub.held - hub.stalled > most:
            raise full("requests", f"{most} requests are already running")
        share = max(1, most // ANONYMOUS_SHARE)
        if address is not None and hub.anonymous[address] > share:
            raise full("requests", f"{share} requests without a token are already running")
        if hub.buffered > self._bounds.max_buffered_bytes:
            raise full_of_bytes()

    @contextmanager
    def _arriving(self, scope: Scope, client: str) -> Iterator[None]:
        """Count a request whose body has to arrive, for its client. Raises ErrorResponse."""
        if not _has_body(scope):
            yield
            return
        arriving, share = self._hub.arriving, max(1, self._bounds.max_requests // ARRIVING_SHARE)
        arriving[client] += 1
        try:
            if arriving[client] > share and scope["path"] != HEALTH:
                raise full("requests", f"{share} requests of this client are still arriving")
            yield
        finally:
            arriving[client] -= 1
            if not arriving[client]:
                del arriving[client]

    def _hold(self, size: int) -> int:
        """Count a body's copies as buffered. Returns the number of bytes counted for the body.

        Accepts an empty body, and a body of any size if no other is buffered. Raises ErrorResponse.
        """
        hub, held = self._hub, size * COPIES
        others = hub.buffered - size
        if held and others and others + held > self._bounds.max_buffered_bytes:
            hub.buffered -= size
            raise full_of_bytes()
        hub.buffered += held - size
        return held

    async def _read(self, scope: Scope, receive: Receive, limit: int) -> bytes:
        """Read the whole body and count its bytes as buffered. Raises ErrorResponse."""
        hub = self._hub
        if content_length(scope["headers"]) > limit:
            raise _BodyTooLarge(limit, is_arriving=True)
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
                        raise _BodyTooLarge(limit, is_arriving=message.get("more_body", False))
                    if chunk and hub.buffered > self._bounds.max_buffered_bytes:
                        raise full_of_bytes()
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

    def _client(self, scope: Scope) -> tuple[str | None, str]:
        """The client's address if its request has no valid bearer token, else None.

        Also what identifies the client: its token, or its address if it needs none.
        """
        connection = HTTPConnection(scope)
        address = audit.client_of(connection)
        try:
            token = self._hub.token(connection, compat=True)
        except Unauthorized as error:
            if "authorization" in connection.headers:
                audit.token_refused(connection, str(error))
            return address, address
        return None, address if token is EVERYTHING else f"token {token.name}"

    def _max_bytes(self, address: str | None) -> int:
        """The body limit. It is lower without a token, so that strangers cannot fill the memory."""
        most = self._bounds.max_body_bytes
        return most if address is None else min(most, MOST_ANONYMOUS_BYTES)


class _Disconnected(Exception):
    """The client disconnected before its request was complete."""


class _BodyTooLarge(ErrorResponse):
    """The body is larger than `limit` bytes. `is_arriving`: the client may still send it."""

    def __init__(self, limit: int, *, is_arriving: bool) -> None:
        detail = f"a request body may have at most {limit} bytes"
        super().__init__(413, "too-large", detail, headers={"Connection": "close"})
        self.is_arriving = is_arriving


def _has_body(scope: Scope) -> bool:
    """Whether a request says that a body follows; calls of gRPC always have one."""
    names = {name for name, _ in scope["headers"]}
    return (
        content_length(scope["headers"]) > 0
        or b"transfer-encoding" in names
        or scope.get("http_version") == "2"
    )


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
