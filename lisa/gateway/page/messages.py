"""The pages of messages: a topic's list in one state, one message, and sending it again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lisa.admin import journal as journal_flows
from lisa.admin import story
from lisa.admin.messages import LiveState, list_messages
from lisa.admin.reading import entry_number, shards_of_id
from lisa.admin.search import BODY_BYTES
from lisa.admin.story import StoryEvent
from lisa.admin.why import why
from lisa.core.model.clock import parse_duration
from lisa.core.model.envelope import Envelope, decode_envelope, id_time_ms, new_id
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import COALESCED_IDS, check_id, own_id_of, shown_id
from lisa.core.model.lanes import cost_and_slack
from lisa.core.model.late import LateAction, LatePolicy, split_policy
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.sharding import key_of
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import found
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.gateway.access import Scope
from lisa.gateway.context import GatewayContext
from lisa.gateway.page.rendering import Body, format_body, message_link
from lisa.gateway.page.snapshot import LOOK_S
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import FINAL, Done, FormAction, PageRequest, Verb
from lisa.gateway.problems import ErrorResponse
from lisa.producer import Outgoing

MOST_EDITED = 16 * 1024
"""Bytes of the longest body that can be edited.

A form without a bearer token is limited to 64 KiB, and triples most bytes.
"""

PER_PAGE = 50
EVENTS_PER_LOOK = 20_000
STORY_S = 2.0

SLACK_MS = 60_000
"""How far the clock that generated an id may be ahead of the Redis clock."""


def is_editable(body: Body) -> bool:
    """Whether a body is complete, readable and short enough for a form."""
    is_readable = body.kind in ("JSON", "text") and not body.more
    return is_readable and len(body.text.encode("utf-8", "replace")) <= MOST_EDITED


async def _stored(
    gateway: GatewayContext, topic: str, message_id: str
) -> tuple[Inspection, Envelope, dict[str, Any]]:
    """A live message, its envelope, and the options of a message with its headers and policies.

    Raises ErrorResponse.
    """
    seen = await gateway.settler.look(topic, message_id)
    if not seen.envelope:
        raise ErrorResponse(
            409, "no-body", f"message {shown_id(message_id)!r} is settled, so its body was deleted"
        )
    envelope = decode_envelope(seen.envelope)
    retry, late, lane = split_policy(await gateway.ask(_policy, topic, message_id))
    policy = LatePolicy.decode(late) if late else None
    if policy and policy.then is LateAction.COLLAPSE:  # which only a schedule can have
        policy = None
    cost, slack = cost_and_slack(lane)
    options = {
        "headers": envelope.headers,
        "retry": None if retry is None else RetryPolicy.decode(retry),  # an empty one: no retries
        "late": policy,
        "cost": cost,
        "slack": slack,
    }
    return seen, envelope, options


def _policy(store: Store, topic: str, message_id: str) -> Flow[str | None]:
    for shard in (yield from shards_of_id(store, topic, message_id)):
        found = yield from store.command("HGET", store.keys.topic(shard).policy, message_id)
        if found is not None:
            return text(found)
    return None


def _body(envelope: Envelope) -> Any:
    """The body in the form in which producers take it."""
    if envelope.kind == "j":
        return msgspec.Raw(envelope.body)
    return envelope.body.decode() if envelope.kind == "s" else envelope.body


def edited_body(kind: str, body: str) -> Any:
    """The body of a form in the form in which producers take it. Raises InvalidMessage."""
    plain = body.replace("\r\n", "\n")  # browsers send every line break as two characters
    if kind == "s":
        return plain
    if kind != "j":
        raise InvalidMessage("a body of bytes cannot be edited here")
    try:
        return msgspec.Raw(msgspec.json.format(plain.encode(), indent=-1))
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"the edited body is not JSON: {error}") from None


async def show_list(visit: PageRequest) -> Response:
    """The message list page."""
    line = await require_topic(visit)
    topic = line.topic
    snapshot = await visit.snapshots.current()
    state = next(
        (state for state in LiveState if state == visit.query.get("state")), LiveState.WAITING
    )
    group = visit.query.get("group") or None
    page = await visit.gateway.ask(
        list_messages,
        topic,
        state,
        group=None if state is LiveState.WAITING else group,
        cursor=visit.query.get("cursor"),
        limit=PER_PAGE,
    )
    return visit.page(
        "messages.html",
        topic=topic,
        state=state,
        states=list(LiveState),
        group=group,
        groups=[group.name for group in line.counts.groups],
        rows=page.rows,
        cursor=page.cursor,
        now_ms=snapshot.at_ms,
    )


POSITION = re.compile(r"([0-9]{1,4}/)?([1-9][0-9]{0,17}-[0-9]{1,18})?")


async def show(visit: PageRequest) -> Response:
    """The page of a message."""
    topic = visit.topic()
    message_id = check_id(visit.request.path_params.get("id") or visit.query.get("id", ""))
    seen = await visit.ask(LOOK_S, _inspect, topic, message_id)
    what = found(topic, message_id, seen)
    snapshot = await visit.snapshots.current()
    history = await _history(visit, topic, message_id, seen, snapshot.at_ms)
    if what is None and not history.events and history.cursor is None:
        raise ErrorResponse(
            404,
            "unknown-message",
            f"message {shown_id(message_id)!r} is unknown on topic {topic!r}: it was never sent, "
            "or its tombstone has expired",
        )
    body, headers, fault = _content(seen)
    is_live = what is not None and not what.state.is_final
    is_shared = own_id_of(message_id) in COALESCED_IDS  # with other sends of its key
    return visit.page(
        "message.html",
        topic=topic,
        id=message_id,
        what=what,
        seen=seen,
        body=body,
        headers=headers,
        fault=fault,
        history=history,
        reasons=await visit.ask(LOOK_S, why, topic, message_id) if is_live else (),
        # A refresh does not replace the form; without an id of its own it may be answered with 304.
        new_id="" if "hx-request" in visit.request.headers else new_id(),
        is_editable=body is not None and is_editable(body) and not is_shared,
        first_due_ms=min(
            (state.first_due_ms for state in seen.group_states if state.first_due_ms), default=None
        ),
        now_ms=snapshot.at_ms,
        stone=seen.tombstone if what and what.state.is_final else None,
    )


def _inspect(store: Store, topic: str, message_id: str) -> Flow[Inspection]:
    (seen,) = yield from store.run_by_id(Inspect(topic, [message_id]))
    return seen


class _History(NamedTuple):
    """A message's events, and how much of the journal was searched."""

    journal: journal_flows.Journal
    events: Sequence[StoryEvent] = ()
    searched: int = 0
    back_to_ms: int | None = None
    cursor: str | None = None


async def _history(
    visit: PageRequest, topic: str, message_id: str, seen: Inspection, now_ms: int
) -> _History:
    ask, cursor = visit.snapshots.ask, visit.query.get("before")
    journal = await ask(STORY_S, journal_flows.journal, topic)
    if cursor is not None and not POSITION.fullmatch(cursor):
        raise ConfigError(f"before={cursor!r} is not a journal position; omit it")
    if not journal.events:
        return _History(journal)
    born_ms = id_time_ms(message_id)
    # An id from the future means a wrong clock or an id of another format.
    is_plausible = born_ms is not None and born_ms <= now_ms + SLACK_MS
    read = await ask(
        STORY_S,
        story.read_back,
        topic,
        message_id,
        cursor,
        most=EVENTS_PER_LOOK,
        not_before_ms=max(0, born_ms - SLACK_MS) if born_ms and is_plausible else 0,
    )
    events = {event.entry: event for event in read.events}
    if read.cursor is not None:
        known = _instants(seen, born_ms, now_ms)
        near = await ask(STORY_S, story.around, topic, message_id, instants_ms=known)
        events |= {event.entry: event for event in near}
    found = sorted(events.values(), key=lambda event: entry_number(event.entry))
    has_first = any(event.state in ("sent", "restored") for event in found)
    following = None if has_first else read.cursor
    return _History(journal, found, read.looked, read.back_to_ms, following)


def _instants(seen: Inspection, born_ms: int | None, now_ms: int) -> list[int]:
    """Times at which the message's state says that something happened to it."""
    found = [born_ms, seen.waiting_due_ms]
    if seen.tombstone is not None:
        found += [seen.tombstone.at_ms, seen.tombstone.due_ms]
    for copy in seen.group_states:
        found += [copy.due_ms, copy.first_due_ms]
        if copy.idle_ms is not None:
            found.append(now_ms - copy.idle_ms)
    return sorted({instant for instant in found if instant is not None and instant <= now_ms})


def _content(seen: Inspection) -> tuple[Body | None, dict[str, str], str | None]:
    if not seen.envelope:
        return None, {}, None
    try:
        envelope = decode_envelope(seen.envelope)
    except InvalidMessage as error:
        return None, {}, str(error)
    return format_body(envelope.kind, envelope.body, most=BODY_BYTES), envelope.headers, None


async def _cancel(action: FormAction) -> Done:
    outcome = await action.visit.gateway.sender.cancel(action.topic, action.id())
    return Done("cancel", str(outcome))


async def _fire(action: FormAction) -> Done:
    outcome = await action.visit.gateway.sender.fire_now(action.topic, action.id())
    return Done("fire", str(outcome))


async def _reschedule(action: FormAction) -> Done:
    delay, at_local = action.text("delay"), action.text("at_local")
    outcome = await action.visit.gateway.sender.reschedule(
        action.topic,
        action.id(),
        delay=parse_duration(delay) if delay or not at_local else None,
        at_local=at_local or None,
        tz=action.text("tz") or None,
    )
    return Done("reschedule", str(outcome))


async def _again(action: FormAction) -> Done:
    """Send a copy with body, headers and policies of a message.

    The form chooses the new id, so a form that is sent twice sends one message.
    """
    gateway, fields = action.visit.gateway, action.fields
    _, envelope, options = await _stored(gateway, action.topic, action.id())
    new_id, delay = check_id(fields.get("new", "")), fields.get("delay") or None
    key = key_of(action.id())
    outgoing = Outgoing(_body(envelope), id=new_id, key=key, delay=delay, **options)
    sent = await gateway.sender.offer(action.topic, outgoing)
    return Done("again", str(sent.outcome), back=message_link(action.topic, sent.id))


async def _edit(action: FormAction) -> Done:
    """Replace a dead message by one with another body, due now.

    Id, headers and policies stay the same. Nothing changes if the message has left the garbage
    or if a group still handles it. Raises InvalidMessage if it had a JSON body and the new one is
    not JSON.
    """
    gateway, topic = action.visit.gateway, action.topic
    action.visit.token.require(Scope.PRODUCE, topic)
    seen, envelope, options = await _stored(gateway, topic, action.id())
    states = {held.state for held in seen.group_states}
    if "garbage" not in states or states & {"ready", "in_flight", "retry"}:
        return Done("edit", "duplicate")
    body = edited_body(envelope.kind, action.fields.get("body", ""))
    own_id, key = own_id_of(action.id()), key_of(action.id())
    outgoing = Outgoing(body, id=own_id, key=key, **options)
    sent = await gateway.sender.offer(topic, outgoing, OnDuplicate.KEEP_LIVE)
    return Done("edit", str(sent.outcome))


VERBS = {
    "cancel": Verb("cancelMessage", _cancel, "Cancel", FINAL),
    "fire": Verb("fireMessage", _fire),
    "reschedule": Verb("rescheduleMessage", _reschedule),
    "again": Verb("sendMessage", _again),
    "edit": Verb("requeueGarbage", _edit),
}
