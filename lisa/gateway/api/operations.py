"""Operations: declared at their handlers, and how requests reach them.

From an operation follow its HTTP route, its part of the OpenAPI document and its gRPC method.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getdoc
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette import types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from lisa.gateway import audit
from lisa.gateway.access import EVERYTHING, Scope, Token
from lisa.gateway.api.types import NoFields, convert_fields, invalid, read_json
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse, is_refusal

Q_co = TypeVar("Q_co", bound=msgspec.Struct, covariant=True)
B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T")

ROOT = "/v1"
JSON = "application/json"
TOPIC = f"{ROOT}/topics/{{topic}}"
MESSAGES = f"{TOPIC}/messages"
MESSAGE = f"{MESSAGES}/{{id}}"
KEY = f"{TOPIC}/keys/{{key}}"

BY_QUERY = {
    "/messages/{id}": "/message",
    "/keys/{key}": "/key",
    "/schedules/{name}": "/schedule",
}
"""Paths with ids or keys of any characters, and the paths whose query has the id instead.

Some ids do not survive a path, such as `..`.
"""

MOST_PARAMETERS = 32
TURN_S = 0.001
"""How long a calculation keeps the event loop; another request needs several turns."""

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[Q_co, B_co]):
    """A validated and authorised request.

    failed: errors of items of a batch that could not be read, by index; only of gRPC calls.
    """

    gateway: GatewayContext
    request: Request
    token: Token
    path: Mapping[str, str]
    query: Q_co
    body: B_co
    failed: Mapping[int, ErrorResponse] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        """The topic in the path."""
        return self.path["topic"]

    @property
    def id(self) -> str:
        """The message id in the path."""
        return self.path["id"]

    @property
    def key(self) -> str:
        """The key in the path."""
        return self.path["key"]


class Reply(Response, Generic[T]):
    """A response whose content is a T: with another status than 200, with headers, or a stream."""


Handler: TypeAlias = Callable[[Call[Any, Any]], Awaitable[msgspec.Struct | Response]]
HandlerType = TypeVar("HandlerType", bound=Handler)
Problems: TypeAlias = Mapping[int, str]

NO_TOPIC: Problems = {404: "The topic is unknown."}
NO_GROUP: Problems = {404: "The topic is unknown, or has no such group."}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path, with the function that handles it; see `Operations.add`.

    scope: the scope that the token needs; None if no token is needed.
    is_audited: whether the audit log records it.
    query: the type of the query parameters.
    body: the type of the request body; None if there is none.
    reply: the type of the response body.
    answers: status to description.
    problems: status to description, in addition to the problems common to all operations.
    leads_to: names of the operations that take the id from this operation's response.
    """

    name: str
    method: str
    path: str
    group: str
    handler: Handler
    summary: str
    description: str
    query: type[msgspec.Struct]
    body: Any
    reply: Any
    answers: Mapping[int, str]
    is_audited: bool
    scope: Scope | None = Scope.READ
    is_body_optional: bool = False
    problems: Problems = field(default_factory=dict)
    media_type: str = JSON
    leads_to: Sequence[str] = ()

    @property
    def parameters(self) -> list[str]:
        """The names of the path parameters."""
        return [segment[1:-1] for segment in self.path.split("/") if segment.startswith("{")]

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Any]:
        """The decoder of a request body."""
        return msgspec.json.Decoder(self.body or NoFields)

    async def perform(self, call: Call[Any, Any]) -> Response:
        """The handler's response; records what the audit log has to show."""
        try:
            result = await self.handler(call)
        except BaseException as error:  # also of a client that disconnects
            if self.is_audited and not is_refusal(error):
                self._record(call, {"result": "failed"})
            raise
        response = result if isinstance(result, Response) else answer(result)
        if not self.is_audited:
            return response
        results = msgspec.json.decode(response.body or b"{}", type=dict[str, Any])
        self._record(call, {name: results[name] for name in _RESULTS if name in results})
        return response

    def _record(self, call: Call[Any, Any], results: dict[str, Any]) -> None:
        """Record the given fields without their values, which may be secrets of pushes."""
        given = [] if call.body is None else sorted(_given(call.body))
        named = [getattr(part, "group", None) for part in (call.body, call.query)]
        group = {"group": next(filter(None, named), call.path.get("group"))}
        details = {**call.path, **group, "given": ",".join(given), **results}
        audit.changed(call.request, call.token, self.name, **details)


class Operations(list[Operation]):
    """The operations of one group, each declared by decorating its handler."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group

    def add(
        self, method: str, path: str, answers: str | Mapping[int, str], **options: Any
    ) -> Callable[[HandlerType], HandlerType]:
        """Declare the decorated function as an operation, whose name is that of the function.

        The function takes a `Call` of the query type and the body type, and returns the response's
        body, or a `Reply` with a body of this type. The first paragraph of its docstring is the
        operation's summary, the rest the description.

        answers: those of `Operation`, or the description of status 200.
        options: the others of `Operation`. By default, the operations that change something and
            need the scope `operate` are audited.
        """
        options.setdefault("is_audited", options.get("scope") is Scope.OPERATE and method != "GET")

        def declare(handler: HandlerType) -> HandlerType:
            first, *others = handler.__name__.split("_")
            text = (getdoc(handler) or "").split("\n\n")
            summary, *further = (" ".join(paragraph.split()) for paragraph in text)
            call, reply = get_type_hints(handler).values()
            query, body = get_args(call)
            self.append(
                Operation(
                    name="".join((first, *map(str.capitalize, others))),
                    method=method,
                    path=path,
                    group=self._group,
                    handler=handler,
                    summary=summary.removesuffix("."),
                    description="\n\n".join(further),
                    query=query,
                    body=None if body is NoneType else body,
                    reply=get_args(reply)[0] if get_origin(reply) is Reply else reply,
                    answers={200: answers} if isinstance(answers, str) else answers,
                    **options,
                )
            )
            return handler

        return declare


def answer(content: T, status: int = 200) -> Reply[T]:
    """A JSON response."""
    return Reply(_encoder.encode(content), status, media_type=JSON)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a pause for other tasks once their calculation and use have taken a turn."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began >= TURN_S:
            await asyncio.sleep(0)
            began = time.monotonic()


_RESULTS = ("outcome", "done", "settled", "changed", "new")
"""Fields of responses that say how much was changed."""


def _given(body: msgspec.Struct) -> list[str]:
    """The names of the fields that do not have their default."""
    names, defaults = body.__struct_fields__, body.__struct_defaults__
    known = dict(zip(reversed(names), reversed(defaults), strict=False))
    no_default = object()
    return [name for name in names if getattr(body, name) is not known.get(name, no_default)]


def routes_of(gateway: GatewayContext, operations: Sequence[Operation]) -> list[ApiRoute]:
    """A route for each path of the operations."""
    by_path: dict[tuple[str, str], dict[str, Operation]] = {}
    for operation in operations:
        by_path.setdefault((operation.path, ""), {})[operation.method] = operation
        for by_id, by_query in BY_QUERY.items():
            if by_id in operation.path:
                named = by_id.partition("{")[2].rstrip("}")
                key = operation.path.replace(by_id, by_query), named
                by_path.setdefault(key, {})[operation.method] = operation
    by_path[f"{ROOT}/", ""] = by_path[ROOT, ""]
    return [ApiRoute(gateway, path, found, named) for (path, named), found in by_path.items()]


class ApiRoute(Route):
    """The operations of one path, by method.

    A slash within an id stays encoded until the path has matched: `a%2Ffire` is an id, `a/fire`
    fires message `a`. named: the parameter of the operations' path that the query holds instead.
    """

    def __init__(
        self, gateway: GatewayContext, path: str, operations: Mapping[str, Operation], named: str
    ) -> None:
        super().__init__(path, self._answer)
        self.methods = None  # other methods are refused with a problem
        self._gateway = gateway
        self._operations = operations
        self._named = named

    def matches(self, scope: types.Scope) -> tuple[Match, types.Scope]:
        """Match the path with its encoded slashes. Raises ErrorResponse if it is not UTF-8."""
        if scope["type"] != "http" or not scope["path"].startswith(ROOT):
            return Match.NONE, {}
        if _PATH not in scope:
            scope[_PATH] = _with_encoded_slashes(scope.get("raw_path") or scope["path"].encode())
        found = self.path_regex.match(scope[_PATH])
        if found is None:
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.endpoint, "path_params": found.groupdict()}

    async def _answer(self, request: Request) -> Response:
        """Check, read and carry out a request. Raises ErrorResponse and others."""
        operation = self._operations.get(request.method) or self._other(request.method)
        path = dict(request.path_params)
        if "%" in request.scope[_PATH]:
            path = {name: _with_slashes(text) for name, text in path.items()}
        token = EVERYTHING
        if operation.scope is not None:
            token = self._gateway.require(request, operation.scope, path.get("topic"))
        query = operation.query()
        if (text := request.scope["query_string"]) or self._named:
            fields = _parse_query(text, self._named, path)
            query = convert_fields("the query", fields, operation.query, strict=False)
        body = await _read_body(operation, request)
        return await operation.perform(Call(self._gateway, request, token, path, query, body))

    def _other(self, method: str) -> Operation:
        """The operation that answers HEAD. Raises ErrorResponse for other methods."""
        found = self._operations.get("GET") if method == "HEAD" else None
        if found is None or found.media_type != JSON:
            allowed = ", ".join(sorted(self._operations))
            text = f"this path accepts {allowed}, not {method}"
            raise ErrorResponse(405, "method", text, headers={"Allow": allowed})
        return found


_PATH = "lisa.path"


def _with_encoded_slashes(raw: bytes) -> str:
    """A path, decoded except for slashes and percent signs in its segments."""
    try:
        if b"%" not in raw:
            return raw.decode("ascii")
        parts = [unquote_to_bytes(part).decode() for part in raw.decode("ascii").split("/")]
    except UnicodeDecodeError:
        raise invalid("the path is not percent-encoded UTF-8") from None
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def _with_slashes(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%")


def _parse_query(text: bytes, named: str, path: dict[str, str]) -> dict[str, str]:
    """The query parameters; adds the one that belongs to the path, if there is one, to `path`."""
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
    if named:
        if not found.get(named):
            raise invalid(f"the query parameter {named} is missing")
        path[named] = found.pop(named)
    return found


async def _read_body(operation: Operation, request: Request) -> Any:
    message = await request.receive()  # the limits middleware has buffered the body
    data = message.get("body", b"")
    if not data:
        if operation.body is None:
            return None
        if operation.is_body_optional:
            return operation.body()
    kind = request.headers.get("content-type", JSON)
    if kind != JSON and not _is_json(kind):
        raise ErrorResponse(415, "media-type", f"send application/json, not {kind!r}")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ErrorResponse(
            415,
            "media-type",
            f"send the body uncompressed, without Content-Encoding: {coding}",
            headers={"Accept-Encoding": "identity"},
        )
    return read_json(operation.decoder, data)


def _is_json(kind: str) -> bool:
    """Whether a content type is accepted for JSON.

    The form type is accepted because `curl -d` sends it by default. This does not allow cross-site
    forms: the limits middleware rejects them by their origin.
    """
    media = kind.partition(";")[0].strip().lower()
    if media in (JSON, "application/x-www-form-urlencoded"):
        return True
    return media.startswith("application/") and media.endswith("+json")
