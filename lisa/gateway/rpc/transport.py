"""Turns each call into an ASGI request, and the response into messages and a status.

A call is an HTTP/2 request already: its metadata are the headers, and its first message is the
body. All methods are streams to the gRPC library, although most send one message each way. Only a
stream lets the gateway bound the time that a client takes to send and to read, and tells whether a
response was written.

Requests become the fields of the HTTP API, and its JSON responses Protobuf messages. Fields have
equal names in both, with three exceptions. A body is `body_json` or `body_bytes` instead of `body`
or `body_base64`. The fields of a single message stand in `message`. Options are a map of text, and
`reset` names those that are null in JSON.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from starlette.types import ASGIApp
from starlette.types import Message as Event

from lisa.gateway.api.types import invalid, read_json
from lisa.gateway.long_poll import on_short_stack
from lisa.gateway.problems import ClientDisconnected, ErrorResponse, problem_of
from lisa.gateway.rpc import lisa_pb2

M = TypeVar("M", bound=Message)

_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_PROBLEM = lisa_pb2.Problem.DESCRIPTOR.fields_by_name
_FLAGS = {"true": True, "false": False}

EXCHANGE = "lisa.exchange"
"""Key of the call's `Exchange` in its ASGI scope."""

PROBLEM = "lisa-problem-bin"
"""Trailing metadata with the error as a `lisa.v1.Problem`."""

DETAIL_BYTES = 1_500
"""Maximum size of a detail, which is sent twice: percent-encoded, and in the problem as base64.

gRPC clients refuse metadata above 8 KiB by default, and report RESOURCE_EXHAUSTED instead.
"""


def parse(kind: type[M], data: bytes) -> M:
    """A Protobuf message from its bytes. Raises ErrorResponse."""
    try:
        message: M = kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"the request is not a valid {kind.__name__}: {error}") from None
    return message


def request_fields(message: Message) -> dict[str, Any]:
    """The fields of a request that are set, named as in the HTTP API. Raises ErrorResponse.

    An item of a list that has an invalid body is an ErrorResponse.
    """
    fields: dict[str, Any] = _plain(message)
    fields |= fields.pop("message", {})
    options = fields.pop("options", {})
    if clash := options.keys() & message.DESCRIPTOR.fields_by_name.keys():
        raise invalid(f"options has the unknown field `{min(clash)}`")
    reset = dict.fromkeys(fields.pop("reset", ()))
    if clash := options.keys() & reset.keys():
        raise invalid(f"the option `{min(clash)}` is in options and in reset; give one of them")
    fields |= {name: _FLAGS.get(text, text) for name, text in options.items()}
    return fields | reset


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {field.name: _plain(item) for field, item in value.ListFields()}
        if "body_json" in fields:
            fields["body"] = read_json(_raw_decoder, fields.pop("body_json").encode())
        if "body_bytes" in fields:
            fields["body_base64"] = fields.pop("body_bytes")
        return fields
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))  # an idempotency key depends on the order
    return [_plain_item(item) for item in value]


def _plain_item(value: Any) -> Any:
    try:
        return _plain(value)
    except ErrorResponse as error:
        return error


def response(kind: type[M], content: bytes) -> M:
    """The Protobuf message for a JSON response."""
    fields = msgspec.json.decode(content)
    if kind is lisa_pb2.OptionsAnswer:
        fields = {"options": fields}
    if "options" in fields:
        fields["options"] = {name: _text(value) for name, value in fields["options"].items()}
    for part in (fields, *fields.get("deliveries", ()), *fields.get("schedules", ())):
        if "body" in part:
            part["body_json"] = msgspec.json.encode(part.pop("body")).decode()
        if "body_base64" in part:
            part["body_bytes"] = b64decode(part.pop("body_base64"))
    message: M = kind(**fields)
    return message


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def problem(content: Mapping[str, Any]) -> lisa_pb2.Problem:
    """A problem document as a Protobuf message."""
    return lisa_pb2.Problem(**{name: value for name, value in content.items() if name in _PROBLEM})


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
