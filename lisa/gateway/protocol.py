"""Uvicorn's HTTP protocol with limits on request heads and on the time to read a response.

The limits middleware handles bodies. It never sees a connection that sends no complete head, so
idle connections and endless heads are closed here, and so are clients that do not read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lisa.core.daemon.status import HEALTH
from lisa.gateway.request_metrics import Meter
from lisa.gateway.shares import Client, Shares

MOST_HEAD_BYTES = 64 * 1024
"""Maximum size of request line and headers, plus any body bytes in the same read."""


def bounded(timeout_s: float, meter: Meter, shares: Shares) -> type[asyncio.Protocol]:
    """A protocol class that closes connections whose client is too slow, or has too many.

    timeout_s: how long a client may take to send a complete head, and to read pending data.
    """
    members = {"timeout_s": timeout_s, "meter": meter, "addresses": _Addresses(shares)}
    return type("Bounded", (_Bounded,), members)


class _Addresses:
    """The open connections of each address, within the address's share.

    Beyond the share, a new connection replaces the address's oldest one that waits for a request.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._idle: dict[str, dict[_Bounded, None]] = {}  # the oldest first

    def opened(self, connection: _Bounded) -> Client:
        """Count a new connection."""
        client = self._shares.of_address(connection.client[0] if connection.client else "")
        self._shares.connections.take(client)
        self.waits(connection, client)
        if self.is_over(client):
            oldest = next(iter(self._idle[client.name]))
            if oldest is not connection:
                oldest.replaced()
        return client

    def closed(self, connection: _Bounded, client: Client) -> None:
        """Stop counting a connection."""
        self._shares.connections.give(client)
        self.works(connection, client)

    def waits(self, connection: _Bounded, client: Client) -> None:
        """Note that a connection waits for a request."""
        self._idle.setdefault(client.name, {})[connection] = None

    def works(self, connection: _Bounded, client: Client) -> None:
        """Note that a connection has a request, or has ended."""
        if idle := self._idle.get(client.name):
            idle.pop(connection, None)
            if not idle:
                del self._idle[client.name]

    def is_over(self, client: Client) -> bool:
        """Whether an address has more connections than its share."""
        return self._shares.connections.is_over(client)


class _Bounded(HttpToolsProtocol):
    timeout_s: float
    meter: Meter
    addresses: _Addresses
    _address: Client
    _is_counted = True
    _is_excess = False
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self._address = self.addresses.opened(self)
        self._is_excess = self.addresses.is_over(self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        if self._running is not None and not self._running.response_complete:
            # Uvicorn marks only the last of several pipelined requests.
            self._running.disconnected = True
            self._running.message_event.set()
        self._uncount()
        super().connection_lost(exc)

    def replaced(self) -> None:
        """Close the connection, which waits for a request, in favour of a newer one."""
        self._uncount()
        self._reject(b"503 Service Unavailable")

    def _uncount(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self.addresses.closed(self, self._address)

    def send_400_response(self, msg: str) -> None:
        self.meter.malformed += 1
        super().send_400_response(msg)
        self._start_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_timer()
        elif self._is_counted and self.cycle.response_complete:  # no further request was received
            self.addresses.waits(self, self._address)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.addresses.works(self, self._address)
        self._is_excess = self._is_excess and self.addresses.is_over(self._address)
        # Health checks are answered even at the limit on connections.
        is_health = self.url == HEALTH.encode()
        most = 0 if self._is_excess else self.config.limit_concurrency
        self.limit_concurrency = None if is_health else most
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
        self._timer = self.loop.call_later(self.timeout_s, self._reject, b"408 Request Timeout")

    def _start_write_timer(self) -> None:
        """Abort the connection if its client reads too slowly. A closing one waits for it, too."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

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
        self._start_write_timer()
