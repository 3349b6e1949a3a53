"""Opaque cursors for clients: base64 of an internal list position, which may hold any bytes."""

from __future__ import annotations

import binascii
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode

from lisa.gateway.api.operations import invalid
from lisa.gateway.problems import ErrorResponse

# The format of admin.messages: GROUP/ENTRY for streams, with @NUMBER if there are several shards,
# and GROUP/SCORE:MEMBER for sorted sets.
_STREAM = re.compile(r"[A-Za-z0-9_.:-]{0,128}/(?:\d{1,18}-\d{1,18}(?:@\d{1,2})?)?", re.ASCII)
_SORTED = re.compile(r"[A-Za-z0-9_.:-]{0,128}/(?:\d{1,16}:.*)?", re.ASCII | re.DOTALL)


def encode_cursor(cursor: str | None) -> str | None:
    """A cursor for a response."""
    if cursor is None:
        return None
    return urlsafe_b64encode(cursor.encode("utf-8", "surrogateescape")).rstrip(b"=").decode("ascii")


def decode_cursor(text: str | None, *, is_stream: bool = False) -> str | None:
    """The internal position of a client's cursor. Raises ErrorResponse."""
    if text is None:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        raise unknown_cursor(text) from None
    cursor = data.decode("utf-8", "surrogateescape")
    if not (_STREAM if is_stream else _SORTED).fullmatch(cursor):
        raise unknown_cursor(text)
    return cursor


def unknown_cursor(text: str) -> ErrorResponse:
    """The error of a cursor that its list did not give out."""
    return invalid(f"cursor {text[:80]!r} does not belong to this list; omit it to start over")
