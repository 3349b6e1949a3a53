"""Field types and base classes shared by the models."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lisa.core.model.clock import MAX_DUE_MS, duration_ms, parse_duration
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.retry_policy import MAX_DELAY, MAX_RETRIES

MOST_ITEMS = 1_000
MOST_ROWS = 500

DurationText = Annotated[
    str,
    Meta(
        max_length=64,
        description="A duration with units, such as `30m` or `1h30m`.",
        extra_json_schema={"pattern": r"^(\d{1,9}(\.\d{1,6})?(ms|[smhd])\s?){1,5}$"},
    ),
]


def _duration(least_ms: int, most_ms: int) -> Any:
    return Annotated[int, Meta(ge=least_ms, le=most_ms)] | DurationText


Instant = Annotated[int, Meta(ge=0, le=MAX_DUE_MS, description="Epoch milliseconds, UTC.")]
WallTime = Annotated[
    str,
    Meta(
        description="Due when the clock in `tz` shows this: `2026-12-24T09:00`; with "
        "`business_days`, a time such as `09:00`."
    ),
]
Fold = Annotated[
    Literal[0, 1],
    Meta(description="Of a local time that occurs twice: 0 the first (default), 1 the second."),
]
BusinessDays = Annotated[
    int,
    Meta(
        ge=0,
        le=250,
        description="Due on the n-th business day after today: a day on which the message's "
        "`window` opens, by default Monday to Friday.",
    ),
]
if TYPE_CHECKING:
    Milliseconds: TypeAlias = int
    RetryPause: TypeAlias = int
    AckTimeout: TypeAlias = int
    PullWait: TypeAlias = int
    Ttl: TypeAlias = int
    PushTimeout: TypeAlias = int
else:  # requests hold milliseconds; clients may also write text
    Milliseconds = _duration(0, MAX_DUE_MS)
    RetryPause = _duration(0, duration_ms(MAX_DELAY))
    AckTimeout = _duration(duration_ms(MIN_ACK_TIMEOUT), duration_ms(MAX_ACK_TIMEOUT))
    PullWait = _duration(0, 60_000)
    Ttl = _duration(1, MAX_DUE_MS)
    PushTimeout = _duration(100, 3_600_000)

ACK_TIMEOUT = Meta(
    description="When an unsettled delivery is redelivered; defaults to the topic's option."
)
MessageId = Annotated[
    str, Meta(min_length=1, max_length=256, description="1 to 256 bytes, no control characters.")
]
ReceiptText = Annotated[
    str, Meta(min_length=1, max_length=2_048, description="The receipt from the pull.")
]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
ReasonText = Annotated[str, Meta(max_length=1_024)]
Late: TypeAlias = dict[str, str] | Annotated[str, Meta(max_length=64)]
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
    """A request's body or query. Durations are decoded to milliseconds."""

    def __post_init__(self) -> None:
        """Convert durations that the client wrote as text. Raises ValueError."""
        for name in _durations(type(self)):
            value = getattr(self, name)
            if isinstance(value, (str, list)):
                setattr(self, name, _in_milliseconds(type(self), name, value))


@cache
def _durations(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of a request's fields that hold durations."""
    names = kind.__struct_fields__
    return tuple(name for name in names if name.endswith("_ms") or name == "retry")


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a request's fields, cached because their evaluation is slow."""
    return {one.name: one.type for one in msgspec.structs.fields(kind)}


def _in_milliseconds(kind: type[msgspec.Struct], name: str, value: str | list[Any]) -> Any:
    if name == "retry" and isinstance(value, str):  # a policy, which may have a jitter
        return value
    try:
        converted = (
            [_one_in_milliseconds(one) for one in value]
            if isinstance(value, list)
            else (_one_in_milliseconds(value))
        )
        return msgspec.convert(converted, _types(kind)[name])
    except ValueError as error:  # also that of msgspec, if the limits are exceeded
        raise ValueError(f"{name}: {error}") from None


def _one_in_milliseconds(value: str | int) -> int:
    return value if isinstance(value, int) else duration_ms(parse_duration(value))


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
