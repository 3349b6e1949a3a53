"""Drops connections to demoted primaries.

A primary that hangs, is partitioned, or is replaced while it runs keeps its connections: calls wait
for a reply until the socket timeout, or write to a server whose data will be discarded. While a
process has connections through Sentinel or to a cluster, one thread therefore polls for the current
primaries and closes connections to former ones. A call on such a connection fails with a connection
error, and the next one connects to the new primary.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any

import redis

from lisa.core.daemon.threads import ServiceThread, begin_round, rest, unforeseen
from lisa.core.redis.address import Address
from lisa.core.redis.topology import NodeAddress

log = logging.getLogger(__name__)

EVERY_S = 0.3
IDLE_S = 5.0
"""A watch without connections ends after this time."""

Ask = Callable[[], set[NodeAddress]]
Hook = Callable[[Any], None]


class _Watch:
    """One thread that watches all connections of a process to one system.

    thread: None without connections.
    """

    def __init__(self, key: Hashable, ask: Ask, shown: str) -> None:
        self._key = key
        self._ask = ask
        self._shown = shown
        self._lock = threading.Lock()
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loops: weakref.WeakKeyDictionary[Any, asyncio.AbstractEventLoop] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: set[NodeAddress] = set()
        self.thread: ServiceThread | None = None
        self._used = time.monotonic()
        self._logged = ""

    def add(self, connection: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Watch a new connection."""
        with self._lock:
            self._connections.add(connection)
            if loop is not None:
                self._loops[connection] = loop
            if self.thread is None or not self.thread.is_alive():  # dead in a forked child
                thread = ServiceThread("lisa-failover", self._run)
                try:
                    thread.start()
                except RuntimeError as error:  # the thread limit; the next connection tries again
                    log.warning("%s: cannot watch for failovers: %s", self._shown, error)
                else:
                    self.thread = thread

    def _run(self) -> None:
        while True:
            rest()
            time.sleep(EVERY_S)
            begin_round()
            if not self._step():
                return

    def _step(self) -> bool:
        """Poll once and close stale connections. Returns False if the watch can end."""
        with self._lock:
            connections = [one for one in self._connections if one.is_connected]
            if connections:
                self._used = time.monotonic()
            elif time.monotonic() - self._used > IDLE_S:
                self.thread = None
                _forget(self._key, self)
                return False
        try:
            primaries = self._ask()
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            log.debug("%s: cannot determine the primary: %s", self._shown, error)
            return True
        except Exception as error:  # noqa: BLE001  a malformed answer must not end the watch
            if repr(error) != self._logged:
                unforeseen(f"{self._shown}: cannot determine the primary", error)
            self._logged = repr(error)
            return True
        self._logged = ""
        self._seen |= primaries
        left = [one for one in connections if self._is_left(one, primaries)]
        for one in left:
            self._shut(one)
            with self._lock:
                self._connections.discard(one)  # added again when it reconnects
        if left:
            log.info("%s: closed %d connections to a former primary", self._shown, len(left))
        return True

    def _is_left(self, connection: Any, primaries: set[NodeAddress]) -> bool:
        node = (connection.host, connection.port)
        return node not in primaries and node in self._seen

    def _shut(self, connection: Any) -> None:
        loop = self._loops.get(connection)
        if loop is not None:
            with suppress(RuntimeError):  # the loop and its connections are closed
                loop.call_soon_threadsafe(_abort, connection)
        else:
            interrupt(connection)


def interrupt(connection: Any) -> None:
    """End the calls of other threads on a blocking connection with an error."""
    sock = connection._sock  # noqa: SLF001  redis-py cannot interrupt a blocked read
    if sock is not None:
        with suppress(OSError):
            # Not SSLSocket.shutdown, which removes the TLS session from the reading thread.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _abort(connection: Any) -> None:
    writer = connection._writer  # noqa: SLF001  as above
    if writer is not None:
        writer.transport.abort()


_watches: dict[Hashable, _Watch] = {}
_watches_lock = threading.Lock()


def _watch_of(address: Address, ask: Ask) -> _Watch:
    """The watch shared by all connections with the same address and credentials."""
    key = address.identity
    with _watches_lock:
        if key not in _watches:
            _watches[key] = _Watch(key, ask, address.shown)
        return _watches[key]


def watch_threads() -> list[ServiceThread]:
    """The running failover threads, for health checks."""
    with _watches_lock:
        watches = list(_watches.values())
    return [thread for one in watches if (thread := one.thread) is not None]


def _forget(key: Hashable, watch: _Watch) -> None:
    """Delete a watch, and with it the address's password, when its thread ends."""
    with _watches_lock:
        if _watches.get(key) is watch:
            del _watches[key]


def watched(address: Address, ask: Ask, before: Hook | None = None) -> Hook:
    """A connect hook for blocking connections that registers them with the watch.

    `before` replaces the connection's own `on_connect`. `ask` returns the current primaries.
    """

    def connected(connection: Any) -> None:
        if before is not None:
            before(connection)
        else:
            connection.on_connect()
        _watch_of(address, ask).add(connection)

    return connected


def watched_async(address: Address, ask: Ask) -> Callable[[Any], Awaitable[None]]:
    """Asynchronous version of `watched`; `ask` blocks and runs on the watch's thread."""

    async def connected(connection: Any) -> None:
        await connection.on_connect()
        _watch_of(address, ask).add(connection, asyncio.get_running_loop())

    return connected
