"""Creates Redis clients for every kind of address; no other module does.

Replies are raw (RESP2, no client-side conversion), so they have the same form with every client.
Clients do not retry: `core.store.runner` repeats what is safe to repeat.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from lisa.core.redis.address import NO_LIMIT, SENTINEL_TIMEOUT_S, Address
from lisa.core.redis.exchange import Packer
from lisa.core.redis.failover import Ask, watched, watched_async
from lisa.core.redis.pools import AsyncPool, AsyncSentinelPool, Pool, SentinelPool
from lisa.core.redis.sentinels import AsyncSentinels, Sentinels
from lisa.core.redis.tls import share_contexts
from lisa.core.redis.topology import NodeAddress, Topology, topology_of

if TYPE_CHECKING:
    from lisa.core.redis.cluster import AsyncRawCluster, RawCluster

_CUT = ("handler is closed", "transport is closed")
"""Messages of uvloop and asyncio for a connection that was closed while in use."""
_STREAMS = frozenset({"writelines", "drain", "write", "read", "feed_data", "close", "at_eof"})


def _is_cut(error: RuntimeError | AttributeError) -> bool:
    if isinstance(error, AttributeError):  # another task has closed the connection
        return error.obj is None and error.name in _STREAMS
    return any(words in str(error).lower() for words in _CUT)


def _cancellable(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A method that does not lose a cancellation which arrives as it completes.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 returned normally then. A
    timeout around a call would have no effect.
    """

    async def call(connection: Any, *args: Any, **keywords: Any) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        result = await method(connection, *args, **keywords)
        if task and task.cancelling() > before:
            await connection.disconnect(nowait=True)  # its reply will not be read
            raise asyncio.CancelledError
        return result

    return call if sys.version_info < (3, 12) else method


def _reporting_cuts(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(connection: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return await method(connection, *args, **keywords)
        except (RuntimeError, AttributeError) as error:
            if not _is_cut(error):
                raise
            await connection.disconnect(nowait=True)
            raise redis.ConnectionError(f"the connection was closed: {error}") from error

    return call


@cache
def _packing(kind: Any) -> type:
    """A subclass of an asyncio connection class that uses `Packer`.

    redis-py takes no packer for asyncio connections. The subclass also raises ConnectionError for a
    closed connection instead of the event loop's own exception.
    """
    own = {
        "send_packed_command": _reporting_cuts(_cancellable(kind.send_packed_command)),
        "read_response": _reporting_cuts(kind.read_response),
    }
    return type(kind.__name__, (kind,), {"pack_command": staticmethod(Packer.pack), **own})


def _packed(client: Any) -> Any:
    """An asyncio client without connections yet, whose connections use `_packing`."""
    pool = share_contexts(client).connection_pool
    pool.connection_class = _packing(pool.connection_class)
    return client


def _blocking(url: str, **keywords: Any) -> redis.Redis:
    given = {"max_connections": NO_LIMIT, **keywords}
    client = redis.Redis.from_pool(Pool.from_url(url, retry=_ONCE, **given))
    return cast(redis.Redis, share_contexts(client))


def _asyncio(url: str, **keywords: Any) -> aredis.Redis:
    client = aredis.Redis.from_pool(AsyncPool.from_url(url, retry=_ONCE_ASYNC, **keywords))
    return cast(aredis.Redis, _packed(client))


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
"""Options of redis-py's cluster client that the clients of its nodes do not accept."""


def _asking_sentinels(address: Address) -> Ask:
    hosts, service, _ = address.service()
    own = {**address.sentinel_keywords(), "retry": _ONCE}
    sentinel = Sentinels(hosts, sentinel_kwargs=own)
    return lambda: {sentinel.discover_master(service)}


def _asking_nodes(topology: Topology) -> Ask:
    def ask() -> set[NodeAddress]:
        if not topology.refresh():
            raise redis.ConnectionError("no node gave a reliable answer")
        return set(topology.primaries)

    return ask


def _node_url(node: NodeAddress, keywords: dict[str, Any]) -> str:
    """The URL of a node; removes the keyword arguments that the URL expresses."""
    host = f"[{node[0]}]" if ":" in node[0] else node[0]
    return f"{'rediss' if keywords.pop('ssl', False) else 'redis'}://{host}:{node[1]}"


def _node_keywords(address: Address) -> dict[str, Any]:
    return {name: value for name, value in address.keywords().items() if name not in _CLUSTERS_OWN}


def _topology(address: Address) -> Topology:
    remap = address.options.get("address_remap")

    def connect(node: NodeAddress) -> redis.Redis:
        keywords = _node_keywords(address) | _SHORT
        keywords.pop("redis_connect_func", None)
        return _blocking(_node_url(node, keywords), **keywords)

    return topology_of(address, lambda: Topology(address.parts.nodes, connect, remap))


def _cluster(address: Address) -> RawCluster:
    from lisa.core.redis.cluster import RawCluster  # late: only for clusters

    topology = _topology(address)

    def connect(node: NodeAddress) -> redis.Redis:
        keywords = _node_keywords(address)
        before = keywords.pop("redis_connect_func", None)
        connected = watched(address, _asking_nodes(topology), before)
        return _blocking(
            _node_url(node, keywords),
            command_packer=Packer(),
            redis_connect_func=connected,
            **keywords,
        )

    return RawCluster(topology, connect)


def _async_cluster(address: Address) -> AsyncRawCluster:
    from lisa.core.redis.cluster import AsyncRawCluster

    topology = _topology(address)

    def connect(node: NodeAddress) -> Any:
        keywords = _node_keywords(address)
        keywords["redis_connect_func"] = watched_async(address, _asking_nodes(topology))
        url = _node_url(node, keywords)
        return _asyncio(url, **keywords)

    return AsyncRawCluster(topology, connect)


def make_client(address: Address) -> Any:
    """Create a blocking client."""
    if address.kind == "cluster":
        return _cluster(address)
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        before = keywords.get("redis_connect_func")
        keywords["redis_connect_func"] = watched(address, _asking_sentinels(address), before)
        # Do not retry a sentinel that is down: the next one has the same information.
        own = {**address.sentinel_keywords(), "retry": _ONCE}
        given: dict[str, Any] = {
            "max_connections": NO_LIMIT,
            "retry": _ONCE,
            "command_packer": Packer(),
            **keywords,
        }
        sentinel: Any = Sentinels(hosts, sentinel_kwargs=own, **given)
        return share_contexts(sentinel.master_for(service, connection_pool_class=SentinelPool))
    return _blocking(address.shown, command_packer=Packer(), **address.keywords())


def make_async_client(address: Address) -> Any:
    """Create an asyncio client."""
    if address.kind == "cluster":
        return _async_cluster(address)
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        keywords["redis_connect_func"] = watched_async(address, _asking_sentinels(address))
        own = {**address.sentinel_keywords(), "retry": _ONCE_ASYNC}
        sentinel: Any = AsyncSentinels(hosts, sentinel_kwargs=own, retry=_ONCE_ASYNC, **keywords)
        return _packed(sentinel.master_for(service, connection_pool_class=AsyncSentinelPool))
    return _asyncio(address.shown, **address.keywords())


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
