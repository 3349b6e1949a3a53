"""All parts of a manager: its connection, nodes, services, loops and jobs, and what makes work due.

Services that move messages run in loops, whose threads handle each topic at the instant when it is
due. All others are jobs with schedules, run by APScheduler.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from lisa.core.daemon.threads import ServiceThread, longest_round_s, stalled
from lisa.core.metrics.numbers import Numbers, add, put
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import CHANGED, Shard, Topic, topic_of
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.failover import watch_threads
from lisa.core.store import presence
from lisa.core.store.store import SyncStore, chunks
from lisa.manager.bulk_reads import PAGE, Name
from lisa.manager.expirer import Expirer
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.jobs import Jobs
from lisa.manager.loop import Loop, Step
from lisa.manager.nodes import PATIENCE, PROBE_INTERVAL_S, Nodes, ProbeResult, warn_of_loss
from lisa.manager.plan import Plan, Schedules
from lisa.manager.promoter import Promoter
from lisa.manager.pruner import Pruner
from lisa.manager.reclaimer import POLL_S, LeaseHold, Reclaimer
from lisa.manager.registry import Registry
from lisa.manager.sampler import Sampler
from lisa.manager.scheduler import Scheduler
from lisa.manager.server_clock import ServerClock
from lisa.manager.sharder import Sharder
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from lisa.manager.trimmer import Trimmer
from lisa.manager.waker import Waker
from lisa.manager.zone_data import ZoneData

REFRESH = timedelta(seconds=POLL_S)
PRUNE = timedelta(seconds=5)
SAMPLE = "2 * * * * ?"  # not on the minute, because the server's clock may be slightly behind
SEARCH_S = 6 * 3_600.0
LONGEST_REST_S = 60.0
REST = 10
"""How many times as long as a search, which scans all keys, the next one waits at least."""
STUCK_S = 10.0
DOUBT_S = 86_400.0
"""How long no garbage is purged after the server's clock was set forward."""
PROMOTERS, RECLAIMERS = 4, 2
BATCH = 8
RECLAIM_BATCH = 64
"""Topics per reclaim step. Most topics have nothing in flight, which a plain read shows."""
KINDS = (
    "promoted",
    "reclaimed",
    "expired",
    "skipped",
    "garbage",
    "purged",
    "cleared",
    "trimmed",
    "mended",
    "scheduled",
)
"""What the counter `lisa_manager_moved_total` counts."""

log = logging.getLogger(__name__)


class Engine:
    """Runs all services of one manager. Call `start` once, then `stop`."""

    def __init__(self, address: Address, plan: Plan, prefix: str, name: str) -> None:
        self.name = name
        self.store = store = SyncStore(Connection(address), Keys(prefix), PATIENCE, who="manager")
        self._stopped = threading.Event()
        self._clock = clock = ServerClock()
        self._steps = 0  # of the clock, as far as topics were made due because of them
        self.nodes = nodes = Nodes(store, clock, self._node_changed, self._resume, self._waker_of)
        self._is_list_lost = threading.Event()
        self._search_at = self._searched_until = -math.inf
        self._search_pauses = Backoff(PROBE_INTERVAL_S, LONGEST_REST_S)
        self._started_ms = 0
        self._is_announced = False
        self._beat_at = -math.inf
        self.signals = SignalQueue(store)
        self.idle = IdleTopics(self._activated)
        self.registry = Registry(store, plan, self._add, nodes)
        self._hold = LeaseHold(store, nodes.node_of)
        self._expirer = Expirer(store, self.signals)
        self._promoter = Promoter(
            store, clock, self._expirer, self.registry.batches, hold=self._hold, idle=self.idle
        )
        self.reclaimer = Reclaimer(
            store, clock, self.signals, plan.window, hold=self._hold, idle=self.idle
        )
        self._scheduler = Scheduler(store, clock)
        self._zone_data = ZoneData(store, clock)
        self._trimmer = Trimmer(store)
        self.pruner = Pruner(store, clock)
        self._sampler = Sampler(store)
        self._sharder = Sharder(store)
        self.sweeper = Sweeper(
            store,
            self._expirer,
            self.registry.is_kept,
            stopped=self._stopped.is_set,
            doubts_clock=lambda: clock.was_set_forward(DOUBT_S),
            is_list_there=lambda: nodes.answers(key=store.keys.topics),
        )
        # On a cluster, a pipeline sends one command at a time, so batches gain nothing.
        together = (1, 1) if store.has_nodes else (BATCH, RECLAIM_BATCH)
        self._promoting = self._loop("promoter", self._promoter.step, PROMOTERS, together[0])
        self._reclaiming = self._loop("reclaimer", self.reclaimer.step, RECLAIMERS, together[1])
        # "greeter" is a label of metrics that users have stored, so it stays.
        self._declaring = self._loop("greeter", self.registry.declare_awaited)
        self.scheduling = self._loop("scheduler", self._scheduler.step)
        self.loops = (self._promoting, self._reclaiming, self._declaring, self.scheduling)
        self.jobs = self._scheduled(plan.schedules)

    def _loop(self, name: str, step: Step, workers: int = 1, batch: int = 1) -> Loop:
        longest_s = longest_round_s(self.store.connection.address.socket_timeout_s)
        return Loop(name, step, nodes=self.nodes, workers=workers, batch=batch, longest_s=longest_s)

    def _scheduled(self, schedules: Schedules) -> Jobs:
        clock, jobs = self._clock, Jobs(self.nodes)

        def add_for_picked(
            name: str,
            schedule: str | timedelta,
            pick: Callable[[Sequence[Shard]], Sequence[Name]],
            work: Callable[[Name], object],
        ) -> None:
            """Add a job for those topics that may need work, as `pick` finds page by page."""

            def topics() -> Iterator[Name]:
                for page in chunks(self.idle.due(name), PAGE):
                    yield from pick(self.nodes.available(page))

            jobs.add_for_each(name, schedule, topics, work)

        jobs.add("move", schedules.move, self._poll)
        jobs.add("process-pending", schedules.process_pending, self._reclaim_all)
        add_for_picked("clean", schedules.clean, self._trimmer.pick, self._trimmer.step)
        add_for_picked("prune", PRUNE, self.pruner.pick, self.pruner.step)
        add_for_picked("shards", schedules.sweep, self._pick_sharded, self._sharder.step)
        add_for_picked("sweep", schedules.sweep, self.sweeper.pick, self.sweep)
        add_for_picked(
            "sample",
            SAMPLE,
            lambda topics: self._sampler.pick(topics, clock.now_ms()),
            lambda topic: self._sampler.step(topic, clock.now_ms()),
        )
        jobs.add_for_each("layouts", REFRESH, self._changed_topics, self._sharder.finish)
        jobs.add("managers", schedules.sweep, self._sweep_managers)
        jobs.add("refresh", REFRESH, self._refresh)
        jobs.add("schedules", REFRESH, self.find_schedules)
        jobs.add("idle", REFRESH, lambda: self.idle.retire(self.store))
        jobs.add("search", REFRESH, self._search)
        jobs.add("presence", presence.BEAT, self.beat)
        return jobs

    # -- start and end

    def start(self) -> None:
        """Start all threads; waits for an unreachable server.

        Raises ConfigError if the server rejects the connection or has a newer data layout.
        """
        try:
            self.nodes.start()
        except ConfigError:
            self.store.close()
            raise
        self.signals.start()
        for loop in self.loops:
            loop.start()
        self.jobs.start()

    def stop(self) -> None:
        """Finish running scripts, then end all threads."""
        self._stopped.set()
        for loop in self.loops:
            loop.due_heap.close()
        self.jobs.stop()
        for loop in self.loops:
            loop.stop()
        self.signals.stop()
        is_there = self.nodes.answers(key=self.store.keys.managers)
        self.nodes.stop()
        if is_there:
            try:
                self.store.drive(presence.leave_manager(self.store, self.name))
            except LisaError as error:
                log.info("could not remove this manager's record: %s", error)
        self.store.close()

    def reconfigure(self, plan: Plan) -> list[str]:
        """Apply a new plan and return the differences as text."""
        changes = self.registry.reconfigure(plan)
        try:
            self.registry.step()
        except LisaError as error:
            log.warning("topics will be declared when the server answers: %s", error)
        return changes

    # -- what makes topics due

    def _waker_of(self, node: str) -> Waker:
        keys = self.store.keys
        return Waker(self.store.connection, keys.wake, self.woken, self._check_after_gap, node)

    def _node_changed(self, node: str, result: ProbeResult) -> None:
        """A node answered for the first time, after an outage or after a gap."""
        # Reclaim nothing on the node until its consumers could renew their leases.
        self._hold.add(result.since, result.gap_s, node)
        if result.emptied:
            self._is_announced = False  # the loss is logged
        if result.is_change:
            self._declare_again(node)
            for work in (self.registry.step, self.beat):
                try:
                    work()
                except LisaError as error:
                    # The jobs retry and log the error. A server at maxmemory must be drained first.
                    log.debug("will be retried: %s", error)
        # Also after a gap: producers do not wait as long for a list of topics as a probe.
        if self.store.has_nodes and not result.is_first:
            self._is_list_lost.set()
            self._search_at = self._searched_until

    def _declare_again(self, node: str | None = None) -> None:
        """Declare the topics of a node that restarted or was emptied, and finish its reshards.

        Without a node, those of all nodes.
        """
        self.registry.declare_again(lambda topic: node is None or self.nodes.node_of(topic) == node)
        self._sharder.is_check_due.set()

    def _resume(self, node: str) -> None:
        """Schedule all topics of a node that became available."""
        self._check(node, self.loops)

    def _check_after_gap(self, node: str) -> None:
        """Check all topics of a node, because its announcements during the gap are lost."""
        self._check(node, (self._promoting, self.scheduling))
        self._sharder.is_check_due.set()

    def _check(self, node: str, loops: Sequence[Loop]) -> None:
        """Make all topics of a node due now."""
        topics = {*self.registry.topics, *self.scheduling.due_heap.topics()}
        own = [topic for topic in topics if self.nodes.node_of(topic) in (node, None)]
        for loop in loops:
            loop.due_heap.schedule_now(own)

    def _add(self, topic: str) -> None:
        self.idle.add(topic)
        for loop in (self._promoting, self._reclaiming, self._declaring):
            loop.due_heap.add(topic)

    def _activated(self, topic: Shard) -> None:
        """Look for expired leases again in a topic that was idle."""
        self.reclaimer.scan_again([topic])
        self._reclaiming.due_heap.schedule_now([topic])

    def woken(self, node: str, topic: str) -> None:
        """A client announced an earlier message, a waiting consumer, or a change of the shards.

        Clients announce a topic on its own node. What other nodes say of it is a repetition.
        """
        if self.nodes.node_of(topic.removesuffix(CHANGED)) not in (node, None):
            return
        if topic.endswith(CHANGED):
            self._sharder.announced[Topic(topic.removesuffix(CHANGED))] = None
            return
        self.registry.learn([topic])
        self.idle.mark_active(topic)
        at = time.monotonic() + self._promoter.lag_s(topic)
        self._promoting.due_heap.bring_forward({topic: at}, 0.0)
        self.scheduling.due_heap.schedule_now([topic])
        if not self.store.known_groups(topic):
            self._declaring.due_heap.schedule_now([topic])

    # -- jobs

    def _poll(self) -> None:
        """Read when the available topics have their next due message."""
        active, idle = self.idle.active(), self.idle.share("move")
        self._promoting.due_heap.bring_forward(
            self._promoter.poll(self.nodes.available(active), self.nodes.available(idle))
        )

    def _reclaim_all(self) -> None:
        """Make the next scan of active topics, and of some idle ones, a full scan, and scan now."""
        due = self.idle.due("process-pending")
        self.reclaimer.scan_again(due)
        self._reclaiming.due_heap.schedule_now(due)

    def _changed_topics(self) -> list[Topic]:
        return self._sharder.changed(lambda: self.nodes.available(self.registry.topics))

    def _pick_sharded(self, shards: Sequence[Shard]) -> list[Topic]:
        """The sharded topics of these shards, where the topic's own node is available."""
        here = [shard for shard in shards if self.nodes.is_available(topic_of(shard))]
        return self._sharder.pick(here)

    def sweep(self, topic: str) -> None:
        """Sweep one topic, and forget it if it is idle."""
        if not self.sweeper.step(topic):
            return
        for loop in self.loops:
            loop.due_heap.remove(topic)
            loop.topic_errors.forget(topic)
        for service in (
            self._promoter,
            self.reclaimer,
            self._zone_data,
            self._trimmer,
            self._sampler,
            self._sharder,
            self.idle,
        ):
            service.forget(topic)
        # Last: a later announcement must add the topic to the heaps again.
        self.registry.forget(topic)
        if self.sweeper.relist_if_used(topic):
            self.registry.learn([topic])
        else:
            self.jobs.forget(topic)

    def _sweep_managers(self) -> None:
        is_there = self.nodes.answers(key=self.store.keys.managers)
        if is_there and self.sweeper.managers():
            self.idle.check_all()

    def _refresh(self) -> None:
        """Look for expired leases, waiting consumers and undeclared topics."""
        if self._steps != (steps := len(self._clock.steps)):
            self._steps = steps
            for loop in self.loops:
                # The clock step shifted all due instants.
                loop.due_heap.schedule_now(loop.due_heap.topics())
        # Reclaim first: declarations fail while the server is at maxmemory.
        topics = self.nodes.available(self.idle.due("refresh"))
        self._reclaiming.due_heap.bring_forward(self.reclaimer.poll(topics))
        self._declaring.due_heap.schedule_now(self.registry.awaited(topics))
        self.registry.step(is_hurried=False)
        if self._is_list_lost.is_set() and self.nodes.answers(key=self.store.keys.topics):
            self.registry.list_again()
            self._is_list_lost.clear()

    def find_schedules(self) -> None:
        """Learn the topics with schedules, and look at the next tick of each."""
        if not self.nodes.answers(key=self.store.keys.scheduled):
            return
        topics = self._scheduler.listed()
        gone_topics = {*self.scheduling.due_heap.topics()}.difference(topics)
        for gone in gone_topics.difference(self.registry.topics if gone_topics else ()):
            self.scheduling.due_heap.remove(gone)
            self.scheduling.topic_errors.forget(gone)
            self._zone_data.forget(gone)
        for topic in topics:
            self.scheduling.due_heap.add(topic)
        available = self.nodes.available(list(map(Shard, topics)))
        self.scheduling.due_heap.bring_forward(self._scheduler.poll(available))
        self.scheduling.due_heap.schedule_now(self._zone_data.step(available))

    def _search(self) -> None:
        """Search for topics at the start, every six hours, and after each outage or gap.

        Announcements may be lost meanwhile.
        """
        began = time.monotonic()
        if began < max(self._search_at, self._searched_until):
            return
        self._search_at = began + SEARCH_S
        try:
            self.registry.search(self._stopped.is_set)
        except LisaError as error:
            log.debug("the search for topics will be repeated: %s", error)
            self._search_at = time.monotonic() + self._search_pauses.take()
        else:
            self._search_pauses.reset()
            now = time.monotonic()
            self._searched_until = now + min(REST * (now - began), LONGEST_REST_S)

    def beat(self) -> None:
        """Announce this manager; declare everything again if its record was lost."""
        if not self.nodes.answers(key=self.store.keys.managers):
            return
        if not self._started_ms:
            self._started_ms = self._clock.now_ms()
        me = presence.ManagerPresence(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            topics=self.registry.topic_count,
        )
        was_announced = self._is_announced  # before the call: threads of several nodes make it
        is_new = self.store.drive(presence.announce_manager(self.store, me))
        before, self._beat_at = self._beat_at, time.monotonic()
        if is_new and was_announced:
            # The server lost its data, and another role wrote the schema again before a probe.
            self._declare_again()
            if self._beat_at - before < presence.GONE_AFTER.total_seconds():
                warn_of_loss(self.store.where)  # else another manager removed the record
        self._is_announced = True

    # -- health and metrics

    def health(self) -> dict[str, object]:
        """The content of `/healthz`; `status` is ok, starting or failing."""
        threads = self.threads()
        faults = [*stalled(threads), *self.jobs.faults()]
        stuck = max(loop.due_heap.overdue_s() for loop in self.loops) > STUCK_S
        # While any node answers, its topics are served, so the process must not be restarted.
        reachable = self.nodes.is_any_available
        begun = self._started_ms or self.nodes.error
        status = (
            "ok" if reachable and not faults and not stuck else "failing" if begun else "starting"
        )
        return {
            "status": status,
            "name": self.name,
            "redis": {
                "address": self.store.where,
                "reachable": reachable,
                "error": self.nodes.error,
                **({"away": self.nodes.away} if self.store.has_nodes else {}),
            },
            "topics": self._topics_health(),
            "threads": {thread.name: round(thread.age_s, 1) for thread in threads},
            "faults": faults,
        }

    def _topics_health(self) -> dict[str, dict[str, object]]:
        """By topic: seconds since its least recently promoted shard was promoted, and any error."""
        ages: dict[str, list[float]] = {}
        found: dict[str, dict[str, object]] = {}
        for shard in self.registry.topics:
            topic, age = topic_of(shard), self._promoter.age_s(shard)
            ages.setdefault(topic, []).extend(() if age is None else (age,))
            own = self._promoting.topic_errors.of(shard) or self._reclaiming.topic_errors.of(shard)
            error = found.get(topic, {}).get("error") or own
            found[topic] = {"promoted_s_ago": max(ages[topic], default=None), "error": error}
        return found

    def threads(self) -> list[ServiceThread]:
        """All threads that must live until the manager stops."""
        return [
            *[thread for loop in self.loops for thread in loop.threads],
            *self.signals.threads(),
            *self.nodes.threads(),
            *watch_threads(),
        ]

    def numbers(self) -> Numbers:
        """The metrics of this manager."""
        numbers: Numbers = {}
        put(numbers, "lisa_manager_topics", self.registry.topic_count)
        put(numbers, "lisa_manager_unannounced_total", self.signals.dropped)
        for kind in KINDS:
            put(numbers, "lisa_manager_moved_total", 0, kind)
        for service in (
            self._promoter,
            self.reclaimer,
            self._expirer,
            self._scheduler,
            self._trimmer,
            self.sweeper,
        ):
            for labels, count in service.moved.numbers().items():
                add(numbers, "lisa_manager_moved_total", count, *labels)
        services = [(loop.name, loop.seconds, loop.topic_errors) for loop in self.loops]
        services += [(job.name, job.seconds, job.errors) for job in self.jobs.by_name.values()]
        for name, seconds, errors in services:
            put(numbers, "lisa_manager_step_seconds", seconds.numbers(), name)
            put(numbers, "lisa_manager_failures_total", errors.total, name)
            put(numbers, "lisa_manager_troubles", len(errors.failures), name)
        for loop in self.loops:
            put(numbers, "lisa_manager_overdue_seconds", loop.due_heap.overdue_s(), loop.name)
        return numbers
