"""Probe a server each second: reachability, run id, schema key and clock."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lisa.core.daemon.threads import ServiceThread, unforeseen
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.redis import errors
from lisa.core.store.server_checks import info, wrong_mode
from lisa.core.store.store import SyncStore
from lisa.manager.bulk_reads import ask_all
from lisa.manager.server_clock import ServerClock

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.0
"""A node that has not answered after this time counts as unavailable until it answers."""

log = logging.getLogger(__name__)


class ProbeResult(NamedTuple):
    """The result of one answered probe.

    back: the server was unreachable before this probe.
    first: this is the first probe, and the first answer.
    another_run: the server restarted, or another server answers at the address.
    emptied: the schema key was missing.
    uptime_s: seconds since the server started.
    gap_s: seconds since the last answered probe; infinite for the first answer.
    promoted: at the first answer, the server has been a replica at some time; the time of its
        promotion is unknown.
    """

    back: bool
    first: bool
    another_run: bool
    emptied: bool
    uptime_s: float
    gap_s: float
    promoted: bool

    @property
    def is_change(self) -> bool:
        """Whether everything known about the server may be outdated."""
        return self.back or self.another_run or self.emptied


class ServerMonitor:
    """Probes one server; logs each outage and each recovery once.

    A server that refuses writes counts as unreachable: no service of a manager can work on it.
    `reachable` is cleared when the server stops answering, and set by `mark_reachable` once the
    work that follows a recovery is done.

    probe: on a cluster, a store connected to this node only.
    key: returns a key of an unused topic; on a cluster, one in the node's slots, or "".
    has_schema: whether this node holds the schema key.
    away: called when the server becomes unreachable.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        *,
        probe: SyncStore | None = None,
        key: Callable[[], str] | None = None,
        has_schema: Callable[[], bool] = lambda: True,
        away: Callable[[], None] = lambda: None,
    ) -> None:
        self.reachable = threading.Event()
        self.was_absent = False
        """Whether the server was unreachable at first, or joined later. Leases may have aged."""
        self.refusal: ConfigError | None = None
        self.is_newer = False
        self._store = store
        self._clock = clock
        self._probe = probe or store
        self._key = key or (lambda: store.keys.topic("probe").options)
        self._has_schema = has_schema
        self._on_away = away
        self._run_id: str | None = None
        self._answered = -math.inf
        self._error: LisaError | None = None

    def step(self) -> ProbeResult | None:
        """Probe once; None if the server does not answer.

        Raises ConfigError if the server rejects the connection or has a newer data layout.
        """
        try:
            server = info(self._probe.ask("INFO", "server"))
            if wrong := wrong_mode(self._store.where, server):
                raise wrong
            replication = info(self._probe.ask("INFO", "replication"))
            self._check_role(replication)
            self._check_writes()
            known = not self._has_schema() or self._check_schema()
            if self._has_schema():  # only one node of a cluster, because their clocks may differ
                self._clock.sample(self._probe)
        except LisaError as error:
            self.refusal = error if isinstance(error, ConfigError) else None
            self._away(error)
            if self.refusal is not None:
                raise
            return None
        self.refusal = None
        run_id, uptime = server.get("run_id", ""), float(server.get("uptime_in_seconds", 0))
        before, self._run_id = self._run_id, run_id
        if before is not None and not known:
            warn_of_loss(self._probe.where)
        last, self._answered = self._answered, time.monotonic()
        return ProbeResult(
            back=not self.reachable.is_set(),
            first=before is None and not self.was_absent,
            another_run=before is not None and before != run_id,
            emptied=not known,
            uptime_s=uptime,
            gap_s=self._answered - last,
            promoted=before is None and _was_promoted(replication),
        )

    def mark_reachable(self) -> None:
        """Set `reachable`, and log the recovery if it was clear."""
        if not self.reachable.is_set():
            log.info("%s is reachable", self._probe.where)
            self._error = None
            self.reachable.set()

    @property
    def error(self) -> str | None:
        """The error of the last probe while the server is unreachable, or None."""
        return None if self._error is None else str(self._error)

    def _away(self, error: LisaError) -> None:
        was_reachable = self.reachable.is_set()
        self.reachable.clear()
        self.was_absent = self.was_absent or self._run_id is None
        if type(error) is not type(self._error):
            log.error("%s; trying again", error)
        self._error = error
        if was_reachable:
            self._on_away()

    def _check_role(self, replication: Mapping[str, str]) -> None:
        """Check that the server accepts writes. Raises ServerUnavailable.

        On a cluster, the client refreshes its topology when a replica takes over.
        """
        is_read_only = replication.get("slave_read_only") == "1"
        if replication.get("role") == "slave" and is_read_only and not self._store.has_nodes:
            self._probe.connection.reconnect()  # perhaps to the primary that replaced it
            raise errors.read_only(self._probe.where)

    def _check_writes(self) -> None:
        """Check that the server accepts writes, by one that changes nothing. Raises LisaError.

        It refuses them while it cannot save its data, or has too few replicas; a cluster's node
        also while the cluster is down. A full server accepts this one, because it can be drained.
        """
        key = self._key()
        if not key:
            return
        (reply,) = ask_all(self._probe, [("HDEL", key, "")])
        if isinstance(reply, Exception) and not errors.is_redirection(reply):
            raise errors.translated(reply, self._probe.where)

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


def warn_of_loss(where: str) -> None:
    """Log that a server has lost the data of the prefix."""
    log.warning(
        "%s has lost its messages: the server was emptied, or restarted without its data", where
    )


def _was_promoted(replication: Mapping[str, str]) -> bool:
    """Whether the server has ever been a replica. Such servers have a second replication id."""
    return bool(replication.get("master_replid2", "").strip("0"))


class Node:
    """A thread that probes one server each second, and immediately when `suspect` is called.

    `changed` is called after each outage, change or gap, before the node becomes available; `close`
    once the thread has ended.
    """

    def __init__(
        self,
        name: str,
        monitor: ServerMonitor,
        changed: Callable[[Node, ProbeResult], None],
        longest_s: float,
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.close = close
        self.monitor = monitor
        self.answers = False
        """Whether the last probe was answered."""
        self.probed = threading.Condition()
        self.probes = 0
        self._changed = changed
        self._began = math.inf
        self._is_probe_due = threading.Event()
        self._stopped = threading.Event()
        self.thread = ServiceThread(
            f"lisa-pulse-{name}" if name else "lisa-pulse",
            self._run,
            longest_s,
            self._stopped.is_set,
        )

    def start(self) -> None:
        """Start the thread, which probes immediately."""
        self._is_probe_due.set()
        self.thread.start()

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopped.set()
        self._is_probe_due.set()

    @property
    def is_available(self) -> bool:
        """Whether the node answers in time, and the work after its recovery is done."""
        return self.monitor.reachable.is_set() and time.monotonic() - self._began < PROBE_TIMEOUT_S

    def suspect(self, wait_s: float) -> None:
        """Probe now, and wait up to `wait_s` for the result."""
        with self.probed:
            self._is_probe_due.set()
            if not self._stopped.is_set():
                self.probed.wait(wait_s)

    def probe(self) -> None:
        """Probe once, and call `changed` if needed. Raises what `ServerMonitor.step` raises."""
        self._began = time.monotonic()
        result = None
        try:
            result = self.monitor.step()
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

    def _run(self) -> None:
        self._watch()
        self.close()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self.thread.rest()
            self._is_probe_due.wait(PROBE_INTERVAL_S)
            self._is_probe_due.clear()
            if self._stopped.is_set():
                return
            self.thread.begin()
            try:
                self.probe()
            except ConfigError:
                pass  # logged by the monitor; the operator may correct a password at any time
            except Exception as error:  # noqa: BLE001  logged; the next probe follows in a second
                unforeseen("pulse", error)
            if not self.monitor.reachable.is_set():
                self._stopped.wait(PROBE_INTERVAL_S / 4)
                self._is_probe_due.set()
