"""An HTTP load generator with little overhead: prepared bytes on plain connections.

It parses only the status line and Content-Length of responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit


def post(url: str, path: str, body: bytes) -> bytes:
    """A complete POST request with a JSON body."""
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """A connection with one request at a time; calls `answered(caller, status, body)`."""

    def __init__(self, answered: Callable[[Caller, int, bytes], None]) -> None:
        self._answered = answered
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def send(self, request: bytes) -> None:
        """Send a request; `answered` is called with the response."""
        if self._transport is None or self._transport.is_closing():
            raise SystemExit("the gateway closed a connection")
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect a response."""
        self._held += data
        head, parted, rest = self._held.partition(b"\r\n\r\n")
        if not parted:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) >= length:
            self._held = b""
            self._answered(self, int(head[9:12]), rest)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


async def connect(url: str, answered: Callable[[Caller, int, bytes], None]) -> Caller:
    """Connect to the gateway."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, caller = await loop.create_connection(
        lambda: Caller(answered), parts.hostname or "", parts.port or 80
    )
    return caller
