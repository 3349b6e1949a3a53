"""The page of one message: state, body, history."""

from __future__ import annotations

import re

from starlette.responses import Response

from lisa.admin import journal as journal_flows
from lisa.admin import story
from lisa.admin.reading import entry_number
from lisa.admin.search import BODY_BYTES
from lisa.admin.story import StoryEvent
from lisa.core.model.envelope import decode_envelope, id_time_ms, new_id
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_id
from lisa.core.store.inspection import found
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.page import resending
from lisa.gateway.page.bodies import Body, shown
from lisa.gateway.page.snapshot_cache import LOOK_S
from lisa.gateway.page.view_context import PageRequest
from lisa.gateway.problems import ErrorResponse

EVENTS_PER_LOOK = 20_000
STORY_S = 2.0
_POSITION = re.compile(r"([0-9]{1,4}/)?([1-9][0-9]{0,17}-[0-9]{1,18})?")
SLACK_MS = 60_000
"""How far the clock that generated an id may be ahead of the Redis clock."""


async def show(visit: PageRequest) -> Response:
    """The page of a message."""
    topic = visit.topic()
    message_id = check_id(visit.request.path_params.get("id") or visit.query.get("id", ""))
    seen = await _look(visit, topic, message_id)
    what = found(topic, message_id, seen)
    snapshot = await visit.snapshot()
    history = await _history(visit, topic, message_id, seen, snapshot.at_ms)
    if what is None and not history.events and history.cursor is None:
        raise ErrorResponse(
            404,
            "unknown-message",
            f"message {message_id!r} is unknown on topic {topic!r}: it was never sent, or its "
            "tombstone has expired",
        )
    body, headers, fault = _content(seen)
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
        # A refresh does not replace the form; without an id of its own it may be answered with 304.
        new_id="" if "hx-request" in visit.request.headers else new_id(),
        is_editable=body is not None and resending.is_editable(body),
        first_due_ms=min(
            (one.first_due_ms for one in seen.group_states if one.first_due_ms), default=None
        ),
        now_ms=snapshot.at_ms,
        stone=seen.tombstone if what and what.state.value in _FINAL else None,
    )


async def _look(visit: PageRequest, topic: str, message_id: str) -> Inspection:
    """The message's state: fresh for a page load, shared between refreshes of open pages."""
    settler = visit.hub.settler
    if "hx-request" not in visit.request.headers:
        return await settler.look(topic, message_id)
    return await visit.snapshots.share(
        ("look", topic, message_id), LOOK_S, lambda: settler.look(topic, message_id)
    )


_FINAL = ("acked", "cancelled", "expired", "skipped", "purged")


class _History:
    """A message's events, and how much of the journal was searched."""

    def __init__(self, journal: journal_flows.Journal) -> None:
        self.journal = journal
        self.events: list[StoryEvent] = []
        self.searched = 0
        self.back_to_ms: int | None = None
        self.cursor: str | None = None


async def _history(
    visit: PageRequest, topic: str, message_id: str, seen: Inspection, now_ms: int
) -> _History:
    store = visit.hub.store
    journal = await visit.snapshots.flow(
        ("journal", topic), STORY_S, lambda: journal_flows.journal(store, topic)
    )
    history, cursor = _History(journal), visit.query.get("before")
    if cursor is not None and not _POSITION.fullmatch(cursor):
        raise ConfigError(f"before={cursor!r} is not a journal position; omit it")
    if not journal.events:
        return history
    born_ms = id_time_ms(message_id)
    # An id from the future means a wrong clock or an id of another format.
    is_plausible = born_ms is not None and born_ms <= now_ms + SLACK_MS
    not_before = max(0, born_ms - SLACK_MS) if born_ms and is_plausible else 0
    read = await visit.snapshots.flow(
        ("story", topic, message_id, cursor),
        STORY_S,
        lambda: story.read_back(
            store,
            topic,
            message_id,
            cursor=cursor,
            most=EVENTS_PER_LOOK,
            not_before_ms=not_before,
        ),
    )
    events = {event.entry: event for event in read.events}
    if read.cursor is not None:
        known = _instants(seen, born_ms, now_ms)
        near = await visit.snapshots.flow(
            ("near", topic, message_id),
            STORY_S,
            lambda: story.around(store, topic, message_id, known),
        )
        events |= {event.entry: event for event in near}
    history.events = sorted(events.values(), key=lambda event: entry_number(event.entry))
    history.searched, history.back_to_ms, history.cursor = read.looked, read.back_to_ms, read.cursor
    if any(event.state in ("sent", "restored") for event in history.events):
        history.cursor = None  # the first event was found
    return history


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
    return shown(envelope, most=BODY_BYTES), envelope.headers, None
