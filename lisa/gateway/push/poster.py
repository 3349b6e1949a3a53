"""One push: a request, and what its answer means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

import httpcore
import httpx

from lisa.admin.push import PushTarget, key_of
from lisa.core.message import Message
from lisa.gateway.push.allowed import Allowed, NotAllowed
from lisa.gateway.push.network import GuardedBackend
from lisa.gateway.push.signing import body_of, headers_of

__all__ = ["Answer", "Poster", "Verdict"]

KEEP_ALIVE_S = 4.0
"""Shorter than the five seconds that common servers keep idle connections for."""

MOST_KEPT = 100
MOST_READ = 16 * 1024
"""Bytes of an answer that are read, so that its connection can be used again."""

SHOWN = 200
LONGEST_WAIT = 24 * 3600
"""Seconds that a Retry-After is heeded for at most."""


class Verdict(Enum):
    """What an answer asks for."""

    DONE = "done"
    LATER = "later"
    FAILED = "failed"


class Answer(NamedTuple):
    """What a target made of a push; `wait_s` with `LATER`, `reason` with all but `DONE`."""

    verdict: Verdict
    reason: str = ""
    wait_s: float = 0.0


class Poster:
    """Sends pushes.

    No redirect is followed, no cookie kept, no proxy used: a request goes to the address that was
    judged, or nowhere.
    """

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._pool: httpcore.AsyncConnectionPool | None = None

    def _connections(self) -> httpcore.AsyncConnectionPool:
        if self._pool is None:
            # Late: most gateways push nothing, and reading the certificates takes its time.
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=httpx.create_ssl_context(),
                max_connections=None,  # each target is bounded by itself
                max_keepalive_connections=MOST_KEPT,
                keepalive_expiry=KEEP_ALIVE_S,
                network_backend=GuardedBackend(self._allowed),
            )
        return self._pool

    async def post(self, target: PushTarget, message: Message, timeout_s: float) -> Answer:
        """Push a message; whatever goes wrong is an answer, too."""
        body, media_type = body_of(message)
        headers = headers_of(message, media_type, body, key_of(target.secret), int(time.time()))
        answer: Answer | None = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._connections().stream(
                    "POST", target.url,
                    headers=[("content-length", str(len(body))), *headers], content=body,
                    extensions={"timeout": dict.fromkeys(_TIMEOUTS, timeout_s)},
                ) as response,
            ):  # fmt: skip
                answer = _judged(response, "")
                with suppress(httpcore.NetworkError, httpcore.ProtocolError):
                    answer = _judged(response, await _text(response))
        except NotAllowed as error:
            return Answer(Verdict.FAILED, f"not allowed: {error}")
        except (TimeoutError, httpcore.TimeoutException):
            # An answer whose body is slow has been given all the same.
            return answer or Answer(Verdict.FAILED, f"no answer within {timeout_s:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            said = str(error) or type(error).__name__
            return answer or Answer(Verdict.FAILED, f"no answer: {said}"[:SHOWN])
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            await self._pool.aclose()


_TIMEOUTS = ("connect", "read", "write", "pool")


def _judged(response: httpcore.Response, said: str) -> Answer:
    status = response.status
    if 200 <= status < 300:
        return Answer(Verdict.DONE)
    with suppress(ValueError):
        said = f"{HTTPStatus(status).phrase}: {said}" if said else HTTPStatus(status).phrase
    if 300 <= status < 400:
        said = "redirects are not followed"
    reason = f"{status} {said}".strip()
    if status in (429, 503):
        wait_s = _wait_s(response)
        if wait_s > 0:
            return Answer(Verdict.LATER, reason, wait_s)
    return Answer(Verdict.FAILED, reason)


def _wait_s(response: httpcore.Response) -> float:
    """Seconds that a Retry-After asks for, as number or as date; 0 without one."""
    headers = {name.lower(): value for name, value in response.headers}
    value = headers.get(b"retry-after", b"").decode("latin-1").strip()
    if value.isascii() and value.isdigit():
        return float(min(int(value[:12]), LONGEST_WAIT))
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if moment.utcoffset() is None:
        moment = moment.replace(tzinfo=UTC)
    left_s = (moment - datetime.now(UTC)).total_seconds()
    return min(max(left_s, 0.0), float(LONGEST_WAIT))


async def _text(response: httpcore.Response) -> str:
    """The start of an answer in one line; the rest is read up to a bound and dropped."""
    read = bytearray()
    async for chunk in _chunks(response):
        read += chunk
        if len(read) > MOST_READ:
            break
    text = bytes(read[: 4 * SHOWN]).decode("utf-8", "replace")
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


def _chunks(response: httpcore.Response) -> AsyncIterator[bytes]:
    return response.aiter_stream()
