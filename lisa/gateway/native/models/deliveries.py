"""Pulling messages, and saying what became of them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from lisa.core.outcomes import Discard
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.retry import Failed
from lisa.gateway.native.models.base import (
    AckTimeout,
    Answer,
    Name,
    ReceiptText,
    Request,
    RetryPause,
    one_of,
)
from lisa.gateway.waiting import MOST

__all__ = [
    "AckAnswer", "DeliveryAnswer", "ExtendRequest", "HeldAnswer", "PullAnswer", "PullRequest",
    "ReceiptRequest", "RetryAnswer", "RetryRequest",
]  # fmt: skip

LONGEST_WAIT_MS = 60_000


class ReceiptRequest(Request):
    """Which delivery is meant."""

    receipt: ReceiptText


class AckAnswer(Answer):
    """It is settled. `late`: after its ack timeout; `repeated`: an earlier call had done it."""

    id: str
    outcome: Annotated[str, one_of(Acked.ACKED, Acked.LATE, Acked.REPEATED)]


class RetryRequest(Request):
    """A delivery that failed."""

    receipt: ReceiptText
    delay_ms: Annotated[
        RetryPause | None, Meta(description="Until the next attempt; by default as the policy says")
    ] = None
    reason: Annotated[str | None, Meta(description="Why; 1,024 bytes of it are kept.")] = None
    discard: Annotated[bool, Meta(description="To garbage at once.")] = False

    @property
    def said(self) -> str:
        """The reason that is kept."""
        return self.reason or (str(Discard()) if self.discard else "the client asked for a retry")


class RetryAnswer(Answer):
    """Where it went: `dead` is in garbage. `due_ms` is that of the next attempt."""

    id: str
    outcome: Annotated[str, one_of(Failed.RETRYING, Failed.DEAD)]
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Those that failed.")]


class ExtendRequest(Request):
    """A delivery whose ack timeout is to begin anew."""

    receipt: ReceiptText
    ack_timeout_ms: Annotated[
        AckTimeout | None, Meta(description="From now on; by default as it was pulled.")
    ] = None


class HeldAnswer(Answer):
    """Whether the delivery was yours; here it was, else the answer is a problem."""

    id: str
    held: Annotated[bool, Meta(extra_json_schema={"const": True})]


class PullRequest(Request):
    """What is wanted. The answer comes with the first messages, or empty when the time is up."""

    max: Annotated[int, Meta(ge=1, le=MOST)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=LONGEST_WAIT_MS)] = 0
    ack_timeout_ms: AckTimeout | None = None
    group: Annotated[
        Name | None, Meta(description="By default the topic's only one.")
    ] = None  # fmt: skip


class DeliveryAnswer(Answer):
    """One message in your hands, until its ack timeout ends."""

    id: str
    receipt: str
    attempt: Annotated[int, Meta(description="1, 2, ...")]
    due_ms: int
    headers: dict[str, str]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class PullAnswer(Answer):
    """The deliveries, none if the time was up."""

    deliveries: list[DeliveryAnswer]
