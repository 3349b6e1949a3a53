"""Routes requests to operations.

`NativeRoute` finds an operation by the encoded path, checks the token, validates the request, and
calls the operation's handler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Scope, Send

from lisa.gateway import audit
from lisa.gateway.access import EVERYTHING, Token
from lisa.gateway.api.hints import mismatch
from lisa.gateway.api.models.base import NoFields
from lisa.gateway.api.operations import Call, Operation, invalid, read_json
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import ClientDisconnected
from lisa.gateway.problems import ErrorResponse, is_refusal, problem_of

PREFIX = b"/v1/"
INDEX = PREFIX.rstrip(b"/")
MOST_PARAMETERS = 32

BY_QUERY = {"/messages/{id}": "/message", "/schedules/{name}": "/schedule"}
"""Paths with ids of any characters, and the paths whose query has the id instead."""

_FOUND = "lisa.native"


class Endpoint:
    """One operation with the decoders of its requests."""

    def __init__(self, hub: GatewayContext, operation: Operation, named: str = "") -> None:
        self._hub = hub
        self.operation = operation
        self._named = named  # the path parameter that the query holds
        self._decoder = msgspec.json.Decoder(operation.body or NoFields)
        self._no_query = operation.query()
        self.streams = operation.media_type != "application/json"

    async def answer(self, request: Request, path: dict[str, str]) -> Response:
        """Check, read and carry out an HTTP request. Raises ErrorResponse and others."""
        token = self.authorise(request, path)
        query = self._no_query
        text = request.scope["query_string"]
        if text or self._named:
            query = self.query(self._parse_query(text, path))
        body = await self._read_body(request)
        return await self.perform(Call(self._hub, request, token, path, query, body))

    def authorise(self, request: Request, path: Mapping[str, str]) -> Token:
        """The token of a request, if it allows the operation.

        Raises Unauthorized, Forbidden or InvalidMessage.
        """
        if self.operation.scope is None:
            return EVERYTHING
        return self._hub.require(request, self.operation.scope, path.get("topic"))

    async def perform(self, call: Call[Any, Any]) -> Response:
        """Call the handler, and record what the audit log has to show."""
        try:
            response = await self.operation.handler(call)
        except BaseException as error:  # also of a client that disconnects
            if not is_refusal(error):
                self._record(call, {"result": "failed"})
            raise
        if self.operation.is_audited:
            results = msgspec.json.decode(response.body or b"{}", type=dict[str, Any])
            self._record(call, {name: results[name] for name in _RESULTS if name in results})
        return response

    def _record(self, call: Call[Any, Any], results: dict[str, Any]) -> None:
        if self.operation.is_audited:
            details = {**call.path, **_details(call.query, call.body), **results}
            audit.changed(call.request, call.token, self.operation.name, **details)

    def _parse_query(self, text: bytes, path: dict[str, str]) -> dict[str, str]:
        found = _parse_query(text)
        if self._named:
            if not found.get(self._named):
                raise invalid(f"the query parameter {self._named} is missing")
            path[self._named] = found.pop(self._named)
        return found

    def query(self, found: Mapping[str, Any]) -> msgspec.Struct:
        """The query parameters from their values, which may be text. Raises ErrorResponse."""
        try:
            return msgspec.convert(found, self.operation.query, strict=False)
        except msgspec.ValidationError as error:
            raise invalid(mismatch("the query", self.operation.query, error)) from None

    async def _read_body(self, request: Request) -> Any:
        message = await request.receive()  # the limits middleware has buffered the body
        data = message.get("body", b"")
        if not data:
            if self.operation.body is None:
                return None
            if self.operation.is_body_optional:
                return self.operation.body()
        kind = request.headers.get("content-type", "application/json")
        if not _is_json(kind):
            raise ErrorResponse(415, "media-type", f"send application/json, not {kind!r}")
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ErrorResponse(
                415,
                "media-type",
                f"send the body uncompressed, without Content-Encoding: {coding}",
                headers={"Accept-Encoding": "identity"},
            )
        return self.body(data)

    def body(self, data: bytes) -> Any:
        """A request body from its JSON. Raises ErrorResponse."""
        return read_json(self._decoder, data)


def _details(query: msgspec.Struct, body: msgspec.Struct | None) -> dict[str, Any]:
    """What the audit log records of a request: group, and the given fields without their values.

    Values may be secrets, such as the key that signs pushes.
    """
    group = getattr(body, "group", None) or getattr(query, "group", None)
    return {
        **({} if group is None else {"group": group}),
        "given": "" if body is None else ",".join(sorted(_given(body))),
    }


def _given(body: msgspec.Struct) -> list[str]:
    """The names of the fields that do not have their default."""
    names, defaults = body.__struct_fields__, body.__struct_defaults__
    known = dict(zip(reversed(names), reversed(defaults), strict=False))
    return [name for name in names if getattr(body, name) is not known.get(name, _NO_DEFAULT)]


_NO_DEFAULT = object()
_RESULTS = ("outcome", "done", "settled", "changed", "new")
"""Fields of responses that say how much was changed."""


def _is_json(kind: str) -> bool:
    """Whether a content type is accepted for JSON.

    The form type is accepted because `curl -d` sends it by default. This does not allow cross-site
    forms: the limits middleware rejects them by their origin.
    """
    media = kind.partition(";")[0].strip().lower()
    if media in ("application/json", "application/x-www-form-urlencoded"):
        return True
    return media.startswith("application/") and media.endswith("+json")


def _parse_query(text: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MOST_PARAMETERS,
        )
    except UnicodeDecodeError:
        raise invalid("the query string is not percent-encoded UTF-8") from None
    except ValueError:
        raise invalid(f"the query string has more than {MOST_PARAMETERS} parameters") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise invalid("a query parameter is given twice")
    return found


class _Node:
    """A node of the path tree: children by segment or as a parameter, and endpoints by method."""

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.name = ""
        self.endpoints: dict[str, Endpoint] = {}

    def grow(self, path: str) -> _Node:
        node = self
        for part in path.split("/"):
            if part.startswith("{"):
                node.any = node.any or _Node()
                node.name = part[1:-1]
                node = node.any
            else:
                node = node.words.setdefault(part, _Node())
        return node


class NativeRoute(BaseRoute):
    """Routes all operations. Splits the path before percent-decoding its segments.

    An id may therefore contain any character: `a%2Ffire` is an id, `a/fire` fires message `a`. For
    ids that do not survive a path, such as `..`, `messages/{id}` is also `message?id=`, and
    `schedules/{name}` is also `schedule?name=`.
    """

    def __init__(self, hub: GatewayContext, operations: Sequence[Operation]) -> None:
        self._root = _Node()
        for operation in operations:
            path = operation.path.removeprefix(INDEX.decode()).removeprefix("/")
            self._root.grow(path).endpoints[operation.method] = Endpoint(hub, operation)
            for by_path, by_query in BY_QUERY.items():
                if by_path in path:
                    node = self._root.grow(path.replace(by_path, by_query))
                    named = by_path.partition("{")[2].rstrip("}")
                    node.endpoints[operation.method] = Endpoint(hub, operation, named)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Find the path's node; the method is checked in `handle`."""
        if scope["type"] != "http":
            return Match.NONE, {}
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        if raw != INDEX and not raw.startswith(PREFIX):
            return Match.NONE, {}
        try:
            parts = raw[len(PREFIX) :].decode("ascii").split("/")
            if b"%" in raw:
                parts = [unquote_to_bytes(part).decode() for part in parts]
        except UnicodeDecodeError:
            return Match.FULL, {_FOUND: (None, {})}
        node, path = self._root, {}
        for part in parts:
            following = node.words.get(part)
            if following is None:
                if node.any is None or not part:
                    return Match.NONE, {}
                path[node.name] = part
                following = node.any
            node = following
        if not node.endpoints:
            return Match.NONE, {}
        return Match.FULL, {_FOUND: (node, path)}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request whose path matched."""
        node, path = scope[_FOUND]
        try:
            response = await _endpoint(node, scope["method"]).answer(Request(scope, receive), path)
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001  answered as a problem
            response = problem_of(error).response()
        await response(scope, receive, send)

    def url_path_for(self, name: str, /, **_path_params: Any) -> Any:
        """Always raises NoMatchFound: operations have no Starlette route names."""
        raise NoMatchFound(name, {})


def _endpoint(node: _Node | None, method: str) -> Endpoint:
    if node is None:
        raise invalid("the path is not percent-encoded UTF-8")
    endpoint = node.endpoints.get(method)
    if endpoint is None and method == "HEAD":
        endpoint = node.endpoints.get("GET")
        endpoint = None if endpoint is None or endpoint.streams else endpoint
    if endpoint is None:
        allowed = ", ".join(sorted(node.endpoints))
        raise ErrorResponse(
            405, "method", f"this path accepts {allowed}, not {method}", headers={"Allow": allowed}
        )
    return endpoint
