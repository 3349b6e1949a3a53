"""Actions from the web page. Every form is posted and carries its session's anti-forgery key.

Actions that cannot be undone, or that affect more than the selected messages, ask for confirmation.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id
from lisa.gateway.access import Forbidden
from lisa.gateway.api import OPERATIONS
from lisa.gateway.page import garbage, keyed, messages, schedules, sessions, topic
from lisa.gateway.page.visits import (
    NOTICE,
    Done,
    FormAction,
    PageRequest,
    read_form,
    safe_path,
)
from lisa.gateway.problems import ErrorResponse, is_refusal


async def act(visit: PageRequest) -> Response:
    """Run a form's action and redirect to the page that it came from."""
    pairs = await read_form(visit.request)
    fields = dict(pairs)
    visit.require_actions()
    if visit.is_new or not sessions.is_form_key(visit.token, visit.cookie, fields.get("key", "")):
        raise Forbidden("the form is not from this session: go back, reload the page and try again")
    verb, _, pick = fields.get("do", "").partition(" ")
    picks = [pick] if pick else [value for name, value in pairs if name == "pick"]
    action = FormAction(visit, visit.topic(), verb, _picked(picks), fields)
    known = VERBS.get(verb)
    if known is None:
        raise ErrorResponse(400, "form", f"unknown action {verb!r}")
    visit.token.require(_SCOPES[known.operation], action.topic)
    if known.warning is not None and fields.get("sure") != "yes":
        # Messages that die after the question is shown are excluded.
        store = visit.gateway.store
        until = str(await store.drive(store.server_time_ms()) + 1)
        action = replace(action, fields={**fields, "until": until})
        kept = [(name, value) for name, value in pairs if name not in ("key", "until", "pace")]
        kept.append(("until", until))
        title, count = await known.asks(action) if known.asks else ("1 message", 1)
        return visit.page(
            "confirm.html",
            topic=action.topic,
            action=f"{known.name} {title}",
            warning=known.warning,
            count=count,
            has_pace=verb == "requeue_all",
            kept=kept,
            back=safe_path(fields.get("back", "/")),
        )
    try:
        done = await known.work(action)
    except BaseException as error:  # also of a client that disconnects
        if not is_refusal(error):
            action.audit(verb, result="failed")
        raise
    if isinstance(done, Response):
        return done
    action.audit(done.did, done=done.n)
    visit.snapshots.clear()
    return RedirectResponse(_back(fields, done), 303)


def _back(fields: dict[str, str], done: Done) -> str:
    path = done.back or safe_path(fields.get("back", "/"))
    notice = {name: value for name in NOTICE if (value := getattr(done, name)) != ""}
    return f"{path}{'&' if '?' in path else '?'}{urlencode(notice)}"


def _picked(values: list[str]) -> tuple[tuple[str, str], ...]:
    """Group and id of each selected message. Raises InvalidMessage."""
    found = []
    for value in values:
        group, slash, message_id = value.partition("/")
        if not slash:
            raise InvalidMessage(f"{value!r} is not of the form GROUP/ID")
        found.append((group, check_id(message_id)))
    return tuple(found)


_SCOPES = {operation.name: operation.scope for operation in OPERATIONS}
VERBS = {**topic.VERBS, **messages.VERBS, **keyed.VERBS, **garbage.VERBS, **schedules.VERBS}
