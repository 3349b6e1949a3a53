"""Field types and base classes shared by the models."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lisa.core.model.clock import MAX_DUE_MS, duration_ms
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.retry_policy import MAX_DELAY, MAX_RETRIES

MOST_ITEMS = 1_000
MOST_ROWS = 500

_LONGEST_RETRY_MS = duration_ms(MAX_DELAY)

Instant = Annotated[int, Meta(ge=0, le=MAX_DUE_MS, description="Epoch milliseconds, UTC.")]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_DUE_MS)]
RetryPause = Annotated[int, Meta(ge=0, le=_LONGEST_RETRY_MS)]
AckTimeout = Annotated[
    int,
    Meta(
        ge=duration_ms(MIN_ACK_TIMEOUT),
        le=duration_ms(MAX_ACK_TIMEOUT),
        description="When an unsettled delivery is redelivered; defaults to the topic's option.",
    ),
]
MessageId = Annotated[
    str, Meta(min_length=1, max_length=256, description="1 to 256 bytes, no control characters.")
]
ReceiptText = Annotated[
    str, Meta(min_length=1, max_length=2_048, description="The receipt from the pull.")
]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
ReasonText = Annotated[str, Meta(max_length=1_024)]
Retries: TypeAlias = Annotated[list[RetryPause], Meta(max_length=MAX_RETRIES)] | str
Cursor = Annotated[
    str,
    Meta(
        max_length=4_096,
        description="The `cursor` of the previous page; omit it for the first page.",
    ),
]
Limit = Annotated[int, Meta(ge=1, le=MOST_ROWS, description="Maximum number of rows per page.")]


def one_of(*values: str) -> Meta:
    """Schema metadata listing the values that a successful response may have."""
    return Meta(extra_json_schema={"enum": [str(one) for one in values]})


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request's body or query."""


class Answer(msgspec.Struct, kw_only=True):
    """A response body."""


class NoFields(Request):
    """The query or body type of operations without parameters or body."""


class Problem(msgspec.Struct, kw_only=True):
    """A problem document (RFC 9457). Programs should check `type`."""

    type: str
    title: str
    status: int
    detail: str
    id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    held: bool | UnsetType = UNSET
