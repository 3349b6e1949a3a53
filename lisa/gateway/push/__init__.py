"""Pushes: each delivery of a group is POSTed to a web hook, signed, and settled by the response.

Any number of gateways share the work: each pulls as many messages as its targets have capacity for.
Targets are set with `lisa topic push` or through the native API.
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from starlette.routing import BaseRoute

from lisa.core.settings import GatewaySettings
from lisa.gateway.context import GatewayContext
from lisa.gateway.push.allowed import Allowed
from lisa.gateway.push.poster import certificates
from lisa.gateway.push.supervisor import PushSupervisor

__all__ = ["allowed_of", "check_settings", "reload_targets", "routes"]

_supervisors: WeakKeyDictionary[GatewayContext, PushSupervisor] = WeakKeyDictionary()


def allowed_of(hub: GatewayContext) -> Allowed:
    """The addresses that pushes may connect to. Raises ConfigError if `push-allow` is invalid."""
    return Allowed.of(hub.settings.gateway_server.push_allow)


async def reload_targets(hub: GatewayContext, topic: str) -> None:
    """Reload a topic's targets immediately after a change made through this gateway."""
    if (supervisor := _supervisors.get(hub)) is not None:
        await supervisor.reload(topic)


def check_settings(settings: GatewaySettings) -> None:
    """Raises ConfigError if `push-allow` is invalid, or the environment's certificates are.

    Certificates that the environment does not name are loaded at the first push.
    """
    Allowed.of(settings.gateway_server.push_allow)
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        certificates()


def routes(hub: GatewayContext) -> list[BaseRoute]:
    """No routes, since the native API has them; only adds the service that pushes."""
    supervisor = _supervisors[hub] = PushSupervisor(hub, allowed_of(hub))
    hub.add_service(supervisor.run, "push")
    return []
