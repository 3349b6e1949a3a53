"""Consumers and managers: who is alive, and what each consumer holds."""

from __future__ import annotations

from starlette.responses import Response

from lisa.admin import roles
from lisa.core.keys import check_topic
from lisa.core.presence import ConsumerPresence
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.page.visits import Visit

__all__ = ["consumers", "managers"]

MOST = 500
MOST_HELD = 200


async def consumers(visit: Visit) -> Response:
    """All consumers that the visitor may see, or one and what it holds."""
    scene = await visit.scene()
    seen = [
        (one, one.record) for one in scene.consumers
        if isinstance(one.record, ConsumerPresence) and visit.token.sees(one.record.topic)
    ]  # fmt: skip
    topic, name = visit.query.get("topic"), visit.query.get("name")
    if topic and name:
        if not visit.token.sees(check_topic(topic)):
            raise Forbidden(f"token {visit.token.name!r} does not see topic {topic!r}")
        one = next((one for one, r in seen if (r.topic, r.name) == (topic, name)), None)
        store = visit.hub.store
        held = await store.drive(roles.held(store, topic, name, limit=MOST_HELD))
        return visit.page(
            "consumer.html", topic=topic, name=name, one=one, held=held, most=MOST_HELD,
            now_ms=scene.at_ms,
        )  # fmt: skip
    seen.sort(key=lambda pair: (pair[0].alive, pair[1].topic, pair[1].name))
    return visit.page(
        "consumers.html", people=[one for one, _ in seen[:MOST]], left_out=max(0, len(seen) - MOST),
        alive=sum(one.alive for one, _ in seen), now_ms=scene.at_ms,
    )  # fmt: skip


async def managers(visit: Visit) -> Response:
    """All managers."""
    scene = await visit.scene()
    return visit.page(
        "managers.html", people=scene.managers, alive=sum(one.alive for one in scene.managers),
        now_ms=scene.at_ms, server=scene.server,
        is_operator=visit.token.allows(Scope.OPERATE, None),
    )  # fmt: skip
