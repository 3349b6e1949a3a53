"""Faults of one node of a running cluster, each with a start and an end."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import redis

from lisa.embedded.server import HOST
from tests import topologies
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.topologies import Cluster, Node

SERVER_OPTIONS = (
    "--cluster-require-full-coverage",
    "no",
    # Writes reach the operating system before the reply, so a killed node loses none.
    "--appendonly",
    "yes",
    "--appendfsync",
    "no",
)
BATCH, PAUSE_S = 5, 0.02
"""How many keys move in one step, and the pause between two steps."""
AT_ONCE = 200
"""How many slots without keys move in one step."""


class NodeFault:
    """One node and the topic on it.

    away: the unreachable nodes, shared by overlapping faults.
    heir: a node without a fault; it takes over a leaving node's slots and meets a joining node.
    """

    loses_data: ClassVar[bool] = False

    def __init__(
        self, cluster: Cluster, node: Node, topic: str, heir: Node, away: list[Node]
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.topic = topic
        self.heir = heir
        self.away = away
        self.began_at = self.ended_at = 0.0
        """Between these instants, by Unix time, the node may not answer."""

    def begin(self) -> None:
        """Take the node away."""
        self.began_at = time.time()
        self.away.append(self.node)

    def end(self) -> None:
        """Bring the node back."""
        self.away.remove(self.node)

    @property
    def present(self) -> list[Node]:
        """All reachable members."""
        return [node for node in self.cluster.primaries if node not in self.away]


class Dies(NodeFault):
    """Killed, then started again with its data."""

    def begin(self) -> None:
        super().begin()
        self.node.server.kill()

    def end(self) -> None:
        self.ended_at = time.time()
        self.node.server.restart()
        super().end()


class ReturnsEmpty(Dies):
    """Killed, then started again without its data."""

    loses_data = True

    def end(self) -> None:
        shutil.rmtree(self.node.server.directory / "appendonlydir")
        super().end()


class Hangs(NodeFault):
    """Stopped with its connections open, then resumed."""

    def begin(self) -> None:
        super().begin()
        self.node.stop_for_a_while()

    def end(self) -> None:
        self.ended_at = time.time()
        self.node.go_on()
        super().end()


class Move(NodeFault):
    """Slots move while their topics are in use, on a thread that `end` waits for."""

    def begin(self) -> None:
        self.began_at = time.time()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        self.ended_at = time.time()

    def move(self) -> None:
        """Do the entire work."""
        raise NotImplementedError

    def _work(self) -> None:
        try:
            self.move()
        except BaseException as error:  # noqa: BLE001  `end` raises it
            self._errors.append(error)

    def _move_slot(self, slot: int, target: Node) -> None:
        topologies.migrate(
            self.cluster, slot, self.node, target, batch=BATCH, pause_s=PAUSE_S, told=()
        )
        self._tell_all("CLUSTER", "SETSLOT", slot, "NODE", topologies.id_of(target))

    def _tell_all(self, *command: object) -> None:
        """Send to all reachable members; others learn by gossip."""
        for node in self.present:
            with suppress(redis.RedisError, OSError):
                node.ask(*command)


class Joins(Move):
    """A new node joins and takes the slot of the topic from this node."""

    def move(self) -> None:
        assert self.cluster.start is not None
        new = self.cluster.start()
        self.heir.ask("CLUSTER", "MEET", HOST, new.server.port, new.bus)
        wait_until(lambda: all(has_met(node, new) for node in (self.node, self.heir)))
        wait_until(lambda: has_met(new, self.node) and is_up(new))
        self._move_slot(topologies.slot_of(f"{{{self.topic}}}"), new)
        self.cluster.primaries.append(new)


class Leaves(Move):
    """All slots of this node move to the heir; the others forget the node, which keeps running."""

    def move(self) -> None:
        self._move_slot(topologies.slot_of(f"{{{self.topic}}}"), self.heir)
        while slots := slots_of(self.node):
            for slot in self._give_free_slots(slots):
                self._move_slot(slot, self.heir)
        self.cluster.primaries.remove(self.node)
        self.forget()

    def forget(self) -> None:
        """Have all reachable members forget the node."""
        self._tell_all("CLUSTER", "FORGET", topologies.id_of(self.node))

    def _give_free_slots(self, slots: Sequence[int]) -> list[int]:
        """Move the slots without keys; return the others."""
        target, used = topologies.id_of(self.heir), []
        for begin in range(0, len(slots), AT_ONCE):
            some = slots[begin : begin + AT_ONCE]
            set_slots(self.heir, some, "IMPORTING", topologies.id_of(self.node))
            set_slots(self.node, some, "MIGRATING", target)  # from now on, no key is created there
            counts = ask_all(self.node, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in some])
            free = [slot for slot, count in zip(some, counts, strict=True) if not count]
            used += [slot for slot, count in zip(some, counts, strict=True) if count]
            for node in (self.heir, self.node):
                set_slots(node, free, "NODE", target)
        return used


def set_slots(node: Node, slots: Sequence[int], state: str, name: str) -> None:
    """One CLUSTER SETSLOT for each slot; a node without slots refuses, as it is a replica now."""
    ask_all(node, [("CLUSTER", "SETSLOT", slot, state, name) for slot in slots])


def ask_all(node: Node, commands: Sequence[tuple[object, ...]]) -> list[object]:
    """Several commands in one pipeline; the raw replies and errors."""
    with node.admin as client, client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))


def slots_of(node: Node) -> list[int]:
    """The slots that a node claims."""
    return [
        slot
        for first, last, where, *_ in node.ask("CLUSTER", "SLOTS")
        if where[1] == node.server.port
        for slot in range(first, last + 1)
    ]


def has_met(node: Node, other: Node) -> bool:
    """True if a node knows another as a member."""
    name = topologies.id_of(other).encode()
    lines = node.ask("CLUSTER", "NODES").splitlines()
    return any(line.startswith(name) and b"handshake" not in line for line in lines)


def is_up(node: Node) -> bool:
    """True if a node serves its slots."""
    return b"cluster_state:ok" in node.ask("CLUSTER", "INFO")


def is_whole(cluster: Cluster) -> bool:
    """True if all members report that every slot is served."""
    with suppress(redis.RedisError, OSError):
        said = [node.ask("CLUSTER", "INFO") for node in cluster.primaries]
        return all(b"cluster_state:ok" in one and b"slots_ok:16384" in one for one in said)
    return False
