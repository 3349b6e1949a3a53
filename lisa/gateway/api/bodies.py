"""Message bodies in requests and responses: any JSON value, or bytes in base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from msgspec import UNSET

from lisa.gateway.api.models.schedules import ScheduleRequest
from lisa.gateway.api.models.sending import SendRequest
from lisa.gateway.api.operations import invalid, read_json

DEEPEST = 100
"""Maximum nesting of a JSON body, well below the limits of common JSON parsers."""

_decoder = msgspec.json.Decoder()


def read_body(request: SendRequest | ScheduleRequest) -> Any:
    """The message body from a request. Raises ErrorResponse.

    JSON is passed on as raw text, so that numbers keep their precision.
    """
    raw = request.body
    if raw is UNSET:
        if request.body_base64 is None:
            raise invalid("body is missing: give body (which may be null) or body_base64")
        return _from_base64(request.body_base64)
    if request.body_base64 is not None:
        raise invalid("give either body or body_base64, not both")
    # The request decoder does not validate strings and numbers within a raw value.
    value = read_json(_decoder, raw)
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
        for one in row:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        row = [one for one in inner if isinstance(one, (dict, list))]
        levels -= 1
    return levels < 0


def response_body(body: Any) -> dict[str, Any]:
    """The field of a response that holds a body: `body`, or `body_base64` for bytes."""
    if isinstance(body, bytes):
        return {"body_base64": base64.b64encode(body).decode("ascii")}
    return {"body": body}
