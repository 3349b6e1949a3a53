"""Answers requests in the format of the original API."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.gateway import audit
from lisa.gateway.context import GatewayContext
from lisa.gateway.limits_middleware import reject_foreign
from lisa.gateway.long_poll import ClientDisconnected
from lisa.gateway.problems import ErrorResponse, problem_of

Handler = Callable[[Request], Awaitable[Response]]


def answering(handler: Handler, failure: Callable[[ErrorResponse], bytes]) -> Handler:
    """An endpoint that answers errors with the body that `failure` makes of them.

    The originals always answer 200, and so do these APIs for client errors. Errors that the
    originals do not have (authentication, limits, outages) keep their status.
    """

    async def answer(request: Request) -> Response:
        try:
            if request.method == "HEAD":  # its response would discard a delivered job
                raise ErrorResponse(405, "method", "HEAD is not supported here")
            reject_foreign(request.scope)  # these APIs change state on GET, too
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  answered in the original's format
            problem = problem_of(error)
            status = 200 if problem.status in (400, 404, 409) else problem.status
            return Response(failure(problem), status, problem.headers, "application/json")

    return answer


def record_change(hub: GatewayContext, request: Request, action: str, **details: Any) -> None:
    """Record a change in the audit log, as the native API does for its operations.

    Sends, pulls and settlements are left to the journal.
    """
    audit.changed(request, hub.token(request, compat=True), action, **details)


def text_of(body: Any) -> str:
    """A message body as text: bytes in base64, JSON as encoded."""
    if isinstance(body, str):
        return body
    if isinstance(body, bytes):
        return base64.b64encode(body).decode("ascii")
    return msgspec.json.encode(body).decode()
