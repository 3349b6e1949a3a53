"""Access control and errors of Camellia's API, in Camellia's format."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lisa.core.delivery.group_resolution import SeveralGroups
from lisa.core.model.errors import InvalidMessage, LisaError, ServerUnavailable
from lisa.gateway.access import Forbidden, Scope, Unauthorized
from lisa.gateway.compat.camellia import wire
from lisa.gateway.compat.camellia.health import ServiceState
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import ClientDisconnected
from lisa.gateway.problems import CHALLENGE, RETRY_LATER, BoundedWarnings
from lisa.gateway.shares import Crowded

log = logging.getLogger("lisa.gateway.camellia")

Handler = Callable[[Request, wire.Parameters], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(
    hub: GatewayContext,
    handler: Handler,
    empty: dict[str, Any],
    service: ServiceState | None = None,
    *,
    is_open: bool = False,
) -> Endpoint:
    """An endpoint that returns errors as codes, with the fields in `empty`.

    service: records each request as client activity. is_open: no token is needed.
    """

    async def endpoint(request: Request) -> Response:
        if service is not None:
            service.used()
        try:
            if not is_open:
                hub.token(request, compat=True)
            return await handler(request, await wire.Parameters.of(request))
        except wire.BadParameter as error:
            return wire.bad_request(request, error)
        except Exception as error:  # noqa: BLE001  the original returns a code for any error
            return _failure(request, error, empty)

    return endpoint


_refusals = BoundedWarnings(log)


def allowed_topic(
    hub: GatewayContext, request: Request, parameters: wire.Parameters, scope: Scope
) -> str:
    """The request's topic, if the token allows it. Raises Unauthorized or Forbidden."""
    topic = parameters.text("topic")
    hub.require(request, scope, topic, compat=True)
    return topic


def _failure(request: Request, error: Exception, empty: dict[str, Any]) -> Response:
    """The response for an error: 401 or 403, 503 if the server is unavailable, or a code."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)  # no client reads it
    if isinstance(error, Unauthorized):
        return wire.answer(401, status=401, headers=CHALLENGE, msg=str(error))
    if isinstance(error, Forbidden):
        return wire.answer(403, status=403, msg=str(error))
    path = request.url.path
    if isinstance(error, InvalidMessage):
        log.info("%s: %s", path, error)
        return wire.answer(wire.PARAM_WRONG, **empty)
    if isinstance(error, (ServerUnavailable, Crowded)):
        _refusals.warn("%s: %s", path, error)
        # On 503 the SDK stops using this server for a while.
        return wire.answer(wire.UNKNOWN, status=503, headers=RETRY_LATER, msg=None)
    if isinstance(error, SeveralGroups):
        reason = (
            f"topic {error.topic!r} has several groups: name one under groups in the gateway's YAML"
        )
        log.warning("%s: %s", path, reason)
        return wire.answer(wire.UNKNOWN, **{**empty, "msg": reason})
    if isinstance(error, LisaError):
        log.warning("%s: %s", path, error)
    else:
        log.error("%s failed", path, exc_info=error)
    return wire.answer(wire.UNKNOWN, **empty)
