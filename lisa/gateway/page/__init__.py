"""The web page: what an operator looks at, and, where it is allowed, acts on.

HTML from templates, kept live by htmx; nothing is fetched from elsewhere and nothing is built. It
works without scripts, too, only that it then stands still and shows tables instead of plots.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from lisa.gateway.hub import Hub
from lisa.gateway.page import (
    actions,
    assets,
    entrance,
    garbage,
    message,
    messages,
    overview,
    people,
    topic,
)
from lisa.gateway.page.sight import Sight
from lisa.gateway.page.visits import View, as_endpoint

__all__ = ["routes"]

VIEWS: dict[str, View] = {
    "/": overview.show,
    "/search": message.search,
    "/consumers": people.consumers,
    "/managers": people.managers,
    "/topics/{topic}": topic.show,
    "/topics/{topic}/garbage": garbage.show,
    "/topics/{topic}/messages": messages.show,
    "/topics/{topic}/message": message.show,
    "/topics/{topic}/messages/{id:path}": message.show,
}


def routes(hub: Hub) -> list[BaseRoute]:
    """The page's addresses."""
    sight = Sight(hub)
    found: list[BaseRoute] = [
        Route(path, as_endpoint(hub, sight, view)) for path, view in VIEWS.items()
    ]
    act = as_endpoint(hub, sight, actions.act)
    found.append(Route("/topics/{topic}/act", act, methods=["POST"]))
    return [*found, *entrance.routes(hub), *assets.routes()]
