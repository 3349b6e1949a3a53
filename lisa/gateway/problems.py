"""Errors as HTTP responses: problem+json (RFC 9457)."""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lisa.core.model.errors import (
    ConfigError,
    DuplicateMessage,
    GroupRemoved,
    InvalidMessage,
    KeyFull,
    NotReplicated,
    RemovalUnfinished,
    ScheduleChanged,
    ServerUnavailable,
    TooManyGroups,
    TopicFull,
    TopicInUse,
)
from lisa.core.model.sharding import key_of
from lisa.core.redis.errors import ClientError, is_full, refusal_of
from lisa.gateway.access import Forbidden, Unauthorized
from lisa.gateway.shares import Crowded

log = logging.getLogger("lisa.gateway")

DETAIL_START, DETAIL_END = 700, 300
"""Characters of a longer detail that are kept: it quotes a long value, and ends with the advice."""


class ClientDisconnected(Exception):
    """The client disconnected, so no response is needed."""


class ErrorResponse(Exception):
    """An error response. `kind` is the last part of `type`, which programs can check."""

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
        self.detail = _without_middle(detail)
        self.headers = dict(headers or {})
        self.more = more

    @property
    def content(self) -> dict[str, Any]:
        """The members of the problem document, in order."""
        key = key_of(self.more.get("id", ""))
        return {
            "type": f"urn:lisa:problem:{self.kind}",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.more,
            **({} if key is None else {"key": key}),
        }

    def response(self) -> Response:
        """The problem as problem+json."""
        content = msgspec.json.encode(self.content)
        return Response(content, self.status, self.headers, "application/problem+json")


def _without_middle(detail: str) -> str:
    if len(detail) <= DETAIL_START + DETAIL_END:
        return detail
    return f"{detail[:DETAIL_START]} ... {detail[-DETAIL_END:]}"


RETRY_LATER = {"Retry-After": "1"}
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="lisa"'}

# The first matching class decides.
_KINDS: tuple[tuple[type[Exception], int, str, Mapping[str, str]], ...] = (
    (Unauthorized, 401, "unauthorized", CHALLENGE),
    (Forbidden, 403, "forbidden", {}),
    (Crowded, 503, "crowded", RETRY_LATER),
    (DuplicateMessage, 409, "duplicate", {}),
    (KeyFull, 429, "key-full", RETRY_LATER),
    (TopicFull, 429, "topic-full", RETRY_LATER),
    (GroupRemoved, 404, "unknown-group", {}),
    (TopicInUse, 409, "in-use", {}),
    (ScheduleChanged, 409, "schedule-changed", {}),
    (RemovalUnfinished, 409, "removal-unfinished", RETRY_LATER),
    (TooManyGroups, 409, "too-many-groups", {}),
    (InvalidMessage, 400, "invalid", {}),
    (ConfigError, 400, "refused", {}),
)


def problem_of(error: Exception) -> ErrorResponse:
    """The problem to return for an error. Logs errors that are not the client's."""
    if isinstance(error, ErrorResponse):
        return error
    if isinstance(error, HTTPException):
        return ErrorResponse(error.status_code, "http", error.detail, headers=error.headers)
    if is_full(error.__cause__):
        return ErrorResponse(
            503,
            "server-full",
            "Redis is out of memory and rejects new messages until some are handled",
            headers=RETRY_LATER,
        )
    if isinstance(error, NotReplicated):
        log.warning("a write was not confirmed by enough replicas: %s", error)
        return ErrorResponse(
            503,
            "not-replicated",
            "the write was accepted, but not confirmed by the configured number of replicas; "
            "repeating the request with the same id is safe",
            headers=RETRY_LATER,
            ids=list(error.ids),
        )
    if _is_outage(error):
        # The log has the details; the response must not expose the server's address.
        _outages.warn("a request failed because Redis is unavailable: %s", error)
        refusal = refusal_of(error.__cause__)
        detail = f"{refusal.cause} and refuses writes" if refusal else "does not respond"
        return ErrorResponse(503, "server-unavailable", f"Redis {detail}", headers=RETRY_LATER)
    for error_type, status, kind, headers in _KINDS:
        if isinstance(error, error_type):
            return ErrorResponse(status, kind, str(error), headers=headers)
    log.error("a request failed", exc_info=error)
    return ErrorResponse(500, "fault", "internal error; see the gateway's log")


def is_refusal(error: BaseException) -> bool:
    """Whether an error rejects a request, which has changed nothing."""
    if isinstance(error, ErrorResponse):
        return error.status < http.HTTPStatus.INTERNAL_SERVER_ERROR
    if is_full(error.__cause__) or _is_outage(error):
        return False
    return isinstance(error, tuple(kind for kind, *_ in _KINDS))


def _is_outage(error: BaseException) -> bool:
    denied = isinstance(error, ConfigError) and isinstance(error.__cause__, ClientError)
    return denied or isinstance(error, ServerUnavailable)


class BoundedWarnings:
    """Warnings of one kind: at most one per `EACH_S`, and a summary of the others after that."""

    EACH_S = 10.0

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._quiet_until = 0.0
        self._skipped = 0
        self._last = ""

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, or count it for the next summary. Call it on an event loop."""
        left_s = self._quiet_until - time.monotonic()
        if left_s <= 0:
            self._summarise()
            self._quiet_until = time.monotonic() + self.EACH_S
            self._logger.warning(text, *values)
            return
        if not self._skipped:
            asyncio.get_running_loop().call_later(left_s, self._summarise)
        self._skipped += 1
        self._last = text % values

    def _summarise(self) -> None:
        if self._skipped:
            self._logger.warning("%d more such warnings, the last: %s", self._skipped, self._last)
            self._skipped = 0


_outages = BoundedWarnings(log)
