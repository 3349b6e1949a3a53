"""Operations that list consumers and managers, as of their last heartbeat."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import asdict

from lisa.admin import roles
from lisa.admin.roles import RolePresence
from lisa.core.store.presence import ConsumerPresence, ManagerPresence
from lisa.gateway.api.operations import NO_TOPIC, Call, Operations
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import Answer, Name, NoFields, Request

Unknown = Annotated[
    bool,
    Meta(description="Not alive, but perhaps running: the server refuses to store heartbeats."),
]


class RolesQuery(Request):
    """Filters for listing consumers."""

    topic: Annotated[Name | None, Meta(description="Defaults to all topics.")] = None


class PushState(Answer):
    """How a gateway's pushes of one group go, as of its last heartbeat."""

    group: str
    host: str
    state: Annotated[str, Meta(description="running, degraded, or waiting (Retry-After).")]
    failed: Annotated[int, Meta(description="Pushes that failed in a row.")]
    failing_ms: Annotated[int, Meta(description="How long every push has failed.")]
    error: Annotated[str, Meta(description="Why the last push failed.")]


class ConsumerAnswer(Answer):
    """One consumer on one topic, as of its last heartbeat."""

    name: str
    topic: str
    group: Annotated[str | None, Meta(description="Null while no group is declared.")]
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    unknown: Unknown
    concurrency: int
    running: int
    held: int
    handled: int
    state: str
    error: Annotated[str, Meta(description="Why the last message failed, while messages fail.")]
    failing_ms: Annotated[int, Meta(description="How long every message has failed.")]
    busy_ms: Annotated[
        int, Meta(description="How long all handlers have been busy with the same messages.")
    ]
    pushes: Annotated[list[PushState], Meta(description="The pushes of a gateway.")]


class ConsumersAnswer(Answer):
    """Consumers, including those that stopped recently."""

    consumers: list[ConsumerAnswer]


class ManagerAnswer(Answer):
    """One manager, as of its last heartbeat."""

    name: str
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    unknown: Unknown
    topics: int


class ManagersAnswer(Answer):
    """Managers, including those that stopped recently."""

    managers: list[ManagerAnswer]


operations = Operations("Roles")


@operations.add("GET", "/v1/consumers", "The consumers of the allowed topics.", problems=NO_TOPIC)
async def list_consumers(call: Call[RolesQuery, None]) -> ConsumersAnswer:
    """List consumers."""
    store, topic = call.gateway.store, call.query.topic
    if topic is not None:
        seen = [call.token.allowed_topic(topic)]
        await require_topic(call.gateway, topic)
    else:
        seen = [name for name in await store.drive(store.topics()) if call.token.sees(name)]
    found = await call.gateway.ask(roles.consumers, seen) if seen else []
    return ConsumersAnswer(consumers=[_consumer(role) for role in found])


def _consumer(role: RolePresence[ConsumerPresence]) -> ConsumerAnswer:
    pushes = [PushState(**asdict(push)) for push in role.record.pushes]
    fields = asdict(role.record) | {"group": role.record.group or None, "pushes": pushes}
    return ConsumerAnswer(
        **fields, silent_ms=role.silent_ms, alive=role.alive, unknown=role.is_unknown
    )


@operations.add("GET", "/v1/managers", "All managers.")
async def list_managers(call: Call[NoFields, None]) -> ManagersAnswer:
    """List managers."""
    found = await call.gateway.ask(roles.managers)
    return ManagersAnswer(managers=[_manager(role) for role in found])


def _manager(role: RolePresence[ManagerPresence]) -> ManagerAnswer:
    return ManagerAnswer(
        **asdict(role.record), silent_ms=role.silent_ms, alive=role.alive, unknown=role.is_unknown
    )
