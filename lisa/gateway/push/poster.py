"""Sends one push as a signed HTTP request and interprets the response."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import certifi
import httpcore
import msgspec

from lisa.admin.push import StoredPushTarget, key_of
from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.gateway.context import RedisClock
from lisa.gateway.push.network import Allowed, GatewayFault, GuardedBackend, NotAllowed
from lisa.gateway.trace_context import trace_context

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z")
_PLAIN = re.compile(r"[\x21-\x24\x26-\x7e]+\Z")
"""Visible ASCII without %, so that no id is sent as the percent-encoding of another."""

MOST_HEADER_BYTES = 8 * 1024
"""Limit for a message's own headers; most servers reject more."""

AGENT = f"lisa-gateway/{version('lisa-delay-queue')}"

KEEP_ALIVE_S = 4.0
"""Shorter than the five seconds after which common servers close idle connections."""

CONNECT_PART = 0.9
"""Part of a push's time after which a lookup or connection fails with its own error."""

MOST_KEPT = 100

MOST_READ = 16 * 1024
"""Bytes of a response body that are read so that the connection can be reused."""

SHOWN = 200

LONGEST_WAIT = 24 * 3600
"""Upper limit for Retry-After, in seconds."""


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


class PushVerdict(Enum):
    """How to settle a delivery after a push."""

    DONE = "done"
    LATER = "later"
    FAILED = "failed"
    FAULT = "fault"


class PushResult(NamedTuple):
    """The result of a push. `reason` is set unless `DONE`; `wait_s` is set for `LATER`.

    FAULT: the gateway could not push, for which the message is not charged. detail: more than
    `reason`, for the log: those who may set targets must not learn about the gateway's network.
    rests_lane: of `LATER`, only the messages with the same key have to wait.
    """

    verdict: PushVerdict
    reason: str = ""
    wait_s: float = 0.0
    detail: str = ""
    rests_lane: bool = False


def certificates() -> ssl.SSLContext:
    """The authorities that vouch for targets. Raises ConfigError if they cannot be read."""
    file, directory = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    name = "SSL_CERT_FILE" if file else "SSL_CERT_DIR" if directory else "certifi"
    try:
        if file or not directory:
            return ssl.create_default_context(cafile=file or certifi.where())
        if not any(Path(directory).iterdir()):
            raise FileNotFoundError("the directory is empty")
        return ssl.create_default_context(capath=directory)
    except OSError as error:
        raise ConfigError(
            f"{name}={file or directory or certifi.where()}: cannot be read as certificates of "
            f"authorities, without which no https: target can be verified: {error}"
        ) from None


class Poster:
    """Sends pushes over pooled connections.

    Follows no redirects, keeps no cookies and uses no proxy, so that requests go only to addresses
    that passed the allow-list.
    """

    def __init__(self, allowed: Allowed, clock: RedisClock) -> None:
        self._allowed = allowed
        self._clock = clock
        self._pool: httpcore.AsyncConnectionPool | None = None

    def _connections(self) -> httpcore.AsyncConnectionPool:
        if self._pool is None:
            # Most gateways push nothing, and loading the certificates is slow.
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=certificates(),
                max_connections=None,  # each target has its own limit
                max_keepalive_connections=MOST_KEPT,
                keepalive_expiry=KEEP_ALIVE_S,
                network_backend=GuardedBackend(self._allowed),
            )
        return self._pool

    async def post(
        self, target: StoredPushTarget, message: Message, timeout_s: float
    ) -> PushResult:
        """Push a message. Failures are returned as a result, not raised."""
        body, media_type = body_of(message)
        now_ms = self._clock.about_ms()
        headers = headers_of(message, media_type, body, key_of(target.secret), now_ms // 1000)
        limits = {**dict.fromkeys(_TIMEOUTS, timeout_s), "connect": timeout_s * CONNECT_PART}
        has_lane = target.uses_lanes and message.key is not None
        answer: PushResult | None = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._connections().stream(
                    "POST",
                    target.url,
                    headers=[("content-length", str(len(body))), *headers],
                    content=body,
                    extensions={"timeout": limits},
                ) as response,
            ):
                answer = _answer_of(response, "", now_ms, has_lane=has_lane)
                with suppress(httpcore.NetworkError, httpcore.ProtocolError):
                    answer = _answer_of(response, await _text(response), now_ms, has_lane=has_lane)
        except NotAllowed as error:
            host = urlsplit(target.url).hostname
            reason = f"not allowed: {host} has no address that this gateway may push to"
            return PushResult(PushVerdict.FAILED, reason, detail=f" ({error})")
        except (GatewayFault, ConfigError) as error:
            return PushResult(PushVerdict.FAULT, str(error))
        except (TimeoutError, httpcore.TimeoutException):
            # A response with a slow body still counts.
            return answer or PushResult(PushVerdict.FAILED, f"no response within {timeout_s:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            detail = str(error) or type(error).__name__
            return answer or PushResult(PushVerdict.FAILED, f"no response: {detail}"[:SHOWN])
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            await self._pool.aclose()


_TIMEOUTS = ("read", "write", "pool")


def _answer_of(
    response: httpcore.Response, text: str, now_ms: int, *, has_lane: bool
) -> PushResult:
    status = response.status
    if 200 <= status < 300:
        return PushResult(PushVerdict.DONE)
    with suppress(ValueError):
        phrase = HTTPStatus(status).phrase
        text = f"{phrase}: {text}" if text else phrase
    if 300 <= status < 400:
        text = "redirects are not followed"
    reason = f"{status} {text}".strip()
    if status in (429, 503):
        wait_s = _wait_s(response, now_ms)
        if wait_s > 0:
            rests_lane = has_lane and status == 429
            return PushResult(PushVerdict.LATER, reason, wait_s, rests_lane=rests_lane)
    return PushResult(PushVerdict.FAILED, reason)


def _wait_s(response: httpcore.Response, now_ms: int) -> float:
    """The seconds in a Retry-After header, given as number or date; 0 if absent.

    A date counts from that of the response, which the same clock shows, or else from `now_ms`.
    """
    headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
    value = headers.get(b"retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(min(int(value[:12]), LONGEST_WAIT))
    moment = _moment(value)
    if moment is None:
        return 0.0
    left_s = (moment - (_moment(headers.get(b"date", "")) or ms_datetime(now_ms))).total_seconds()
    return min(max(left_s, 0.0), float(LONGEST_WAIT))


def _moment(text: str) -> datetime | None:
    """The time in a header; None if it has none."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment


async def _text(response: httpcore.Response) -> str:
    """The start of a response body as one line; the rest is read up to a limit and dropped."""
    read = bytearray()
    async for chunk in response.aiter_stream():
        read += chunk
        if len(read) > MOST_READ:
            break
    text = bytes(read[: 4 * SHOWN]).decode("utf-8", "replace")
    line = " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
