"""Cursors as clients see them: opaque, whatever bytes the place behind a page is named by."""

from __future__ import annotations

import binascii
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode

from lisa.gateway.native.operations import invalid

__all__ = ["read_cursor", "written_cursor"]

# What admin.messages writes: the group, then an entry of its stream or a score and its member.
_STREAM = re.compile(r"[A-Za-z0-9_.:-]{0,128}/(?:\d{1,18}-\d{1,18})?")
_SORTED = re.compile(r"[A-Za-z0-9_.:-]{0,128}/(?:\d{1,16}:.*)?", re.DOTALL)


def written_cursor(cursor: str | None) -> str | None:
    """A cursor for an answer."""
    if cursor is None:
        return None
    return urlsafe_b64encode(cursor.encode("utf-8", "surrogateescape")).rstrip(b"=").decode("ascii")


def read_cursor(text: str | None, *, is_stream: bool = False) -> str | None:
    """The cursor behind what a client brings back. Raises Problem."""
    if text is None:
        return None
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        raise _foreign(text) from None
    cursor = data.decode("utf-8", "surrogateescape")
    if not (_STREAM if is_stream else _SORTED).fullmatch(cursor):
        raise _foreign(text)
    return cursor


def _foreign(text: str) -> Exception:
    return invalid(f"cursor {text[:80]!r} is none of this list; leave it out to begin anew")
