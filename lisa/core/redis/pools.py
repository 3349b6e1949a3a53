"""Pools of connections to one server, on which commands are run. Nothing is retried here.

redis-py's pool polls a connection, takes locks and counts for metrics at each command, which costs
as much processor time as the command's round trip. A connection whose replies were all read is kept
beside redis-py's pool and skips all of this. Ten times a second, and after each error, a connection
passes through redis-py's pool as usual, which finds connections that the server closed, renews
credentials and replaces connections to a former primary. Its `execute_command` would add retries
and reply conversion, which are not wanted either.

TLS contexts are shared between the connections of a process. redis-py creates a context for each
connection, and reads the system's certificates each time: 27 ms of CPU time, during which an event
loop is blocked. A process that opens twenty connections after a failover would exceed its timeouts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any

import hiredis
import redis
from redis._parsers import _HiredisParser
from redis.asyncio import connection as asyncio_connection
from redis.client import PubSub
from redis.connection import SSLConnection

from lisa.core.redis.errors import is_cut, is_shared_fault, is_usable_after
from lisa.core.redis.flow import Command

CHECK_EVERY_S = 0.1
Context = asyncio_connection.RedisSSLContext

_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_SETTINGS = tuple(name for name in Context.__slots__ if name != "context")
_contexts: dict[tuple[str, ...], tuple[tuple[int, ...], SSLContext]] = {}


_pack: Any = hiredis.pack_command


def packed(commands: Sequence[Command]) -> bytes:
    """Encode commands for one write, without redis-py's checks, which cost more than this."""
    return b"".join(map(_pack, map(tuple, commands)))


class Pool:
    """Blocking connections to one server, or to the primary that the sentinels name.

    Safe to share between threads.

    inner: redis-py's pool, for which kept connections are in use.
    """

    def __init__(self, inner: redis.ConnectionPool) -> None:
        self.inner = inner
        inner.connection_class = with_shared_contexts(inner.connection_class)
        self._kept: list[Any] = []
        self._check_at = 0.0

    def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""
        request = _pack(tuple(command))
        connection = self._take()
        try:
            connection.send_packed_command((request,))
            reply = connection.read_response()
        except BaseException as error:
            self._give_back(connection, error)
            raise
        self._kept.append(connection)
        return reply

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; the replies may include errors."""
        return self.exchange(packed(commands), len(commands))

    def execute_on_each(self, command: Command) -> list[tuple[str, Any]]:
        """Send one command to the only server, whose name is empty."""
        return [("", reply) for reply in self.execute_many([command])]

    def exchange(self, request: bytes, count: int) -> list[Any]:
        """Send packed commands and return their `count` replies, which may include errors."""
        connection, replies, fault = self._take(), list[Any](), None
        try:
            connection.send_packed_command((request,))
            while len(replies) < count:
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
                    fault = fault if is_usable_after(error) else error
        except BaseException as error:
            self._give_back(connection, error)
            raise
        self._give_back(connection, fault)
        return replies

    def subscribe(self, channel: str, _node: str = "") -> PubSub:
        """Subscribe to a channel on a separate connection."""
        pubsub = PubSub(self.inner, ignore_subscribe_messages=True)
        pubsub.subscribe(channel)
        return pubsub

    def interrupt(self) -> None:
        """Shut down all connections on which callers wait for replies."""
        self._return_kept()
        with self.inner._lock:  # noqa: SLF001  redis-py has no other way
            busy = list(self.inner._in_use_connections)  # noqa: SLF001
        for connection in busy:
            interrupt(connection)

    def close_idle(self) -> None:
        """Close the connections that are not in use; later commands open new ones."""
        self._return_kept()
        self.inner.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close all connections."""
        self._return_kept()
        self.inner.disconnect()
        for sentinel in _sentinels(self.inner):
            sentinel.close()

    def _take(self) -> Any:
        """A connection that is ready for a command."""
        if os.getpid() != self.inner.pid:  # a forked child
            self._kept = []
        elif time.monotonic() < self._check_at:
            try:
                return self._kept.pop()  # atomic: threads share the pool
            except IndexError:  # no connection is kept, or another thread took it
                pass
        self._return_kept()
        return self.inner.get_connection()

    def _give_back(self, connection: Any, error: BaseException | None) -> None:
        """Take back a connection whose replies were read, or that cannot be used after an error.

        If the server did not answer, or takes no writes, the idle connections are closed as well:
        whatever happened to one, such as a firewall that forgot them, happened to all.
        """
        if error is None or is_usable_after(error):
            self._kept.append(connection)
            return
        connection.disconnect()  # the reply may still arrive
        self.inner.release(connection)
        if is_shared_fault(error):
            self.close_idle()

    def _return_kept(self) -> None:
        self._check_at = time.monotonic() + CHECK_EVERY_S
        while self._kept:
            try:
                self.inner.release(self._kept.pop())
            except IndexError:  # another thread was faster
                return


class AsyncPool:
    """Asyncio version of `Pool`; belongs to the event loop that first uses it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        inner.connection_class = with_shared_contexts(inner.connection_class)
        self._kept: list[Any] = []
        self._check_at = 0.0

    async def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""
        (reply,) = await self.exchange(packed((command,)), 1)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; the replies may include errors."""
        return await self.exchange(packed(commands), len(commands))

    async def execute_on_each(self, command: Command) -> list[tuple[str, Any]]:
        """Send one command to the only server, whose name is empty."""
        return [("", reply) for reply in await self.execute_many([command])]

    async def exchange(self, request: bytes, count: int) -> list[Any]:
        """Send packed commands and return their `count` replies, which may include errors."""
        task, connection, replies = asyncio.current_task(), None, list[Any]()
        cancelled, fault = task.cancelling() if task else 0, None
        try:
            connection = await self._take()
            await connection.send_packed_command((request,))
            if task and task.cancelling() > cancelled:
                # redis-py sends within `asyncio.wait_for`, which loses a cancellation that arrives
                # as the call completes, before Python 3.12.
                raise asyncio.CancelledError
            while len(replies) < count:
                try:
                    replies.append(await connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
                    fault = fault if is_usable_after(error) else error
        except BaseException as error:
            await self._give_back(connection, error)
            if is_cut(error):  # the event loop's own exception
                raise redis.ConnectionError(f"the connection was closed: {error}") from error
            raise
        if fault is None:
            self._kept.append(connection)
        else:
            await self._give_back(connection, fault)
        return replies

    async def close_idle(self) -> None:
        """Close the connections that are not in use; later commands open new ones."""
        await self._return_kept()
        for idle in list(self.inner._available_connections):  # noqa: SLF001
            await idle.disconnect(nowait=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._return_kept()
        await self.inner.disconnect()
        for sentinel in _sentinels(self.inner):
            await sentinel.aclose()

    async def _take(self) -> Any:
        """A connection that is ready for a command."""
        if self._kept and time.monotonic() < self._check_at:
            return self._kept.pop()
        await self._return_kept()
        return await self.inner.get_connection()

    async def _give_back(self, connection: Any, error: BaseException) -> None:
        """Take back a connection that cannot be used after an error; see `Pool._give_back`.

        Without a connection, one that was cut while it was set up is among the idle ones.
        """
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self.inner.release(connection)
        if is_cut(error) or (connection is not None and is_shared_fault(error)):
            await self.close_idle()

    async def _return_kept(self) -> None:
        self._check_at = time.monotonic() + CHECK_EVERY_S
        while self._kept:
            await self.inner.release(self._kept.pop())


def _sentinels(inner: Any) -> Sequence[Any]:
    """The clients of the sentinels, which remain open when a pool is closed."""
    manager = getattr(inner, "sentinel_manager", None)
    return manager.sentinels if manager is not None else ()


def interrupt(connection: Any) -> None:
    """End the calls of other threads on a blocking connection with an error."""
    sock = connection._sock  # noqa: SLF001  redis-py cannot interrupt a blocked read
    if sock is not None:
        with suppress(OSError):
            # Not SSLSocket.shutdown, which removes the TLS session from the reading thread.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


# -- TLS


@cache
def with_shared_contexts(kind: Any) -> Any:
    """A subclass of a connection class that shares its TLS contexts; `kind` itself without TLS."""
    if issubclass(kind, SSLConnection):
        replaced = {"_wrap_socket_with_ssl": _wrap, "can_read": _can_read}
        return type(kind.__name__, (kind,), replaced)
    if issubclass(kind, asyncio_connection.SSLConnection):
        return type(kind.__name__, (kind,), {"_connection_arguments": _arguments})
    return kind


def _shared(settings: Context) -> SSLContext:
    """The context for these settings; a new one if a file has changed, such as a certificate."""
    key = tuple(repr(getattr(settings, name)) for name in _SETTINGS)
    paths = [getattr(settings, name) for name in _FILES]
    changed = tuple(Path(path).stat().st_mtime_ns for path in paths if path)
    found = _contexts.get(key)
    if found is None or found[0] != changed:
        found = _contexts[key] = (changed, settings.get())
    return found[1]


def _wrap(connection: Any, sock: Any) -> Any:
    """Replaces `SSLConnection._wrap_socket_with_ssl`."""
    if connection.ssl_validate_ocsp or connection.ssl_validate_ocsp_stapled:
        return SSLConnection._wrap_socket_with_ssl(connection, sock)  # noqa: SLF001
    settings = Context(
        keyfile=connection.keyfile,
        certfile=connection.certfile,
        cert_reqs=connection.cert_reqs,
        include_verify_flags=connection.ssl_include_verify_flags,
        exclude_verify_flags=connection.ssl_exclude_verify_flags,
        ca_certs=connection.ca_certs,
        ca_data=connection.ca_data,
        ca_path=connection.ca_path,
        check_hostname=connection.check_hostname,
        min_version=connection.ssl_min_version,
        ciphers=connection.ssl_ciphers,
        password=connection.certificate_password,
    )
    return _shared(settings).wrap_socket(sock, server_hostname=connection.host)


def _can_read(connection: Any, timeout: float = 0) -> bool:
    """Replaces `SSLConnection.can_read`, which only sees that the socket received something.

    After the handshake of TLS 1.3 servers send session tickets. On a connection that has not read a
    reply yet, redis-py takes them for one, and closes the connection.
    """
    if not SSLConnection.can_read(connection, timeout):
        return False
    parser = connection._parser  # noqa: SLF001
    if not isinstance(parser, _HiredisParser) or parser._reader.has_data():  # noqa: SLF001
        return True
    return bool(parser.read_from_socket(timeout=0, raise_on_timeout=False))  # keeps what it reads


def _arguments(connection: Any) -> Any:
    """Replaces `_connection_arguments` of asyncio's SSLConnection."""
    connection.ssl_context.context = _shared(connection.ssl_context)
    return asyncio_connection.SSLConnection._connection_arguments(connection)  # noqa: SLF001
