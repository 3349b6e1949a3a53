"""The methods of the service: an ASGI application that carries out one call per request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lisa.gateway.api import OPERATIONS
from lisa.gateway.api.operations import Call, Operation
from lisa.gateway.api.routing import Endpoint
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import ClientDisconnected
from lisa.gateway.problems import ErrorResponse, problem_of
from lisa.gateway.rpc import lisa_pb2
from lisa.gateway.rpc.consume import consume
from lisa.gateway.rpc.conversion import parse, request_fields

SERVICE = lisa_pb2.DESCRIPTOR.services_by_name["Lisa"]
CONSUME = "Consume"
"""The method that is no operation of the HTTP API."""

_encoder = msgspec.json.Encoder(enc_hook=lambda _error: None)  # null for a message in `failed`


def path_of(method: str) -> str:
    """The path of a method's requests."""
    return f"/{SERVICE.full_name}/{method}"


def method_of(operation: Operation) -> str:
    """The name of an operation's method."""
    return operation.name[0].upper() + operation.name[1:]


class RpcApp:
    """An ASGI application whose requests have Protobuf bodies, and its responses JSON."""

    def __init__(self, hub: GatewayContext) -> None:
        self._hub = hub
        self._handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            path_of(method_of(one)): _Method(hub, one).answer
            for one in OPERATIONS
            if method_of(one) in SERVICE.methods_by_name
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out one call."""
        request = Request(scope, receive)
        if scope["path"] == path_of(CONSUME):
            await consume(self._hub, request, send)
            return
        try:
            response = await self._handlers[scope["path"]](request)
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001  answered as a problem
            response = problem_of(error).response()
        await response(scope, receive, send)


class _Method:
    """One operation as a method."""

    def __init__(self, hub: GatewayContext, operation: Operation) -> None:
        self._hub = hub
        self._endpoint = Endpoint(hub, operation)
        self._kind = GetMessageClass(SERVICE.methods_by_name[method_of(operation)].input_type)

    async def answer(self, request: Request) -> Response:
        operation = self._endpoint.operation
        message = await request.receive()  # the limits middleware has buffered the body
        fields = request_fields(parse(self._kind, message["body"]))
        path = {name: fields.pop(name, "") for name in operation.parameters}
        token = self._endpoint.authorise(request, path)
        in_query = operation.query.__struct_fields__
        given = {name: fields.pop(name) for name in in_query if name in fields}
        query = self._endpoint.query(given)
        body = None if operation.body is None else self._endpoint.body(_encoder.encode(fields))
        messages = enumerate(fields.get("messages", ()))
        failed = {index: one for index, one in messages if isinstance(one, ErrorResponse)}
        call = Call(self._hub, request, token, path, query, body, failed)
        return await self._endpoint.perform(call)
