"""Dead messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lisa.gateway.native.models.base import (
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

__all__ = ["GarbageAnswer", "GarbageQuery", "GarbageRequest"]


class GarbageQuery(Request):
    """Which dead messages are listed."""

    group: Name | None = None
    reason: Annotated[
        ReasonText | None,
        Meta(
            description="Only those whose reason holds this text, upper and lower case alike. "
            "A page may then be short, or empty: go by its cursor."
        ),
    ] = None
    died_before_ms: Instant | None = None
    cursor: Cursor | None = None
    limit: Limit = 100


class GarbageRequest(Request):
    """Which dead messages are meant: those of `ids`, or with `all` every one that matches."""

    ids: Annotated[list[MessageId], Meta(min_length=1, max_length=MOST_ITEMS)] | None = None
    all: bool = False
    group: Annotated[Name | None, Meta(description="By default all groups.")] = None
    reason: ReasonText | None = None
    died_before_ms: Instant | None = None


class GarbageAnswer(Answer):
    """How many messages it was done for; `missing` are ids that were in no such garbage."""

    done: int
    missing: list[str]
