"""Messages by their id alone.

Two of the earlier systems know no topics when it comes to ids: one pool held all jobs. Lisa's ids
are their topic's, and no index is kept for the sake of these paths; the topic is looked for. What
did not come by the same face is never taken for its job, however alike the ids; but these systems'
clients are handed out all of a topic's messages, and can say of each that it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from starlette.requests import Request

from lisa.core.envelope import decode_envelope
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.flow import Flow
from lisa.core.keys import check_id
from lisa.core.store import Store, chunks
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.doorman import is_foreign
from lisa.gateway.hub import ROLE, Hub
from lisa.gateway.problems import Problem

__all__ = ["Job", "find_job", "headers_of", "refuse_foreign_pages", "searched"]

TOPICS_PER_STEP = 250


class Job(NamedTuple):
    """Where an id was found; `is_live` is False where only its tombstone is left.

    `is_own`: it came by this face.
    """

    topic: str
    seen: Inspection
    is_own: bool

    @property
    def is_live(self) -> bool:
        """Whether it is not settled yet."""
        return bool(self.seen.envelope)

    @property
    def state(self) -> str:
        """Where it stands; of several groups, the first in the order of what still happens to it.

        A settled one says how it ended.
        """
        if not self.is_live:
            return self.seen.tombstone.state if self.seen.tombstone else "unknown"
        if self.seen.waiting_due_ms is not None:
            return "waiting"
        states = {place.state for place in self.seen.places}
        return next((one for one in _ORDER if one in states), "ready")


_ORDER = ("in_flight", "ready", "retry", "garbage")


async def find_job(
    hub: Hub,
    message_id: str,
    mark: str,
    topics: Iterable[Iterable[str]],
    *,
    or_handed_out: bool = False,
) -> Job | None:
    """The job of an id: among `topics`, looked at set after set until one has it.

    Live before settled; `or_handed_out` takes any message that a gateway's client holds, too, after
    this face's own. Raises ConfigError where it is live in several topics.
    """
    check_id(message_id)
    settled: Job | None = None
    others: list[Job] = []
    tried: set[str] = set()
    for some in topics:
        fresh = sorted(set(some) - tried)
        tried.update(fresh)
        jobs = [job for one in chunks(fresh, TOPICS_PER_STEP)
                for job in await _jobs(hub, message_id, mark, one)]  # fmt: skip
        if live := _only([job for job in jobs if job.is_live and job.is_own], message_id):
            return live
        others += [job for job in jobs if not job.is_own and or_handed_out and _is_held(job.seen)]
        settled = settled or next((job for job in jobs if not job.is_live), None)
    return _only(others, message_id) or settled


def _only(live: list[Job], message_id: str) -> Job | None:
    if len(live) > 1:
        names = ", ".join(job.topic for job in live)
        raise ConfigError(f"id {message_id!r} is known in topics {names}: say which, topic=...")
    return live[0] if live else None


def _is_held(seen: Inspection) -> bool:
    """Whether a gateway handed it out."""
    return any(one.state == "in_flight" and (one.consumer or "").startswith(f"{ROLE}-")
               for one in seen.places)  # fmt: skip


async def _jobs(hub: Hub, message_id: str, mark: str, topics: Iterable[str]) -> list[Job]:
    topics = list(topics)
    if not topics:
        return []
    known = await hub.store.drive(_known(hub.store, topics, message_id))
    found = []
    for topic in topics:
        if topic not in known:
            continue
        seen = await hub.settler.look(topic, message_id)
        if seen.envelope:
            found.append(Job(topic, seen, is_own=mark in headers_of(seen)))
        elif seen.tombstone:
            found.append(Job(topic, seen, is_own=True))
    return found


def _known(store: Store, topics: Sequence[str], message_id: str) -> Flow[set[str]]:
    """The topics of which some shard knows an id."""
    layouts = yield from store.layouts(topics)
    places = [
        (topic, layout.place(topic, message_id, count))
        for topic, layout in zip(topics, layouts, strict=True)
        for count in dict.fromkeys((layout.shards, *layout.older))
    ]
    replies = yield from store.commands([
        ("EXISTS", key(message_id)) for _, place in places
        for keys in [store.keys.topic(place)] for key in (keys.body, keys.done)
    ])  # fmt: skip
    return {topic for i, (topic, _) in enumerate(places) if replies[2 * i] + replies[2 * i + 1]}


def headers_of(seen: Inspection) -> dict[str, str]:
    """The headers of a live message; none where a foreign hand made it unreadable."""
    try:
        return decode_envelope(seen.envelope).headers
    except InvalidMessage:
        return {}


def searched(
    hub: Hub, request: Request, scope: Scope, first: Iterable[str], known: Iterable[str]
) -> Iterator[list[str]]:
    """The sets of topics to search: the likely ones, then all that the token allows.

    Raises Unauthorized, Forbidden.
    """
    token = hub.token(request, compat=True)
    if scope not in token.scopes:
        raise Forbidden(f"token {token.name!r} does not allow scope {scope}")
    yield [topic for topic in first if token.allows(scope, topic)]
    yield [topic for topic in known if token.allows(scope, topic)]


def refuse_foreign_pages(request: Request) -> None:
    """These systems change things by GET, which a page of any other site could have fetched.

    Nor may a HEAD do what the GET does: its answer, a job perhaps, would be seen by nobody.
    """
    if request.method == "HEAD":
        raise Problem(405, "method", "these paths take no HEAD")
    headers = dict(request.scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if is_foreign(origin, host, headers):
        raise Problem(403, "origin", f"a page of {origin or 'another site'} may not do this")
