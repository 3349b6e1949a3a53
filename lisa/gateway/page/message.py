"""One message: where it stands, what it carries, and its whole story; and how it is found."""

from __future__ import annotations

from starlette.responses import RedirectResponse, Response

from lisa.admin import journal as journal_flows
from lisa.admin import story
from lisa.admin.reading import entry_number
from lisa.admin.story import Event
from lisa.core.envelope import decode_envelope, id_time_ms
from lisa.core.errors import ConfigError, InvalidMessage, LisaError
from lisa.core.keys import check_id, check_topic
from lisa.core.shards import base
from lisa.core.store import chunks
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.gateway.page.bodies import Body, shown
from lisa.gateway.page.rendering import message_link
from lisa.gateway.page.sight import LOOK_S
from lisa.gateway.page.visits import Visit
from lisa.gateway.problems import Problem
from lisa.producer.found import found

__all__ = ["search", "show"]

BODY_BYTES = 64 * 1024
MOST_TOPICS = 2_000
TOPICS_PER_STEP = 100
EVENTS_PER_LOOK = 20_000
STORY_S = 2.0
SLACK_MS = 60_000
"""How far the clock of whoever made an id may be ahead of Redis's."""


async def search(visit: Visit) -> Response:
    """Find an id in one topic or in all; the only one is shown at once."""
    wanted = visit.query.get("q", "").strip()
    if not wanted:
        return visit.page("search.html", wanted="", hits=None, looked=0, left_out=0)
    message_id = check_id(wanted)
    named = visit.query.get("topic")
    scene = await visit.scene()
    topics = [check_topic(named)] if named else list(scene.lines)
    topics = [topic for topic in topics if visit.token.sees(topic)]
    hits = await _hits(visit, topics[:MOST_TOPICS], message_id)
    if len(hits) == 1:
        return RedirectResponse(message_link(hits[0], message_id), 303)
    return visit.page(
        "search.html", wanted=message_id, hits=hits, looked=min(len(topics), MOST_TOPICS),
        left_out=max(0, len(topics) - MOST_TOPICS),
    )  # fmt: skip


async def _hits(visit: Visit, topics: list[str], message_id: str) -> list[str]:
    """The topics that know an id. Raises LisaError."""
    store, hits = visit.hub.store, []
    for some in chunks(topics, TOPICS_PER_STEP):
        layouts = await store.drive(store.layouts(some))
        looks = [
            Inspect(layout.place(topic, message_id, count), [message_id], bodies=False)
            for topic, layout in zip(some, layouts, strict=True)
            for count in dict.fromkeys((layout.shards, *layout.older))
        ]
        answers = await store.drive(store.run_many(looks))
        for look, answer in zip(looks, answers, strict=True):
            if isinstance(answer, LisaError):
                raise answer
            if found(base(look.topic), message_id, answer[0]) is not None:
                hits.append(base(look.topic))
    return list(dict.fromkeys(hits))


async def show(visit: Visit) -> Response:
    """A message's page."""
    topic = visit.topic()
    message_id = check_id(visit.request.path_params.get("id") or visit.query.get("id", ""))
    seen = await _look(visit, topic, message_id)
    what = found(topic, message_id, seen)
    scene = await visit.scene()
    told = await _story(visit, topic, message_id, seen, scene.at_ms)
    if what is None and not told.events and told.cursor is None:
        raise Problem(404, "unknown-message", f"nothing is known of message {message_id!r} on topic"
                      f" {topic!r}: it never was, or its tombstone is gone")  # fmt: skip
    body, headers, fault = _content(seen)
    return visit.page(
        "message.html", topic=topic, id=message_id, what=what, seen=seen, body=body,
        headers=headers, fault=fault, told_story=told, now_ms=scene.at_ms,
        stone=seen.tombstone if what and what.state.value in _FINAL else None,
    )  # fmt: skip


async def _look(visit: Visit, topic: str, message_id: str) -> Inspection:
    """Where it stands: at this instant for who comes, shared by all who stay and watch."""
    settler = visit.hub.settler
    if "hx-request" not in visit.request.headers:
        return await settler.look(topic, message_id)
    return await visit.sight.share(
        ("look", topic, message_id), LOOK_S, lambda: settler.look(topic, message_id)
    )


_FINAL = ("acked", "cancelled", "expired", "purged")


class _Story:
    """What is known of the past, and how much of the journal was looked at."""

    def __init__(self, journal: journal_flows.Journal) -> None:
        self.journal = journal
        self.events: list[Event] = []
        self.looked = 0
        self.back_to_ms: int | None = None
        self.cursor: str | None = None


async def _story(
    visit: Visit, topic: str, message_id: str, seen: Inspection, now_ms: int
) -> _Story:
    store = visit.hub.store
    journal = await visit.sight.flow(
        ("journal", topic), STORY_S, lambda: journal_flows.journal(store, topic)
    )
    told, cursor = _Story(journal), visit.query.get("before")
    if not journal.events:
        return told
    born_ms = id_time_ms(message_id)
    # An id from the future tells only of a clock that is wrong, or of a foreign maker.
    is_told = born_ms is not None and born_ms <= now_ms + SLACK_MS
    not_before = max(0, born_ms - SLACK_MS) if born_ms and is_told else 0
    try:
        read = await visit.sight.flow(
            ("story", topic, message_id, cursor), STORY_S,
            lambda: story.read_back(
                store, topic, message_id, cursor=cursor, most=EVENTS_PER_LOOK,
                not_before_ms=not_before,
            ),
        )  # fmt: skip
    except ValueError:
        raise ConfigError(f"{cursor!r} is no place in the journal; leave it out") from None
    events = {event.entry: event for event in read.events}
    if read.cursor is not None:
        known = _instants(seen, born_ms, now_ms)
        near = await visit.sight.flow(
            ("near", topic, message_id), STORY_S,
            lambda: story.around(store, topic, message_id, known),
        )  # fmt: skip
        events |= {event.entry: event for event in near}
    told.events = sorted(events.values(), key=lambda event: entry_number(event.entry))
    told.looked, told.back_to_ms, told.cursor = read.looked, read.back_to_ms, read.cursor
    if any(event.state in ("sent", "restored") for event in told.events):
        told.cursor = None  # its beginning was found
    return told


def _instants(seen: Inspection, born_ms: int | None, now_ms: int) -> list[int]:
    """When something must have happened to a message, as far as its present state tells."""
    found = [born_ms, seen.waiting_due_ms]
    if seen.tombstone is not None:
        found += [seen.tombstone.at_ms, seen.tombstone.due_ms]
    for place in seen.places:
        found.append(place.due_ms)
        if place.idle_ms is not None:
            found.append(now_ms - place.idle_ms)
    return sorted({instant for instant in found if instant is not None and instant <= now_ms})


def _content(seen: Inspection) -> tuple[Body | None, dict[str, str], str | None]:
    if not seen.envelope:
        return None, {}, None
    try:
        envelope = decode_envelope(seen.envelope)
    except InvalidMessage as error:
        return None, {}, str(error)
    return shown(envelope, most=BODY_BYTES), envelope.headers, None
