"""Models for sending messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.api.models.base import (
    MOST_ITEMS,
    Answer,
    BusinessDays,
    Fold,
    Instant,
    Late,
    MessageId,
    Milliseconds,
    Problem,
    Request,
    Retries,
    Ttl,
    WallTime,
)


class SendRequest(Request):
    """A message to send. Due now, or according to one of `delay_ms`, `due_ms` and `at_local`."""

    body: Annotated[
        Raw | UnsetType,
        Meta(description="Any JSON value. Exactly one of `body` and `body_base64`."),
    ] = UNSET
    body_base64: Annotated[
        str | None,
        Meta(
            description="A binary body in base64 (RFC 4648, section 4).",
            extra_json_schema={"contentEncoding": "base64"},
        ),
    ] = None
    delay_ms: Annotated[
        Milliseconds | None, Meta(description="Delay from now, by the server's clock.")
    ] = None
    due_ms: Instant | None = None
    at_local: WallTime | None = None
    tz: Annotated[
        str | None,
        Meta(description="Time zone of `at_local`, and of a `window` that names none."),
    ] = None
    fold: Fold | None = None
    business_days: BusinessDays | None = None
    window: Annotated[
        str | None,
        Meta(
            description="When the message may be handed over, as in `mon-fri 9-17`; takes "
            "precedence over the topic's window."
        ),
    ] = None
    id: Annotated[
        MessageId | None,
        Meta(description="Your own id, for idempotent sends; by default an id is generated."),
    ] = None
    ttl_ms: Annotated[
        Ttl | None, Meta(description="The message expires this long after its due time.")
    ] = None
    headers: Annotated[
        dict[str, str] | None, Meta(description="At most 65,535 bytes, as JSON.")
    ] = None
    retry: Annotated[
        Retries | None,
        Meta(
            description="The message's own retry delays: a list of durations, or text such as "
            "'0,0,2m'. An empty list means a single attempt."
        ),
    ] = None
    late: Annotated[
        Late | None,
        Meta(
            description="What to do if a manager promotes the message too late: "
            "`{'after': '10m', 'then': 'skip'}` or text such as 'skip after 10m'; also garbage, or "
            "run. By default the topic's option."
        ),
    ] = None
    on_duplicate: Annotated[
        OnDuplicate | None,
        Meta(
            description="If the id exists: keep the earlier message (the default), keep it only "
            "until it is settled, cancelled or garbage, replace it, update it (replace all but "
            "its due time), or reject the new one."
        ),
    ] = None


class SendAnswer(Answer):
    """The outcome of sending one message."""

    id: str
    outcome: Sent


class BatchRequest(Request):
    """A batch of messages, each with the fields of a single send."""

    # Items are decoded separately, so that an invalid item does not fail the others.
    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MOST_ITEMS)]
    on_duplicate: Annotated[
        OnDuplicate | None,
        Meta(description="Default for messages without their own `on_duplicate`."),
    ] = None


class BatchResult(Answer):
    """The result for one message of a batch: an outcome, or its problem."""

    id: str | UnsetType = UNSET
    outcome: Sent | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class BatchAnswer(Answer):
    """The results in request order, and counts by outcome."""

    results: list[BatchResult]
    accepted: int
    duplicate: int
    replaced: int
    replaced_in_flight: int
    updated: int
    rejected: int
    failed: Annotated[
        int, Meta(description="Messages with a problem, which may have to be sent again.")
    ]
