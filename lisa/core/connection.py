"""Connections: one command, many in one round trip, or a chain; nothing is repeated here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.asyncio as aredis

from lisa.core.address import Address
from lisa.core.clients import Packer, make_async_client, make_client
from lisa.core.flow import Command

__all__ = [
    "AsyncConnection",
    "Connection",
    "Subscription",
    "wrap",
    "wrap_async",
]


_NODES_OWN = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
"""Of commands to several nodes, what one of them did not do: the others' replies count."""


def _for_cluster(command: Command) -> Command:
    """What a cluster's client sends to every node it must know as one word."""
    if command[0] == "SCRIPT":
        return ("SCRIPT " + str(command[1]), *command[2:])
    return command


def _sentinels(client: Any) -> Sequence[Any]:
    """The clients to the sentinels, which closing a client leaves open."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return manager.sentinels if manager is not None else ()


def _one_reply(reply: Any) -> Any:
    """Of a command that went to every node of a cluster, one node's reply."""
    return next(iter(reply.values())) if isinstance(reply, dict) else reply


class Connection:
    """A blocking connection, safe to share between threads."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open: Any = None
        self._opening = threading.Lock()

    @property
    def _redis(self) -> Any:
        client = self._open
        if client is not None:
            return client
        with self._opening:
            if self._open is None:
                client = make_client(self.address)
                if self.address.kind != "cluster":
                    client.response_callbacks.clear()
                self._open = client
            return self._open

    def execute(self, command: Command) -> Any:
        """Send one command; raises the client's errors."""
        if self.address.kind == "cluster":
            return self._on_cluster(command)
        # Not by the client's execute_command: what that adds (retries, measures, replies in
        # Python's shapes) is not wanted here, and is a fifth of what a round trip costs.
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            pool.release(connection)

    def _on_cluster(self, command: Command) -> Any:
        if command[0] == "SCAN":
            return self._scan_cluster(int(command[1]), command[2:])
        return _one_reply(self._redis.send(_for_cluster(command)))

    def _scan_cluster(self, cursor: int, rest: Command) -> list[Any]:
        # The callers' cursor holds a node's own one and the node's number among the primaries.
        nodes = sorted(self._redis.get_primaries(), key=lambda node: node.name)
        inner, number = divmod(cursor, len(nodes))
        node = nodes[min(number, len(nodes) - 1)]
        reply = self._redis.get_redis_connection(node).execute_command("SCAN", inner, *rest)
        inner = int(reply[0])
        number = number if inner else (number + 1) % len(nodes)
        return [b"%d" % (inner * len(nodes) + number), reply[1]]

    def behind(self, cursor: int) -> int:
        """The cursor of a SCAN that goes on behind a node which did not answer; 0 at the end."""
        if self.address.kind != "cluster" or self._open is None:
            return 0
        count = len(self._open.get_primaries())
        return (cursor % count + 1) % count

    def begin(self, commands: Sequence[Command]) -> Iterator[Any]:
        """Send commands together; each reply comes when it is asked for, errors among them.

        All of them are to be asked for. On a cluster a command is sent when its reply is.
        """
        if self.address.kind == "cluster":
            return map(self._one, commands)
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        try:
            packed = [part for command in commands for part in Packer.pack(*command)]
            connection.send_packed_command([b"".join(packed)])
        except BaseException:
            pool.release(connection)
            raise
        return self._replies(pool, connection, len(commands))

    @staticmethod
    def _replies(pool: Any, connection: Any, left: int) -> Iterator[Any]:
        try:
            while left:
                try:
                    reply = connection.read_response()
                except redis.ResponseError as error:
                    reply = error
                left -= 1
                yield reply
        finally:
            if left:
                connection.disconnect()
            pool.release(connection)

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; errors stand among the replies."""
        return list(self.begin(commands))

    def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """The same on one connection, to the node that has a key."""
        if self.address.kind == "cluster":
            replies: list[Any] = self._redis.chain(key, commands)
            return replies
        return self.execute_many(commands) if len(commands) > 1 else [self._one(commands[0])]

    def _one(self, command: Command) -> Any:
        try:
            return self.execute(command)
        except redis.ResponseError as error:
            return error
        except _NODES_OWN as error:
            if self.address.kind != "cluster":
                raise
            return error

    def subscribe(self, channel: str) -> Subscription:
        """Listen on a channel, on a connection of its own."""
        return Subscription(self._redis.pubsub(ignore_subscribe_messages=True), channel)

    def close(self) -> None:
        """Close all sockets; the next command opens them again."""
        client, self._open = self._open, None
        if client is not None:
            client.close()
            for sentinel in _sentinels(client):
                sentinel.close()


class Subscription:
    """One channel's messages."""

    def __init__(self, pubsub: Any, channel: str) -> None:
        self._pubsub = pubsub
        pubsub.subscribe(channel)

    def ping(self) -> None:
        """Ask for a sign of life: `get` answers an empty message for it."""
        self._pubsub.ping()

    def get(self, timeout_s: float) -> bytes | None:
        """The next message, or None if none came in time; raises the client's errors."""
        ends = time.monotonic() + timeout_s
        while True:
            left = max(0.0, ends - time.monotonic())
            message = self._pubsub.get_message(timeout=left)
            if message is not None:
                data: bytes = message["data"]
                return data
            if time.monotonic() >= ends:
                return None

    def close(self) -> None:
        """Stop listening."""
        self._pubsub.close()


class AsyncConnection:
    """An asyncio connection; belongs to the event loop that first uses it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open: Any = None

    @property
    def _redis(self) -> Any:
        if self._open is None:
            client = make_async_client(self.address)
            if self.address.kind != "cluster":
                client.response_callbacks.clear()
            self._open = client
        return self._open

    async def execute(self, command: Command) -> Any:
        """Send one command; raises the client's errors."""
        if self.address.kind == "cluster":
            return _one_reply(await self._redis.send(_for_cluster(command)))
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_command(*command)
            return await connection.read_response()
        finally:
            await pool.release(connection)

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; errors stand among the replies."""
        if self.address.kind == "cluster":
            return [await self._one(command) for command in commands]
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """The same on one connection, to the node that has a key."""
        if self.address.kind == "cluster":
            found: list[Any] = await self._redis.chain(key, commands)
            return found
        if len(commands) == 1:
            return [await self._one(commands[0])]
        replies: list[Any] = []
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            packed = [part for command in commands for part in Packer.pack(*command)]
            await connection.send_packed_command([b"".join(packed)])
            while len(replies) < len(commands):
                try:
                    replies.append(await connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
        finally:
            if len(replies) < len(commands):
                await connection.disconnect(nowait=True)
            await pool.release(connection)
        return replies

    async def _one(self, command: Command) -> Any:
        try:
            return await self.execute(command)
        except redis.ResponseError as error:
            return error
        except _NODES_OWN as error:
            if self.address.kind != "cluster":
                raise
            return error

    async def close(self) -> None:
        """Close all sockets."""
        client, self._open = self._open, None
        if client is not None:
            await client.aclose()
            for sentinel in _sentinels(client):
                await sentinel.aclose()


def wrap(client: redis.Redis) -> Connection:
    """A connection over a client that already exists (fakeredis, in tests of users)."""
    connection = Connection(Address())
    connection._open = client  # noqa: SLF001  the class above is this module's own
    client.response_callbacks.clear()
    return connection


def wrap_async(client: aredis.Redis) -> AsyncConnection:
    """The same for an asyncio client."""
    connection = AsyncConnection(Address())
    connection._open = client  # noqa: SLF001  the class above is this module's own
    client.response_callbacks.clear()
    return connection
