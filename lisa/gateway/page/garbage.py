"""The garbage page: lists dead messages, and offers to requeue or purge them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.responses import Response

from lisa.admin import garbage_reasons, story
from lisa.admin.garbage import GarbageSelection
from lisa.admin.messages import Row
from lisa.core.model.clock import duration_ms, parse_duration
from lisa.core.model.keys import check_group
from lisa.gateway.page import run_records
from lisa.gateway.page.bodies import Body, shown
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.view_context import PageRequest

PER_PAGE = 25
PREVIEW_BYTES = 4_096
MOST_REASONS = 20
REASONS_S = 3.0
MOST_EXAMINED = 5_000
"""Messages that one request examines at most; the next page continues from there."""


@dataclass(frozen=True, slots=True)
class Dead:
    """One dead message and a preview of its body."""

    row: Row
    body: Body | None
    fault: str | None


FIELDS = ("group", "reason", "older", "kind")
"""The fields of the filter form."""


def selection_of(
    topic: str, *, group: str, reason: str, older: str, kind: str, now_ms: int
) -> GarbageSelection:
    """The selection for a filter form; empty fields do not filter. Raises InvalidMessage."""
    before = now_ms - duration_ms(parse_duration(older)) if older else None
    return GarbageSelection(
        topic=topic,
        group=check_group(group) if group else None,
        died_before_ms=before,
        reason=reason or None,
        kind=kind or None,
    )


async def show(visit: PageRequest) -> Response:
    """The kinds of reasons, and a page of dead messages, newest first."""
    line = await require_topic(visit)
    topic = line.topic
    store, snapshot = visit.hub.store, await visit.snapshot()
    fields = {name: visit.query.get(name, "").strip() for name in FIELDS}
    selection = selection_of(topic, **fields, now_ms=snapshot.at_ms)
    found = await store.drive(
        garbage_reasons.newest(
            store, selection, cursor=visit.query.get("cursor"), limit=PER_PAGE, most=MOST_EXAMINED
        )
    )
    ids = [row.id for row in found.rows]
    previews = await store.drive(story.previews(store, topic, ids, PREVIEW_BYTES))
    dead = []
    for row, one in zip(found.rows, previews, strict=True):
        body = None
        if one is not None and one.envelope is not None:
            body = shown(one.envelope, most=PREVIEW_BYTES, whole=one.whole)
        dead.append(Dead(row, body, one.fault if one else "the body was deleted"))
    whole = replace(selection, kind=None)
    reasons, examined = await visit.snapshots.flow(
        ("reasons", topic, *(fields[name] for name in FIELDS if name != "kind")),
        REASONS_S,
        lambda: garbage_reasons.by_reason(store, whole, most=MOST_EXAMINED),
    )
    groups = [group.name for group in line.counts.groups]
    return visit.page(
        "garbage.html",
        topic=topic,
        dead=dead,
        cursor=found.cursor,
        fields=fields,
        groups=groups,
        now_ms=snapshot.at_ms,
        line=line,
        reasons=reasons[:MOST_REASONS],
        examined=examined,
        run=await store.drive(run_records.read(store, topic)),
        is_filtered=any(fields.values()),
    )
