"""Operations: declared at their handlers, used for routing and for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getdoc
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.retry_policy import RetryPolicy
from lisa.gateway.access import Scope, Token
from lisa.gateway.api.hints import mismatch, not_json
from lisa.gateway.api.models.base import Problem
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse, problem_of

Q_co = TypeVar("Q_co", bound=msgspec.Struct, covariant=True)
B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T")

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[Q_co, B_co]):
    """A validated and authorised request.

    failed: errors of items of a batch that could not be read, by index; only of gRPC calls.
    """

    hub: GatewayContext
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


class Reply(Response, Generic[T]):
    """A response whose content is a T, so that a handler's annotation states its response type."""


Handler: TypeAlias = Callable[[Call[Any, Any]], Awaitable[Response]]
HandlerType = TypeVar("HandlerType", bound=Handler)
Problems: TypeAlias = Mapping[int, str]

TOPIC = "/v1/topics/{topic}"
MESSAGES = f"{TOPIC}/messages"
MESSAGE = f"{MESSAGES}/{{id}}"

NO_TOPIC: Problems = {404: "The topic is unknown."}
NO_GROUP: Problems = {404: "The topic is unknown, or has no such group."}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path, with the function that handles it.

    The handler takes a `Call` of the query type and the body type, and returns a `Reply` of the
    response type. The first paragraph of its docstring is the summary, the rest the description.

    scope: the scope that the token needs; None if no token is needed.
    is_audited: whether the audit log records it.
    answers: status to description.
    problems: status to description, in addition to the problems common to all operations.
    leads_to: names of the operations that take the id from this operation's response.
    """

    name: str
    method: str
    path: str
    group: str
    handler: Handler
    answers: Mapping[int, str]
    is_audited: bool
    scope: Scope | None = Scope.READ
    is_body_optional: bool = False
    problems: Problems = field(default_factory=dict)
    media_type: str = "application/json"
    leads_to: Sequence[str] = ()

    @property
    def parameters(self) -> list[str]:
        """The names of the path parameters."""
        return [one[1:-1] for one in self.path.split("/") if one.startswith("{")]

    @cached_property
    def query(self) -> type[msgspec.Struct]:
        """The type of the query parameters."""
        query: type[msgspec.Struct] = get_args(self._annotations[0])[0]
        return query

    @cached_property
    def body(self) -> Any:
        """The type of the request body; None if there is none."""
        body = get_args(self._annotations[0])[1]
        return None if body is NoneType else body

    @cached_property
    def reply(self) -> Any:
        """The type of the response body."""
        return get_args(self._annotations[1])[0]

    @property
    def _annotations(self) -> list[Any]:
        """The annotations of the handler's parameter and of its result."""
        return list(get_type_hints(self.handler).values())

    @property
    def summary(self) -> str:
        """The first paragraph of the handler's docstring, without its full stop."""
        return self._paragraphs[0].removesuffix(".")

    @property
    def description(self) -> str:
        """The other paragraphs of the handler's docstring; may be empty."""
        return "\n\n".join(self._paragraphs[1:])

    @property
    def _paragraphs(self) -> list[str]:
        return [" ".join(one.split()) for one in (getdoc(self.handler) or "").split("\n\n")]


class Operations(list[Operation]):
    """The operations of one group, each declared by decorating its handler."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group

    def add(
        self, name: str, method: str, path: str, **options: Any
    ) -> Callable[[HandlerType], HandlerType]:
        """Declare the decorated function as an operation; the options are those of `Operation`.

        By default, the operations that change something and need the scope `operate` are audited.
        """
        changes = options.get("scope") is Scope.OPERATE and method != "GET"
        options = {"is_audited": changes, "group": self._group, **options}

        def declare(handler: HandlerType) -> HandlerType:
            self.append(Operation(name=name, method=method, path=path, handler=handler, **options))
            return handler

        return declare


def answer(content: T, status: int = 200) -> Reply[T]:
    """A JSON response."""
    return Reply(_encoder.encode(content), status, media_type="application/json")


def invalid(detail: str) -> ErrorResponse:
    """The problem for an invalid request."""
    return ErrorResponse(400, "invalid", detail)


def problem_answer(error: Exception) -> Problem:
    """An error as one result of a batch."""
    return msgspec.convert(problem_of(error).content, Problem)


def read_json(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """Decode JSON into the decoder's type. Raises ErrorResponse."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(mismatch("the JSON", decoder.type, error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(not_json(bytes(data), error)) from None
    except RecursionError:
        raise invalid("the JSON is nested too deeply") from None


def read_policy(retry: list[int] | str | None) -> RetryPolicy | None:
    """The retry policy of a request. Raises ErrorResponse."""
    if retry is None:
        return None
    try:
        return RetryPolicy(tuple(retry)) if isinstance(retry, list) else RetryPolicy.parse(retry)
    except InvalidMessage as error:
        raise invalid(f"retry: {error}") from None
