"""Bodies on their way in and out: any JSON value as it was written, or bytes as base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lisa.gateway.native.models import SendRequest
from lisa.gateway.native.operations import invalid, read_json

__all__ = ["read_body", "written_body"]

DEEPEST = 100
"""Levels of a JSON body: far below where any client's reader gives up."""

_decoder = msgspec.json.Decoder()


def read_body(request: SendRequest) -> Any:
    """A request's body, ready to be sent. Raises Problem.

    JSON passes as it was written, so that no number loses a digit.
    """
    raw = request.body
    if raw is UNSET:
        if request.body_base64 is None:
            raise invalid("body is missing: give body (null is a value) or body_base64")
        return _from_base64(request.body_base64)
    if request.body_base64 is not None:
        raise invalid("give one of body and body_base64; they contradict each other")
    # The request's own decoder passes over a raw value's letters and numbers: this one looks.
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
        raise invalid(f"body_base64 is no base64: {error}") from None


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


def written_body(body: Any) -> tuple[Any | UnsetType, str | UnsetType]:
    """`body` and `body_base64` of an answer; the one that does not apply is unset."""
    if isinstance(body, bytes):
        return UNSET, base64.b64encode(body).decode("ascii")
    return body, UNSET
