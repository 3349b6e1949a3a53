"""Makes Redis clients, for each kind of address; nothing else does.

Replies reach the callers raw (RESP2, no client-side shaping), so that they have one shape whatever
the client, and no client repeats anything: `core.runner` repeats what is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["Packer", "make_async_client", "make_client", "telling_its_id"]


class Packer:
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
    return type(kind.__name__, (kind,), {"pack_command": staticmethod(Packer.pack)})


_ONCE = Retry(NoBackoff(), 0)


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
            rows = [  # a node that does not know its own host gives none
                [((one[0] or b"").decode() or asked[0], int(one[1])) for one in row[2:]]
                for row in slots
            ]
            known.extend(place for row in rows for place in row if place not in known)
            return {row[0] for row in rows}
        raise failed

    return ask


def make_client(address: Address) -> Any:
    """A blocking client."""
    once = _ONCE
    if address.kind == "cluster":
        hosts, _, keywords = address.hosts()
        before = keywords.get("redis_connect_func")
        keywords["redis_connect_func"] = watched(address, _asking_nodes(address), before)
        nodes = [ClusterNode(host, port) for host, port in hosts]
        return RawCluster(startup_nodes=nodes, retry=once, **keywords)
    given: dict[str, Any] = {"retry": once, "command_packer": Packer()}
    if address.kind == "sentinel":
        hosts, service, keywords = address.service()
        before = keywords.get("redis_connect_func")
        keywords["redis_connect_func"] = watched(address, _asking_sentinels(address), before)
        # A sentinel that is gone is not waited for: the next one knows as much.
        own = {**address.sentinel_keywords(), "retry": once}
        sentinel = Sentinel(hosts, sentinel_kwargs=own, **given, **keywords)
        return sentinel.master_for(service)
    return redis.Redis.from_url(address.url, **given, **address.keywords())


def make_async_client(address: Address) -> Any:
    """A client for asyncio."""
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
