"""Cluster clients that keep working while nodes fail, join and leave, and while slots move.

redis-py's cluster client asks the default node which arguments are keys, sends commands without a
key to every node, and follows no redirection to an unknown node. These clients know the keys, send
a command without a key to one node that answers, keep chains of commands together, and follow every
redirection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from redis.crc import key_slot

from lisa.core.daemon.threads import in_thread
from lisa.core.redis.errors import LOST, ClientError
from lisa.core.redis.flow import Command, Flow, adrive, drive
from lisa.core.redis.pools import packed
from lisa.core.redis.topology import NodeAddress, Topology

MOST_REDIRECTIONS = 5
_NOT_COVERED = "its slot is not covered by the cluster"
_READS = ("XREADGROUP", "XREAD")
_SCRIPTED = ("EVALSHA", "EVAL")
_CONTAINERS = ("XINFO", "XGROUP", "MEMORY", "OBJECT")
_KEYLESS = frozenset(
    {
        "ACL",
        "CLIENT",
        "CLUSTER",
        "COMMAND",
        "CONFIG",
        "DBSIZE",
        "INFO",
        "PING",
        "PUBLISH",
        "SCRIPT",
        "TIME",
    }
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the client: send commands to a node, or refresh the topology."""

    method: str
    arguments: tuple[Any, ...]

    def run(self, cluster: Any) -> Any:
        """The result; with the asyncio client, to be awaited."""
        return getattr(cluster, self.method)(*self.arguments)

    arun = run


def _refresh(topology: Topology) -> _Call:
    """Refresh the topology, unless another caller has done so in the meantime."""
    return _Call("refresh", (topology.rounds,))


def _key_of(command: Command) -> str | bytes | None:
    """The first key of a command; None for a command without keys."""
    name = command[0]
    if name in _KEYLESS or (name in _SCRIPTED and not int(command[2])):
        return None
    if name in _READS:
        position = command.index("STREAMS") + 1
    else:
        position = 3 if name in _SCRIPTED else 2 if name in _CONTAINERS else 1
    key = command[position]
    return key if isinstance(key, bytes) else str(key)


def slot_of(key: str | bytes) -> int:
    """The hash slot of a key."""
    return int(key_slot(key if isinstance(key, bytes) else key.encode()))


def _node_of(topology: Topology, command: Command) -> NodeAddress | None:
    """The node for a command; None without a key or a known owner."""
    key = _key_of(command)
    return None if key is None else topology.owner(slot_of(key))


def _send(
    topology: Topology, node: NodeAddress, commands: Sequence[Command], *, asking: bool = False
) -> Flow[list[Any]]:
    """Send commands to one node, and refresh the topology if it does not answer."""
    # ASKING applies to one command only.
    sent = [part for command in commands for part in (("ASKING",), command)] if asking else commands
    try:
        replies: list[Any] = yield _Call("exchange", (node, packed(sent), len(sent)))
    except LOST as error:
        yield from lose(topology, node, error)
        raise
    topology.answered(node)
    return replies[1::2] if asking else replies


def lose(topology: Topology, node: NodeAddress, error: BaseException) -> Flow[None]:
    """Record that a node did not answer, and refresh the topology."""
    if isinstance(error, exceptions.MaxConnectionsError):  # a local limit, not the node's
        return
    topology.failed(node)
    with suppress(exceptions.RedisError, OSError):
        yield _refresh(topology)


def one_command(topology: Topology, command: Command) -> Flow[list[Any]]:
    """Run one command on its key's node, or on any node without a key; a list of one reply."""
    if command[0] == "SCAN":
        return (yield from _scan(topology, int(command[1]), command[2:]))
    key = _key_of(command)
    if key is not None:
        return (yield from chain(topology, slot_of(key), [command]))
    if not topology.primaries:
        yield _refresh(topology)
    failed: BaseException = exceptions.ConnectionError("no node is known")
    for node in topology.primaries:
        try:
            return (yield from _send(topology, node, [command]))
        except LOST as error:
            failed = error
    yield _refresh(topology)
    raise failed


def _reply_to(topology: Topology, command: Command) -> Flow[Any]:
    """The reply of `one_command`. Raises the server's error."""
    (reply,) = yield from one_command(topology, command)
    if isinstance(reply, Exception):
        raise reply
    return reply


def every_primary(topology: Topology, command: Command) -> Flow[list[tuple[str, Any]]]:
    """Run one command on each primary; pairs of the node's name and its reply or error.

    A node that did not answer shortly before is not asked: waiting for it would delay each call.
    """
    if not topology.primaries:
        yield _refresh(topology)
    found: list[tuple[str, Any]] = []
    for node in topology.primaries:
        try:
            if topology.has_failed(node):
                raise exceptions.ConnectionError("it did not answer shortly before")
            (reply,) = yield from _send(topology, node, [command])
        except LOST as error:
            reply = error
        found.append((f"{node[0]}:{node[1]}", reply))
    return found


def _scan(topology: Topology, cursor: int, rest: Command) -> Flow[list[Any]]:
    # The caller's cursor combines the node's own cursor and the node's index.
    if not topology.primaries:
        yield _refresh(topology)
    node, inner = topology.scan_node(cursor)
    keys: list[Any] = []
    if node is None:
        inner = 0
    else:
        (reply,) = yield from _send(topology, node, [("SCAN", inner, *rest)])
        if isinstance(reply, Exception):
            return [reply]
        inner, keys = int(reply[0]), reply[1]
    return [[b"%d" % topology.scan_cursor(cursor, inner), keys]]


def chain(topology: Topology, slot: int, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Run commands on the node that owns a slot, following redirections."""
    node = topology.owner(slot)
    if node is None:
        yield _refresh(topology)
        node = topology.owner(slot)
        if node is None:
            raise exceptions.SlotNotCoveredError(_NOT_COVERED)
    replies = yield from _send(topology, node, commands)
    for _ in range(MOST_REDIRECTIONS):
        first = replies[0]
        if isinstance(first, exceptions.ClusterDownError):
            yield _refresh(topology)
        if not isinstance(first, exceptions.AskError):  # the base class of MovedError
            return replies
        node = topology.redirected(first.host, first.port, node)
        asking = not isinstance(first, exceptions.MovedError)
        if not asking:
            topology.moved(first.slot_id, node)
        replies = yield from _send(topology, node, commands, asking=asking)
    if isinstance(replies[0], exceptions.AskError):
        raise exceptions.ClusterError(f"more than {MOST_REDIRECTIONS} redirections: {replies[0]}")
    return replies


def one_by_one(topology: Topology, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Run commands one after another; the replies may include errors, also of nodes.

    A node that did not answer receives no further command. Otherwise a hanging node would cost a
    socket timeout per command.
    """
    replies: list[Any] = []
    lost: dict[NodeAddress | None, Exception] = {}
    for command in commands:
        reply = lost.get(_node_of(topology, command)) if lost else None
        if reply is None:
            try:
                (reply,) = yield from one_command(topology, command)
            except ClientError as error:  # does not affect the replies of other nodes
                reply = error
            if isinstance(reply, LOST) and (node := _node_of(topology, command)) is not None:
                lost[node] = reply
        replies.append(reply)
    return replies


class _Nodes:
    """The pools of a cluster's nodes, created on first use, and the flows that both clients run."""

    def __init__(self, topology: Topology, connect: Callable[[NodeAddress], Any]) -> None:
        self.topology = topology
        self._connect = connect
        self._lock = threading.Lock()
        self._pools: dict[NodeAddress, Any] = {}
        self._left: list[Any] = []

    def pool(self, node: NodeAddress) -> Any:
        """The pool of a node, whether or not the node is known to own slots."""
        found = self._pools.get(node)
        if found is None:
            with self._lock:
                found = self._pools.get(node)
                if found is None:
                    members = {*self.topology.members, node}
                    gone = [member for member in self._pools if member not in members]
                    self._left += [self._pools.pop(member) for member in gone]
                    found = self._pools[node] = self._connect(node)
        return found

    def _drive(self, flow: Flow[Any]) -> Any:
        raise NotImplementedError

    def execute(self, command: Command) -> Any:
        """Run one command on the node of its key, or without a key on any primary that answers."""
        return self._drive(_reply_to(self.topology, command))

    def execute_many(self, commands: Sequence[Command]) -> Any:
        """Run commands one after another; the replies may include errors."""
        return self._drive(one_by_one(self.topology, commands))

    def execute_on_each(self, command: Command) -> Any:
        """Run one command on each primary; pairs of the node's name and its reply or error."""
        return self._drive(every_primary(self.topology, command))

    def execute_chain(self, key: str, commands: Sequence[Command]) -> Any:
        """Run commands on the node that holds `key`; the replies may include errors."""
        return self._drive(chain(self.topology, slot_of(key), commands))

    def named(self, name: str) -> NodeAddress:
        """The address of a node from its name."""
        host, _, port = name.rpartition(":")
        return host, int(port)

    def _take_left(self) -> list[Any]:
        """The pools of nodes that have left the cluster, to be closed."""
        with self._lock:
            left, self._left = self._left, []
        return left

    def _take_all(self) -> list[Any]:
        with self._lock:
            pools, self._pools = [*self._pools.values(), *self._left], {}
            self._left = []
        return pools


class Cluster(_Nodes):
    """A blocking client; safe to share between threads."""

    def _drive(self, flow: Flow[Any]) -> Any:
        return drive(flow, self)

    def exchange(self, node: NodeAddress, request: bytes, count: int) -> list[Any]:
        """Send packed commands to a node, and return its replies."""
        pool = self.pool(node)
        for left in self._take_left() if self._left else ():
            left.close_idle()
        replies: list[Any] = pool.exchange(request, count)
        return replies

    def refresh(self, seen: int) -> None:
        """Refresh the topology; see `Topology.refresh`."""
        self.topology.refresh(seen)

    def subscribe(self, channel: str, name: str = "") -> Any:
        """Subscribe to a channel on the named node, or on any primary that is thought to answer."""
        if not self.topology.primaries:
            self.topology.refresh()
        node = self.named(name) if name else self.topology.primaries[0]
        try:
            return self.pool(node).subscribe(channel)
        except LOST as error:
            drive(lose(self.topology, node, error), self)
            raise

    def close(self) -> None:
        """Close all connections."""
        for pool in self._take_all():
            pool.close()


class AsyncCluster(_Nodes):
    """An asyncio client."""

    _refreshing: asyncio.Future[bool] | None = None

    def _drive(self, flow: Flow[Any]) -> Any:
        return adrive(flow, self)

    async def exchange(self, node: NodeAddress, request: bytes, count: int) -> list[Any]:
        """See `Cluster.exchange`."""
        pool = self.pool(node)
        for left in self._take_left() if self._left else ():
            await left.close_idle()
        replies: list[Any] = await pool.exchange(request, count)
        return replies

    async def refresh(self, seen: int) -> None:
        """Refresh the topology on another thread, one for all tasks; see `Topology.refresh`."""
        while True:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = in_thread(self.topology.refresh, seen)
            await asyncio.shield(self._refreshing)
            if seen != self.topology.rounds:
                return

    async def close(self) -> None:
        """Close all connections."""
        self._refreshing = None  # the next call may come from another event loop
        for pool in self._take_all():
            await pool.close()
