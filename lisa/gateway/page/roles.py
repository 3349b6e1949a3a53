"""The pages of consumers and managers: their state, and a consumer's messages in flight."""

from __future__ import annotations

from starlette.responses import Response

from lisa.admin import roles
from lisa.gateway.access import Scope
from lisa.gateway.page import attention
from lisa.gateway.page.visits import PageRequest

MOST = 500
MOST_HELD = 200


async def consumers(visit: PageRequest) -> Response:
    """The consumers that the visitor may see, or one consumer and its messages in flight."""
    snapshot = await visit.snapshots.current()
    seen = [consumer for consumer in snapshot.consumers if visit.token.sees(consumer.record.topic)]
    topic, name = visit.query.get("topic"), visit.query.get("name")
    if topic and name:
        visit.token.allowed_topic(topic)
        found = (
            consumer
            for consumer in seen
            if (consumer.record.topic, consumer.record.name) == (topic, name)
        )
        held = await visit.gateway.ask(roles.held, topic, name, limit=MOST_HELD)
        return visit.page(
            "consumer.html",
            topic=topic,
            name=name,
            one=next(found, None),
            held=held,
            most=MOST_HELD,
        )
    seen.sort(
        key=lambda consumer: (
            consumer.alive,
            consumer.is_unknown,
            consumer.record.topic,
            consumer.record.name,
        )
    )
    return visit.page(
        "consumers.html",
        roles=seen[:MOST],
        left_out=max(0, len(seen) - MOST),
        alive=sum(consumer.alive for consumer in seen),
        unknown=sum(consumer.state == "unknown" for consumer in seen),
        gone=sum(consumer.state == "gone" for consumer in seen),
    )


async def managers(visit: PageRequest) -> Response:
    """The manager page."""
    is_operator = visit.token.allows(Scope.OPERATE, None)
    snapshot = (await visit.snapshots.current()).shown_to(operators=is_operator)
    return visit.page(
        "managers.html",
        roles=snapshot.managers,
        relays=snapshot.relays,
        alive=sum(manager.alive for manager in snapshot.managers),
        server=snapshot.server,
        problems=attention.of_managers(snapshot),
        is_operator=is_operator,
    )
