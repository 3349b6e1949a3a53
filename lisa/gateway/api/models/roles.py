"""Models for consumers and managers, as in their last heartbeat."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lisa.gateway.api.models.base import Answer, Name, Request

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
