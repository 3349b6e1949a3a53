"""Asks sentinels for the primary, and drops connections to demoted primaries.

All sentinels are asked in parallel, and the latest configuration counts. redis-py's own client uses
the first answer; a partitioned sentinel would send clients back to a former primary.

A primary that hangs, is partitioned, or is replaced while it runs keeps its connections: calls wait
for a reply until the socket timeout, or write to a server whose data will be discarded. While a
process has connections through Sentinel or to a cluster, one thread therefore polls for the current
primaries and closes connections to former ones. A call on such a connection fails with a connection
error, and the next one connects to the new primary.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import MasterNotFoundError, Sentinel

from lisa.core.daemon.threads import ServiceThread, begin_round, rest, unforeseen
from lisa.core.redis.address import Address
from lisa.core.redis.errors import ClientError, passes
from lisa.core.redis.pools import interrupt
from lisa.core.redis.topology import OTHERS_S, NodeAddress, ask_together

log = logging.getLogger(__name__)

EVERY_S = 0.3
IDLE_S = 5.0
"""A watch without connections ends after this time."""

Ask = Callable[[], set[NodeAddress]]
Hook = Callable[[Any], None]


_State = Mapping[str, Any]


class _LatestEpoch:
    """Chooses the primary from all answers. Only a majority may return to an earlier epoch."""

    _epoch = -1

    def _chosen(self: Any, service: str, answers: Sequence[Any]) -> tuple[str, int]:
        states: list[_State] = [
            answer[service]
            for answer in answers
            if not isinstance(answer, BaseException) and service in answer
        ]
        latest = max((state["config-epoch"] for state in states), default=-1)
        if latest >= self._epoch or 2 * len(states) > len(self.sentinels):
            for state in states:
                if state["config-epoch"] == latest and self.check_master_state(state, service):
                    self._epoch = latest
                    return state["ip"], state["port"]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and not states and not any(map(passes, errors)):
            raise errors[0]  # a wrong password, or servers that are not sentinels
        why = "no usable primary" if states else "no Sentinel knows a service of this name"
        shown = "; ".join([why, *map(str, errors)])
        raise MasterNotFoundError(f"service {service!r}: {shown}")


class Sentinels(_LatestEpoch, Sentinel):
    """Blocking Sentinel client."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address. Raises MasterNotFoundError."""
        answers = ask_together(list(self.sentinels), lambda one: one.sentinel_masters())
        return self._chosen(service_name, answers)


class AsyncSentinels(_LatestEpoch, AsyncSentinel):
    """Asyncio Sentinel client."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address. Raises MasterNotFoundError."""
        waiting = {
            asyncio.ensure_future(sentinel.sentinel_masters()) for sentinel in self.sentinels
        }
        done: set[asyncio.Future[Any]] = set()
        within_s: float | None = None  # each request has its own timeout
        try:
            while waiting:
                some, waiting = await asyncio.wait(
                    waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
                )
                done |= some
                if not some:
                    break
                if any(answer.exception() is None for answer in some):
                    within_s = OTHERS_S
        finally:
            for answer in waiting:
                answer.cancel()
        return self._chosen(
            service_name, [answer.exception() or answer.result() for answer in done]
        )


class _Watch:
    """One thread that watches all connections of a process to one system.

    thread: None without connections.
    """

    def __init__(self, key: Hashable, ask: Ask, shown: str) -> None:
        self._key = key
        self._ask = ask
        self._shown = shown
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[Any, asyncio.AbstractEventLoop | None] = (
            weakref.WeakKeyDictionary()
        )
        """The connections, each with its event loop; None if it is a blocking one."""
        self._seen: set[NodeAddress] = set()
        self.thread: ServiceThread | None = None
        self._used = time.monotonic()
        self._logged = ""

    def add(self, connection: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Watch a new connection."""
        with self._lock:
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
            connections = [connection for connection in self._loops if connection.is_connected]
            if connections:
                self._used = time.monotonic()
            elif time.monotonic() - self._used > IDLE_S:
                self.thread = None
                _forget(self._key, self)
                return False
        try:
            primaries = self._ask()
        except ClientError as error:
            log.debug("%s: cannot determine the primary: %s", self._shown, error)
            return True
        except Exception as error:  # noqa: BLE001  a malformed answer must not end the watch
            if repr(error) != self._logged:
                unforeseen(f"{self._shown}: cannot determine the primary", error)
            self._logged = repr(error)
            return True
        self._logged = ""
        self._seen |= primaries
        left = [connection for connection in connections if self._is_left(connection, primaries)]
        for connection in left:
            with self._lock:
                loop = self._loops.pop(connection, None)  # added again when it reconnects
            if loop is None:
                interrupt(connection)
                continue
            with suppress(RuntimeError):  # the loop and its connections are closed
                loop.call_soon_threadsafe(_abort, connection)
        if left:
            log.info("%s: closed %d connections to a former primary", self._shown, len(left))
        return True

    def _is_left(self, connection: Any, primaries: set[NodeAddress]) -> bool:
        node = (connection.host, connection.port)
        return node not in primaries and node in self._seen


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
    return [thread for watch in watches if (thread := watch.thread) is not None]


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
