"""Actions from the web page. Every form is posted and carries its session's anti-forgery key.

Actions that cannot be undone, or that affect more than the selected messages, ask for confirmation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from lisa.admin import garbage as garbage_flows
from lisa.admin import topics as topic_flows
from lisa.admin.garbage import by_reason
from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id
from lisa.gateway import audit
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.api import OPERATIONS
from lisa.gateway.page import garbage, messages, schedules, sessions
from lisa.gateway.page.garbage import FIELDS, GarbageRun, selection_of
from lisa.gateway.page.rendering import message_link
from lisa.gateway.page.visits import (
    NOTICE,
    Done,
    FormAction,
    PageRequest,
    Verb,
    read_form,
    safe_path,
)
from lisa.gateway.problems import ErrorResponse, is_refusal

_INSTANT = re.compile(r"[0-9]{1,15}\Z", re.ASCII)

MOST_COUNTED = 100_000
"""Dead messages that a question with a filter by reason counts."""


async def act(visit: PageRequest) -> Response:
    """Run a form's action and redirect to the page that it came from."""
    pairs = await read_form(visit.request)
    fields = dict(pairs)
    visit.require_actions()
    if visit.is_new or not sessions.is_form_key(visit.token, visit.cookie, fields.get("key", "")):
        raise Forbidden("the form is not from this session: go back, reload the page and try again")
    topic = visit.topic()
    verb, _, pick = fields.get("do", "").partition(" ")
    picks = [pick] if pick else [value for name, value in pairs if name == "pick"]
    action = FormAction(visit, topic, verb, _picked(picks), fields)
    known = VERBS.get(verb)
    if known is None:
        raise ErrorResponse(400, "form", f"unknown action {verb!r}")
    visit.token.require(_SCOPES[known.operation], topic)
    if known.warning is not None and fields.get("sure") != "yes":
        # Messages that die after the question is shown are excluded.
        until = str(await _now_ms(action) + 1)
        action = replace(action, fields={**fields, "until": until})
        kept = [(name, value) for name, value in pairs if name not in ("key", "until", "pace")]
        kept.append(("until", until))
        asks = known.asks or _about_messages
        title, count = await asks(action)
        return visit.page(
            "confirm.html",
            topic=topic,
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
            _audit(action, verb, result="failed")
        raise
    if isinstance(done, Response):
        return done
    _audit(action, done.did, done=done.n)
    visit.snapshots.clear()
    return RedirectResponse(_back(fields, done), 303)


def _audit(action: FormAction, did: str, **results: object) -> None:
    visit, fields = action.visit, action.fields
    audit.changed(
        visit.request,
        visit.token,
        did,
        topic=action.topic,
        id=fields.get("id"),
        new_id=fields.get("new"),
        schedule=fields.get("schedule"),
        session=visit.session_name,
        **{name: fields.get(name) for name in (*FIELDS, "pace")},
        **results,
    )


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


async def _now_ms(action: FormAction) -> int:
    store = action.visit.gateway.store
    return await store.drive(store.server_time_ms())


async def _selection(action: FormAction) -> garbage_flows.GarbageSelection:
    """The garbage that matches the filter and was dead when the confirmation was shown."""
    given = {name: action.fields.get(name, "") for name in FIELDS}
    until = action.fields.get("until", "")
    asked_ms = int(until) if _INSTANT.match(until) else await _now_ms(action) + 1
    found = selection_of(action.topic, **given, now_ms=asked_ms)
    return found if found.died_before_ms is not None else replace(found, died_before_ms=asked_ms)


async def _how_many(action: FormAction) -> int:
    if action.verb == "purge":
        return len(action.picked)
    if not action.verb.endswith("_all"):
        return 1
    selection = await _selection(action)
    if selection.reason is None and selection.kind is None:
        return await action.visit.gateway.ask(garbage_flows.matching, selection)
    counts, _ = await action.visit.gateway.ask(by_reason, selection, most=MOST_COUNTED)
    return sum(reason.messages for reason in counts)


async def _about_messages(action: FormAction) -> tuple[str, int]:
    count = await _how_many(action)
    return f"{count:,} {'message' if count == 1 else 'messages'}", count


async def _switch(action: FormAction) -> Done:
    flow = _SWITCHES[action.verb]
    await action.visit.gateway.ask(flow, action.topic)
    return Done(f"{action.verb}d")


async def _some(action: FormAction) -> Done:
    flow = _FLOWS[action.verb]
    by_group: dict[str, list[str]] = {}
    for group, message_id in action.picked:
        by_group.setdefault(group, []).append(message_id)
    done = 0
    for group, ids in by_group.items():
        done += sum(await action.visit.gateway.ask(flow, action.topic, group, ids))
    return Done(f"{action.verb}d", done, len(action.picked))


async def _all(action: FormAction) -> Done:
    topic, verb = action.topic, action.verb.removesuffix("_all")
    rate = garbage.pace(action.fields.get("pace", ""))
    run = GarbageRun(action.visit.gateway, topic, verb, await _how_many(action), rate)
    await run.start(await _selection(action), _FLOWS[verb])
    if not run.is_running:
        return Done(f"{verb}d", run.done)
    run.on_end(lambda: _audit(action, f"{verb}d", done=run.done))
    return Done(f"{verb}_continues", run.done)


async def _stop(action: FormAction) -> Done:
    return Done("stopped", await garbage.stop_run(action.visit.gateway, action.topic))


_FLOWS = {"requeue": garbage_flows.requeue, "purge": garbage_flows.purge}
_SWITCHES = {"pause": topic_flows.pause, "resume": topic_flows.resume}


async def _cancel(action: FormAction) -> Done:
    outcome = await action.visit.gateway.sender.cancel(action.topic, action.id())
    return Done("cancel", str(outcome))


async def _fire(action: FormAction) -> Done:
    outcome = await action.visit.gateway.sender.fire_now(action.topic, action.id())
    return Done("fire", str(outcome))


async def _reschedule(action: FormAction) -> Done:
    fields, sender = action.fields, action.visit.gateway.sender
    delay, at_local = fields.get("delay", "").strip(), fields.get("at_local", "").strip()
    outcome = await sender.reschedule(
        action.topic,
        action.id(),
        delay=parse_duration(delay) if delay or not at_local else None,
        at_local=at_local or None,
        tz=fields.get("tz", "").strip() or None,
    )
    return Done("reschedule", str(outcome))


async def _again(action: FormAction) -> Done:
    fields = action.fields
    new_id, outcome = await messages.send_copy(
        action.visit.gateway,
        action.topic,
        action.id(),
        new_id=fields.get("new", ""),
        delay=fields.get("delay", ""),
    )
    return Done("again", outcome, back=message_link(action.topic, new_id))


async def _edit(action: FormAction) -> Done:
    topic = action.topic
    action.visit.token.require(Scope.PRODUCE, topic)
    body = action.fields.get("body", "")
    return Done("edit", await messages.send_edited(action.visit.gateway, topic, action.id(), body))


_SCOPES = {operation.name: operation.scope for operation in OPERATIONS}
_FINAL = "This cannot be undone."
VERBS = {
    "pause": Verb("pauseTopic", _switch),
    "resume": Verb("resumeTopic", _switch),
    "requeue": Verb("requeueGarbage", _some),
    "purge": Verb("purgeGarbage", _some, "Purge", _FINAL),
    "requeue_all": Verb("requeueGarbage", _all, "Requeue", "They become due immediately."),
    "stop": Verb("requeueGarbage", _stop),
    "purge_all": Verb("purgeGarbage", _all, "Purge", _FINAL),
    "cancel": Verb("cancelMessage", _cancel, "Cancel", _FINAL),
    "fire": Verb("fireMessage", _fire),
    "again": Verb("sendMessage", _again),
    "edit": Verb("requeueGarbage", _edit),
    "reschedule": Verb("rescheduleMessage", _reschedule),
    **schedules.VERBS,
}
