"""One request for a page: the visitor's token, rights and form, login, and error pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import check_id, check_key
from lisa.core.redis.flow import Flow
from lisa.gateway import audit
from lisa.gateway.access import Forbidden, Scope, Token, Unauthorized
from lisa.gateway.base_path import inside_path
from lisa.gateway.context import GatewayContext, act_for
from lisa.gateway.page import sessions
from lisa.gateway.page.rendering import answer, render
from lisa.gateway.page.snapshot import SnapshotCache
from lisa.gateway.problems import ErrorResponse, problem_of

NOTICE = ("did", "n", "of")
"""Query parameters that report the result of an action once."""

MOST_FIELDS = 2_000

FINAL = "This cannot be undone."
AUDITED = ("group", "reason", "older", "kind", "pace")
"""The fields of forms that the audit log records under their names."""

T = TypeVar("T")


class PageRequest:
    """One request for a page, as views receive it. Raises Unauthorized without a valid token."""

    def __init__(self, gateway: GatewayContext, snapshots: SnapshotCache, request: Request) -> None:
        self.gateway = gateway
        self.snapshots = snapshots
        self.request = request
        self.cookie = sessions.cookie_of(request)
        self.is_new = False
        self._session: sessions.Session | None = None
        self.token = self._identify()
        act_for(self.token)
        if self.may_act and self.cookie is None:
            self.cookie, self.is_new = sessions.issue(self.token, gateway.clock.about_ms()), True

    def _identify(self) -> Token:
        access = self.gateway.access
        if "authorization" in self.request.headers:
            return self.gateway.require(self.request, Scope.READ)
        self._session = sessions.read(access, self.cookie, self.gateway.clock.about_ms())
        if self._session is not None:
            found = self._session.token
        else:
            self.cookie = None
            if not access.is_open:
                raise Unauthorized("log in first")
            found = access.identify(None)
        found.require(Scope.READ, None)
        return found

    async def check_session(self) -> None:
        """Raises Unauthorized if the visitor has logged out."""
        session = None if self.gateway.access.is_open else self._session
        if session is not None and await sessions.has_ended(self.gateway.store, session):
            raise Unauthorized("log in again")

    @property
    def session_name(self) -> str:
        """The start of the session's id, which tells the sessions of a token apart."""
        return self._session.id[:6] if self._session else ""

    @property
    def may_act(self) -> bool:
        """Whether the gateway allows actions from the page."""
        return self.gateway.settings.gateway_server.allow_actions

    def require_actions(self) -> None:
        """Raises Forbidden unless the gateway allows actions from the page."""
        if not self.may_act:
            raise Forbidden("this page is read-only: start the gateway with --allow-actions")

    def may(self, scope: str, topic: str) -> bool:
        """Whether this visitor may act on a topic with a scope from this page."""
        return self.may_act and self.token.allows(Scope(scope), topic)

    @property
    def form_key(self) -> str:
        """The anti-forgery key of this visitor's forms."""
        return sessions.form_key(self.token, self.cookie) if self.cookie else ""

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters."""
        return self.request.query_params

    @property
    def here(self) -> str:
        """The path and query of this page, without the result of an action."""
        kept = [(k, v) for k, v in self.request.query_params.multi_items() if k not in NOTICE]
        path = _raw_path(self.request)
        return f"{path}?{urlencode(kept)}" if kept else path

    def topic(self) -> str:
        """The topic named in the path. Raises InvalidMessage or Forbidden."""
        return self.token.allowed_topic(self.request.path_params["topic"])

    async def ask(self, lasts_s: float, flow: Callable[..., Flow[T]], *args: Any) -> T:
        """The result of a flow: fresh for a page load, shared by the refreshes of open pages."""
        if "hx-request" in self.request.headers:
            return await self.snapshots.ask(lasts_s, flow, *args)
        return await self.gateway.ask(flow, *args)

    def page(self, template: str, /, status: int = 200, **values: Any) -> Response:
        """A rendered template as the response."""
        body = render(template, visit=self, **values)
        return answer(self.request, body, status)


View: TypeAlias = Callable[[PageRequest], Awaitable[Response]]


def as_endpoint(
    gateway: GatewayContext, snapshots: SnapshotCache, view: View
) -> Callable[[Request], Awaitable[Response]]:
    """A Starlette endpoint for a view; errors become error pages."""

    async def endpoint(request: Request) -> Response:
        visit: PageRequest | None = None
        try:
            visit = PageRequest(gateway, snapshots, request)
            await visit.check_session()
            response = await view(visit)
        except Unauthorized:
            return _to_login(request)
        except Exception as error:
            if visit is None:
                raise
            problem, is_away = problem_of(error), isinstance(error, ServerUnavailable)
            response = visit.page("error.html", problem.status, problem=problem, is_away=is_away)
            response.headers.update(problem.headers)
        if visit.is_new and visit.cookie:
            sessions.give(request, response, visit.cookie)
        return response

    return endpoint


def login_link(path: str) -> str:
    """The login path that leads back to `path`."""
    return "/login" if path == "/" else f"/login?{urlencode({'next': path})}"


def _to_login(request: Request) -> Response:
    if "hx-request" in request.headers:
        shown = request.headers.get("hx-current-url", "")
        path = "/" + shown.partition("://")[2].partition("/")[2] if shown else "/"
        path = inside_path(request.scope, path)
        return Response("log in again", 401, {"HX-Redirect": login_link(safe_path(path))})
    asked = _raw_path(request) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(login_link(safe_path(asked)), 303)


def _raw_path(request: Request) -> str:
    """The path as requested, still quoted, so that an id with a % stays unchanged."""
    return str(request.scope["raw_path"].decode("ascii", "replace"))


def safe_path(path: str) -> str:
    """`path` if it is a path on this gateway, else `/`."""
    plain = path.startswith("/") and path[1:2] not in ("/", "\\") and path.isprintable()
    return path if plain else "/"


async def read_form(request: Request) -> list[tuple[str, str]]:
    """The fields of a posted form. Raises ErrorResponse."""
    try:
        text = (await request.body()).decode("ascii")
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise ErrorResponse(400, "form", f"the form cannot be parsed: {error}") from None


@dataclass(frozen=True, slots=True)
class FormAction:
    """A posted form: the action and the messages it applies to."""

    visit: PageRequest
    topic: str
    verb: str
    picked: tuple[tuple[str, str], ...]
    fields: dict[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A field without spaces around it; empty if the form lacks it."""
        return self.fields.get(name, "").strip()

    def id(self) -> str:
        """The id of the message to act on. Raises InvalidMessage."""
        return check_id(self.fields.get("id", ""))

    def message_key(self) -> str:
        """The key of the messages to act on. Raises InvalidMessage."""
        return check_key(self.fields.get("message_key", ""))

    def audit(self, did: str, **results: object) -> None:
        """Record in the audit log what was done."""
        audit.changed(
            self.visit.request,
            self.visit.token,
            did,
            topic=self.topic,
            id=self.fields.get("id"),
            key=self.fields.get("message_key"),
            new_id=self.fields.get("new"),
            schedule=self.fields.get("schedule"),
            session=self.visit.session_name,
            **{name: self.fields.get(name) for name in AUDITED},
            **results,
        )


class Done(NamedTuple):
    """The result of an action; `back` is the page to show instead of the form's."""

    did: str
    n: int | str = ""
    of: int | str = ""
    back: str = ""


class Verb(NamedTuple):
    """An action: the operation of the API whose scope it requires, its work, and how it asks.

    work: returns what it did, or a page to show because it did nothing. warning: the text of the
    page that asks for confirmation; None runs the action immediately. asks: what the action applies
    to and how many, such as ("5 messages", 5); by default one message.
    """

    operation: str
    work: Callable[[FormAction], Awaitable[Done | Response]]
    name: str = ""
    warning: str | None = None
    asks: Callable[[FormAction], Awaitable[tuple[str, int]]] | None = None


def login_routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The login and logout routes. The limits middleware rejects forms sent by other sites."""

    async def ask(request: Request) -> Response:
        if gateway.access.is_open:
            return RedirectResponse("/", 303)
        return _login_form(request, safe_path(request.query_params.get("next", "/")))

    async def enter(request: Request) -> Response:
        form = dict(await read_form(request))
        path = safe_path(form.get("next", "/"))
        token = gateway.access.by_secret(form.get("token", "").strip())
        if token is None or not token.grants(Scope.READ):
            fault = "may not read: it lacks the scope read" if token else "is not valid"
            audit.login_refused(request, f"the token {fault}")
            return _login_form(request, path, f"The token {fault}.")
        response = RedirectResponse(path, 303)
        sessions.give(request, response, sessions.issue(token, gateway.clock.about_ms()))
        return response

    async def leave(request: Request) -> Response:
        response: Response = RedirectResponse("/login", 303)
        now_ms = gateway.clock.about_ms()
        session = sessions.read(gateway.access, sessions.cookie_of(request), now_ms)
        try:
            if session is not None and not gateway.access.is_open:
                await sessions.end(gateway.store, session, now_ms)
        except LisaError as error:
            response = problem_of(error).response()
        sessions.forget(response)
        return response

    return [
        Route("/login", ask),
        Route("/login", enter, methods=["POST"]),
        Route("/logout", leave, methods=["POST"]),
    ]


def _login_form(request: Request, path: str, fault: str = "") -> Response:
    body = render("login.html", path=path, fault=fault)
    return answer(request, body, 403 if fault else 200)
