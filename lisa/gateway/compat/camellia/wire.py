"""Camellia's wire format: parameters as Spring parses them, JSON as Jackson and fastjson write it.

Spring accepts parameters from the query and the form. A missing or ill-typed parameter gets HTTP
400 before the queue is called; errors from the queue get HTTP 200 with a code in the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.core.model.message import Message
from lisa.core.store.inspection import FoundMessage, State, found
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.compat.requests import MOST_FIELDS, read_form, text_of
from lisa.gateway.problems import ErrorResponse

SUCCESS = 200
PARAM_WRONG = 400
NOT_EXISTS = 404
UNKNOWN = 500

JSON = "application/json"

_DECIMAL = re.compile(r"[+-]?[0-9]+\Z")
_HEX = re.compile(r"(-?)(?:0[xX]|#)([0-9a-fA-F]+)\Z")
_TRUE = frozenset(("true", "on", "yes", "1"))
_FALSE = frozenset(("false", "off", "no", "0"))

HEADER = "camellia"


class BadParameter(ErrorResponse):
    """A parameter is missing or has the wrong type."""

    def __init__(self, detail: str) -> None:
        super().__init__(400, "parameter", detail)


class Parameters:
    """The parameters of one request, the query before the form; of duplicates, the first counts."""

    def __init__(self, request: Request, values: Mapping[str, str]) -> None:
        self.request = request
        self._values = values

    @classmethod
    async def of(cls, request: Request) -> Parameters:
        """Read query and form parameters. Raises BadParameter."""
        try:
            pairs = parse_qsl(request.url.query, keep_blank_values=True, max_num_fields=MOST_FIELDS)
            if request.method == "POST":
                pairs += await read_form(request)
        except ValueError as error:
            raise BadParameter(
                f"the parameters, at most {MOST_FIELDS}, cannot be parsed: {error}"
            ) from None
        return cls(request, dict(reversed(pairs)))

    def text(self, name: str) -> str:
        """A required text, which may be empty. Raises BadParameter."""
        try:
            return self._values[name]
        except KeyError:
            raise _missing(name) from None

    def optional_text(self, name: str) -> str | None:
        """An optional text."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, bits: int = 64) -> int:
        """A Java long, or int with bits=32; by default `default`. Raises BadParameter."""
        given = "".join(self._values.get(name, "").split())
        if not given:
            if default is None:
                raise _missing(name)
            return default
        if _DECIMAL.match(given) and len(given) <= 20:
            number = int(given)
        elif (found := _HEX.match(given)) and len(given) <= 20:
            number = int(found[1] + found[2], 16)
        else:
            raise BadParameter(f"parameter '{name}' must be an integer, not {given[:40]!r}")
        if not -(1 << bits - 1) <= number < 1 << bits - 1:
            raise BadParameter(f"parameter '{name}' is out of range: {number}")
        return number

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """A boolean; if missing or empty, the default. Raises BadParameter."""
        given = self._values.get(name, "").strip().lower()
        if not given:
            if default is None:
                raise _missing(name)
            return default
        if given not in _TRUE | _FALSE:
            raise BadParameter(f"parameter '{name}' must be true or false, not {given[:40]!r}")
        return given in _TRUE


def _missing(name: str) -> BadParameter:
    return BadParameter(f"Required parameter '{name}' is not present.")


def answer(
    code: int, *, status: int = 200, headers: Mapping[str, str] | None = None, **fields: Any
) -> Response:
    """A response as Jackson writes it, with nulls. status: the HTTP status."""
    body = msgspec.json.encode({"code": code, **fields})
    return Response(body, status, headers, media_type=JSON)


def compact(found: Sequence[msgspec.Struct]) -> bytes:
    """A pull response as fastjson writes it: sorted by field name, without nulls and `msg`."""
    rows = [
        {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        for message in found
    ]
    return msgspec.json.encode({"code": SUCCESS, "delayMsgList": rows}, order="sorted")


def bad_request(request: Request, error: BadParameter) -> Response:
    """HTTP 400 in Spring's format."""
    content = {
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "status": 400,
        "error": "Bad Request",
        "message": error.detail,
        "path": request.url.path,
    }
    return Response(msgspec.json.encode(content), 400, media_type=JSON)


WAITING, READY, CONSUMING, CONSUMED, EXPIRED, EXHAUSTED, DELETED = range(1, 8)

_STATUS = {
    State.READY: READY,
    State.IN_FLIGHT: CONSUMING,
    State.GARBAGE: EXHAUSTED,
    State.ACKED: CONSUMED,
    State.CANCELLED: DELETED,
    State.PURGED: DELETED,
    State.SKIPPED: EXPIRED,
}
_ALIVE = (State.WAITING, State.READY, State.IN_FLIGHT, State.RETRY)


class DelayMsg(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """A message in Camellia's field order. Times are epoch milliseconds."""

    topic: str
    msg_id: str
    msg: str | None = None
    produce_time: int | None = None
    trigger_time: int | None = None
    expire_time: int | None = None
    max_retry: int | None = None
    retry: int = 0
    status: int = WAITING


class Origin(NamedTuple):
    """The content of the `camellia` header."""

    produce_ms: int
    trigger_ms: int
    ttl_ms: int
    max_retry: int

    @property
    def header(self) -> dict[str, str]:
        """The message header with this content."""
        return {HEADER: ",".join(map(str, self))}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Origin | None:
        """Parse the header; None if it is missing or not valid."""
        parts = headers.get(HEADER, "").split(",")
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
            return None
        return cls(*map(int, parts))


def as_pulled(message: Message) -> DelayMsg:
    """A message that is being delivered; its `retry` counts this delivery."""
    return with_origin(
        Origin.of(message.headers),
        message.due_ms if message.attempt == 1 else None,
        topic=message.topic,
        msg_id=message.id,
        msg=text_of(message.body),
        retry=message.attempt,
        status=CONSUMING,
    )


def as_found(topic: str, message_id: str, seen: Inspection, now_ms: int) -> DelayMsg | None:
    """A message that was looked up; None if it is unknown."""
    message = found(topic, message_id, seen)
    if message is None:
        return None
    is_live = not message.state.is_final
    retry = message.attempts
    if message.state is State.EXPIRED and message.due_ms is not None:
        retry = max(0, retry - 1)  # expired at its delivery, which does not count
    # For a later attempt or a dead message, due_ms is no longer the original due time.
    before = 0 if is_live and message.state is not State.IN_FLIGHT else 1
    is_first = message.attempts <= before and message.state is not State.GARBAGE
    return with_origin(
        Origin.of(message.headers),
        message.due_ms if is_first else None,
        seen.expires_ms,
        topic=topic,
        msg_id=message_id,
        msg=text_of(message.body) if is_live else None,
        retry=retry,
        status=_status(message, retry, seen.expires_ms, now_ms),
    )


def is_alive(topic: str, message_id: str, seen: Inspection) -> bool:
    """Whether the message may still be delivered, or is in flight."""
    message = found(topic, message_id, seen)
    return message is not None and message.state in _ALIVE


def with_origin(
    origin: Origin | None, due_ms: int | None = None, expires_ms: int | None = None, **known: Any
) -> DelayMsg:
    """A message with the times of its origin, unless later ones are known."""
    if origin is None:
        return DelayMsg(trigger_time=due_ms, expire_time=expires_ms, **known)
    if expires_ms is not None:  # set from the due time, unchanged by retries
        due_ms = expires_ms - origin.ttl_ms
    trigger_ms = origin.trigger_ms if due_ms is None else due_ms
    return DelayMsg(
        produce_time=origin.produce_ms,
        trigger_time=trigger_ms,
        expire_time=trigger_ms + origin.ttl_ms,
        max_retry=origin.max_retry,
        **known,
    )


def _status(message: FoundMessage, retry: int, expires_ms: int | None, now_ms: int) -> int:
    # A message past its ttl is not delivered, even before a manager has expired it.
    is_past = expires_ms is not None and expires_ms <= now_ms
    if message.state is State.EXPIRED or (is_past and message.state is not State.IN_FLIGHT):
        return EXHAUSTED if retry else EXPIRED
    if message.state in (State.WAITING, State.RETRY):
        return READY if message.due_ms is not None and message.due_ms <= now_ms else WAITING
    return _STATUS[message.state]
