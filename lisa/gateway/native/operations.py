"""One table of operations makes both the routes and the OpenAPI document.

An operation says what it takes and answers; `Native` finds it by the path as it was sent, checks
the token, reads the request strictly, and calls its handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from lisa.gateway.access import EVERYTHING, Scope, Token
from lisa.gateway.holding import ClientLeft
from lisa.gateway.hub import Hub
from lisa.gateway.native.models import NoFields
from lisa.gateway.problems import Problem, problem_of

__all__ = ["Call", "Native", "Operation", "Problems", "answer", "invalid", "read_json"]

Q_co = TypeVar("Q_co", bound=msgspec.Struct, covariant=True)
B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T")

PREFIX = b"/v1/"
MOST_PARAMETERS = 32

_FOUND = "lisa.native"
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[Q_co, B_co]):
    """One request, read and allowed."""

    hub: Hub
    request: Request
    token: Token
    path: Mapping[str, str]
    query: Q_co
    body: B_co

    @property
    def topic(self) -> str:
        """The topic that the path names."""
        return self.path["topic"]

    @property
    def id(self) -> str:
        """The message that the path names."""
        return self.path["id"]


Handler: TypeAlias = Callable[[Call[Any, Any]], Awaitable[Response]]
Problems: TypeAlias = Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    scope: what its token must allow, None for any token; `is_public` asks for none at all.
    answers: by status what is answered, the type of its JSON and in what case.
    problems: by status in what case, beyond those that any operation may answer.
    leads_to: the names of those that take the id which this one answers.
    """

    name: str
    method: str
    path: str
    group: str
    summary: str
    handler: Handler
    answers: Mapping[int, tuple[Any, str]]
    scope: Scope | None = None
    is_public: bool = False
    query: type[msgspec.Struct] = NoFields
    body: Any = None
    is_body_optional: bool = False
    problems: Problems = field(default_factory=dict)
    media_type: str = "application/json"
    description: str = ""
    leads_to: Sequence[str] = ()

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return [one[1:-1] for one in self.path.split("/") if one.startswith("{")]


def answer(content: object, status: int = 200) -> Response:
    """Content as JSON."""
    return Response(_encoder.encode(content), status, media_type="application/json")


def invalid(detail: str) -> Problem:
    """A request that can never be accepted."""
    return Problem(400, "invalid", detail)


def read_json(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """JSON as a type. Raises Problem."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(f"this does not fit: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"this is no JSON in UTF-8: {error}") from None
    except RecursionError:
        raise invalid("this is nested too deeply") from None


class _Door:
    """One operation, with what reads its requests."""

    def __init__(self, hub: Hub, operation: Operation) -> None:
        self._hub = hub
        self._operation = operation
        self._decoder = msgspec.json.Decoder(operation.body or NoFields)
        self._no_query = operation.query()
        self.streams = operation.media_type != "application/json"

    async def answer(self, request: Request, path: Mapping[str, str]) -> Response:
        operation = self._operation
        token = EVERYTHING
        if not operation.is_public:
            token = self._hub.require(request, operation.scope, path.get("topic"))
        query = self._no_query
        if text := request.scope["query_string"]:
            query = _read_query(operation.query, text)
        body = await self._read_body(request)
        return await operation.handler(Call(self._hub, request, token, path, query, body))

    async def _read_body(self, request: Request) -> Any:
        message = await request.receive()  # the doorman has read it whole
        data = message.get("body", b"")
        if not data:
            if self._operation.body is None:
                return None
            if self._operation.is_body_optional:
                return self._operation.body()
        kind = request.headers.get("content-type", "application/json")
        if not _is_json(kind):
            raise Problem(415, "media-type", f"send application/json, not {kind!r}")
        return read_json(self._decoder, data)


def _is_json(kind: str) -> bool:
    """Whether a content type may stand on JSON.

    `curl -d` calls everything a form. That a form of another site's page passes for JSON, too, does
    no harm: the doorman has turned it away by its origin.
    """
    media = kind.partition(";")[0].strip().lower()
    if media in ("application/json", "application/x-www-form-urlencoded"):
        return True
    return media.startswith("application/") and media.endswith("+json")


def _read_query(kind: type[msgspec.Struct], text: bytes) -> msgspec.Struct:
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict",
            max_num_fields=MOST_PARAMETERS,
        )  # fmt: skip
    except ValueError as error:  # UnicodeDecodeError is one
        raise invalid(f"the query cannot be read: {error}") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise invalid("a query parameter is given twice")
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(f"the query does not fit: {error}") from None


class _Node:
    """One step of a path: the next ones by word, or any word as a parameter; and what ends here."""

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.name = ""
        self.doors: dict[str, _Door] = {}

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


class Native(BaseRoute):
    """All operations of the table. A path's parts are taken apart before they are decoded.

    So an id may hold any character, percent-encoded: `a%2Ffire` is an id, `a/fire` fires `a`.
    """

    def __init__(self, hub: Hub, operations: Sequence[Operation]) -> None:
        self._root = _Node()
        for operation in operations:
            node = self._root.grow(operation.path.removeprefix(PREFIX.decode()))
            node.doors[operation.method] = _Door(hub, operation)

    def matches(self, scope: ASGIScope) -> tuple[Match, ASGIScope]:
        """Find the operation, or at least its path."""
        if scope["type"] != "http":
            return Match.NONE, {}
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        if not raw.startswith(PREFIX):
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
        if not node.doors:
            return Match.NONE, {}
        return Match.FULL, {_FOUND: (node, path)}

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Answer a request that matched."""
        node, path = scope[_FOUND]
        try:
            response = await _door(node, scope["method"]).answer(Request(scope, receive), path)
        except ClientLeft:
            return
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told
            response = problem_of(error).response()
        await response(scope, receive, send)

    def url_path_for(self, name: str, /, **_path_params: Any) -> Any:
        """No route of the table has a name in Starlette's sense."""
        raise NoMatchFound(name, {})


def _door(node: _Node | None, method: str) -> _Door:
    if node is None:
        raise invalid("the path is not UTF-8, percent-encoded")
    door = node.doors.get(method)
    if door is None and method == "HEAD":
        door = node.doors.get("GET")
        door = None if door is None or door.streams else door
    if door is None:
        allowed = ", ".join(sorted(node.doors))
        raise Problem(405, "method", f"this path takes {allowed}, not {method}",
                      headers={"Allow": allowed})  # fmt: skip
    return door
