"""The search for messages: by id in all topics at once, by a prefix or by text with a cursor.

Searches live messages, or the archive if the gateway knows one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.responses import RedirectResponse, Response

from lisa.admin import search
from lisa.admin.search import MessageQuery, SearchPage, unescaped
from lisa.core.model.display import visible
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import check_id, check_topic
from lisa.core.model.sharding import Topic, topic_of
from lisa.core.store.inspection import found
from lisa.core.store.store import chunks
from lisa.core.transitions.inspect import Inspect
from lisa.gateway.page import archived
from lisa.gateway.page.archived import ArchivePage, ArchiveQuery
from lisa.gateway.page.rendering import message_link
from lisa.gateway.page.view_context import PageRequest

MOST_TOPICS = 2_000
TOPICS_PER_STEP = 100
MOST_IDS = 20_000
MOST_BODIES = 2_000
"""Messages that one request examines at most, in a search by id and by text."""

_archive_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
"""Searches of the archive run one after the other, because each may use all cores."""


async def show(visit: PageRequest) -> Response:
    """Search one topic or all topics; a single message with the exact id redirects to its page."""
    wanted = visit.query.get("q", "").strip()
    in_text = visit.query.get("in") == "text"
    named, cursor = visit.query.get("topic") or None, visit.query.get("cursor")
    snapshot = await visit.snapshot()
    topics = [check_topic(named)] if named else list(snapshot.lines)
    topics = [topic for topic in topics if visit.token.sees(topic)]
    exact: list[str] = []
    page: SearchPage | ArchivePage | None = None
    known = visit.hub.settings.gateway_server.archive
    archive = known if visit.query.get("where") == "archive" else None
    if wanted and archive is not None:
        query = ArchiveQuery(wanted=wanted, in_text=in_text, topic=named)
        page = await _archived(visit, archive, query)
    elif wanted and not in_text and cursor is None:
        exact = await _exact(visit, topics[:MOST_TOPICS], check_id(wanted))
        written = unescaped(wanted)  # as a page shows an id with hiding characters
        if not exact and visible(written) == wanted != written:
            exact, wanted = await _exact(visit, topics[:MOST_TOPICS], check_id(written)), written
        if len(exact) == 1 and "in" not in visit.query:
            return RedirectResponse(message_link(exact[0], wanted), 303)
    if wanted and archive is None:
        flow = search.search(
            visit.hub.store,
            topics,
            MessageQuery(wanted=wanted, in_text=in_text),
            cursor=cursor,
            most=MOST_BODIES if in_text else MOST_IDS,
        )
        page = await visit.hub.store.drive(flow)
    return visit.page(
        "search.html",
        wanted=wanted,
        in_text=in_text,
        has_archive=known is not None,
        in_archive=archive is not None,
        named=named,
        exact=exact,
        page=page,
        topics=len(topics),
        left_out=max(0, len(topics) - MOST_TOPICS),
        names=[topic for topic in snapshot.lines if visit.token.sees(topic)],
        body_kib=search.BODY_BYTES // 1024,
    )


async def _archived(visit: PageRequest, archive: str, query: ArchiveQuery) -> ArchivePage:
    """Search the archive, for topics that the visitor may see. Raises ConfigError."""
    search_it = partial(
        archived.search, archive, query, sees=visit.token.sees, cursor=visit.query.get("cursor")
    )
    return await asyncio.get_running_loop().run_in_executor(_archive_thread, search_it)


async def _exact(visit: PageRequest, topics: list[str], message_id: str) -> list[str]:
    """The topics that have a message with this id. Raises LisaError."""
    store, hits = visit.hub.store, []
    for some in chunks(topics, TOPICS_PER_STEP):
        layouts = await store.drive(store.layouts(list(map(Topic, some))))
        looks = [
            Inspect(shard, [message_id], bodies=False)
            for topic, layout in zip(some, layouts, strict=True)
            for shard in layout.shards_of_id(Topic(topic), message_id)
        ]
        answers = await store.drive(store.run_many(looks))
        for look, answer in zip(looks, answers, strict=True):
            if isinstance(answer, LisaError):
                raise answer
            if found(topic_of(look.topic), message_id, answer[0]) is not None:
                hits.append(topic_of(look.topic))
    return list(dict.fromkeys(hits))
