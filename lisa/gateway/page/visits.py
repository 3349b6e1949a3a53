"""One request for a page: who asks, what they may see and do, and what to say when it fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from lisa.core.errors import ServerUnavailable
from lisa.core.keys import check_topic
from lisa.gateway.access import Forbidden, Scope, Token, Unauthorized
from lisa.gateway.hub import Hub
from lisa.gateway.page import sessions
from lisa.gateway.page.rendering import answer, render
from lisa.gateway.page.sight import Scene, Sight
from lisa.gateway.problems import Problem, problem_of

__all__ = ["View", "Visit", "as_endpoint", "login_link", "read_form", "safe_path"]

TOLD = ("did", "n", "of")
"""What an address carries once, after something was done."""

MOST_FIELDS = 2_000


class Visit:
    """What a view has to do with."""

    def __init__(self, hub: Hub, sight: Sight, request: Request) -> None:
        self.hub = hub
        self.sight = sight
        self.request = request
        self.cookie = request.cookies.get(sessions.COOKIE)
        self.is_new = False
        self.token = self._identify()
        if self.may_act and self.cookie is None:
            self.cookie, self.is_new = sessions.issue(self.token), True

    def _identify(self) -> Token:
        access = self.hub.access
        if "authorization" in self.request.headers:
            return self.hub.token(self.request)
        found = sessions.read(access, self.cookie)
        if found is None:
            self.cookie = None
            if not access.is_open:
                raise Unauthorized("log in first")
            return access.identify(None)
        return found

    @property
    def may_act(self) -> bool:
        """Whether this page may change anything at all."""
        return self.hub.settings.gateway_server.allow_actions

    def may(self, scope: str, topic: str) -> bool:
        """Whether this visitor may do something of a scope to a topic, from this page."""
        return self.may_act and self.token.allows(Scope(scope), topic)

    @property
    def form_key(self) -> str:
        """What this visitor's forms carry."""
        return sessions.form_key(self.token, self.cookie) if self.cookie else ""

    @property
    def query(self) -> Mapping[str, str]:
        """The address's parameters."""
        return self.request.query_params

    @property
    def here(self) -> str:
        """This page's own address, without what was told once."""
        kept = [(k, v) for k, v in self.request.query_params.multi_items() if k not in TOLD]
        path = _raw_path(self.request)
        return f"{path}?{urlencode(kept)}" if kept else path

    def topic(self) -> str:
        """The topic that the address names. Raises InvalidMessage, Forbidden."""
        topic = check_topic(self.request.path_params["topic"])
        if not self.token.sees(topic):
            raise Forbidden(f"token {self.token.name!r} does not see topic {topic!r}")
        return topic

    async def scene(self) -> Scene:
        """All that is known at this moment; use `lines` for what this visitor may see of it."""
        return await self.sight.scene()

    def page(self, template: str, /, status: int = 200, **values: Any) -> Response:
        """A template as the answer."""
        body = render(template, visit=self, **values)
        return answer(self.request, body, status)


View: TypeAlias = Callable[[Visit], Awaitable[Response]]


def as_endpoint(hub: Hub, sight: Sight, view: View) -> Callable[[Request], Awaitable[Response]]:
    """A view as Starlette calls it; its errors become pages."""

    async def endpoint(request: Request) -> Response:
        try:
            visit = Visit(hub, sight, request)
        except Unauthorized:
            return _to_login(request)
        except Exception as error:  # noqa: BLE001  told to the visitor, and logged by problem_of
            return problem_of(error).response()
        try:
            response = await view(visit)
        except Exception as error:  # noqa: BLE001  the same
            response = _trouble(visit, problem_of(error), isinstance(error, ServerUnavailable))
        if visit.is_new and visit.cookie:
            sessions.give(request, response, visit.cookie)
        return response

    return endpoint


def _trouble(visit: Visit, problem: Problem, is_away: bool) -> Response:  # noqa: FBT001  one caller
    response = visit.page("trouble.html", problem.status, problem=problem, is_away=is_away)
    response.headers.update(problem.headers)
    return response


def login_link(path: str) -> str:
    """Where to log in, and come back from to a page."""
    return "/login" if path == "/" else f"/login?{urlencode({'next': path})}"


def _to_login(request: Request) -> Response:
    if "hx-request" in request.headers:
        shown = request.headers.get("hx-current-url", "")
        path = "/" + shown.partition("://")[2].partition("/")[2] if shown else "/"
        return Response("log in again", 401, {"HX-Redirect": login_link(safe_path(path))})
    asked = _raw_path(request) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(login_link(safe_path(asked)), 303)


def _raw_path(request: Request) -> str:
    """The path as it was asked for: quoted, so that an id with a % in it stays the same."""
    return str(request.scope["raw_path"].decode("ascii", "replace"))


def safe_path(path: str) -> str:
    """A path on this gateway; whatever leads elsewhere becomes the first page."""
    plain = path.startswith("/") and path[1:2] not in ("/", "\\") and path.isprintable()
    return path if plain else "/"


async def read_form(request: Request) -> list[tuple[str, str]]:
    """The fields of a posted form. Raises Problem."""
    try:
        text = (await request.body()).decode("ascii")
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise Problem(400, "form", f"this form cannot be read: {error}") from None
