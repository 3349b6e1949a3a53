"""Cluster clients that keep working while nodes fail, join and leave, and while slots move.

redis-py's cluster client asks the default node which arguments are keys, sends commands without a
key to every node, and follows no redirection to an unknown node. These clients know the keys, send
a command without a key to one node that answers, keep chains of commands together, and follow every
redirection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from lisa.core.daemon.threads import in_thread
from lisa.core.redis.cluster_flows import (
    LOST,
    CommandPage,
    chain,
    every_primary,
    lose,
    one_command,
    slot_of,
)
from lisa.core.redis.exchange import aexchange, exchange
from lisa.core.redis.flow import Command, adrive, drive
from lisa.core.redis.topology import NodeAddress, Topology


class _Nodes:
    """The clients of a cluster's nodes, created on first use."""

    def __init__(self, topology: Topology, connect: Callable[[NodeAddress], Any]) -> None:
        self.topology = topology
        self._connect = connect
        self._lock = threading.Lock()
        self._clients: dict[NodeAddress, Any] = {}
        self._left: list[Any] = []

    def client(self, node: NodeAddress) -> Any:
        """The client of a node, whether or not the node is known to own slots."""
        found = self._clients.get(node)
        if found is None:
            with self._lock:
                found = self._clients.get(node)
                if found is None:
                    members = {*self.topology.members, node}
                    gone = [one for one in self._clients if one not in members]
                    self._left += [self._clients.pop(one) for one in gone]
                    found = self._clients[node] = self._connect(node)
        return found

    def named(self, name: str) -> NodeAddress:
        """The address of a node from its name."""
        host, _, port = name.rpartition(":")
        return host, int(port)

    def _take_left(self) -> list[Any]:
        """The clients of nodes that have left the cluster, to be closed."""
        with self._lock:
            left, self._left = self._left, []
        return left

    def _take_all(self) -> list[Any]:
        with self._lock:
            clients, self._clients = [*self._clients.values(), *self._left], {}
            self._left = []
        return clients


class RawCluster(_Nodes):
    """A blocking cluster client with raw replies; safe to share between threads."""

    def send(self, command: Command) -> Any:
        """Run one command on the node of its key, or without a key on any primary that answers."""
        (reply,) = drive(one_command(self.topology, command), self)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def each(self, commands: Sequence[Command]) -> Iterator[Any]:
        """Run commands, each when its reply is requested; the replies may include errors."""
        page = CommandPage(self.topology)
        for command in commands:
            yield drive(page.run(command), self)

    def send_to_each(self, command: Command) -> list[tuple[str, Any]]:
        """Run one command on each primary; pairs of the node's name and its reply or error."""
        return drive(every_primary(self.topology, command), self)

    def chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Run commands on the node that holds `key`; the replies may include errors."""
        return drive(chain(self.topology, slot_of(key), commands), self)

    def exchange(self, node: NodeAddress, request: bytes, count: int) -> list[Any]:
        """Send packed commands to a node, and return its replies."""
        pool = self.client(node).connection_pool
        for left in self._take_left() if self._left else ():
            left.connection_pool.disconnect(inuse_connections=False)
        return list(exchange(pool, request, count))

    def refresh(self, seen: int) -> None:
        """Refresh the topology; see `Topology.refresh`."""
        self.topology.refresh(seen)

    def pubsub(self, channel: str, name: str = "") -> Any:
        """Subscribe to a channel on the named node, or on any primary that is thought to answer."""
        if not self.topology.primaries:
            self.topology.refresh()
        node = self.named(name) if name else self.topology.primaries[0]
        client: redis.Redis = self.client(node)
        listener = client.pubsub(ignore_subscribe_messages=True)
        try:
            listener.subscribe(channel)
        except LOST as error:
            drive(lose(self.topology, node, error), self)
            raise
        return listener

    def close(self) -> None:
        """Close all connections."""
        for client in self._take_all():
            client.close()


class AsyncRawCluster(_Nodes):
    """An asyncio cluster client with raw replies."""

    _refreshing: asyncio.Future[bool] | None = None

    async def send(self, command: Command) -> Any:
        """See `RawCluster.send`."""
        (reply,) = await adrive(one_command(self.topology, command), self)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def each(self, commands: Sequence[Command]) -> list[Any]:
        """See `RawCluster.each`."""
        page = CommandPage(self.topology)
        return [await adrive(page.run(command), self) for command in commands]

    async def send_to_each(self, command: Command) -> list[tuple[str, Any]]:
        """See `RawCluster.send_to_each`."""
        return await adrive(every_primary(self.topology, command), self)

    async def chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """See `RawCluster.chain`."""
        return await adrive(chain(self.topology, slot_of(key), commands), self)

    async def exchange(self, node: NodeAddress, request: bytes, count: int) -> list[Any]:
        """See `RawCluster.exchange`."""
        pool = self.client(node).connection_pool
        for left in self._take_left() if self._left else ():
            await left.connection_pool.disconnect(inuse_connections=False)
        return await aexchange(pool, request, count)

    async def refresh(self, seen: int) -> None:
        """Refresh the topology on another thread, one for all tasks; see `Topology.refresh`."""
        while True:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = in_thread(self.topology.refresh, seen)
            await asyncio.shield(self._refreshing)
            if seen != self.topology.rounds:
                return

    async def aclose(self) -> None:
        """Close all connections."""
        self._refreshing = None  # the next call may come from another event loop
        for client in self._take_all():
            await client.aclose()
