"""Who is alive: consumers and managers."""

from __future__ import annotations

from starlette.responses import Response

from lisa.admin import roles
from lisa.core.keys import check_topic
from lisa.core.presence import ConsumerPresence, ManagerPresence
from lisa.gateway.access import Forbidden
from lisa.gateway.native.models import (
    ConsumerAnswer,
    ConsumersAnswer,
    ManagerAnswer,
    ManagersAnswer,
    NoFields,
    RolesQuery,
)
from lisa.gateway.native.operations import Call, answer

__all__ = ["consumers", "managers"]


async def consumers(call: Call[RolesQuery, None]) -> Response:
    """Consumers of the topics that the token sees."""
    store, topic = call.hub.store, call.query.topic
    if topic is not None and not call.token.sees(check_topic(topic)):
        raise Forbidden(f"token {call.token.name!r} does not allow topic {topic!r}")
    names = [topic] if topic else await store.drive(store.topics())
    seen = [name for name in names if call.token.sees(name)]
    found = await store.drive(roles.consumers(store, seen)) if seen else []
    return answer(
        ConsumersAnswer(consumers=[
            ConsumerAnswer(
                name=one.record.name, topic=one.record.topic, group=one.record.group or None,
                host=one.record.host, pid=one.record.pid, started_ms=one.record.started_ms,
                seen_ms=one.record.seen_ms, silent_ms=one.silent_ms, alive=one.alive,
                concurrency=one.record.concurrency, running=one.record.running,
                held=one.record.held, handled=one.record.handled, state=one.record.state,
            )
            for one in found if isinstance(one.record, ConsumerPresence)
        ])
    )  # fmt: skip


async def managers(call: Call[NoFields, None]) -> Response:
    """All managers."""
    store = call.hub.store
    found = await store.drive(roles.managers(store))
    return answer(
        ManagersAnswer(managers=[
            ManagerAnswer(
                name=one.record.name, host=one.record.host, pid=one.record.pid,
                started_ms=one.record.started_ms, seen_ms=one.record.seen_ms,
                silent_ms=one.silent_ms, alive=one.alive, topics=one.record.topics,
            )
            for one in found if isinstance(one.record, ManagerPresence)
        ])
    )  # fmt: skip
