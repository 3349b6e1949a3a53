"""Leaves servers that are primaries no more, though they still hold their end of the connection.

A primary that hangs, or was cut off, or was replaced while it runs, keeps its connections: calls
wait for a reply until the socket time-out, or go on writing to what nobody will read. So while a
process has connections to servers behind sentinels, or of a cluster, one thread asks who the
primaries are, and shuts the connections to those that were and are not. Whoever uses one meets a
lost connection, and asks for the new primary, as after any other.
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

from lisa.core.address import Address

__all__ = ["Ask", "Place", "watched", "watched_async"]

log = logging.getLogger(__name__)

EVERY_S = 0.3
IDLE_S = 5.0
"""A watch without connections ends after so long."""

Place = tuple[str, int]
Ask = Callable[[], set[Place]]
Hook = Callable[[Any], None]


class _Watch:
    """One thread for all connections of one process to one system."""

    def __init__(self, key: Hashable, ask: Ask, shown: str) -> None:
        self._key = key
        self._ask = ask
        self._shown = shown
        self._lock = threading.Lock()
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loops: weakref.WeakKeyDictionary[Any, asyncio.AbstractEventLoop] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: set[Place] = set()
        self._thread: threading.Thread | None = None
        self._used = time.monotonic()
        self._told = ""

    def add(self, connection: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Mind a connection that was just made."""
        with self._lock:
            self._connections.add(connection)
            if loop is not None:
                self._loops[connection] = loop
            if self._thread is None or not self._thread.is_alive():  # not in a forked child
                self._thread = threading.Thread(target=self._run, name="lisa-failover", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            if not self._step():
                return

    def _step(self) -> bool:
        """Ask once, and shut what is to be shut; whether anybody needs the next step."""
        with self._lock:
            connections = [one for one in self._connections if one.is_connected]
            if connections:
                self._used = time.monotonic()
            elif time.monotonic() - self._used > IDLE_S:
                self._thread = None
                _forget(self._key, self)
                return False
        try:
            primaries = self._ask()
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            log.debug("%s: nobody says who is primary: %s", self._shown, error)
            return True
        except Exception as error:  # an answer of no known shape must not end the watch
            if repr(error) != self._told:
                log.exception("%s: it cannot be told who is primary", self._shown)
            self._told = repr(error)
            return True
        self._told = ""
        self._seen |= primaries
        left = [one for one in connections if self._is_left(one, primaries)]
        for one in left:
            self._shut(one)
            with self._lock:
                self._connections.discard(one)  # it comes back when it connects again
        if left:
            log.info("%s: %d connections to a former primary were shut", self._shown, len(left))
        return True

    def _is_left(self, connection: Any, primaries: set[Place]) -> bool:
        place = (connection.host, connection.port)
        return place not in primaries and place in self._seen

    def _shut(self, connection: Any) -> None:
        loop = self._loops.get(connection)
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and its connections with it
                loop.call_soon_threadsafe(_abort, connection)
            return
        sock = connection._sock  # noqa: SLF001  redis-py has no way to wake who reads from it
        if sock is not None:
            with suppress(OSError):
                # Not the method of a TLS socket, which takes the session away from who reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _abort(connection: Any) -> None:
    writer = connection._writer  # noqa: SLF001  as above
    if writer is not None:
        writer.transport.abort()


_watches: dict[Hashable, _Watch] = {}
_watches_lock = threading.Lock()


def _watch_of(address: Address, ask: Ask) -> _Watch:
    """One for all connections that reach the same servers in the same way, whatever they do."""
    options = tuple(sorted(
        (name, repr(value)) for name, value in address.options.items()
        if name != "redis_connect_func"
    ))  # fmt: skip
    key = (address.url, address.username, address.password, address.sentinel_username,
           address.sentinel_password, options)  # fmt: skip
    with _watches_lock:
        if key not in _watches:
            _watches[key] = _Watch(key, ask, address.shown)
        return _watches[key]


def _forget(key: Hashable, watch: _Watch) -> None:
    """Its thread ends: what it knows, a password among it, is kept no longer."""
    with _watches_lock:
        if _watches.get(key) is watch:
            del _watches[key]


def watched(address: Address, ask: Ask, before: Hook | None = None) -> Hook:
    """What a blocking connection is to call when it connects; `before` makes it ready.

    Without it the connection makes itself ready. `ask` answers where the primaries are.
    """

    def connected(connection: Any) -> None:
        if before is not None:
            before(connection)
        elif address.kind != "cluster":  # a cluster's client has done it
            connection.on_connect()
        _watch_of(address, ask).add(connection)

    return connected


def watched_async(address: Address, ask: Ask) -> Callable[[Any], Awaitable[None]]:
    """The same for asyncio; `ask` blocks, on the watch's thread."""

    async def connected(connection: Any) -> None:
        await connection.on_connect()
        _watch_of(address, ask).add(connection, asyncio.get_running_loop())

    return connected
