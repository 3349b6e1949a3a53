"""Handlers that list consumers and managers."""

from __future__ import annotations

from msgspec.structs import asdict

from lisa.admin import roles
from lisa.admin.roles import RolePresence
from lisa.core.store.presence import ConsumerPresence, ManagerPresence
from lisa.gateway.api.models.base import NoFields
from lisa.gateway.api.models.roles import (
    ConsumerAnswer,
    ConsumersAnswer,
    ManagerAnswer,
    ManagersAnswer,
    PushState,
    RolesQuery,
)
from lisa.gateway.api.operations import NO_TOPIC, Call, Operations, Reply, answer
from lisa.gateway.api.topics import require_topic

operations = Operations("Roles")


@operations.add(
    "listConsumers",
    "GET",
    "/v1/consumers",
    answers={200: "The consumers of the allowed topics."},
    problems=NO_TOPIC,
)
async def consumers(call: Call[RolesQuery, None]) -> Reply[ConsumersAnswer]:
    """List consumers."""
    store, topic = call.hub.store, call.query.topic
    if topic is not None:
        seen = [call.token.allowed_topic(topic)]
        await require_topic(call.hub, topic)
    else:
        seen = [name for name in await store.drive(store.topics()) if call.token.sees(name)]
    found = await store.drive(roles.consumers(store, seen)) if seen else []
    return answer(ConsumersAnswer(consumers=[_consumer(one) for one in found]))


def _consumer(one: RolePresence[ConsumerPresence]) -> ConsumerAnswer:
    pushes = [PushState(**asdict(push)) for push in one.record.pushes]
    fields = asdict(one.record) | {"group": one.record.group or None, "pushes": pushes}
    return ConsumerAnswer(
        **fields, silent_ms=one.silent_ms, alive=one.alive, unknown=one.is_unknown
    )


@operations.add("listManagers", "GET", "/v1/managers", answers={200: "All managers."})
async def managers(call: Call[NoFields, None]) -> Reply[ManagersAnswer]:
    """List managers."""
    store = call.hub.store
    found = await store.drive(roles.managers(store))
    return answer(ManagersAnswer(managers=[_manager(one) for one in found]))


def _manager(one: RolePresence[ManagerPresence]) -> ManagerAnswer:
    return ManagerAnswer(
        **asdict(one.record), silent_ms=one.silent_ms, alive=one.alive, unknown=one.is_unknown
    )
