"""The web page for operators: shows topics, messages and roles, and optionally changes them.

HTML from templates, refreshed by htmx. All files come from the gateway, without a build step.
Without scripts the page does not refresh and shows tables instead of plots.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from lisa.gateway.context import GatewayContext
from lisa.gateway.page import (
    actions,
    assets,
    garbage,
    login,
    message,
    messages,
    overview,
    roles,
    search,
    topic,
)
from lisa.gateway.page.snapshot_cache import SnapshotCache
from lisa.gateway.page.view_context import View, as_endpoint

__all__ = ["routes"]

VIEWS: dict[str, View] = {
    "/": overview.show,
    "/search": search.show,
    "/consumers": roles.consumers,
    "/managers": roles.managers,
    "/topics/{topic}": topic.show,
    "/topics/{topic}/garbage": garbage.show,
    "/topics/{topic}/messages": messages.show,
    "/topics/{topic}/message": message.show,
    "/topics/{topic}/messages/{id:path}": message.show,
}


def routes(hub: GatewayContext) -> list[BaseRoute]:
    """The routes of the page."""
    snapshots = SnapshotCache(hub)
    found: list[BaseRoute] = [
        Route(path, as_endpoint(hub, snapshots, view)) for path, view in VIEWS.items()
    ]
    act = as_endpoint(hub, snapshots, actions.act)
    found.append(Route("/topics/{topic}/act", act, methods=["POST"]))
    return [*found, *login.routes(hub), *assets.routes()]
