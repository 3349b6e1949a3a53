"""A load of HTTP requests that costs little itself: prepared bytes on plain connections.

Answers are told apart by their status line and their Content-Length alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

__all__ = ["Caller", "connect", "post"]


def post(url: str, path: str, body: bytes) -> bytes:
    """A whole POST request of JSON."""
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """One connection with one request under way: `answered(caller, status, body)` goes on."""

    def __init__(self, answered: Callable[[Caller, int, bytes], None]) -> None:
        self._answered = answered
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for a request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def send(self, request: bytes) -> None:
        """Ask; `answered` is called with what comes."""
        if self._transport is None or self._transport.is_closing():
            raise SystemExit("the gateway closed a connection")
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect an answer."""
        self._held += data
        head, parted, rest = self._held.partition(b"\r\n\r\n")
        if not parted:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) >= length:
            self._held = b""
            self._answered(self, int(head[9:12]), rest)

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.close()


async def connect(url: str, answered: Callable[[Caller, int, bytes], None]) -> Caller:
    """A connection to the gateway."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, caller = await loop.create_connection(
        lambda: Caller(answered), parts.hostname or "", parts.port or 80
    )
    return caller
