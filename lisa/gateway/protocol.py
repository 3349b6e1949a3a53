"""Uvicorn's HTTP protocol with limits on the time and size of request heads.

The limits middleware handles bodies. It never sees a connection that sends no complete head, so
idle connections and endless heads are closed here.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024
"""Maximum size of request line and headers, plus any body bytes in the same read."""


def bounded(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class that closes connections without a complete head after `head_timeout_s`."""
    return type("Bounded", (_Bounded,), {"head_timeout_s": head_timeout_s})


class _Bounded(HttpToolsProtocol):
    head_timeout_s: float
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        awaited = self._timer
        super().data_received(data)
        if self._timer is None:
            return
        self._head_bytes = len(data) + (self._head_bytes if self._timer is awaited else 0)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._reject(b"431 Request Header Fields Too Large")

    def _start_timer(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(
            self.head_timeout_s, self._reject, b"408 Request Timeout"
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject(self, status: bytes) -> None:
        """Close the connection; send the status if a request was started."""
        self._stop_timer()
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._head_bytes and not busy and not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self.transport.close()
