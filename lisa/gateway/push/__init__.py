"""Pushes: each delivery of a group is POSTed to a web hook, signed, and settled by the answer.

Any number of gateways share the work: each takes what its targets have room for, as consumers do.
Targets are set by `lisa topic push`, and by the native API.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from starlette.routing import BaseRoute

from lisa.gateway.hub import Hub
from lisa.gateway.push.allowed import Allowed
from lisa.gateway.push.supervisor import Supervisor

__all__ = ["allowed_of", "look_now", "routes", "start"]

_supervisors: WeakKeyDictionary[Hub, Supervisor] = WeakKeyDictionary()


def allowed_of(hub: Hub) -> Allowed:
    """Where this gateway's pushes may go. Raises ConfigError for a list that cannot be read."""
    return Allowed.of(hub.settings.gateway_server.push_allow)


async def look_now(hub: Hub, topic: str) -> None:
    """A topic's targets were changed through this gateway: it need not find out by itself."""
    if (supervisor := _supervisors.get(hub)) is not None:
        await supervisor.look_at(topic)


def routes(hub: Hub) -> list[BaseRoute]:
    """None: the native API has them. A list that cannot be read ends the start here.

    Raises ConfigError.
    """
    allowed_of(hub)
    return []


def start(hub: Hub) -> None:
    """Push, until the hub closes."""
    supervisor = _supervisors[hub] = Supervisor(hub, allowed_of(hub))
    hub.keep_running(supervisor.run(), "push")
