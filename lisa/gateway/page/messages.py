"""The list of a topic's messages in one state, in pages."""

from __future__ import annotations

from starlette.responses import Response

from lisa.admin.messages import LiveState, list_messages
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.view_context import PageRequest

PER_PAGE = 50


async def show(visit: PageRequest) -> Response:
    """The message list page."""
    line = await require_topic(visit)
    topic = line.topic
    store, snapshot = visit.hub.store, await visit.snapshot()
    state = next((one for one in LiveState if one == visit.query.get("state")), LiveState.WAITING)
    group = visit.query.get("group") or None
    page = await store.drive(
        list_messages(
            store,
            topic,
            state,
            group=None if state is LiveState.WAITING else group,
            cursor=visit.query.get("cursor"),
            limit=PER_PAGE,
        )
    )
    return visit.page(
        "messages.html",
        topic=topic,
        state=state,
        states=list(LiveState),
        group=group,
        groups=[one.name for one in line.counts.groups],
        rows=page.rows,
        cursor=page.cursor,
        now_ms=snapshot.at_ms,
    )
