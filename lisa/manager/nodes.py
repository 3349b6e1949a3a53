"""Redis nodes: which nodes answer, and which node holds a topic.

A single server, with or without Sentinel, is one node with an empty name. On a cluster, each
primary is a node with its own monitor thread, so a dead or hanging node stops only its own topics.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, TypeVar

from lisa.core.daemon.threads import ServiceThread, longest_round_s, unforeseen
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.redis.cluster_flows import slot_of
from lisa.core.redis.connection import Connection
from lisa.core.redis.errors import ClientError, translated
from lisa.core.store.store import SyncStore
from lisa.manager.server_clock import ServerClock
from lisa.manager.server_monitor import (
    PROBE_INTERVAL_S,
    PROBE_TIMEOUT_S,
    Node,
    ProbeResult,
    ServerMonitor,
)

PATIENCE = timedelta(milliseconds=60)
"""How long one call is retried. Short, because the loops retry too."""

SUSPECT_S = 0.1
"""How long a loop's thread waits for a probe of a cluster node; other topics need the thread."""

Name = TypeVar("Name", bound=str)

log = logging.getLogger(__name__)


class NodeStatus(Protocol):
    """The availability of nodes, as loops and jobs need it."""

    @property
    def is_any_available(self) -> bool:
        """Whether any node is available."""

    def is_available(self, topic: str) -> bool:
        """Whether the topic's node is available."""

    def suspect(self, topic: str = "") -> None:
        """Report that the topic's node did not answer; without a topic, that some node did not."""


class Nodes:
    """All nodes and their monitor threads.

    node_changed: called with a node's name and the probe's result after an outage, a restart, a
        flush or a gap, before the node becomes available.
    resume: called with the name of a node whose topics became available, or whose slots changed.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        node_changed: Callable[[str, ProbeResult], None],
        resume: Callable[[str], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._node_changed = node_changed
        self._resume = resume
        self._nodes: dict[str, Node] = {}
        self._slots: tuple[list[int], list[tuple[int, str]]] = ([], [])
        self._error: str | None = None
        self._stopped = threading.Event()
        self._longest_s = longest_round_s(store.connection.address.socket_timeout_s)
        self._thread = ServiceThread(
            "lisa-nodes", self._follow, self._longest_s, self._stopped.is_set
        )
        if not store.has_nodes:
            self._nodes[""] = Node("", ServerMonitor(store, clock), self._changed, self._longest_s)

    def start(self) -> None:
        """Probe every node once and start the monitor threads.

        Raises ConfigError if every node rejects the connection, or the data layout is newer.
        """
        if not self._store.has_nodes:
            self._nodes[""].probe()
            self._nodes[""].start()
            return
        refusal = self._read_slots()
        if isinstance(refusal, ConfigError):
            raise refusal
        self._thread.start()
        ends = time.monotonic() + 2 * PROBE_TIMEOUT_S
        for node in list(self._nodes.values()):
            with node.probed:
                node.probed.wait_for(lambda node=node: node.probes, ends - time.monotonic())  # type: ignore[misc]
        refusals = [node.monitor.refusal for node in list(self._nodes.values())]
        newer = self._newer_layout()
        if newer is not None or (refusals and all(refusals)):
            self.stop()
            raise newer or refusals[0] or ConfigError("refused")

    def threads(self) -> list[ServiceThread]:
        """The monitor threads, for health checks."""
        threads = [node.thread for node in list(self._nodes.values())]
        return [*threads, self._thread] if self._store.has_nodes else threads

    def stop(self) -> None:
        """Stop all monitor threads."""
        self._stopped.set()
        for node in list(self._nodes.values()):
            node.stop()
        for node in list(self._nodes.values()):
            node.thread.join(2 * PROBE_INTERVAL_S)
            node.close()

    def node_of(self, topic: str) -> str | None:
        """The name of the node that holds a topic; None if unknown."""
        if not self._store.has_nodes:
            return ""
        return self._owner(self._store.keys.topic(topic).waiting)

    def is_available(self, topic: str) -> bool:
        """Whether the topic's node is available."""
        return self._is_available(self.node_of(topic))

    def available(self, topics: Sequence[Name]) -> list[Name]:
        """The given topics whose node is available."""
        if not self._store.has_nodes:
            return list(topics) if self._is_available("") else []
        return [topic for topic in topics if self.is_available(topic)]

    def answers(self, topic: str = "", *, key: str = "") -> bool:
        """Whether the node of a topic or a key answered its last probe."""
        name = self._owner(key) if key else self.node_of(topic)
        node = None if name is None else self._nodes.get(name)
        return node is not None and node.answers

    @property
    def is_any_available(self) -> bool:
        """Whether any node is reachable; a node whose answer is late still counts."""
        nodes = list(self._nodes.values())
        return self._newer_layout() is None and any(one.monitor.reachable.is_set() for one in nodes)

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return list(self._nodes)

    @property
    def away(self) -> list[str]:
        """The names of unavailable nodes."""
        return [name for name in list(self._nodes) if not self._is_available(name)]

    @property
    def error(self) -> str | None:
        """The error of an unavailable node, or None."""
        errors = [node.monitor.error for node in list(self._nodes.values())]
        return next((one for one in errors if one), self._error)

    def suspect(self, topic: str = "") -> None:
        """Probe the topic's node now, or all nodes, and wait briefly for the result."""
        if not self._store.has_nodes:
            self._nodes[""].suspect(PROBE_INTERVAL_S)
        elif not topic:
            for node in list(self._nodes.values()):
                node.suspect(0.0)
        elif (name := self.node_of(topic)) is not None and (known := self._nodes.get(name)):
            known.suspect(SUSPECT_S)

    def _is_available(self, name: str | None) -> bool:
        node = None if name is None else self._nodes.get(name)
        return node is not None and node.is_available and self._newer_layout() is None

    def _newer_layout(self) -> ConfigError | None:
        """The error that stops work on all nodes: the data layout is newer than this version."""
        for node in list(self._nodes.values()):
            if node.monitor.is_newer:
                return node.monitor.refusal
        return None

    def _owner(self, key: str) -> str | None:
        if not self._store.has_nodes:
            return ""
        slot, (firsts, rows) = slot_of(key), self._slots
        row = bisect_right(firsts, slot) - 1
        if row < 0 or slot > rows[row][0]:
            return None
        return rows[row][1]

    def _changed(self, node: Node, result: ProbeResult) -> None:
        self._node_changed(node.name, result)
        node.monitor.mark_reachable()
        self._resume(node.name)

    # -- cluster only

    def _follow(self) -> None:
        while not self._stopped.wait(PROBE_INTERVAL_S):
            self._thread.begin()
            try:
                self._read_slots()
            except Exception as error:  # noqa: BLE001  logged; repeated a second later
                unforeseen("nodes", error)
            self._thread.rest()

    def _read_slots(self) -> LisaError | None:
        """Read the slot map of this process's client and apply its changes; or return the error."""
        connection = self._store.connection
        try:
            connection.refresh()
        except ClientError as error:
            failure = translated(error, self._store.where)
            self._error = str(failure)
            return failure
        rows = connection.slots()
        if rows:
            self._error = None
            self._apply_slots(([row[0] for row in rows], [row[1:] for row in rows]))
        return None

    def _apply_slots(self, slots: tuple[list[int], list[tuple[int, str]]]) -> None:
        if slots == self._slots:
            return
        first, self._slots = not self._slots[0], slots
        names = {name for _, name in slots[1]}
        for name in names.difference(self._nodes):
            probe = self._probe(name)
            made = self._nodes[name] = Node(
                name,
                self._monitor(name, probe),
                self._changed,
                self._longest_s,
                close=probe.close,
            )
            made.monitor.was_absent = not first
            made.start()
        for name in set(self._nodes).difference(names):
            self._nodes.pop(name).stop()
        if not first:
            for name in names:
                self._resume(name)

    def _monitor(self, name: str, probe: SyncStore) -> ServerMonitor:
        return ServerMonitor(
            self._store,
            self._clock,
            probe=probe,
            key=lambda: self._key_on(name),
            away=lambda: self._store.connection.disconnect_node(name),
            has_schema=lambda: self._owner(self._store.keys.schema) == name,
        )

    def _key_on(self, name: str) -> str:
        """A key in one of the node's slots; a command with a key fails if the cluster is down."""
        for number in range(16_384):
            key = self._store.keys.topic(f"probe-{number}").options
            if self._owner(key) == name:
                return key
        return ""

    def _probe(self, name: str) -> SyncStore:
        """A store that is connected to one node only."""
        store = self._store
        address = store.connection.address.node(name)
        short = replace(address, socket_timeout_s=min(address.socket_timeout_s, PROBE_TIMEOUT_S))
        return SyncStore(Connection(short), store.keys, PATIENCE, who="manager")
