"""Topics: options, groups, counts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from lisa.gateway.native.models.base import Answer, Limit, Name, Request

__all__ = [
    "Activity", "DeclaredAnswer", "GroupAnswer", "GroupRequest", "GroupsAnswer",
    "OptionsAnswer", "OptionsRequest", "PausedAnswer", "RemovedAnswer", "TopicAnswer",
    "TopicCounts", "TopicsAnswer", "TopicsQuery",
]  # fmt: skip


class OptionsRequest(Request):
    """Options to set; null takes one back to what the configuration declares, else its default.

    Durations are text with a unit, policies as in `0,0,2m`, an unlimited capacity is `unlimited`.
    """

    ack_timeout: str | UnsetType | None = UNSET
    retry_delays: list[str] | str | UnsetType | None = UNSET
    max_ready: int | str | UnsetType | None = UNSET
    capacity: int | str | UnsetType | None = UNSET
    retention: str | UnsetType | None = UNSET
    dedupe_for: str | UnsetType | None = UNSET
    garbage_keep: str | UnsetType | None = UNSET
    journal: bool | UnsetType | None = UNSET
    journal_max: int | str | UnsetType | None = UNSET
    max_body_bytes: int | str | UnsetType | None = UNSET
    shards: int | str | UnsetType | None = UNSET
    paused: bool | UnsetType | None = UNSET


class OptionsAnswer(Answer):
    """All options, in the form in which they may be set."""

    ack_timeout: str
    retry_delays: str
    max_ready: int
    capacity: int | Literal["unlimited"]
    retention: str
    dedupe_for: str
    garbage_keep: str
    journal: bool
    journal_max: int
    max_body_bytes: int
    shards: int
    paused: bool


class PausedAnswer(Answer):
    """Whether the topic is paused now, and whether this call changed it."""

    paused: bool
    changed: bool


class GroupAnswer(Answer):
    """One group's counts."""

    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_retry_ms: int | None


class GroupsAnswer(Answer):
    """The groups declared on a topic."""

    groups: list[GroupAnswer]


class GroupRequest(Request):
    """A group to declare."""

    group: Name


class DeclaredAnswer(Answer):
    """The group is declared; `new` unless it was before."""

    group: str
    new: bool


class RemovedAnswer(Answer):
    """The group is gone, and so many messages ended with it."""

    group: str
    settled: int


class TopicCounts(Answer):
    """A topic's counts. Those of states are sums over its groups."""

    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int | None
    groups: list[GroupAnswer]


class TopicAnswer(TopicCounts):
    """A topic: counts, options, and counters since it began, each by its name."""

    counters: dict[str, int]
    options: OptionsAnswer


class TopicsQuery(Request):
    """Which topics are listed."""

    cursor: Annotated[str, Meta(max_length=256)] | None = None
    limit: Limit = 100


class TopicsAnswer(Answer):
    """A page of topics, in order of name; `cursor` is null at the end."""

    topics: list[TopicCounts]
    cursor: str | None


class Activity(TopicCounts):
    """One event of a topic's stream: its counts, and what went on since the look before."""

    at_ms: int
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None
