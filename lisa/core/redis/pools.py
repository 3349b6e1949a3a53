"""redis-py's connection pools, with a shortcut for a connection whose replies were all read.

For each command, redis-py's pool polls the connection, takes locks and counts for metrics, which
costs as much processor time as the command's round trip. A kept connection skips all of this. Ten
times a second, and after each error, a connection passes through redis-py's pool as usual, which
finds connections that the server closed, renews credentials and replaces connections to a former
primary.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis
import redis.asyncio as aredis
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.sentinel import SentinelConnectionPool

from lisa.core.redis.errors import is_read_only

CHECK_EVERY_S = 0.1


def is_usable_after(error: BaseException) -> bool:
    """Whether a connection can be used again: its replies were read, and its server takes writes.

    If it has become a read-only replica, a new connection may reach the primary that replaced it.
    """
    return isinstance(error, redis.ResponseError) and not is_read_only(error)


def is_shared_fault(error: BaseException) -> bool:
    """Whether an error of one connection says that the idle connections are useless as well."""
    return isinstance(error, redis.ConnectionError | redis.TimeoutError) or is_read_only(error)


class _Kept:
    """Keeps a pool's unused connections; redis-py counts them as in use."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._kept: list[Any] = []
        self._check_at = 0.0
        super().__init__(*args, **keywords)

    def keep(self, connection: Any) -> None:
        """Keep a connection whose replies have all been read; for any other, call `release`."""
        self._kept.append(connection)

    def _take(self) -> Any:
        """A kept connection, or None if there is none or a check is due."""
        return self._pop() if time.monotonic() < self._check_at else None

    def _pop(self) -> Any:
        try:
            return self._kept.pop()  # atomic: threads share the pool
        except IndexError:
            return None


class _Blocking(_Kept):
    pid: int

    def reset(self) -> None:
        """Forget all connections, at the start and in a forked child."""
        self._kept = []
        super().reset()  # type: ignore[misc]  # the pool's

    def get_connection(self, *args: Any, **keywords: Any) -> Any:
        """A connection that is ready for a command."""
        kept = self._take() if os.getpid() == self.pid else None
        if kept is not None:
            return kept
        self._give_back()
        return super().get_connection(*args, **keywords)  # type: ignore[misc]

    def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: FBT001, FBT002  redis-py's
        """Close the idle connections, or all."""
        self._give_back()
        super().disconnect(inuse_connections)  # type: ignore[misc]

    def discard(self, connection: Any, error: BaseException) -> None:
        """Take back a connection that cannot be used again after an error.

        If the server did not answer, or takes no writes, the idle connections are closed as well:
        whatever happened to one, such as a firewall that forgot them, happened to all.
        """
        connection.disconnect()  # the reply may still arrive
        self.release(connection)  # type: ignore[attr-defined]
        if is_shared_fault(error):
            self.disconnect(inuse_connections=False)

    def busy(self) -> list[Any]:
        """The connections on which callers wait for replies."""
        self._give_back()
        with self._lock:  # type: ignore[attr-defined]
            return list(self._in_use_connections)  # type: ignore[attr-defined]

    def _give_back(self) -> None:
        self._check_at = time.monotonic() + CHECK_EVERY_S
        while (connection := self._pop()) is not None:
            self.release(connection)  # type: ignore[attr-defined]


class Pool(_Blocking, redis.ConnectionPool):
    """Connections to one server."""


class SentinelPool(_Blocking, SentinelConnectionPool):
    """Connections to the primary that the sentinels name."""


class _Async(_Kept):
    async def get_connection(self, *args: Any, **keywords: Any) -> Any:
        """A connection that is ready for a command."""
        kept = self._take()
        if kept is not None:
            return kept
        await self._give_back()
        return await super().get_connection(*args, **keywords)  # type: ignore[misc]

    async def discard(self, connection: Any, error: BaseException) -> None:
        """See `Pool.discard`."""
        await connection.disconnect(nowait=True)
        await self.release(connection)  # type: ignore[attr-defined]
        if is_shared_fault(error):
            await self._give_back()
            for idle in list(self._available_connections):  # type: ignore[attr-defined]
                await idle.disconnect(nowait=True)

    async def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: FBT001, FBT002
        """Close the idle connections, or all."""
        await self._give_back()
        await super().disconnect(inuse_connections)  # type: ignore[misc]

    async def _give_back(self) -> None:
        self._check_at = time.monotonic() + CHECK_EVERY_S
        while (connection := self._pop()) is not None:
            await self.release(connection)  # type: ignore[attr-defined]


class AsyncPool(_Async, aredis.ConnectionPool):
    """Connections of an event loop to one server."""


class AsyncSentinelPool(_Async, AsyncSentinelConnectionPool):
    """Connections of an event loop to the primary that the sentinels name."""
