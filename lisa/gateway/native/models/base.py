"""What several of them share: fields, and problems."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lisa.core.clock import MAX_DUE_MS, duration_ms
from lisa.core.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.retry_policy import MAX_DELAY, MAX_RETRIES

__all__ = [
    "MOST_ITEMS", "AckTimeout", "Answer", "Cursor", "Instant", "Limit", "MessageId",
    "Milliseconds", "Name", "NoFields", "Problem", "ReasonText", "ReceiptText", "Request",
    "Retries", "RetryPause", "one_of",
]  # fmt: skip

MOST_ITEMS = 1_000
MOST_ROWS = 500

_LONGEST_RETRY_MS = duration_ms(MAX_DELAY)

Instant = Annotated[int, Meta(ge=0, le=MAX_DUE_MS, description="Epoch milliseconds, UTC.")]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_DUE_MS)]
RetryPause = Annotated[int, Meta(ge=0, le=_LONGEST_RETRY_MS)]
AckTimeout = Annotated[
    int,
    Meta(ge=duration_ms(MIN_ACK_TIMEOUT), le=duration_ms(MAX_ACK_TIMEOUT),
         description="How long the delivery may stay unsettled; by default as the topic says."),
]  # fmt: skip
MessageId = Annotated[
    str, Meta(min_length=1, max_length=256, description="1 to 256 bytes, no control characters.")
]
ReceiptText = Annotated[
    str, Meta(min_length=1, max_length=2_048, description="The delivery's receipt, as pulled.")
]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
ReasonText = Annotated[str, Meta(max_length=1_024)]
Retries: TypeAlias = Annotated[list[RetryPause], Meta(max_length=MAX_RETRIES)] | str
Cursor = Annotated[
    str, Meta(max_length=4_096, description="The `cursor` of the page before; none for the first.")
]
Limit = Annotated[int, Meta(ge=1, le=MOST_ROWS, description="Rows of one page, at most.")]


def one_of(*values: str) -> Meta:
    """Which of an enumeration's values an answer may hold: those of problems are left out."""
    return Meta(extra_json_schema={"enum": [str(one) for one in values]})


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request's body or query."""


class Answer(msgspec.Struct, kw_only=True):
    """What is answered."""


class NoFields(Request):
    """Nothing: what an operation takes that has no parameters, or no body."""


class Problem(msgspec.Struct, kw_only=True):
    """Why something was not done (RFC 9457). `type` is what programs go by."""

    type: str
    title: str
    status: int
    detail: str
    id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    held: bool | UnsetType = UNSET
