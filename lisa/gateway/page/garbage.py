"""What was given up: look through it, requeue or purge one, some or all that match."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from lisa.admin import garbage as garbage_flows
from lisa.admin import story
from lisa.admin.garbage import Selection
from lisa.admin.messages import Row
from lisa.core.clock import duration_ms, parse_duration
from lisa.core.keys import check_group
from lisa.gateway.page.bodies import Body, shown
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import Visit

__all__ = ["selection_of", "show"]

PER_PAGE = 25
PREVIEW_BYTES = 4_096
MOST_LOOKED = 5_000
"""A filter that matches few looks at no more in one request; the next page goes on."""


@dataclass(frozen=True, slots=True)
class Dead:
    """One dead message, and what its body looks like."""

    row: Row
    body: Body | None
    fault: str | None


def selection_of(topic: str, *, group: str, reason: str, older: str, now_ms: int) -> Selection:
    """What a filter's fields mean; empty ones mean everything. Raises InvalidMessage."""
    before = now_ms - duration_ms(parse_duration(older)) if older else None
    return Selection(
        topic=topic, group=check_group(group) if group else None, died_before_ms=before,
        reason=reason or None,
    )  # fmt: skip


async def show(visit: Visit) -> Response:
    """A page of garbage, the oldest first."""
    line = await require_topic(visit)
    topic = line.topic
    store, scene = visit.hub.store, await visit.scene()
    fields = {name: visit.query.get(name, "").strip() for name in ("group", "reason", "older")}
    selection = selection_of(topic, **fields, now_ms=scene.at_ms)
    found = await store.drive(
        garbage_flows.listed(
            store, selection, cursor=visit.query.get("cursor"), limit=PER_PAGE, most=MOST_LOOKED
        )
    )
    ids = [row.id for row in found.rows]
    previews = await store.drive(story.previews(store, topic, ids, PREVIEW_BYTES))
    dead = []
    for row, one in zip(found.rows, previews, strict=True):
        body = None
        if one is not None and one.envelope is not None:
            body = shown(one.envelope, most=PREVIEW_BYTES, whole=one.whole)
        dead.append(Dead(row, body, one.fault if one else "its body is gone"))
    groups = [group.name for group in line.counts.groups]
    return visit.page(
        "garbage.html", topic=topic, dead=dead, cursor=found.cursor, fields=fields,
        groups=groups, now_ms=scene.at_ms, line=line, is_filtered=any(fields.values()),
    )  # fmt: skip
