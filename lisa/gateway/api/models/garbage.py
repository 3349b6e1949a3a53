"""Models for garbage."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lisa.gateway.api.models.base import (
    MOST_ITEMS,
    Answer,
    Cursor,
    Instant,
    Limit,
    MessageId,
    Name,
    ReasonText,
    Request,
)


class GarbageQuery(Request):
    """Filters for listing dead messages."""

    group: Name | None = None
    reason: Annotated[
        ReasonText | None,
        Meta(
            description="Only messages whose reason contains this text, ignoring case. Pages may "
            "then be short or empty; continue until `cursor` is null."
        ),
    ] = None
    died_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class GarbageRequest(Request):
    """The dead messages to act on: those in `ids`, or with `all` every message that matches."""

    ids: Annotated[list[MessageId], Meta(min_length=1, max_length=MOST_ITEMS)] | None = None
    all: bool = False
    group: Annotated[Name | None, Meta(description="Defaults to all groups.")] = None
    reason: ReasonText | None = None
    died_before_ms: Instant | None = None


class GarbageAnswer(Answer):
    """The number of messages changed, and the requested ids that were not in garbage."""

    done: int
    missing: list[str]
