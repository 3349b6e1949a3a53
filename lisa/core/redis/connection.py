"""Connections: run one command, many in one round trip, or a chain. Nothing is retried here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lisa.core.redis.address import Address
from lisa.core.redis.clients import make_async_client, make_client
from lisa.core.redis.exchange import aexchange, exchange, packed
from lisa.core.redis.failover import interrupt
from lisa.core.redis.flow import Command
from lisa.core.redis.pools import is_usable_after


def _sentinels(client: Any) -> Sequence[Any]:
    """The clients of the sentinels, which remain open when a client is closed."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return manager.sentinels if manager is not None else ()


class _Opener:
    """Creates a connection's client on first use."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open: Any = None
        self._opening = threading.Lock()

    def _make(self) -> Any:
        raise NotImplementedError

    @property
    def _redis(self) -> Any:
        client = self._open
        if client is not None:
            return client
        with self._opening:
            if self._open is None:
                client = self._make()
                if self.address.kind != "cluster":
                    client.response_callbacks.clear()
                self._open = client
            return self._open


class Connection(_Opener):
    """A blocking connection, safe to share between threads."""

    def _make(self) -> Any:
        return make_client(self.address)

    def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""
        if self.address.kind == "cluster":
            return self._redis.send(command)
        # execute_command would add retries, metrics and reply conversion, which are not wanted
        # here and take a fifth of a round trip.
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*command)
            reply = connection.read_response()
        except BaseException as error:
            if is_usable_after(error):
                pool.keep(connection)
            else:
                pool.discard(connection, error)
            raise
        pool.keep(connection)
        return reply

    def behind(self, cursor: int) -> int:
        """The cursor that continues a SCAN after a node that failed; 0 at the end."""
        if self.address.kind != "cluster" or self._open is None:
            return 0
        behind: int = self._open.topology.scan_cursor(cursor, 0)
        return behind

    def begin(self, commands: Sequence[Command]) -> Iterator[Any]:
        """Send commands together and yield the replies, which may include errors.

        The caller must consume all replies. On a cluster each command is sent when its reply is
        requested.
        """
        if self.address.kind == "cluster":
            replies: Iterator[Any] = self._redis.each(commands)
            return replies
        return exchange(self._redis.connection_pool, packed(commands), len(commands))

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; the replies may include errors."""
        return list(self.begin(commands))

    def execute_on_each(self, command: Command) -> list[tuple[str, Any]]:
        """Send one command to each primary; pairs of the node's name and its reply or error."""
        if self.address.kind == "cluster":
            found: list[tuple[str, Any]] = self._redis.send_to_each(command)
            return found
        return [("", reply) for reply in self.execute_many([command])]

    def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, on one connection, to the node that holds `key`."""
        if self.address.kind == "cluster":
            replies: list[Any] = self._redis.chain(key, commands)
            return replies
        return self.execute_many(commands)

    def subscribe(self, channel: str, node: str = "") -> ChannelSubscription:
        """Subscribe to a channel on a separate connection; on a cluster, to the named node.

        Every node broadcasts the messages published on any node.
        """
        if self.address.kind == "cluster":
            return ChannelSubscription(self._redis.pubsub(channel, node))
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(channel)
        return ChannelSubscription(pubsub)

    def refresh(self) -> None:
        """Refresh a cluster's topology. Raises the client's errors."""
        self._redis.topology.refresh()

    def slots(self) -> list[tuple[int, int, str]]:
        """First slot, last slot and primary's name of each range of a cluster, sorted."""
        ranges = self._redis.topology.ranges
        return [(first, last, f"{node[0]}:{node[1]}") for first, last, node in ranges]

    def disconnect_node(self, node: str) -> None:
        """Shut down all connections to one cluster node, so that waiting calls fail immediately."""
        if self._open is None:
            return
        pool = self._open.client(self._open.named(node)).connection_pool
        for connection in pool.busy():
            interrupt(connection)

    def reconnect(self) -> None:
        """Close idle connections to a single server, so that later calls open new ones."""
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close all sockets; the next command reconnects."""
        client, self._open = self._open, None
        if client is not None:
            client.close()
            for sentinel in _sentinels(client):
                sentinel.close()


class ChannelSubscription:
    """A subscription to one channel."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    def ping(self) -> None:
        """Send a PING; `get` returns an empty message for the reply."""
        self._pubsub.ping()

    def get(self, timeout_s: float) -> bytes | None:
        """The next message, or None after `timeout_s`. Raises the client's errors."""
        ends = time.monotonic() + timeout_s
        while True:
            left = max(0.0, ends - time.monotonic())
            message = self._pubsub.get_message(timeout=left)
            if message is not None:
                data: bytes = message["data"]
                return data
            if time.monotonic() >= ends:
                return None

    def interrupt(self) -> None:
        """End a call of `get` on another thread with an error."""
        connection = self._pubsub.connection
        if connection is not None:
            interrupt(connection)

    def close(self) -> None:
        """End the subscription."""
        self._pubsub.close()


class AsyncConnection(_Opener):
    """An asyncio connection; belongs to the event loop that first uses it."""

    def _make(self) -> Any:
        return make_async_client(self.address)

    async def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""
        if self.address.kind == "cluster":
            return await self._redis.send(command)
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_command(*command)
            reply = await connection.read_response()
        except BaseException as error:
            if is_usable_after(error):
                pool.keep(connection)
            else:
                await pool.discard(connection, error)
            raise
        pool.keep(connection)
        return reply

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; the replies may include errors."""
        if self.address.kind == "cluster":
            replies: list[Any] = await self._redis.each(commands)
            return replies
        return await aexchange(self._redis.connection_pool, packed(commands), len(commands))

    async def execute_on_each(self, command: Command) -> list[tuple[str, Any]]:
        """Send one command to each primary; pairs of the node's name and its reply or error."""
        if self.address.kind == "cluster":
            found: list[tuple[str, Any]] = await self._redis.send_to_each(command)
            return found
        return [("", reply) for reply in await self.execute_many([command])]

    async def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, on one connection, to the node that holds `key`."""
        if self.address.kind == "cluster":
            replies: list[Any] = await self._redis.chain(key, commands)
            return replies
        return await self.execute_many(commands)

    async def close(self) -> None:
        """Close all sockets."""
        client, self._open = self._open, None
        if client is not None:
            await client.aclose()
            for sentinel in _sentinels(client):
                await sentinel.aclose()
