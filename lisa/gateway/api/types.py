"""The types of requests and responses, and how their JSON is read.

They are also the source of the OpenAPI schemas. In requests, `null` means the same as omitting the
field, except for `body`, where null is a value.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lisa.core.model.clock import (
    MAX_DUE_MS,
    MOST_BUSINESS_DAYS,
    checked_shift_ms,
    duration_ms,
    parse_duration,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import MAX_ID_BYTES
from lisa.core.model.lanes import MAX_COST, MAX_SLACK
from lisa.core.model.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.model.retry_policy import MAX_DELAY, MAX_RETRIES, RetryPolicy
from lisa.core.model.sharding import KEY_END, key_of
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.gateway.problems import ErrorResponse, problem_of
from lisa.producer import option_texts

MOST_ITEMS = 1_000
MOST_ROWS = 500

_DURATION = r"(\d{1,9}(\.\d{1,6})?(ms|[smhd])\s?){1,5}$"
DurationText = Annotated[
    str,
    Meta(
        max_length=64,
        description="A duration with units, such as `30m` or `1h30m`.",
        extra_json_schema={"pattern": f"^{_DURATION}"},
    ),
]
_ShiftText = Annotated[
    str,
    Meta(
        max_length=64,
        description="A duration with units and perhaps a sign, such as `1h` or `-30m`.",
        extra_json_schema={"pattern": f"^[+-]?{_DURATION}"},
    ),
]


ACK_TIMEOUT = Meta(
    description="When an unsettled delivery is redelivered; defaults to the topic's option."
)

KEY = "The message's key. Omitted if it has none."

LONGEST_NAME = 100
"""Characters of an unknown field that are compared and shown."""

DEEPEST = 100
"""Maximum nesting of a JSON body, well below the limits of common JSON parsers."""


def _milliseconds(least_ms: int, most_ms: int) -> Any:
    return Annotated[int, Meta(ge=least_ms, le=most_ms)] | DurationText


Instant = Annotated[int, Meta(ge=0, le=MAX_DUE_MS, description="Epoch milliseconds, UTC.")]
if TYPE_CHECKING:
    Milliseconds: TypeAlias = int
    RetryPause: TypeAlias = int
    AckTimeout: TypeAlias = int
    PullWait: TypeAlias = int
    Ttl: TypeAlias = int
    Shift: TypeAlias = int
    PushTimeout: TypeAlias = int
    Slack: TypeAlias = int
else:  # requests hold milliseconds; clients may also write text
    Milliseconds = _milliseconds(0, MAX_DUE_MS)
    RetryPause = _milliseconds(0, duration_ms(MAX_DELAY))
    AckTimeout = _milliseconds(duration_ms(MIN_ACK_TIMEOUT), duration_ms(MAX_ACK_TIMEOUT))
    PullWait = _milliseconds(0, 60_000)
    Ttl = _milliseconds(1, MAX_DUE_MS)
    Shift = Annotated[int, Meta(ge=-MAX_DUE_MS, le=MAX_DUE_MS)] | _ShiftText
    PushTimeout = _milliseconds(100, 3_600_000)
    Slack = _milliseconds(0, duration_ms(MAX_SLACK))

OwnId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_ID_BYTES,
        description=f"1 to {MAX_ID_BYTES} bytes, no control characters.",
    ),
]
LONGEST_ID = 2 * MAX_ID_BYTES + len(KEY_END)
MessageId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=LONGEST_ID,
        description="The id as in responses: of a message with a key, key, U+001F and own id.",
    ),
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
    return Meta(extra_json_schema={"enum": [str(value) for value in values]})


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
def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a request's fields, cached because their evaluation is slow."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _in_milliseconds(kind: type[msgspec.Struct], name: str, value: str | list[Any]) -> Any:
    if name == "retry" and isinstance(value, str):  # a policy, which may have a jitter
        return value
    try:
        converted = (
            [_one_in_milliseconds(item) for item in value]
            if isinstance(value, list)
            else (_one_in_milliseconds(value))
        )
        return msgspec.convert(converted, _field_types(kind)[name])
    except ValueError as error:  # also that of msgspec, if the limits are exceeded
        raise ValueError(f"{name}: {error}") from None


def _one_in_milliseconds(value: str | int) -> int:
    if isinstance(value, int):
        return value
    if value[:1] in ("-", "+"):  # the field's type refuses a negative one where it has no meaning
        return checked_shift_ms(value)
    return duration_ms(parse_duration(value))


class Answer(msgspec.Struct, kw_only=True):
    """A response body."""


def key_field(message_id: str) -> str | UnsetType:
    """The field `key` of a response about a message."""
    key = key_of(message_id)
    return UNSET if key is None else key


class AnswerWithId(Answer):
    """A response body about a message, whose `key` follows from its id."""

    id: str
    key: Annotated[str | UnsetType, Meta(description=KEY)] = UNSET

    def __post_init__(self) -> None:
        """Set the key."""
        self.key = key_field(self.id)


class NoFields(Request):
    """The query or body type of operations without parameters or body."""


class Problem(msgspec.Struct, kw_only=True):
    """A problem document (RFC 9457). Programs should check `type`."""

    type: str
    title: str
    status: int
    detail: str
    id: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    held: bool | UnsetType = UNSET


_UNKNOWN_FIELD = re.compile(
    r"Object contains unknown field `(?P<name>.*)`(?P<place> - at `.*`)?\Z", re.DOTALL
)

_INVALID_VALUE = re.compile(r"Invalid enum value .* - at `\$\.(?P<field>\w+)`\Z", re.DOTALL)

_TIME_AS_NUMBER = re.compile(r"got `(int|float|bool)` - at `\$\.(start|until|at_local)`\Z")

_SYNONYMS = {
    "body": ("payload", "data", "message", "content", "value"),
    "due_ms": ("at", "at_ms", "due", "due_at", "eta", "run_at", "scheduled_at", "timestamp"),
    "delay_ms": ("delay_seconds", "delay_s", "countdown", "in"),
    "ttl_ms": ("expires", "expires_in", "expiry", "expiration"),
    "id": ("message_id", "job_id", "msg_id"),
    "key": ("group_id", "message_group_id", "partition_key", "ordering_key"),
    "max": ("limit", "count", "batch", "batch_size", "max_messages", "max_number_of_messages"),
    "limit": ("max", "count", "page_size", "per_page"),
    "wait_ms": ("timeout", "timeout_ms", "block", "block_ms", "wait_time_seconds"),
    "ack_timeout_ms": ("visibility_timeout", "visibility_timeout_ms", "lease_ms", "ack_deadline"),
    "on_duplicate": ("if_exists", "unique", "conflict"),
    "receipt": ("receipt_handle", "token", "ack_id"),
}
"""What other queues call these fields."""


_MEANT = [(given, meant) for meant, others in _SYNONYMS.items() for given in others]


_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, pairs of surrogates, and single surrogates."""


def not_json(data: bytes, error: Exception) -> str:
    """The text for a body that cannot be decoded.

    The decoder reports an empty body, and half of a surrogate pair, as truncated data.
    """
    if not data.strip():
        return "the body is empty; send JSON"
    for found in _ESCAPES.finditer(data):
        if lone := found["lone"]:
            return f"the body is not valid UTF-8 JSON: {lone.decode()} is half of a surrogate pair"
    return f"the body is not valid UTF-8 JSON: {error}"


def mismatch(what: str, kind: Any, error: msgspec.ValidationError) -> str:
    """The text for `what`, such as "the JSON", which does not match the type `kind`."""
    unknown = _UNKNOWN_FIELD.search(str(error))
    if unknown is None:
        invalid = _INVALID_VALUE.search(str(error))
        allowed = "" if invalid is None else f"; use {', '.join(_values(kind, invalid['field']))}"
        if _TIME_AS_NUMBER.search(str(error)):
            allowed = "; a time is text, as in '2026-12-24T09:00'"
        return f"{what} does not match the schema: {error}{allowed}"
    names, given = _names(kind), unknown["name"][:LONGEST_NAME]
    return f"{what} has the unknown field `{given}`{unknown['place'] or ''}; " + _hint(given, names)


def _hint(given: str, names: Sequence[str]) -> str:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", given).replace("-", "_").lower()
    near = [meant for other, meant in _MEANT if other == plain and meant in names]
    near = near or difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"the fields are {', '.join(names)}" if names else "no fields are expected"


@cache  # each message of a batch may be invalid
def _names(kind: Any) -> Sequence[str]:
    """The names of all fields of the structs in a type, also of nested ones."""
    return sorted(set(_field_names(kind)))


def _field_names(kind: Any) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield field.name
            yield from _field_names(field.type)
    for part in get_args(kind):
        yield from _field_names(part)


@cache
def _values(kind: type[msgspec.Struct], name: str) -> Sequence[str]:
    """The values that a field may have."""
    (field,) = [field for field in msgspec.structs.fields(kind) if field.name == name]
    return [str(value) for value in _choices(field.type)]


def _choices(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        yield from (choice.value for choice in kind)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _choices(part)


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


def invalid(detail: str) -> ErrorResponse:
    """The problem for an invalid request."""
    return ErrorResponse(400, "invalid", detail)


def problem_answer(error: Exception) -> Problem:
    """An error as one result of a batch."""
    return msgspec.convert(problem_of(error).content, Problem)


def read_json(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """Decode JSON into the decoder's type. Raises ErrorResponse."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(mismatch("the JSON", decoder.type, error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(not_json(bytes(data), error)) from None
    except RecursionError:
        raise invalid("the JSON is nested too deeply") from None


def convert_fields(
    what: str, fields: Mapping[str, Any], kind: type[S], *, strict: bool = True
) -> S:
    """A request of decoded fields, whose values may be text unless strict. Raises ErrorResponse."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise invalid(mismatch(what, kind, error)) from None


def read_policy(retry: list[int] | str | None) -> RetryPolicy | None:
    """The retry policy of a request. Raises ErrorResponse."""
    if retry is None:
        return None
    try:
        return RetryPolicy(tuple(retry)) if isinstance(retry, list) else RetryPolicy.parse(retry)
    except InvalidMessage as error:
        raise invalid(f"retry: {error}") from None


_any_json = msgspec.json.Decoder()


def read_body(raw: msgspec.Raw | UnsetType, in_base64: str | None) -> Any:
    """The message body from the fields `body` and `body_base64`. Raises ErrorResponse.

    JSON is passed on as raw text, so that numbers keep their precision.
    """
    if raw is UNSET:
        if in_base64 is None:
            raise invalid("body is missing: give body (which may be null) or body_base64")
        return _from_base64(in_base64)
    if in_base64 is not None:
        raise invalid("give either body or body_base64, not both")
    # The request decoder does not validate strings and numbers within a raw value.
    value = read_json(_any_json, raw)
    if isinstance(value, str):
        return value
    text = bytes(raw)
    if text.count(b"[") + text.count(b"{") > DEEPEST and _is_deeper(value, DEEPEST):
        raise invalid(f"body is nested more than {DEEPEST} levels deep")
    return raw


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"body_base64 is not valid base64: {error}") from None


def _is_deeper(value: Any, levels: int) -> bool:
    row = [value]
    while row and levels >= 0:
        inner: list[Any] = []
        for nested in row:
            if isinstance(nested, dict):
                inner += nested.values()
            elif isinstance(nested, list):
                inner += nested
        row = [nested for nested in inner if isinstance(nested, (dict, list))]
        levels -= 1
    return levels < 0


def response_body(body: Any) -> dict[str, Any]:
    """The field of a response that holds a body: `body`, or `body_base64` for bytes."""
    if isinstance(body, bytes):
        return {"body_base64": base64.b64encode(body).decode("ascii")}
    return {"body": body}


# The format of admin.messages: GROUP/ENTRY for streams, with @NUMBER if there are several shards,
# and GROUP/SCORE:MEMBER for sorted sets. That of keys is SHARD/NUMBER:MEMBER, of limits GROUP/KEY.
IN_STREAM = re.compile(r"[A-Za-z0-9_.:-]{0,128}/(?:\d{1,18}-\d{1,18}(?:@\d{1,2})?)?", re.ASCII)
IN_ORDER = re.compile(r"[A-Za-z0-9_.:~-]{0,160}/(?:\d{1,16}:.*)?", re.ASCII | re.DOTALL)
OF_LIMITS = re.compile(r"[A-Za-z0-9_.:-]{0,128}/.+", re.ASCII | re.DOTALL)


def encode_cursor(cursor: str | None) -> str | None:
    """A cursor for a response."""
    if cursor is None:
        return None
    return urlsafe_b64encode(cursor.encode("utf-8", "surrogateescape")).rstrip(b"=").decode("ascii")


def decode_cursor(text: str | None, form: re.Pattern[str] = IN_ORDER) -> str | None:
    """The internal position of a client's cursor. Raises ErrorResponse."""
    if text is None:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        raise unknown_cursor(text) from None
    cursor = data.decode("utf-8", "surrogateescape")
    if not form.fullmatch(cursor):
        raise unknown_cursor(text)
    return cursor


def unknown_cursor(text: str) -> ErrorResponse:
    """The error of a cursor that its list did not give out."""
    return invalid(f"cursor {text[:80]!r} does not belong to this list; omit it to start over")


class _WireForm(NamedTuple):
    """The JSON name and type of an option, and how Python's value is made of it."""

    name: str
    kind: Any
    convert: Callable[[Any], Any] = lambda value: value


def _delta(milliseconds: int) -> timedelta:
    return timedelta(milliseconds=milliseconds)


_WIRE_FORMS = {
    "delay": _WireForm("delay_ms", Milliseconds, _delta),
    "at_ms": _WireForm("due_ms", Instant),
    "at_local": _WireForm("at_local", str),
    "tz": _WireForm("tz", str),
    "fold": _WireForm("fold", Literal[0, 1]),
    "business_days": _WireForm("business_days", Annotated[int, Meta(ge=0, le=MOST_BUSINESS_DAYS)]),
    "ttl": _WireForm("ttl_ms", Ttl, _delta),
    "headers": _WireForm("headers", dict[str, str]),
    "retry": _WireForm("retry", Retries, read_policy),
    "late": _WireForm("late", Late),
    "cost": _WireForm("cost", Annotated[int, Meta(ge=1, le=MAX_COST)]),
    "slack": _WireForm("slack_ms", Slack, _delta),
    "key": _WireForm("key", OwnId),
    "debounce": _WireForm("debounce_ms", Ttl, _delta),
    "max_wait": _WireForm("max_wait_ms", Ttl, _delta),
    "throttle": _WireForm("throttle_ms", Ttl, _delta),
    "latest": _WireForm("latest", bool),
    "on_duplicate": _WireForm("on_duplicate", OnDuplicate),
}
"""The options whose JSON has another name or a narrower type. `at` has none: it is `due_ms`."""


@cache
def _wire_forms(options: Any) -> dict[str, _WireForm]:
    hints = get_type_hints(options)
    return {
        name: _WIRE_FORMS.get(name) or _WireForm(name, kind)
        for name, kind in hints.items()
        if name != "at"
    }


def option_fields(options: Any) -> list[tuple[str, Any, Any]]:
    """The fields of a request for the options of a producer's method."""
    texts = option_texts(options)
    return [
        (
            form.name,
            Annotated[form.kind | None, Meta(description=_sentence(texts.get(name, "")))],
            None,
        )
        for name, form in _wire_forms(options).items()
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + " ".join(text.split())[1:]


def given_options(request: Request, options: Any) -> dict[str, Any]:
    """The options of a request, as a producer's method takes them. Raises ErrorResponse."""
    forms = _wire_forms(options)
    given = {
        name: form.convert(value)
        for name, form in forms.items()
        if (value := getattr(request, form.name)) is not None
    }
    if len(given.keys() & {"delay", "at_ms", "at_local"}) > 1:
        raise invalid("give only one of delay_ms, due_ms and at_local")
    if "tz" in given and not given.keys() & {"at_local", "window"}:
        local = "at_local or window" if "window" in forms else "at_local"
        raise invalid(f"tz needs {local}; other due times have no time zone")
    return given
