"""Login with a token, and logout."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from lisa.core.model.errors import LisaError
from lisa.gateway import audit
from lisa.gateway.access import Scope
from lisa.gateway.context import GatewayContext
from lisa.gateway.page import sessions
from lisa.gateway.page.rendering import answer, render
from lisa.gateway.page.view_context import read_form, safe_path
from lisa.gateway.problems import problem_of


def routes(hub: GatewayContext) -> list[BaseRoute]:
    """The login and logout routes. The limits middleware rejects forms sent by other sites."""

    async def ask(request: Request) -> Response:
        if hub.access.is_open:
            return RedirectResponse("/", 303)
        return _form(request, safe_path(request.query_params.get("next", "/")))

    async def enter(request: Request) -> Response:
        try:
            form = dict(await read_form(request))
        except Exception as error:  # noqa: BLE001  answered as a problem, logged by problem_of
            return problem_of(error).response()
        path = safe_path(form.get("next", "/"))
        token = hub.access.by_secret(form.get("token", "").strip())
        if token is None or not token.grants(Scope.READ):
            fault = "may not read: it lacks the scope read" if token else "is not valid"
            audit.login_refused(request, f"the token {fault}")
            return _form(request, path, f"The token {fault}.")
        response = RedirectResponse(path, 303)
        sessions.give(request, response, sessions.issue(token, hub.clock.about_ms()))
        return response

    async def leave(request: Request) -> Response:
        response: Response = RedirectResponse("/login", 303)
        now_ms = hub.clock.about_ms()
        session = sessions.read(hub.access, sessions.cookie_of(request), now_ms)
        try:
            if session is not None and not hub.access.is_open:
                await sessions.end(hub.store, session, now_ms)
        except LisaError as error:
            response = problem_of(error).response()
        sessions.forget(response)
        return response

    return [
        Route("/login", ask),
        Route("/login", enter, methods=["POST"]),
        Route("/logout", leave, methods=["POST"]),
    ]


def _form(request: Request, path: str, fault: str = "") -> Response:
    body = render("login.html", path=path, fault=fault)
    return answer(request, body, 403 if fault else 200)
