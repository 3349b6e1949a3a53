"""Searches live messages by a prefix of their id, or by text in headers and body.

There is no index: each call looks at a limited number of messages, for a limited time, and returns
a cursor for the next call. The archive is searched by `lisa pipeline search`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lisa.admin.messages import LiveState, MessageSource, candidates
from lisa.admin.shards import shards
from lisa.admin.story import Preview, previews
from lisa.core.model.errors import ConfigError
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text

STEP = 200
"""Messages that are read at once."""

BODY_BYTES = 8 * 1024
"""Only the beginning of a body is searched."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A message that matches. `where`: the part that matches, such as `body` or `header x`."""

    topic: str
    id: str
    state: LiveState
    group: str
    where: str


@dataclass(frozen=True, slots=True)
class SearchPage:
    """The result of one call.

    looked: number of messages that were examined; `topic` and `state` were the last ones.
    cursor: where the next call continues; None at the end.
    """

    hits: tuple[SearchHit, ...]
    looked: int
    topic: str
    state: LiveState
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageQuery:
    """What to search for. in_text: in headers and body, ignoring case, instead of the id."""

    wanted: str
    in_text: bool = False


def search(
    store: Store,
    topics: Sequence[str],
    query: MessageQuery,
    *,
    cursor: str | None = None,
    most: int = 20_000,
    most_hits: int = 50,
    within_s: float = 1.5,
) -> Flow[SearchPage]:
    """Search topics in the order of their names.

    Ends after `most` messages, `most_hits` hits or `within_s` seconds, but not within a step.
    Raises ConfigError for an invalid cursor, and LisaError.
    """
    start = _read_cursor(cursor)
    ends, looked = time.monotonic() + within_s, 0
    hits: dict[tuple[str, str], SearchHit] = {}
    last = ("", LiveState.WAITING)
    for topic in sorted(topics):
        if start and topic < start[0]:
            continue
        for source in (yield from _sources(store, topic, start)):
            position: str | None = start[-1] if start and start[:4] == _name(topic, source) else ""
            last = (topic, source.state)
            while position is not None:
                if looked >= most or len(hits) >= most_hits or time.monotonic() >= ends:
                    here = json.dumps([*_name(topic, source), position])
                    return SearchPage(tuple(hits.values()), looked, *last, here)
                try:
                    found, position = yield from candidates(store, source, position, STEP)
                except ValueError:
                    raise _unknown_cursor(cursor) from None
                looked += len(found)
                ids = [text(one.id) for one in found if one.id]
                for one, where in (yield from _matching(store, topic, ids, query)):
                    hit = SearchHit(topic, one, source.state, source.group, where)
                    hits.setdefault((topic, one), hit)
    return SearchPage(tuple(hits.values()), looked, *last, None)


def _name(topic: str, source: MessageSource) -> list[str]:
    return [topic, source.shard, str(source.state), source.group]


def _read_cursor(cursor: str | None) -> list[str] | None:
    if cursor is None:
        return None
    try:
        start = json.loads(cursor)
    except (ValueError, RecursionError):
        start = None
    if not (isinstance(start, list) and len(start) == 5 and all(isinstance(x, str) for x in start)):
        raise _unknown_cursor(cursor)
    return start


def _unknown_cursor(cursor: str | None) -> ConfigError:
    return ConfigError(f"{(cursor or '')[:80]!r} is not a cursor of this search; omit it")


def _sources(store: Store, topic: str, start: list[str] | None) -> Flow[list[MessageSource]]:
    """Where live messages of a topic may be, from the cursor's place on."""
    groups = yield from store.groups(topic)
    found = []
    for shard in (yield from shards(store, topic)):
        found.append(MessageSource(shard, "", LiveState.WAITING, None))
        for state in (LiveState.READY, LiveState.IN_FLIGHT, LiveState.RETRY, LiveState.GARBAGE):
            found += [MessageSource(shard, group, state, None) for group in groups]
    places = [_name(topic, one) for one in found]
    if start and start[:4] in places:  # else the group or shard is gone, or it is another topic
        return found[places.index(start[:4]) :]
    return found


def _matching(
    store: Store, topic: str, ids: Sequence[str], query: MessageQuery
) -> Flow[list[tuple[str, str]]]:
    """The ids that match, and the part that matches."""
    if not query.in_text:
        return [(one, "id") for one in ids if one.startswith(query.wanted)]
    found = yield from previews(store, topic, ids, BODY_BYTES)
    return [
        (one, where)
        for one, preview in zip(ids, found, strict=True)
        if (where := _part(preview, query.wanted.lower()))
    ]


def _part(preview: Preview | None, wanted: str) -> str:
    """The part of a message that contains a text in lower case; empty if none does."""
    if preview is None or preview.envelope is None:
        return ""
    for name, value in preview.envelope.headers.items():
        if wanted in name.lower() or wanted in value.lower():
            return f"header {name}"
    body = preview.envelope.body.decode("utf-8", "replace")
    return "body" if wanted in body.lower() else ""
