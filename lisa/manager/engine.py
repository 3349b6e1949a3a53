"""All parts of a manager: its connection, nodes, services, jobs and threads."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from datetime import timedelta

from lisa.core.daemon.threads import ServiceThread, stalled
from lisa.core.metrics.numbers import Numbers
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.failover import watch_threads
from lisa.core.store import presence
from lisa.core.store.store import SyncStore
from lisa.manager.jobs import Jobs
from lisa.manager.metrics import own_numbers
from lisa.manager.nodes import PATIENCE, Nodes
from lisa.manager.plan import Plan, Schedules
from lisa.manager.reclaimer import POLL_S
from lisa.manager.server_clock import ServerClock
from lisa.manager.server_monitor import PROBE_INTERVAL_S, ProbeResult, warn_of_loss
from lisa.manager.services import TopicServices
from lisa.manager.topic_search import TopicSearch
from lisa.manager.waker import Wakers

REFRESH = timedelta(seconds=POLL_S)
SEARCH = timedelta(hours=6)
PRUNE = timedelta(seconds=5)
SAMPLE = "2 * * * * ?"  # not on the minute, because the server's clock may be slightly behind
STUCK_S = 10.0

log = logging.getLogger(__name__)


class Engine:
    """Runs all services of one manager. Call `start` once, then `stop`."""

    def __init__(self, address: Address, plan: Plan, prefix: str, name: str) -> None:
        self.name = name
        self.store = store = SyncStore(Connection(address), Keys(prefix), PATIENCE, who="manager")
        self._clock = ServerClock()
        self._nodes = Nodes(store, self._clock, self._node_changed, self._resume)
        self._stopped = threading.Event()
        self._started_ms = 0
        self._is_announced = False
        self._beat_at = -math.inf
        self._services = TopicServices(
            store, plan, self._nodes, self._clock, is_over=self._stopped.is_set
        )
        self._search = TopicSearch(self._services.registry, self._nodes)
        self._wakers = Wakers(
            store.connection,
            store.keys.wake,
            self._services.woken,
            self._services.check_after_gap,
        )
        self._jobs = self._schedule(plan.schedules)

    def _schedule(self, schedules: Schedules) -> Jobs:
        services, clock = self._services, self._clock
        trimmer, pruner, sampler = services.trimmer, services.pruner, services.sampler
        jobs = Jobs(self._nodes, services.idle.due)
        jobs.add("move", schedules.move, services.poll)
        jobs.add("process-pending", schedules.process_pending, services.reclaim_all)
        jobs.add_for_each("clean", schedules.clean, trimmer.pick, trimmer.step)
        jobs.add_for_each("prune", PRUNE, pruner.pick, pruner.step)
        jobs.add_for_each("shards", schedules.sweep, services.pick_sharded, services.sharder.step)
        jobs.add_for_each("sweep", schedules.sweep, services.sweeper.pick, self._sweep)
        jobs.add_for_each(
            "sample",
            SAMPLE,
            lambda topics: sampler.pick(topics, clock.now_ms()),
            lambda topic: sampler.step(topic, clock.now_ms()),
        )
        jobs.add("managers", schedules.sweep, self._sweep_managers)
        jobs.add("refresh", REFRESH, lambda: services.refresh(jobs.topic_errors["refresh"]))
        jobs.add("schedules", REFRESH, services.find_schedules)
        jobs.add("idle", REFRESH, lambda: services.idle.retire(self.store))
        # On the search's own thread: a manager that stops waits for its jobs.
        jobs.add("search", SEARCH, self._search.schedule)
        jobs.add("presence", presence.BEAT, self._beat)
        return jobs

    def start(self) -> None:
        """Start all threads; waits for an unreachable server.

        Raises ConfigError if the server rejects the connection or has a newer data layout.
        """
        try:
            self._nodes.start()
        except ConfigError:
            self.store.close()
            raise
        self._services.signals.start()
        for loop in self._services.loops:
            loop.start()
        self._wakers.follow(self._nodes.names)
        self._jobs.start()
        self._search.start()

    def stop(self) -> None:
        """Finish running scripts, then end all threads."""
        self._stopped.set()
        self._search.close()
        for loop in self._services.loops:
            loop.close()
        self._jobs.stop()
        self._wakers.stop()
        for loop in self._services.loops:
            loop.stop()
        self._services.signals.stop()
        is_there = self._nodes.answers(key=self.store.keys.managers)
        self._nodes.stop()
        self._search.join(2 * PROBE_INTERVAL_S)
        if is_there:
            try:
                self.store.drive(presence.leave_manager(self.store, self.name))
            except LisaError as error:
                log.info("could not remove this manager's record: %s", error)
        self.store.close()

    def reconfigure(self, plan: Plan) -> list[str]:
        """Apply a new plan and return the differences as text."""
        changes = self._services.registry.reconfigure(plan)
        try:
            self._services.registry.step()
        except LisaError as error:
            log.warning("topics will be declared when the server answers: %s", error)
        return changes

    def health(self) -> dict[str, object]:
        """The content of `/healthz`; `status` is ok, starting or failing."""
        threads = self.threads()
        faults = [*stalled(threads), *self._jobs.faults()]
        stuck = max(loop.due_heap.overdue_s() for loop in self._services.loops) > STUCK_S
        # While any node answers, its topics are served, so the process must not be restarted.
        reachable = self._nodes.is_any_available
        begun = self._started_ms or self._nodes.error
        status = (
            "ok" if reachable and not faults and not stuck else "failing" if begun else "starting"
        )
        return {
            "status": status,
            "name": self.name,
            "redis": {
                "address": self.store.where,
                "reachable": reachable,
                "error": self._nodes.error,
                **({"away": self._nodes.away} if self.store.has_nodes else {}),
            },
            "topics": self._services.health(),
            "threads": {one.name: round(one.age_s, 1) for one in threads},
            "faults": faults,
        }

    def threads(self) -> list[ServiceThread]:
        """All threads that must live until the manager stops."""
        return [
            *self._services.threads(),
            *self._wakers.threads(),
            *self._nodes.threads(),
            *watch_threads(),
        ]

    @property
    def is_reachable(self) -> bool:
        """Whether any node answered its last probe."""
        return self._nodes.is_any_available

    def numbers(self) -> Numbers:
        """The metrics of this manager."""
        return own_numbers(
            self._services.loops,
            self._jobs,
            topics=self._services.registry.topic_count,
            moved=self._services.moved(),
            unannounced=self._services.signals.dropped,
        )

    def _node_changed(self, node: str, result: ProbeResult) -> None:
        """A node answered for the first time, after an outage or after a gap."""
        self._services.hold_leases(node, result)
        if result.emptied:
            self._is_announced = False  # the loss is logged
        if result.is_change:
            self._services.declare_again(node)
            for work in (self._services.registry.step, self._beat):
                try:
                    work()
                except LisaError as error:
                    # The jobs retry and log the error. A server at maxmemory must be drained first.
                    log.debug("will be retried: %s", error)
        # Also after a gap: producers do not wait as long for a list of topics as a probe.
        if self.store.has_nodes and not result.first:
            self._services.list_again()
            self._search.schedule()

    def _resume(self, node: str) -> None:
        self._wakers.follow(self._nodes.names)
        self._services.resume(node)

    def _sweep(self, topic: str) -> None:
        if self._services.sweep(topic):
            self._jobs.forget(topic)

    def _sweep_managers(self) -> None:
        is_there = self._nodes.answers(key=self.store.keys.managers)
        if is_there and self._services.sweeper.managers():
            self._services.idle.check_all()

    def _beat(self) -> None:
        if not self._nodes.answers(key=self.store.keys.managers):
            return
        if not self._started_ms:
            self._started_ms = self._clock.now_ms()
        me = presence.ManagerPresence(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            topics=self._services.registry.topic_count,
        )
        was_announced = self._is_announced  # before the call: threads of several nodes make it
        is_new = self.store.drive(presence.announce_manager(self.store, me))
        before, self._beat_at = self._beat_at, time.monotonic()
        if is_new and was_announced:
            # The server lost its data, and another role wrote the schema again before a probe.
            self._services.declare_again()
            if self._beat_at - before < presence.GONE_AFTER.total_seconds():
                warn_of_loss(self.store.where)  # else another manager removed the record
        self._is_announced = True
