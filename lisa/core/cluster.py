"""Clients of a cluster that keep going while nodes die and slots move.

redis-py's own send each command by itself, ask the default node which of a command's words are
keys, and send what has no key to every node: one that is gone would fail them all. Here keys are
known, what has none goes to one node that answers, and what belongs together stays together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
import redis
from redis import exceptions
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import ClusterNode, RedisCluster

from lisa.core.flow import Command

__all__ = ["AsyncRawCluster", "RawCluster"]

MOST_REDIRECTIONS = 5
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_UNCOVERED = (exceptions.SlotNotCoveredError, KeyError)
"""What the asyncio client raises where it knows nobody who serves a slot."""
_NOT_COVERED = "its slot is not covered by the cluster"
_SHAPED = ("CLUSTER",)
"""What the client asks for itself, to find the node that a key belongs to."""
_READS = ("XREADGROUP", "XREAD")
_SCRIPTED = ("EVALSHA", "EVAL")
_CONTAINERS = ("XINFO", "XGROUP")
_KEYLESS = ("TIME", "INFO", "PING")


def _unshape(callbacks: Any) -> None:
    for name in list(callbacks):  # several threads may meet a new client
        if not name.upper().startswith(_SHAPED):
            callbacks.pop(name, None)


def _pack(command: Sequence[Any]) -> bytes:
    return bytes(hiredis.pack_command(tuple(command)))


def _packed(commands: Sequence[Command], *, asking: bool) -> bytes:
    # ASKING holds for one command: each needs its own.
    ask = _pack(("ASKING",)) if asking else b""
    return b"".join(ask + _pack(command) for command in commands)


def _key_of(command: Sequence[Any]) -> str | bytes:
    """The first key of a command that has one."""
    name = command[0]
    if name in _READS:
        place = command.index("STREAMS") + 1
    else:
        place = 3 if name in _SCRIPTED else 2 if name in _CONTAINERS else 1
    key: str | bytes = command[place]
    return key


class _NoCommands:
    """In place of the table of all commands, which is asked of a node that may be gone."""

    async def initialize(self, node: object = None) -> None:
        """Ask nobody."""


class RawCluster(RedisCluster):
    """Replies come raw, but for what the client itself lives on."""

    @property
    def _untyped(self) -> Any:
        return self  # half of the methods of its base have no annotations

    def get_redis_connection(self, node: ClusterNode) -> redis.Redis:
        """The client of one node."""
        client: redis.Redis = super().get_redis_connection(node)
        _unshape(client.response_callbacks)
        return client

    def determine_slot(self, *args: Any) -> Any:
        """The slot of a command's keys; of a script without any, one by chance."""
        if args[0] in _SCRIPTED and not int(args[2]):
            return super().determine_slot(*args)
        return self._untyped.keyslot(_key_of(args))

    def command(self, **_: Any) -> dict[str, Any]:
        """No table of commands: it is asked of a node that may be gone, and not needed."""
        return {}

    def send(self, command: Command) -> Any:
        """One command, by its key; without one to any primary that answers."""
        if command[0] not in _KEYLESS:
            try:
                return self._untyped.execute_command(*command)
            except exceptions.SlotNotCoveredError:
                self.nodes_manager.initialize()  # somebody may serve it by now
                raise
        failed: BaseException = exceptions.ConnectionError("no node is known")
        for node in self._untyped.get_primaries():
            try:
                return self._untyped.execute_command(*command, target_nodes=node)
            except _LOST as error:
                failed = error
        raise failed

    def chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Commands to the node that has a key; errors stand among the replies."""
        nodes = self.nodes_manager
        try:
            node = nodes.get_node_from_slot(self._untyped.keyslot(key))
        except exceptions.SlotNotCoveredError:
            nodes.initialize()
            raise
        asking = False
        replies: list[Any] = []
        for _ in range(MOST_REDIRECTIONS):
            try:
                replies = self._exchange(node, commands, asking=asking)
            except _LOST:
                nodes.initialize(last_failed_node_name=node.name)
                raise
            first = replies[0]
            if isinstance(first, exceptions.MovedError):
                nodes.move_slot(first)
                node, asking = nodes.get_node_from_slot(first.slot_id), False
            elif isinstance(first, exceptions.AskError):
                asked = self._untyped.get_node(first.host, first.port)
                if asked is None:
                    nodes.initialize()
                    break
                node, asking = asked, True
            else:
                if isinstance(first, exceptions.ClusterDownError):
                    nodes.initialize()
                break
        return replies

    def _exchange(
        self, node: ClusterNode, commands: Sequence[Command], *, asking: bool
    ) -> list[Any]:
        pool = self.get_redis_connection(node).connection_pool
        connection = pool.get_connection()
        replies: list[Any] = []
        wanted = len(commands) * (1 + asking)
        try:
            connection.send_packed_command([_packed(commands, asking=asking)])
            while len(replies) < wanted:
                try:
                    replies.append(connection.read_response())
                except exceptions.ResponseError as error:
                    replies.append(error)
        finally:
            if len(replies) < wanted:
                connection.disconnect()
            pool.release(connection)
        return replies[1::2] if asking else replies


class AsyncRawCluster(AsyncRedisCluster):
    """The same for asyncio."""

    def __init__(self, **keywords: Any) -> None:
        """`redis_connect_func` is awaited for each connection that is made."""
        connected = keywords.pop("redis_connect_func")
        super().__init__(**keywords)
        # Its constructor takes no such function; the nodes it was given have kept their keywords.
        self.connection_kwargs["redis_connect_func"] = connected
        for node in self.nodes_manager.startup_nodes.values():
            node.connection_kwargs["redis_connect_func"] = connected
        _unshape(self.response_callbacks)
        self.commands_parser: Any = _NoCommands()

    async def _determine_slot(self, command: str, *args: Any) -> int:
        if command in _SCRIPTED and not int(args[1]):
            return await super()._determine_slot(command, *args)
        return self.keyslot(_key_of((command, *args)))

    async def send(self, command: Command) -> Any:
        """As `RawCluster.send`."""
        words = [str(command[0]), *command[1:]]
        if command[0] not in _KEYLESS:
            try:
                return await self.execute_command(*words)
            except _UNCOVERED as error:
                await self.nodes_manager.initialize()
                raise exceptions.SlotNotCoveredError(_NOT_COVERED) from error
        await self.initialize()
        failed: BaseException = exceptions.ConnectionError("no node is known")
        for node in self.get_primaries():
            try:
                return await self.execute_command(*words, target_nodes=node)
            except _LOST as error:
                failed = error
        raise failed

    async def chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """As `RawCluster.chain`."""
        await self.initialize()
        nodes = self.nodes_manager
        try:
            node = nodes.get_node_from_slot(self.keyslot(key))
        except _UNCOVERED as error:
            await nodes.initialize()
            raise exceptions.SlotNotCoveredError(_NOT_COVERED) from error
        asking = False
        replies: list[Any] = []
        for _ in range(MOST_REDIRECTIONS):
            try:
                replies = await self._exchange(node, commands, asking=asking)
            except _LOST:
                await nodes.initialize(last_failed_node_name=node.name)
                raise
            first = replies[0]
            if isinstance(first, exceptions.MovedError):
                await nodes.move_slot(first)
                node, asking = nodes.get_node_from_slot(first.slot_id), False
            elif isinstance(first, exceptions.AskError):
                asked = self.get_node(first.host, first.port)
                if asked is None:
                    await nodes.initialize()
                    break
                node, asking = asked, True
            else:
                if isinstance(first, exceptions.ClusterDownError):
                    await nodes.initialize()
                break
        return replies

    async def _exchange(self, node: Any, commands: Sequence[Command], *, asking: bool) -> list[Any]:
        connection = node.acquire_connection()
        replies: list[Any] = []
        wanted = len(commands) * (1 + asking)
        try:
            await node.disconnect_if_needed(connection)
            await connection.send_packed_command(_packed(commands, asking=asking))
            while len(replies) < wanted:
                try:
                    replies.append(await connection.read_response())
                except exceptions.ResponseError as error:
                    replies.append(error)
        finally:
            if len(replies) < wanted:
                await connection.disconnect(nowait=True)
            node.release(connection)
        return replies[1::2] if asking else replies
