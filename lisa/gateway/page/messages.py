"""Messages of a topic in one state, page by page."""

from __future__ import annotations

from starlette.responses import Response

from lisa.admin.messages import State, list_messages
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import Visit

__all__ = ["show"]

PER_PAGE = 50


async def show(visit: Visit) -> Response:
    """The list."""
    line = await require_topic(visit)
    topic = line.topic
    store, scene = visit.hub.store, await visit.scene()
    state = next((one for one in State if one == visit.query.get("state")), State.WAITING)
    group = visit.query.get("group") or None
    page = await store.drive(
        list_messages(
            store, topic, state, group=None if state is State.WAITING else group,
            cursor=visit.query.get("cursor"), limit=PER_PAGE,
        )
    )  # fmt: skip
    return visit.page(
        "messages.html", topic=topic, state=state, states=list(State), group=group,
        groups=[one.name for one in line.counts.groups],
        rows=page.rows, cursor=page.cursor, now_ms=scene.at_ms,
    )  # fmt: skip
