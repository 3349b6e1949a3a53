"""Models for pulling messages and settling deliveries."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from lisa.core.delivery.source import MOST
from lisa.core.model.outcomes import Discard
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.defer import Deferred
from lisa.core.transitions.retry import Failed
from lisa.gateway.api.models.base import (
    ACK_TIMEOUT,
    MOST_ITEMS,
    AckTimeout,
    Answer,
    Name,
    Problem,
    PullWait,
    ReceiptText,
    Request,
    RetryPause,
    one_of,
)


class ReceiptRequest(Request):
    """Identifies a delivery by its receipt."""

    receipt: ReceiptText


class AckAnswer(Answer):
    """The delivery is settled. `late`: after its ack timeout; `repeated`: already acked before."""

    id: str
    outcome: Annotated[str, one_of(Acked.ACKED, Acked.LATE, Acked.REPEATED)]


class RetryRequest(Request):
    """Reports a failed delivery."""

    receipt: ReceiptText
    delay_ms: Annotated[
        RetryPause | None,
        Meta(description="Delay until the next attempt; defaults to the retry policy."),
    ] = None
    reason: Annotated[str | None, Meta(description="The reason; truncated to 1,024 bytes.")] = None
    discard: Annotated[
        bool, Meta(description="Move the message to garbage without further attempts.")
    ] = False

    @property
    def recorded_reason(self) -> str:
        """The reason to record, with a default."""
        return self.reason or (str(Discard()) if self.discard else "the client asked for a retry")


class RetryAnswer(Answer):
    """The outcome: `retrying` at `due_ms`, or `dead`, which means in garbage."""

    id: str
    outcome: Annotated[str, one_of(Failed.RETRYING, Failed.DEAD)]
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Failed attempts.")]


class DeferRequest(Request):
    """Puts a delivery off, because it cannot be handled now."""

    receipt: ReceiptText
    delay_ms: Annotated[RetryPause, Meta(description="Delay until the next delivery.")]
    reason: Annotated[str | None, Meta(description="The reason; truncated to 1,024 bytes.")] = None

    @property
    def recorded_reason(self) -> str:
        """The reason to record, with a default."""
        return self.reason or "the client deferred the message"


class DeferAnswer(Answer):
    """The message is deferred until `due_ms`."""

    id: str
    outcome: Annotated[str, one_of(Deferred.DEFERRED)]
    due_ms: int


class ExtendRequest(Request):
    """Restarts a delivery's ack timeout."""

    receipt: ReceiptText
    ack_timeout_ms: Annotated[
        AckTimeout | None,
        Meta(description="The new ack timeout, counted from now; defaults to that of the pull."),
    ] = None


class HeldAnswer(Answer):
    """Confirms that the delivery was still held; a stale receipt gets a problem instead."""

    id: str
    held: Annotated[bool, Meta(extra_json_schema={"const": True})]


_BatchSize = Meta(min_length=1, max_length=MOST_ITEMS)


class ReceiptBatch(Request):
    """Deliveries to ack or release."""

    deliveries: Annotated[list[ReceiptRequest], _BatchSize]


class RetryBatch(Request):
    """Failed deliveries, each with the fields of a single retry."""

    deliveries: Annotated[list[RetryRequest], _BatchSize]


class DeferBatch(Request):
    """Deliveries to defer, each with the fields of a single defer."""

    deliveries: Annotated[list[DeferRequest], _BatchSize]


class ExtendBatch(Request):
    """Deliveries to extend, each with the fields of a single extend."""

    deliveries: Annotated[list[ExtendRequest], _BatchSize]


class SettledDelivery(Answer):
    """The result of one delivery of a batch: the fields of the single response, or a problem."""

    id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    due_ms: int | UnsetType | None = UNSET
    attempts: int | UnsetType = UNSET
    held: bool | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class SettledBatch(Answer):
    """The results in request order; `failed` have a problem."""

    results: list[SettledDelivery]
    succeeded: int
    failed: int


class PullRequest(Request):
    """A pull. The response is sent with the first messages, or empty after `wait_ms`."""

    max: Annotated[int, Meta(ge=1, le=MOST)] = 1
    wait_ms: PullWait = 0
    ack_timeout_ms: Annotated[AckTimeout | None, ACK_TIMEOUT] = None
    group: Annotated[Name | None, Meta(description="Defaults to the topic's only group.")] = None


class DeliveryAnswer(Answer):
    """One delivered message, held until its ack timeout."""

    id: str
    receipt: str
    attempt: Annotated[int, Meta(description="1 for the first delivery.")]
    due_ms: int
    headers: dict[str, str]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class PullAnswer(Answer):
    """The deliveries; empty if no message became due in time."""

    deliveries: list[DeliveryAnswer]
