"""The web page for operators: shows topics, messages and roles, and optionally changes them.

HTML from templates, refreshed by htmx. All files come from the gateway, without a build step.
Without scripts the page does not refresh and shows tables instead of plots.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.gateway.context import GatewayContext
from lisa.gateway.page import (
    actions,
    garbage,
    keyed,
    messages,
    overview,
    rendering,
    roles,
    schedules,
    search,
    topic,
    visits,
)
from lisa.gateway.page.snapshot import SnapshotCache
from lisa.gateway.page.visits import PageRequest, View, as_endpoint
from lisa.gateway.problems import ErrorResponse, problem_of

__all__ = ["on_http_error", "routes"]

VIEWS: dict[str, View] = {
    "/": overview.show,
    "/search": search.show,
    "/consumers": roles.consumers,
    "/managers": roles.managers,
    "/schedules": schedules.show_all,
    "/topics/{topic}": topic.show,
    "/topics/{topic}/garbage": garbage.show,
    "/topics/{topic}/schedules": schedules.show_list,
    "/topics/{topic}/schedule": schedules.show,
    "/topics/{topic}/schedule/edit": schedules.show_form,
    "/topics/{topic}/messages": messages.show_list,
    "/topics/{topic}/message": messages.show,
    "/topics/{topic}/messages/{id:path}": messages.show,
    "/topics/{topic}/key": keyed.show,
    "/topics/{topic}/keys/{key:path}": keyed.show,
}


def on_http_error(gateway: GatewayContext) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler of Starlette's own errors, such as 404: browsers get a page, programs a problem."""
    snapshots = SnapshotCache(gateway)

    async def handle(request: Request, error: Exception) -> Response:
        problem = problem_of(error)
        is_browser = "text/html" in request.headers.get("accept", "")
        if request.method not in ("GET", "HEAD") or not is_browser:
            return problem.response()

        async def show(_visit: PageRequest) -> Response:
            if problem.status == 404:
                raise ErrorResponse(404, problem.kind, f"There is no page {request.url.path!r}.")
            raise problem

        return await as_endpoint(gateway, snapshots, show)(request)

    return handle


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The routes of the page."""
    snapshots = SnapshotCache(gateway)
    found: list[BaseRoute] = [
        Route(path, as_endpoint(gateway, snapshots, view)) for path, view in VIEWS.items()
    ]
    act = as_endpoint(gateway, snapshots, actions.act)
    found.append(Route("/topics/{topic}/act", act, methods=["POST"]))
    return [*found, *visits.login_routes(gateway), *rendering.static_routes()]
