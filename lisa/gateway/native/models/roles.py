"""Consumers and managers, as they say of themselves."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lisa.gateway.native.models.base import Answer, Name, Request

__all__ = ["ConsumerAnswer", "ConsumersAnswer", "ManagerAnswer", "ManagersAnswer", "RolesQuery"]


class RolesQuery(Request):
    """Whose consumers are listed."""

    topic: Annotated[Name | None, Meta(description="By default all topics.")] = None


class ConsumerAnswer(Answer):
    """One consumer on one topic, as it last said of itself."""

    name: str
    topic: str
    group: Annotated[str | None, Meta(description="Null while it waits for one to be declared.")]
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    concurrency: int
    running: int
    held: int
    handled: int
    state: str


class ConsumersAnswer(Answer):
    """Consumers, gone ones included."""

    consumers: list[ConsumerAnswer]


class ManagerAnswer(Answer):
    """One manager, as it last said of itself."""

    name: str
    host: str
    pid: int
    started_ms: int
    seen_ms: int
    silent_ms: int
    alive: bool
    topics: int


class ManagersAnswer(Answer):
    """Managers, gone ones included."""

    managers: list[ManagerAnswer]
