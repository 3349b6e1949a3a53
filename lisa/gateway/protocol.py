"""Uvicorn's HTTP protocol, with bounds for what comes before a request is whole enough to judge.

The doorman bounds bodies. A connection that says nothing, or sends its head byte by byte or without
end, never gets that far.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MOST_HEAD_BYTES", "bounded"]

MOST_HEAD_BYTES = 64 * 1024
"""Request line and headers, together with what of the body comes in the same read."""


def bounded(head_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol for connections whose request heads are to be there within a time."""
    return type("Bounded", (_Bounded,), {"head_timeout_s": head_timeout_s})


class _Bounded(HttpToolsProtocol):
    head_timeout_s: float
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        awaited = self._timer
        super().data_received(data)
        if self._timer is None:
            return
        self._head_bytes = len(data) + (self._head_bytes if self._timer is awaited else 0)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(
            self.head_timeout_s, self._refuse, b"408 Request Timeout"
        )

    def _head_is_there(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        """End the connection; whoever began to ask is told why."""
        self._head_is_there()
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._head_bytes and not busy and not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self.transport.close()
