"""The only module that makes Redis clients.

Replies reach the callers raw (RESP2, no client-side shaping), so that they have one shape whatever
the client, and nothing is retried here: `core.store` repeats what is safe to repeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import hiredis
import redis
import redis.asyncio as aredis
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import Sentinel

from lisa.core.address import SENTINEL_TIMEOUT_S, Address
from lisa.core.cluster import AsyncRawCluster, RawCluster
from lisa.core.failover import Ask, Place, watched, watched_async
from lisa.core.flow import Command

__all__ = [
    "AsyncConnection",
    "Connection",
    "Subscription",
    "telling_its_id",
    "wrap",
    "wrap_async",
]


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


class _Packer:
    """Packs commands as they are.

    redis-py's own packers look at each argument first, which costs more than the packing.
    """

    @staticmethod
    def pack(*command: Any) -> list[bytes]:
        """One command on the wire. The client's own may hold two words in the first place."""
        words = command[0].split() if isinstance(command[0], str) else [command[0]]
        return [hiredis.pack_command((*words, *command[1:]))]


@cache
def _packing(kind: type) -> type:
    """An asyncio connection of this kind, which cannot be given a packer, with ours."""
    return type(kind.__name__, (kind,), {"pack_command": staticmethod(_Packer.pack)})


_ONCE = Retry(NoBackoff(), 0)
_NODES_OWN = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
"""Of commands to several nodes, what one of them did not do: the others' replies count."""


def _asking_sentinels(address: Address) -> Ask:
    hosts, service, _ = address.service()
    own = {**address.sentinel_keywords(), "retry": _ONCE}
    sentinel = Sentinel(hosts, sentinel_kwargs=own)
    return lambda: {sentinel.discover_master(service)}


def _asking_nodes(address: Address) -> Ask:
    hosts, _, keywords = address.hosts()
    keywords |= {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    keywords.pop("redis_connect_func", None)
    known = list(hosts)

    def ask() -> set[Place]:
        failed: Exception = redis.ConnectionError("no node is known")
        for asked in list(known):
            try:
                with redis.Redis(host=asked[0], port=asked[1], retry=_ONCE, **keywords) as client:
                    client.response_callbacks.clear()
                    slots = client.execute_command("CLUSTER", "SLOTS")
            except (redis.RedisError, OSError) as error:
                failed = error
                known.remove(asked)
                known.append(asked)  # whoever answers stands before who does not
                continue
            rows = [
                [(one[0].decode() or asked[0], int(one[1])) for one in row[2:]] for row in slots
            ]
            known.extend(place for row in rows for place in row if place not in known)
            return {row[0] for row in rows}
        raise failed

    return ask


def _client(address: Address) -> Any:
    once = _ONCE
    if address.kind == "cluster":
        hosts, _, keywords = address.hosts()
        before = keywords.get("redis_connect_func")
        keywords["redis_connect_func"] = watched(address, _asking_nodes(address), before)
        nodes = [ClusterNode(host, port) for host, port in hosts]
        return RawCluster(startup_nodes=nodes, retry=once, **keywords)
    given: dict[str, Any] = {"retry": once, "command_packer": _Packer()}
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        before = keywords.get("redis_connect_func")
        keywords["redis_connect_func"] = watched(address, _asking_sentinels(address), before)
        # A sentinel that is gone is not waited for: the next one knows as much.
        own = {**address.sentinel_keywords(), "retry": once}
        sentinel = Sentinel(hosts, sentinel_kwargs=own, **given, **keywords)
        return sentinel.master_for(service)
    return redis.Redis.from_url(address.url, **given, **address.keywords())


def _async_client(address: Address) -> Any:
    once = AsyncRetry(NoBackoff(), 0)
    if address.kind == "cluster":
        hosts, _, keywords = address.hosts()
        nodes = [AsyncClusterNode(host, port) for host, port in hosts]
        keywords["redis_connect_func"] = watched_async(address, _asking_nodes(address))
        return AsyncRawCluster(startup_nodes=nodes, retry=once, **keywords)
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        keywords["redis_connect_func"] = watched_async(address, _asking_sentinels(address))
        own = {**address.sentinel_keywords(), "retry": once}
        client = AsyncSentinel(hosts, sentinel_kwargs=own, retry=once, **keywords).master_for(
            service
        )
    else:
        client = aredis.Redis.from_url(address.url, retry=once, **address.keywords())
    pool = client.connection_pool
    pool.connection_class = _packing(pool.connection_class)
    return client


def telling_its_id(address: Address, tell: Callable[[int | None], None]) -> Address:
    """The same address, for a connection that tells its client id whenever it connects.

    CLIENT UNBLOCK needs the present one, and redis-py connects again without a word. None where
    the server does not permit to ask.
    """

    def connected(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("CLIENT", "ID")
        try:
            tell(int(connection.read_response()))
        except redis.ResponseError:
            tell(None)

    return replace(address, options={**address.options, "redis_connect_func": connected})


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
                client = _client(self.address)
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

    def begin(self, commands: Sequence[Command]) -> Iterator[Any]:
        """Send commands together; each reply comes when it is asked for, errors among them.

        All of them are to be asked for. On a cluster a command is sent when its reply is.
        """
        if self.address.kind == "cluster":
            return map(self._one, commands)
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        try:
            packed = [part for command in commands for part in _Packer.pack(*command)]
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
            client = _async_client(self.address)
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
            packed = [part for command in commands for part in _Packer.pack(*command)]
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
