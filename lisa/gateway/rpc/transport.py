"""Turns each call into an ASGI request, and the response into messages and a status.

A call is an HTTP/2 request already: its metadata are the headers, and its first message is the
body. All methods are streams to the gRPC library, although most send one message each way. Only a
stream lets the gateway bound the time that a client takes to send and to read, and tells whether a
response was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import Message
from starlette.types import ASGIApp
from starlette.types import Message as Event

from lisa.gateway.api.operations import invalid
from lisa.gateway.long_poll import ClientDisconnected, on_short_stack
from lisa.gateway.problems import ErrorResponse, problem_of
from lisa.gateway.rpc.conversion import problem, response

EXCHANGE = "lisa.exchange"
"""Key of the call's `Exchange` in its ASGI scope."""

PROBLEM = "lisa-problem-bin"
"""Trailing metadata with the error as a `lisa.v1.Problem`."""

DETAIL_BYTES = 1_500
"""Maximum size of a detail, which is sent twice: percent-encoded, and in the problem as base64.

gRPC clients refuse metadata above 8 KiB by default, and report RESOURCE_EXHAUSTED instead.
"""

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_SHOWN = ("retry-after", "warning")
"""Headers of responses that become trailing metadata."""

_EVENT_DATA = b"data: "


async def answer(app: ASGIApp, exchange: Exchange) -> None:
    """Carry out one call by an ASGI application."""
    try:
        await app(exchange.scope, exchange.receive, exchange.send)
    except ClientDisconnected:
        return
    except Exception as error:  # noqa: BLE001  sent as a status
        exchange.fail(problem_of(error))
    await exchange.finish()


class Exchange:
    """One call: the ASGI channels of its request, and its messages.

    The request has no Host header, which the library hides. Browsers cannot make such calls.

    context: the call's `grpc.aio.ServicerContext`, which reads and writes bytes.
    kind: the type of the messages that the method sends.
    timeout_s: how long the client may take to read a message.
    """

    def __init__(self, path: str, kind: type[Message], context: Any, timeout_s: float) -> None:
        self._kind = kind
        self._context = context
        self._timeout_s = timeout_s
        self._is_read = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._problem: dict[str, Any] = {}
        self.scope = {
            "type": "http",
            "http_version": "2",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": _headers(context.invocation_metadata()),
            "client": client_of(context.peer()),
            EXCHANGE: self,
        }

    async def read(self) -> bytes | None:
        """The client's next message; None after the last. Raises ClientDisconnected."""
        try:
            data = await self._context.read()
        except grpc.aio.BaseError as error:
            raise ClientDisconnected from error
        return None if data is grpc.aio.EOF else data

    async def receive(self) -> Event:
        """ASGI's receive channel: the first message is the body, and nothing follows.

        The library cancels the call's task if the client disconnects.
        """
        if self._is_read:
            await asyncio.get_running_loop().create_future()
        self._is_read = True
        data = await self.read()
        if data is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": data, "more_body": False}

    async def write(self, message: Message) -> None:
        """Send a message. Raises ClientDisconnected, or ErrorResponse for a client too slow."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._context.write(message.SerializeToString())
        except grpc.aio.BaseError as error:
            raise ClientDisconnected from error
        except TimeoutError:
            text = f"the client did not read a message within {self._timeout_s:g} s"
            raise ErrorResponse(408, "timeout", text) from None

    async def send(self, event: Event) -> None:
        """ASGI's send channel."""
        if event["type"] == "http.response.start":
            self._status = event["status"]
            self._headers = {name.decode(): value.decode() for name, value in event["headers"]}
            return
        body: bytes = event["body"]
        if self._status >= 400:
            self._problem = msgspec.json.decode(body)
            return
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            body = body.partition(_EVENT_DATA)[2]  # empty in comments
        if body:
            await self.write(await on_short_stack(partial(response, self._kind), body))

    def fail(self, error: ErrorResponse) -> None:
        """Make `finish` send this error."""
        self._headers, self._problem = error.headers, error.content

    async def finish(self) -> None:
        """Send the status."""
        if not (self._status or self._problem):
            self.fail(invalid("the call has no request"))
        shown = {name.lower(): value for name, value in self._headers.items()}
        metadata = tuple((name, shown[name]) for name in _SHOWN if name in shown)
        if not self._problem:
            self._context.set_trailing_metadata(metadata)
            return
        content = {**self._problem, "detail": _shortened(self._problem["detail"])}
        details = (PROBLEM, problem(content).SerializeToString())
        try:
            await self._context.abort(_code(content), content["detail"], (*metadata, details))
        except grpc.aio.AbortError:  # how the library ends a call
            raise
        except grpc.aio.BaseError:  # it has ended already, as for a message too large when unpacked
            return


def _shortened(detail: str) -> str:
    """A detail, cut to fit into the trailing metadata; it may quote a long value."""
    data = detail.encode()
    if len(data) <= DETAIL_BYTES:
        return detail
    return data[:DETAIL_BYTES].decode("utf-8", "ignore") + " ..."


def _code(content: Mapping[str, Any]) -> grpc.StatusCode:
    """The status for a problem document."""
    if content["type"] == "urn:lisa:problem:duplicate":
        return grpc.StatusCode.ALREADY_EXISTS
    return _CODES.get(content["status"], grpc.StatusCode.INTERNAL)


def _headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    """Metadata as ASGI headers, without binary ones."""
    return [
        (name.encode(), value.encode("latin-1"))
        for name, value in metadata
        if not isinstance(value, bytes)
    ]


def client_of(peer: str) -> tuple[str, int] | None:
    """The address of a peer such as `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    family, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if family in ("ipv4", "ipv6") else None
