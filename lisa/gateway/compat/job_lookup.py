"""Finds a message by its id, without its topic.

mykit-delay and delay-queue have one pool of jobs, so their requests name no topic. Lisa's ids are
per topic, and no index by id exists, so the topics are searched. Only messages sent through the
same API count as its jobs, even if another message has the same id. Clients of these APIs do
receive all messages of a topic, however, and may finish any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from starlette.requests import Request

from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_id
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.context import ROLE, GatewayContext

TOPICS_PER_STEP = 250


class FoundJob(NamedTuple):
    """A message or tombstone found by its id. `is_own`: it was sent through the same API."""

    topic: str
    seen: Inspection
    is_own: bool

    @property
    def is_live(self) -> bool:
        """Whether the message is not settled; otherwise only its tombstone was found."""
        return bool(self.seen.envelope)

    @property
    def state(self) -> str:
        """The message's state. With several groups, the first of: in flight, ready, retry, garbage.

        For a settled message, how it was settled.
        """
        if not self.is_live:
            return self.seen.tombstone.state if self.seen.tombstone else "unknown"
        if self.seen.waiting_due_ms is not None:
            return "waiting"
        states = {copy.state for copy in self.seen.group_states}
        return next((one for one in _ORDER if one in states), "ready")


_ORDER = ("in_flight", "ready", "retry", "garbage")


async def find_job(
    hub: GatewayContext,
    request: Request,
    scope: Scope,
    message_id: str,
    topic: str | None,
    *,
    mark: str,
    likely: Callable[[Sequence[str]], Iterable[str]],
) -> FoundJob | None:
    """Find the job with an id, in `topic` or else in all topics; None if there is none.

    Searches the `likely` ones of the known topics first. With the scope `consume`, also accepts
    messages of other APIs that a gateway has delivered, with lower priority. Raises Unauthorized,
    Forbidden, InvalidMessage, or ConfigError if several topics have a live job.
    """
    topics: Iterable[Iterable[str]]
    if topic is not None:
        hub.require(request, scope, topic, compat=True)
        topics = [[topic]]
    else:
        hub.require(request, None, compat=True)
        known = await hub.store.drive(hub.store.topics())
        topics = _topics_to_search(hub, request, scope, likely(known), known)
    return await _search(hub, message_id, mark, topics, or_handed_out=scope is Scope.CONSUME)


async def _search(
    hub: GatewayContext,
    message_id: str,
    mark: str,
    topics: Iterable[Iterable[str]],
    *,
    or_handed_out: bool,
) -> FoundJob | None:
    """Search sets of topics in order, and prefer live jobs to settled ones."""
    check_id(message_id)
    settled: FoundJob | None = None
    others: list[FoundJob] = []
    tried: set[str] = set()
    for some in topics:
        fresh = sorted(set(some) - tried)
        tried.update(fresh)
        jobs = [
            job
            for one in chunks(fresh, TOPICS_PER_STEP)
            for job in await _jobs(hub, message_id, mark, one)
        ]
        if live := _only([job for job in jobs if job.is_live and job.is_own], message_id):
            return live
        others += [job for job in jobs if not job.is_own and or_handed_out and _is_held(job.seen)]
        settled = settled or next((job for job in jobs if not job.is_live), None)
    return _only(others, message_id) or settled


def _only(live: list[FoundJob], message_id: str) -> FoundJob | None:
    if len(live) > 1:
        names = ", ".join(job.topic for job in live)
        raise ConfigError(f"id {message_id!r} exists in several topics ({names}); add topic=...")
    return live[0] if live else None


def _is_held(seen: Inspection) -> bool:
    """Whether the message is in flight through a gateway."""
    return any(
        one.state == "in_flight" and (one.consumer or "").startswith(f"{ROLE}-")
        for one in seen.group_states
    )


async def _jobs(
    hub: GatewayContext, message_id: str, mark: str, topics: Sequence[str]
) -> list[FoundJob]:
    known = await hub.store.drive(_known(hub.store, topics, message_id))
    found = []
    for topic in topics:
        if topic not in known:
            continue
        seen = await hub.settler.look(topic, message_id)
        if seen.envelope:
            found.append(FoundJob(topic, seen, is_own=mark in headers_of(seen)))
        elif seen.tombstone:
            found.append(FoundJob(topic, seen, is_own=True))
    return found


def _known(store: Store, topics: Sequence[str], message_id: str) -> Flow[set[str]]:
    """The topics that have a message or tombstone with an id."""
    layouts = yield from store.layouts(list(map(Topic, topics)))
    shards = [
        (topic, shard)
        for topic, layout in zip(topics, layouts, strict=True)
        for shard in layout.shards_of_id(Topic(topic), message_id)
    ]
    replies = yield from store.commands(
        [
            ("EXISTS", key(message_id))
            for _, shard in shards
            for keys in [store.keys.topic(shard)]
            for key in (keys.body, keys.done)
        ]
    )
    return {topic for i, (topic, _) in enumerate(shards) if replies[2 * i] + replies[2 * i + 1]}


def headers_of(seen: Inspection) -> dict[str, str]:
    """The headers of a live message; empty if its envelope is damaged."""
    try:
        return decode_envelope(seen.envelope).headers
    except InvalidMessage:
        return {}


def _topics_to_search(
    hub: GatewayContext, request: Request, scope: Scope, first: Iterable[str], known: Iterable[str]
) -> Iterator[list[str]]:
    """The sets of topics to search: likely topics first, then all that the token allows.

    Raises Unauthorized or Forbidden.
    """
    token = hub.token(request, compat=True)
    if not token.grants(scope):
        raise Forbidden(f"token {token.name!r} does not allow scope {scope}")
    yield [topic for topic in first if token.allows(scope, topic)]
    yield [topic for topic in known if token.allows(scope, topic)]
