"""Sending messages, one or many."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from lisa.core.clock import MAX_DUE_MS
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.native.models.base import (
    MOST_ITEMS,
    Answer,
    Instant,
    MessageId,
    Milliseconds,
    Problem,
    Request,
    Retries,
)

__all__ = ["BatchAnswer", "BatchRequest", "BatchResult", "SendAnswer", "SendRequest"]


class SendRequest(Request):
    """One message to send. It is due now, or as one of `delay_ms` and `due_ms` says."""

    body: Annotated[
        Raw | UnsetType, Meta(description="Any JSON value. Exactly one of body and body_base64.")
    ] = UNSET
    body_base64: Annotated[
        str | None,
        Meta(
            description="Bytes instead, in base64 (RFC 4648, section 4).",
            extra_json_schema={"contentEncoding": "base64"},
        ),
    ] = None
    delay_ms: Annotated[Milliseconds | None, Meta(description="By the server's clock.")] = None
    due_ms: Instant | None = None
    id: Annotated[
        MessageId | None,
        Meta(description="Your own id: a send repeated with it adds nothing. Else one is made."),
    ] = None
    ttl_ms: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DUE_MS)] | None,
        Meta(description="How long after due it is still worth handling."),
    ] = None
    headers: Annotated[
        dict[str, str] | None, Meta(description="Text to text, 65,535 bytes of JSON at most.")
    ] = None
    retry: Annotated[
        Retries | None,
        Meta(description="Its own pauses between attempts: milliseconds, or text as in '0,0,2m'; "
             "an empty list for a single attempt."),
    ] = None  # fmt: skip
    on_duplicate: Annotated[
        OnDuplicate | None,
        Meta(description="Where the id is known: keep the earlier message (the default), replace "
             "it, or reject the new one."),
    ] = None  # fmt: skip


class SendAnswer(Answer):
    """What became of one message."""

    id: str
    outcome: Sent


class BatchRequest(Request):
    """Messages to send; each is as in a single send."""

    # Each item is read by itself, so that one at fault does not stop the others.
    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MOST_ITEMS)]
    on_duplicate: Annotated[
        OnDuplicate | None, Meta(description="For the messages that say nothing themselves.")
    ] = None


class BatchResult(Answer):
    """One message of a batch: its outcome, or the problem because of which it was not sent."""

    id: str | UnsetType = UNSET
    outcome: Sent | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class BatchAnswer(Answer):
    """Results in the order of the messages, and how many there are of each kind."""

    results: list[BatchResult]
    accepted: int
    duplicate: int
    replaced: int
    rejected: int
    failed: Annotated[int, Meta(description="Messages with a problem; send those again.")]
