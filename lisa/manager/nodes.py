"""Redis nodes: which nodes answer, and which node holds a topic.

A single server, with or without Sentinel, is one node with an empty name. On a cluster, each
primary is a node with its own thread, which probes it each second: reachability, run id, schema
key and clock. So a dead or hanging node stops only its own topics.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, TypeVar

from lisa.core.daemon.threads import ServiceThread, longest_round_s, unforeseen
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.redis import errors
from lisa.core.redis.cluster import slot_of
from lisa.core.redis.connection import Connection
from lisa.core.store.server_checks import info, wrong_mode
from lisa.core.store.store import SyncStore
from lisa.manager.bulk_reads import ask_all
from lisa.manager.server_clock import ServerClock
from lisa.manager.waker import Waker

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.0
"""A node that has not answered after this time counts as unavailable until it answers."""

PATIENCE = timedelta(milliseconds=60)
"""How long one call is retried. Short, because the loops retry too."""

SUSPECT_S = 0.1
"""How long a loop's thread waits for a probe of a cluster node; other topics need the thread."""

SLOTS = 16_384

Name = TypeVar("Name", bound=str)

log = logging.getLogger(__name__)


class ProbeResult(NamedTuple):
    """The result of one answered probe.

    is_first: this is the first probe, and the first answer.
    is_change: everything known about the server may be outdated: it was unreachable before, has
        restarted or was replaced by another server, or was emptied.
    emptied: the schema key was missing.
    since, gap_s: the end of the time in which consumers may not have renewed leases, by
        `time.monotonic`, and its length: from the last answered probe on. Infinite for a server
        that may be another than before.
    """

    is_first: bool
    is_change: bool
    emptied: bool
    since: float
    gap_s: float


class Node:
    """One server: a thread that probes it each second, or at once after `suspect`, and its waker.

    Logs each outage and each recovery once. A server that refuses writes counts as unreachable: no
    service of a manager can work on it.

    changed: called after each outage, change or gap, before the node becomes available.
    name: of a node of a cluster.
    owner: returns the name of the node that holds a key.
    waker: receives the node's announcements.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        changed: Callable[[Node, ProbeResult], None],
        name: str = "",
        owner: Callable[[str], str | None] = lambda _: "",
        *,
        waker: Waker | None = None,
    ) -> None:
        self.name = name
        self.waker = waker
        self.answers = False
        """Whether the last probe was answered."""
        self.is_reachable = False
        """False once the server stops answering, until the work after its recovery is done."""
        self.was_absent = False
        """Whether the server was unreachable at first, or joined later. Leases may have aged."""
        self.refusal: ConfigError | None = None
        self.is_newer = False
        """Whether the data layout is newer than this version."""
        self.error: LisaError | None = None
        """The error of the last probe while the server is unreachable."""
        self.probed = threading.Condition()
        self.probes = 0
        self._store = store
        self._clock = clock
        self._changed = changed
        self._owner = owner
        self._own = _only(store, name) if name else store
        self._run_id: str | None = None
        self._answered, self._began = -math.inf, math.inf
        self._is_probe_due = threading.Event()
        self._stopped = threading.Event()
        self.thread = ServiceThread(
            f"lisa-pulse-{name}" if name else "lisa-pulse",
            self._work,
            longest_round_s(store.connection.address.socket_timeout_s),
            self._stopped.is_set,
        )

    def start(self) -> None:
        """Start the threads; that of the probes probes immediately."""
        self._is_probe_due.set()
        self.thread.start()
        if self.waker is not None:
            self.waker.start()

    def stop(self) -> None:
        """Tell the threads to end."""
        self._stopped.set()
        self._is_probe_due.set()
        if self.waker is not None:
            self.waker.close()

    def close(self) -> None:
        """Close the connections of the probes and of the waker."""
        if self.waker is not None:
            self.waker.stop()
        if self._own is not self._store:
            self._own.close()

    @property
    def is_available(self) -> bool:
        """Whether the node answers in time, and the work after its recovery is done."""
        return self.is_reachable and time.monotonic() - self._began < PROBE_TIMEOUT_S

    def suspect(self, wait_s: float) -> None:
        """Probe now, and wait up to `wait_s` for the result."""
        with self.probed:
            self._is_probe_due.set()
            if not self._stopped.is_set():
                self.probed.wait(wait_s)

    def probe(self) -> None:
        """Probe once, and call `changed` if needed.

        Raises ConfigError if the server rejects the connection or has a newer data layout.
        """
        self._began = time.monotonic()
        result = None
        try:
            result = self.step()
        finally:
            self.answers = result is not None
            with self.probed:
                self.probes += 1
                self.probed.notify_all()
            if not self.answers:
                self._began = math.inf
        if result is not None:
            # While a probe is late, the loops postpone the node's topics.
            is_late = time.monotonic() - self._began >= PROBE_TIMEOUT_S
            if is_late or result.is_change or result.gap_s > PROBE_INTERVAL_S + PROBE_TIMEOUT_S:
                self._changed(self, result)
            self._began = math.inf

    def step(self) -> ProbeResult | None:
        """Ask the server; None if it does not answer. Raises ConfigError, as `probe` does."""
        try:
            server = info(self._own.ask("INFO", "server"))
            if wrong := wrong_mode(self._store.where, server):
                raise wrong
            replication = info(self._own.ask("INFO", "replication"))
            self._check_role(replication)
            self._check_writes()
            has_schema = self._owner(self._store.keys.schema) == self.name
            known = not has_schema or self._check_schema()
            if has_schema:  # only one node of a cluster, because their clocks may differ
                self._clock.sample(self._own)
        except LisaError as error:
            self.refusal = error if isinstance(error, ConfigError) else None
            self._lose(error)
            if self.refusal is not None:
                raise
            return None
        self.refusal = None
        before, self._run_id = self._run_id, server.get("run_id", "")
        if before is not None and not known:
            warn_of_loss(self._own.where)
        last, self._answered = self._answered, time.monotonic()
        is_first = before is None and not self.was_absent
        is_other = before is not None and before != self._run_id
        since, gap_s = self._answered, self._answered - last
        if is_first and not _was_promoted(replication):
            # Leases that aged before this manager started count, except during a server outage.
            since -= float(server.get("uptime_in_seconds", 0))
        return ProbeResult(
            is_first,
            is_change=is_other or not known or not self.is_reachable,
            emptied=not known,
            since=since,
            gap_s=math.inf if is_other or not known else gap_s,
        )

    def mark_reachable(self) -> None:
        """Take the server as reachable from now on, and log it if this is a recovery."""
        if not self.is_reachable:
            log.info("%s is reachable", self._own.where)
            self.error = None
            self.is_reachable = True

    def _lose(self, error: LisaError) -> None:
        was_reachable, self.is_reachable = self.is_reachable, False
        self.was_absent = self.was_absent or self._run_id is None
        if type(error) is not type(self.error):
            log.error("%s; trying again", error)
        self.error = error
        if was_reachable and self.name:
            self._store.connection.disconnect_node(self.name)

    def _check_role(self, replication: Mapping[str, str]) -> None:
        """Check that the server accepts writes. Raises ServerUnavailable.

        On a cluster, the client refreshes its topology when a replica takes over.
        """
        is_read_only = replication.get("slave_read_only") == "1"
        if replication.get("role") == "slave" and is_read_only and not self._store.has_nodes:
            self._own.connection.reconnect()  # perhaps to the primary that replaced it
            raise errors.read_only(self._own.where)

    def _check_writes(self) -> None:
        """Check that the server accepts writes, by one that changes nothing. Raises LisaError.

        It refuses them while it cannot save its data, or has too few replicas; a cluster's node
        also while the cluster is down. A full server accepts this one, because it can be drained.
        """
        for number in range(SLOTS):  # a command with a key fails if the cluster is down
            key = self._store.keys.topic(f"probe-{number}").options
            if self._owner(key) == self.name:
                break
        else:
            return
        (reply,) = ask_all(self._own, [("HDEL", key, "")])
        if isinstance(reply, Exception) and not errors.is_redirection(reply):
            raise errors.translated(reply, self._own.where)

    def _check_schema(self) -> bool:
        """Create the schema key if it is missing; returns whether it existed. Raises LisaError."""
        known = bool(self._store.ask("EXISTS", self._store.keys.schema))
        try:
            self._store.drive(self._store.verify_schema())
        except ConfigError:
            self.is_newer = True
            raise
        self.is_newer = False
        return known

    def _work(self) -> None:
        while not self._stopped.is_set():
            self.thread.rest()
            self._is_probe_due.wait(PROBE_INTERVAL_S)
            self._is_probe_due.clear()
            if self._stopped.is_set():
                break
            self.thread.begin()
            try:
                self.probe()
            except ConfigError:
                pass  # logged; the operator may correct a password at any time
            except Exception as error:  # noqa: BLE001  logged; the next probe follows in a second
                unforeseen("pulse", error)
            if not self.is_reachable:
                self._stopped.wait(PROBE_INTERVAL_S / 4)
                self._is_probe_due.set()
        self.close()


def _only(store: SyncStore, name: str) -> SyncStore:
    """A store that is connected to one node of a cluster only."""
    address = store.connection.address.node(name)
    short = replace(address, socket_timeout_s=min(address.socket_timeout_s, PROBE_TIMEOUT_S))
    return SyncStore(Connection(short), store.keys, PATIENCE, who="manager")


def warn_of_loss(where: str) -> None:
    """Log that a server has lost the data of the prefix."""
    log.warning(
        "%s has lost its messages: the server was emptied, or restarted without its data", where
    )


def _was_promoted(replication: Mapping[str, str]) -> bool:
    """Whether the server has ever been a replica; the time of its promotion is unknown.

    Such servers have a second replication id.
    """
    return bool(replication.get("master_replid2", "").strip("0"))


class Nodes:
    """All nodes.

    node_changed: called with a node's name and the probe's result after an outage, a restart, a
        flush or a gap, before the node becomes available.
    resume: called with the name of a node whose topics became available, or whose slots changed.
    waker_of: returns a new waker for the named node.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        node_changed: Callable[[str, ProbeResult], None],
        resume: Callable[[str], None],
        waker_of: Callable[[str], Waker],
    ) -> None:
        self._store = store
        self._clock = clock
        self._node_changed = node_changed
        self._resume = resume
        self._waker_of = waker_of
        self._nodes: dict[str, Node] = {}
        self._slots: tuple[list[int], list[tuple[int, str]]] = ([], [])
        self._error: LisaError | None = None
        self._stopped = threading.Event()
        self._thread = ServiceThread(
            "lisa-nodes",
            self._follow,
            longest_round_s(store.connection.address.socket_timeout_s),
            self._stopped.is_set,
        )
        if not store.has_nodes:
            self._nodes[""] = Node(store, clock, self._changed, waker=waker_of(""))

    def start(self) -> None:
        """Probe every node once and start the threads.

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
        for node in self._all():
            with node.probed:
                node.probed.wait_for(lambda node=node: node.probes, ends - time.monotonic())  # type: ignore[misc]
        refusals = [node.refusal for node in self._all()]
        newer = self._newer_layout()
        if newer is not None or (refusals and all(refusals)):
            self.stop()
            raise newer or refusals[0] or ConfigError("refused")

    def threads(self) -> list[ServiceThread]:
        """The threads, for health checks."""
        nodes = self._all()
        threads = [node.thread for node in nodes]
        threads += [node.waker.thread for node in nodes if node.waker is not None]
        return [*threads, self._thread] if self._store.has_nodes else threads

    def stop(self) -> None:
        """Stop all threads."""
        self._stopped.set()
        for node in self._all():
            node.stop()
        for node in self._all():
            node.thread.join(2 * PROBE_INTERVAL_S)
            node.close()

    def _all(self) -> list[Node]:
        return list(self._nodes.values())

    def node_of(self, topic: str) -> str | None:
        """The name of the node that holds a topic; None if unknown."""
        return self._owner(self._store.keys.topic(topic).waiting) if self._store.has_nodes else ""

    def is_available(self, topic: str) -> bool:
        """Whether the topic's node is available."""
        node = self._nodes.get(self.node_of(topic) or "")
        return node is not None and node.is_available and self._newer_layout() is None

    def available(self, topics: Sequence[Name]) -> list[Name]:
        """The given topics whose node is available."""
        if not self._store.has_nodes:
            return list(topics) if self._nodes[""].is_available else []
        return [topic for topic in topics if self.is_available(topic)]

    def answers(self, topic: str = "", *, key: str = "") -> bool:
        """Whether the node of a topic or a key answered its last probe."""
        node = self._nodes.get((self._owner(key) if key else self.node_of(topic)) or "")
        return node is not None and node.answers

    @property
    def is_any_available(self) -> bool:
        """Whether any node is reachable; a node whose answer is late still counts."""
        return self._newer_layout() is None and any(node.is_reachable for node in self._all())

    @property
    def away(self) -> list[str]:
        """The names of unavailable nodes."""
        is_newer = self._newer_layout() is not None
        return [node.name for node in self._all() if is_newer or not node.is_available]

    @property
    def error(self) -> str | None:
        """The error of an unavailable node, or None."""
        found = [*[node.error for node in self._all()], self._error]
        return next((str(error) for error in found if error is not None), None)

    def suspect(self, topic: str = "") -> None:
        """Report that the topic's node did not answer: probe it now, and wait briefly.

        Without a topic, probe all nodes.
        """
        if not self._store.has_nodes:
            self._nodes[""].suspect(PROBE_INTERVAL_S)
        elif not topic:
            for node in self._all():
                node.suspect(0.0)
        elif known := self._nodes.get(self.node_of(topic) or ""):
            known.suspect(SUSPECT_S)

    def _newer_layout(self) -> ConfigError | None:
        """The error that stops work on all nodes: the data layout is newer than this version."""
        for node in self._all():
            if node.is_newer:
                return node.refusal
        return None

    def _changed(self, node: Node, result: ProbeResult) -> None:
        self._node_changed(node.name, result)
        node.mark_reachable()
        self._resume(node.name)

    # -- cluster only

    def _owner(self, key: str) -> str | None:
        if not self._store.has_nodes:
            return ""
        slot, (firsts, rows) = slot_of(key), self._slots
        row = bisect_right(firsts, slot) - 1
        return None if row < 0 or slot > rows[row][0] else rows[row][1]

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
        except errors.ClientError as error:
            self._error = errors.translated(error, self._store.where)
            return self._error
        if rows := connection.slots():
            self._error = None
            self._apply_slots(([row[0] for row in rows], [row[1:] for row in rows]))
        return None

    def _apply_slots(self, slots: tuple[list[int], list[tuple[int, str]]]) -> None:
        if slots == self._slots:
            return
        first, self._slots = not self._slots[0], slots
        names = {name for _, name in slots[1]}
        for name in names.difference(self._nodes):
            node = self._nodes[name] = Node(
                self._store,
                self._clock,
                self._changed,
                name,
                self._owner,
                waker=self._waker_of(name),
            )
            node.was_absent = not first
            node.start()
        for name in set(self._nodes).difference(names):
            self._nodes.pop(name).stop()
        if not first:
            for name in names:
                self._resume(name)
