"""The headers and body of a push request, signed according to Standard Webhooks.

`webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`. A target can
verify it with any Standard Webhooks library and the target's secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import msgspec

from lisa.core.model.message import Message
from lisa.gateway.trace_context import trace_context

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z")
_PLAIN = re.compile(r"[\x21-\x24\x26-\x7e]+\Z")
"""Visible ASCII without %, so that no id is sent as the percent-encoding of another."""

MOST_HEADER_BYTES = 8 * 1024
"""Limit for a message's own headers; most servers reject more."""

AGENT = f"lisa-gateway/{version('lisa-delay-queue')}"


def body_of(message: Message) -> tuple[bytes, str]:
    """A message's body as bytes, and its media type."""
    body: Any = message.body
    if isinstance(body, bytes):
        return body, "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), "text/plain; charset=utf-8"
    return msgspec.json.encode(body), "application/json"


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode("ascii")


def headers_of(
    message: Message, media_type: str, body: bytes, key: bytes, timestamp: int
) -> list[tuple[str, str]]:
    """All headers of a push, except those of the connection.

    An id with a percent sign, or with characters not allowed in headers, is percent-encoded; the
    signature covers the encoded id.
    """
    written = message.id
    if not _PLAIN.match(written):
        written = quote(written, safe="")
    return [
        ("content-type", media_type),
        ("user-agent", AGENT),
        ("accept", "*/*"),
        ("accept-encoding", "identity"),
        ("webhook-id", written),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", sign(key, written, timestamp, body)),
        ("lisa-topic", message.topic),
        ("lisa-group", message.group),
        ("lisa-attempt", str(message.attempt)),
        ("lisa-due-ms", str(message.due_ms)),
        *trace_context(message.headers).items(),
        *_own_headers(message.headers),
    ]


def _own_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """The message's headers that are legal in HTTP, up to a size limit; others are dropped."""
    found, size = [], 0
    for name, value in headers.items():
        if not _TOKEN.match(name) or not (value == "" or _VALUE.match(value)):
            continue
        size += len(name) + len(value)
        if size > MOST_HEADER_BYTES:
            break
        found.append((f"lisa-header-{name.lower()}", value))
    return found
