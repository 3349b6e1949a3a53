"""Errors as a client reads them: problem+json (RFC 9457) that says what was wrong."""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lisa.core.errors import (
    ConfigError,
    DuplicateMessage,
    GroupRemoved,
    InvalidMessage,
    LisaError,
    NotReplicated,
    RemovalUnfinished,
    ServerUnavailable,
    TopicFull,
)
from lisa.core.failures import ClientError, is_full
from lisa.gateway.access import Forbidden, Unauthorized
from lisa.gateway.waiting import Crowded

__all__ = ["HANDLERS", "Problem", "problem_of"]

log = logging.getLogger("lisa.gateway")

RETRY_AFTER_S = "1"


class Problem(Exception):
    """An answer other than success; `kind` is a word that programs can go by."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.more = more

    @property
    def content(self) -> dict[str, Any]:
        """Its members, in the order in which they are shown."""
        return {
            "type": f"urn:lisa:problem:{self.kind}",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.more,
        }

    def response(self) -> Response:
        """The problem as problem+json."""
        content = msgspec.json.encode(self.content)
        return Response(content, self.status, self.headers, "application/problem+json")


_LATER = {"Retry-After": RETRY_AFTER_S}
_ASK = {"WWW-Authenticate": 'Bearer realm="lisa"'}

# The first kind that an error is of counts.
_KINDS: tuple[tuple[type[Exception], int, str, Mapping[str, str]], ...] = (
    (Unauthorized, 401, "unauthorized", _ASK),
    (Forbidden, 403, "forbidden", {}),
    (Crowded, 503, "crowded", _LATER),
    (DuplicateMessage, 409, "duplicate", {}),
    (TopicFull, 429, "topic-full", _LATER),
    (GroupRemoved, 404, "unknown-group", {}),
    (RemovalUnfinished, 409, "removal-unfinished", _LATER),
    (InvalidMessage, 400, "invalid", {}),
    (ConfigError, 400, "refused", {}),
)


def problem_of(error: Exception) -> Problem:
    """What an error is to the client."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return Problem(error.status_code, "http", error.detail, headers=error.headers)
    if is_full(error.__cause__):
        return Problem(503, "server-full", "the queue's server is out of memory: it takes nothing "
                       "new until it is drained", headers=_LATER)  # fmt: skip
    if isinstance(error, NotReplicated):
        log.warning("a request was not confirmed: %s", error)
        return Problem(503, "not-replicated", "written, but not confirmed by as many replicas as "
                       "are asked for: the same request, with the same id, adds nothing",
                       headers=_LATER, ids=list(error.ids))  # fmt: skip
    denied = isinstance(error, ConfigError) and isinstance(error.__cause__, ClientError)
    if denied or isinstance(error, ServerUnavailable):
        # Where the server is, and what is wrong there, is for the log.
        log.warning("a request was not done: %s", error)
        return Problem(503, "server-unavailable", "the queue's server does not answer",
                       headers=_LATER)  # fmt: skip
    for kind, status, word, headers in _KINDS:
        if isinstance(error, kind):
            return Problem(status, word, str(error), headers=headers)
    log.error("a request failed", exc_info=error)
    return Problem(500, "fault", "the gateway failed; its log says why")


async def _handle(_request: Request, error: Exception) -> Response:
    return problem_of(error).response()


_HANDLED = (Problem, Unauthorized, Forbidden, Crowded, LisaError, HTTPException, Exception)
HANDLERS: dict[Any, Any] = dict.fromkeys(_HANDLED, _handle)
"""For Starlette's `exception_handlers`."""
