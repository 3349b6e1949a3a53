"""What the page can change. Every form is posted, carries its session's key, and says what to do.

What cannot be taken back, or touches more than what was ticked, is asked about once more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from lisa.admin import garbage as garbage_flows
from lisa.admin import topics as topic_flows
from lisa.core.clock import parse_duration
from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_id
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.page import sessions
from lisa.gateway.page.garbage import selection_of
from lisa.gateway.page.visits import Visit, read_form, safe_path
from lisa.gateway.problems import Problem

__all__ = ["act"]

_INSTANT = re.compile(r"[0-9]{1,15}\Z", re.ASCII)

PATIENCE_S = 5.0
"""How long a browser waits for work on much garbage, which then goes on by itself."""


@dataclass(frozen=True, slots=True)
class Order:
    """A posted form: what to do, and to what."""

    visit: Visit
    topic: str
    verb: str
    picked: tuple[tuple[str, str], ...]
    fields: dict[str, str] = field(default_factory=dict)

    def id(self) -> str:
        """The one message that is meant. Raises InvalidMessage."""
        return check_id(self.fields.get("id", ""))


class _Done(NamedTuple):
    did: str
    n: int | str = ""
    of: int | str = ""


class _Verb(NamedTuple):
    scope: Scope
    work: Callable[[Order], Awaitable[_Done]]
    question: str | None = None
    """Asked before it is done."""


async def act(visit: Visit) -> Response:
    """Do what a form says, and go back to where it stood."""
    pairs = await read_form(visit.request)
    fields = dict(pairs)
    if not visit.may_act:
        raise Forbidden("this page only shows: start the gateway with --allow-actions")
    if visit.is_new or not sessions.is_form_key(visit.token, visit.cookie, fields.get("key", "")):
        raise Forbidden("this form is not from this session: go back, reload, and try again")
    topic = visit.topic()
    verb, _, one = fields.get("do", "").partition(" ")
    picks = [one] if one else [value for name, value in pairs if name == "pick"]
    order = Order(visit, topic, verb, _picked(picks), fields)
    known = VERBS.get(verb)
    if known is None:
        raise Problem(400, "form", f"there is nothing to do called {verb!r}")
    if not visit.token.allows(known.scope, topic):
        raise Forbidden(f"token {visit.token.name!r} does not allow scope {known.scope} on {topic}")
    if known.question and fields.get("sure") != "yes":
        # What dies while the visitor reads the question was not asked about.
        until = str(await _now_ms(order) + 1)
        order = replace(order, fields={**fields, "until": until})
        kept = [(name, value) for name, value in pairs if name not in ("key", "until")]
        kept.append(("until", until))
        count = await _how_many(order)
        return visit.page(
            "sure.html", topic=topic, question=known.question.format(n=f"{count:,}"), count=count,
            kept=kept, back=safe_path(fields.get("back", "/")),
        )  # fmt: skip
    done = await known.work(order)
    visit.sight.look_again()
    return RedirectResponse(_back(fields, done), 303)


def _back(fields: dict[str, str], done: _Done) -> str:
    path = safe_path(fields.get("back", "/"))
    told = {name: value for name, value in done._asdict().items() if value != ""}
    return f"{path}{'&' if '?' in path else '?'}{urlencode(told)}"


def _picked(values: list[str]) -> tuple[tuple[str, str], ...]:
    """Group and id of what was ticked. Raises InvalidMessage."""
    found = []
    for value in values:
        group, slash, message_id = value.partition("/")
        if not slash:
            raise InvalidMessage(f"{value!r} names no group and message")
        found.append((group, check_id(message_id)))
    return tuple(found)


async def _now_ms(order: Order) -> int:
    store = order.visit.hub.store
    return await store.drive(store.server_time_us()) // 1000


async def _selection(order: Order) -> garbage_flows.Selection:
    """What matches; of that only what was dead when the visitor was asked."""
    given = {name: order.fields.get(name, "") for name in ("group", "reason", "older")}
    until = order.fields.get("until", "")
    asked_ms = int(until) if _INSTANT.match(until) else await _now_ms(order) + 1
    found = selection_of(order.topic, **given, now_ms=asked_ms)
    return found if found.died_before_ms is not None else replace(found, died_before_ms=asked_ms)


async def _how_many(order: Order) -> int:
    if order.verb == "purge":
        return len(order.picked)
    if not order.verb.endswith("_all"):
        return 1
    store = order.visit.hub.store
    return await store.drive(garbage_flows.matching(store, await _selection(order)))


async def _pause(order: Order) -> _Done:
    store = order.visit.hub.store
    await store.drive(topic_flows.pause(store, order.topic))
    return _Done("paused")


async def _resume(order: Order) -> _Done:
    store = order.visit.hub.store
    await store.drive(topic_flows.resume(store, order.topic))
    return _Done("resumed")


async def _some(order: Order) -> _Done:
    store, flow = order.visit.hub.store, _FLOWS[order.verb]
    by_group: dict[str, list[str]] = {}
    for group, message_id in order.picked:
        by_group.setdefault(group, []).append(message_id)
    done = 0
    for group, ids in by_group.items():
        done += sum(await store.drive(flow(store, order.topic, group, ids)))
    return _Done(f"{order.verb}d", done, len(order.picked))


async def _all(order: Order) -> _Done:
    hub, verb = order.visit.hub, order.verb.removesuffix("_all")
    selection, done = await _selection(order), 0

    def count(n: int) -> None:
        nonlocal done
        done = n

    flow = garbage_flows.act(hub.store, selection, _FLOWS[verb], progress=count)
    failed: list[Exception] = []

    async def work() -> None:
        try:
            await hub.store.drive(flow)
        except Exception as error:
            failed.append(error)
            raise

    task = hub.keep_running(work(), f"{verb} garbage of {order.topic}")
    await asyncio.wait([task], timeout=PATIENCE_S)
    if failed:
        raise failed[0]
    return _Done(f"{verb}d" if task.done() else f"{verb}_goes_on", done)


_FLOWS = {"requeue": garbage_flows.requeue, "purge": garbage_flows.purge}


async def _cancel(order: Order) -> _Done:
    said = await order.visit.hub.sender.cancel(order.topic, order.id())
    return _Done("cancel", str(said))


async def _fire(order: Order) -> _Done:
    said = await order.visit.hub.sender.fire_now(order.topic, order.id())
    return _Done("fire", str(said))


async def _reschedule(order: Order) -> _Done:
    delay = parse_duration(order.fields.get("delay", ""))
    said = await order.visit.hub.sender.reschedule(order.topic, order.id(), delay=delay)
    return _Done("reschedule", str(said))


_FINAL = "This cannot be taken back."
VERBS = {
    "pause": _Verb(Scope.OPERATE, _pause),
    "resume": _Verb(Scope.OPERATE, _resume),
    "requeue": _Verb(Scope.OPERATE, _some),
    "purge": _Verb(Scope.OPERATE, _some, f"Purge {{n}} for good? {_FINAL}"),
    "requeue_all": _Verb(Scope.OPERATE, _all, "Requeue all {n}? They become due now."),
    "purge_all": _Verb(Scope.OPERATE, _all, f"Purge all {{n}} for good? {_FINAL}"),
    "cancel": _Verb(Scope.PRODUCE, _cancel, f"Cancel this message? {_FINAL}"),
    "fire": _Verb(Scope.PRODUCE, _fire),
    "reschedule": _Verb(Scope.PRODUCE, _reschedule),
}
