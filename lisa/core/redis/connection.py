"""Connections to a server, a cluster, or the primary that Sentinels name. Nothing is retried here.

Replies are raw (RESP2, no client-side conversion), so they have the same form with every kind of
address. No other module creates Redis clients. `core.store.store` repeats what is safe to repeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from lisa.core.redis.address import NO_LIMIT, SENTINEL_TIMEOUT_S, Address
from lisa.core.redis.failover import Ask, AsyncSentinels, Sentinels, watched, watched_async
from lisa.core.redis.flow import Command
from lisa.core.redis.pools import AsyncPool, Pool, interrupt, with_shared_contexts
from lisa.core.redis.topology import NodeAddress, Topology, topology_of

_ONCE, _ONCE_ASYNC = Retry(NoBackoff(), 0), AsyncRetry(NoBackoff(), 0)
_SHORT = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
_CLUSTERS_OWN = frozenset(
    {
        "address_remap",
        "cluster_error_retry_attempts",
        "dynamic_startup_nodes",
        "load_balancing_strategy",
        "read_from_replicas",
        "reinitialize_steps",
        "require_full_coverage",
    }
)
"""Options of redis-py's cluster client that connections to its nodes do not accept."""


class _Link:
    """Runs commands on a pool or a cluster, which is opened at the first use, as after each close.

    The methods that send commands return replies, or with asyncio awaitables of these.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._is_cluster = address.kind == "cluster"
        self._link: Any = None  # a pool or a cluster
        self._opening = threading.Lock()

    def _open(self) -> Any:
        raise NotImplementedError

    def _opened(self) -> Any:
        with self._opening:
            if self._link is None:
                self._link = self._open()
            return self._link

    def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""
        return (self._link or self._opened()).execute(command)

    def execute_many(self, commands: Sequence[Command]) -> Any:
        """Send commands together; the replies may include errors.

        On a cluster they are sent one after another.
        """
        return self._opened().execute_many(commands)

    def execute_on_each(self, command: Command) -> Any:
        """Send one command to each primary; pairs of the node's name and its reply or error."""
        return self._opened().execute_on_each(command)

    def execute_chain(self, key: str, commands: Sequence[Command]) -> Any:
        """Send commands together, on one connection, to the node that holds `key`."""
        if not self._is_cluster:
            return self.execute_many(commands)
        return self._opened().execute_chain(key, commands)


class Connection(_Link):
    """A blocking connection, safe to share between threads."""

    def _open(self) -> Any:
        return _open(self.address)

    def subscribe(self, channel: str, node: str = "") -> ChannelSubscription:
        """Subscribe to a channel on a separate connection; on a cluster, to the named node.

        Every node broadcasts the messages published on any node.
        """
        return ChannelSubscription(self._opened().subscribe(channel, node))

    def behind(self, cursor: int) -> int:
        """The cursor that continues a SCAN after a node that failed; 0 at the end."""
        if not self._is_cluster or self._link is None:
            return 0
        behind: int = self._link.topology.scan_cursor(cursor, 0)
        return behind

    def refresh(self) -> None:
        """Refresh a cluster's topology. Raises the client's errors."""
        self._opened().topology.refresh()

    def slots(self) -> list[tuple[int, int, str]]:
        """First slot, last slot and primary's name of each range of a cluster, sorted."""
        ranges = self._opened().topology.ranges
        return [(first, last, f"{node[0]}:{node[1]}") for first, last, node in ranges]

    def disconnect_node(self, node: str) -> None:
        """Shut down all connections to one cluster node, so that waiting calls fail immediately."""
        if self._link is not None:
            self._link.pool(self._link.named(node)).interrupt()

    def reconnect(self) -> None:
        """Close idle connections to a single server, so that later calls open new ones."""
        self._opened().close_idle()

    def close(self) -> None:
        """Close all sockets; the next command reconnects."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


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


class AsyncConnection(_Link):
    """An asyncio connection; belongs to the event loop that first uses it."""

    def _open(self) -> Any:
        return _open_async(self.address)

    async def close(self) -> None:
        """Close all sockets."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()


# -- pools by kind of address


def _open(address: Address) -> Any:
    keywords = address.keywords()
    if not address.kind:
        return Pool(
            redis.ConnectionPool.from_url(
                address.shown, retry=_ONCE, **{"max_connections": NO_LIMIT, **keywords}
            )
        )
    before = keywords.pop("redis_connect_func", None)
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        keywords["redis_connect_func"] = watched(address, _asking_sentinels(address), before)
        sentinels: Any = _sentinels(Sentinels, hosts, address, _ONCE)
        given = {"max_connections": NO_LIMIT, **keywords}
        return Pool(SentinelConnectionPool(service, sentinels, retry=_ONCE, **given))
    from lisa.core.redis.cluster import Cluster  # late: only for clusters

    topology = _topology(address)
    connected = watched(address, _asking_nodes(topology), before)
    return Cluster(topology, lambda node: _node_pool(address, node, redis_connect_func=connected))


def _open_async(address: Address) -> Any:
    keywords = address.keywords()
    if not address.kind:
        inner = aredis.ConnectionPool.from_url(address.shown, retry=_ONCE_ASYNC, **keywords)
        return AsyncPool(inner)
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        keywords["redis_connect_func"] = watched_async(address, _asking_sentinels(address))
        sentinels: Any = _sentinels(AsyncSentinels, hosts, address, _ONCE_ASYNC)
        inner = AsyncSentinelConnectionPool(service, sentinels, retry=_ONCE_ASYNC, **keywords)
        return AsyncPool(inner)
    from lisa.core.redis.cluster import AsyncCluster

    topology = _topology(address)
    connected = watched_async(address, _asking_nodes(topology))

    def connect(node: NodeAddress) -> AsyncPool:
        given, has_tls = _node_keywords(address)
        kind: Any = aredis.SSLConnection if has_tls else aredis.Connection
        given |= {"redis_connect_func": connected, "host": node[0], "port": node[1]}
        return AsyncPool(aredis.ConnectionPool(kind, retry=_ONCE_ASYNC, **given))

    return AsyncCluster(topology, connect)


def _sentinels(kind: Any, hosts: Sequence[NodeAddress], address: Address, retry: Any) -> Any:
    """The clients of the sentinels.

    They do not retry a sentinel that is down: the next one has the same information.
    """
    made = kind(hosts, sentinel_kwargs={**address.sentinel_keywords(), "retry": retry})
    for sentinel in made.sentinels:
        pool = sentinel.connection_pool
        pool.connection_class = with_shared_contexts(pool.connection_class)
    return made


def _asking_sentinels(address: Address) -> Ask:
    hosts, service, _ = address.service()
    sentinels = _sentinels(Sentinels, hosts, address, _ONCE)
    return lambda: {sentinels.discover_master(service)}


def _asking_nodes(topology: Topology) -> Ask:
    def ask() -> set[NodeAddress]:
        if not topology.refresh():
            raise redis.ConnectionError("no node gave a reliable answer")
        return set(topology.primaries)

    return ask


def _topology(address: Address) -> Topology:
    def connect(node: NodeAddress) -> Pool:
        return _node_pool(address, node, **_SHORT)

    remap = address.options.get("address_remap")
    return topology_of(address, lambda: Topology(address.parts.nodes, connect, remap))


def _node_keywords(address: Address) -> tuple[dict[str, Any], bool]:
    """Keyword arguments for connections to a cluster's nodes, and whether these use TLS."""
    keywords = {name: one for name, one in address.keywords().items() if name not in _CLUSTERS_OWN}
    keywords.pop("redis_connect_func", None)
    return keywords, bool(keywords.pop("ssl", False))


def _node_pool(address: Address, node: NodeAddress, **more: Any) -> Pool:
    given, has_tls = _node_keywords(address)
    kind: Any = redis.SSLConnection if has_tls else redis.Connection
    given = {"max_connections": NO_LIMIT, **given, **more, "host": node[0], "port": node[1]}
    return Pool(redis.ConnectionPool(kind, retry=_ONCE, **given))


def reporting_client_id(address: Address, report: Callable[[int | None], None]) -> Address:
    """The same address, with a connect hook that reports the connection's client id.

    CLIENT UNBLOCK needs the current id, and redis-py reconnects silently. Reports None if the
    server does not permit CLIENT ID.
    """

    def connected(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("CLIENT", "ID")
        try:
            report(int(connection.read_response()))
        except redis.ResponseError:
            report(None)

    return replace(address, options={**address.options, "redis_connect_func": connected})
