"""The services that handle topics, the loops that run them, and what makes topics due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lisa.core.daemon.threads import ServiceThread, longest_round_s
from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import CHANGED, Shard, Topic, topic_of
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promoted
from lisa.manager.expirer import Expirer
from lisa.manager.group_declarer import GroupDeclarer
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.loop import Loop, Service
from lisa.manager.nodes import Nodes
from lisa.manager.plan import Plan
from lisa.manager.promoter import Promoter
from lisa.manager.pruner import Pruner
from lisa.manager.reclaimer import Reclaimer
from lisa.manager.registry import Registry
from lisa.manager.reshard_queue import ReshardQueue
from lisa.manager.sampler import Sampler
from lisa.manager.scheduler import Scheduler
from lisa.manager.server_clock import ServerClock
from lisa.manager.server_monitor import ProbeResult
from lisa.manager.sharder import Sharder
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from lisa.manager.topic_errors import TopicErrors
from lisa.manager.trimmer import Trimmer
from lisa.manager.zone_data import ZoneData

DOUBT_S = 86_400.0
"""How long no garbage is purged after the server's clock was set forward."""
PROMOTERS, RECLAIMERS = 4, 2
BATCH = 8
RECLAIM_BATCH = 64
"""Topics per reclaim step. Most topics have nothing in flight, which a plain read shows."""


class TopicServices:
    """All services that handle topics.

    is_over: whether the manager is stopping.
    """

    def __init__(
        self,
        store: SyncStore,
        plan: Plan,
        nodes: Nodes,
        clock: ServerClock,
        is_over: Callable[[], bool],
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._clock = clock
        self._steps = 0
        self._is_list_lost = threading.Event()
        self.signals = SignalQueue(store)
        self.idle = IdleTopics(self._activated)
        self.registry = Registry(store, plan, self._add, nodes)
        self.trimmer = Trimmer(store)
        self.pruner = Pruner(store, clock)
        self.sampler = Sampler(store)
        self.sharder = Sharder(store)
        self.reshards = ReshardQueue(self.sharder, nodes)
        self._expirer = Expirer(store, self.signals)
        self._reclaimer = Reclaimer(
            store, clock, self.signals, plan.window, nodes.node_of, idle=self.idle
        )
        self._promoter = Promoter(store, clock, self._expirer, self.registry.batch, self._promoted)
        self._declarer = GroupDeclarer(store, self.registry)
        self._scheduler = Scheduler(store, clock)
        self._zone_data = ZoneData(store, clock)
        self.sweeper = Sweeper(
            store,
            self._expirer,
            self.registry.is_kept,
            stopped=is_over,
            doubts_clock=lambda: clock.was_set_forward(DOUBT_S),
            is_list_there=lambda: nodes.answers(key=store.keys.topics),
        )
        # On a cluster, a pipeline sends one command at a time, so batches gain nothing.
        together = (1, 1) if store.has_nodes else (BATCH, RECLAIM_BATCH)
        self._promoting = self._loop("promoter", self._promoter, PROMOTERS, together[0])
        self._reclaiming = self._loop("reclaimer", self._reclaimer, RECLAIMERS, together[1])
        # "greeter" is a label of metrics that users have stored, so it stays.
        self._declaring = self._loop("greeter", self._declarer, 1, 1)
        self._scheduling = self._loop("scheduler", self._scheduler, 1, 1)
        self.loops = (self._promoting, self._reclaiming, self._declaring, self._scheduling)

    def _loop(self, name: str, service: Service, workers: int, batch: int) -> Loop:
        longest_s = longest_round_s(self._store.connection.address.socket_timeout_s)
        return Loop(
            name, service, nodes=self._nodes, workers=workers, batch=batch, longest_s=longest_s
        )

    def threads(self) -> list[ServiceThread]:
        """All threads of the loops and of the signals."""
        loops = [thread for loop in self.loops for thread in loop.threads()]
        return [*loops, *self.signals.threads()]

    def moved(self) -> list[Tally]:
        """The counts of messages that the services moved."""
        services = (
            self._promoter,
            self._reclaimer,
            self._expirer,
            self._scheduler,
            self.trimmer,
            self.sweeper,
        )
        return [one.moved for one in services]

    def health(self) -> Mapping[str, object]:
        """By topic: seconds since its least recently promoted shard was promoted, and any error."""
        found: dict[str, dict[str, object]] = {}
        for topic in self.registry.topics:
            age = self._promoter.age_s(topic)
            promoting, reclaiming = self._promoting.topic_errors, self._reclaiming.topic_errors
            error = promoting.of(topic) or reclaiming.of(topic)
            known = found.setdefault(topic_of(topic), {"promoted_s_ago": age, "error": error})
            known["promoted_s_ago"] = max(
                (one for one in (known["promoted_s_ago"], age) if isinstance(one, float)),
                default=None,
            )
            known["error"] = known["error"] or error
        return found

    def hold_leases(self, node: str, result: ProbeResult) -> None:
        """Reclaim nothing on a node until its consumers could renew their leases."""
        now = time.monotonic()
        if result.first and not result.promoted:
            # Leases that aged before this manager started count, except during a server outage.
            self._reclaimer.hold(now - result.uptime_s, node=node)
        elif result.first or result.another_run or result.emptied:
            self._reclaimer.hold(now, node=node)
        else:
            self._reclaimer.hold(now, result.gap_s, node)

    def declare_again(self, node: str | None = None) -> None:
        """Declare the topics of a node that restarted or was emptied, and finish its reshards.

        Without a node, those of all nodes.
        """
        self.registry.declare_again(
            lambda topic: node is None or self._nodes.node_of(topic) == node
        )
        self.reshards.is_check_due.set()

    def list_again(self) -> None:
        """List all topics again once the node of the list answers."""
        self._is_list_lost.set()

    def resume(self, node: str) -> None:
        """Schedule all topics of a node that became available."""
        self._check(node, self.loops)

    def _check(self, node: str, loops: Sequence[Loop]) -> None:
        """Make all topics of a node due now."""
        topics = {*self.registry.topics, *self._scheduling.due_heap.topics()}
        own = [topic for topic in topics if self._nodes.node_of(topic) in (node, None)]
        for loop in loops:
            loop.due_heap.bring_forward(dict.fromkeys(own, time.monotonic()))

    def _add(self, topic: str) -> None:
        self.idle.add(topic)
        for loop in (self._promoting, self._reclaiming, self._declaring):
            loop.due_heap.add(topic)

    def _promoted(self, topic: str, result: Promoted | LisaError) -> None:
        if isinstance(result, LisaError) or result.moved:
            self.idle.mark_active(topic)
        else:
            self.idle.check(topic)
        self._reclaimer.observe(topic, result)

    def _activated(self, topic: Shard) -> None:
        """Look for expired leases again in a topic that was idle."""
        self._reclaimer.scan_again([topic])
        self._reclaiming.due_heap.schedule_now(topic)

    def woken(self, node: str, topic: str) -> None:
        """A client announced an earlier message, a waiting consumer, or a change of the shards.

        Clients announce a topic on its own node. What other nodes say of it is a repetition.
        """
        if self._nodes.node_of(topic.removesuffix(CHANGED)) not in (node, None):
            return
        if topic.endswith(CHANGED):
            self.reshards.put([Topic(topic.removesuffix(CHANGED))])
            return
        self.registry.learn([topic])
        self.idle.mark_active(topic)
        lag_s = self._promoter.lag_s(topic)
        if lag_s:
            self._promoting.due_heap.bring_forward({topic: time.monotonic() + lag_s})
        else:
            self._promoting.due_heap.schedule_now(topic)
        self._scheduling.due_heap.schedule_now(topic)
        if not self._store.known_groups(topic):
            self._declaring.due_heap.schedule_now(topic)

    def check_after_gap(self, node: str) -> None:
        """Check all topics of a node, because its announcements during the gap are lost."""
        self._check(node, (self._promoting, self._scheduling))
        self.reshards.is_check_due.set()

    def _available(self) -> list[Shard]:
        return self._nodes.available(self.registry.topics)

    def poll(self) -> None:
        """Read when the available topics have their next due message."""
        due_heap = self._promoting.due_heap
        active, idle = self.idle.active(), self.idle.share("move")
        due_heap.bring_forward(
            self._promoter.poll(self._nodes.available(active), self._nodes.available(idle))
        )

    def find_schedules(self) -> None:
        """Learn the topics with schedules, and look at the next tick of each."""
        if not self._nodes.answers(key=self._store.keys.scheduled):
            return
        topics = self._scheduler.listed()
        gone_topics = {*self._scheduling.due_heap.topics()}.difference(topics)
        for gone in gone_topics.difference(self.registry.topics if gone_topics else ()):
            self._scheduling.due_heap.remove(gone)
            self._scheduling.topic_errors.forget(gone)
            self._zone_data.forget(gone)
        for topic in topics:
            self._scheduling.due_heap.add(topic)
        available = self._nodes.available(list(map(Shard, topics)))
        self._scheduling.due_heap.bring_forward(self._scheduler.poll(available))
        for emptied in self._zone_data.step(available):
            self._scheduling.due_heap.schedule_now(emptied)

    def refresh(self, errors: TopicErrors) -> None:
        """Look for expired leases, waiting consumers, undeclared topics and unfinished reshards."""
        if self._steps != (steps := len(self._clock.steps)):
            self._steps = steps
            for loop in self.loops:
                loop.due_heap.schedule_all_now()  # the clock step shifted all due instants
        # Reclaim first: declarations fail while the server is at maxmemory.
        topics = self._nodes.available(self.idle.due("refresh"))
        self._reclaiming.due_heap.bring_forward(self._reclaimer.poll(topics))
        for topic in self._declarer.poll(topics):
            self._declaring.due_heap.schedule_now(topic)
        self.registry.step(is_hurried=False)
        if self._is_list_lost.is_set() and self._nodes.answers(key=self._store.keys.topics):
            self.registry.list_again()
            self._is_list_lost.clear()
        self.reshards.finish(self._available, errors)

    def reclaim_all(self) -> None:
        """Make the next scan of active topics, and of some idle ones, a full scan, and scan now."""
        due = self.idle.due("process-pending")
        self._reclaimer.scan_again(due)
        self._reclaiming.due_heap.bring_forward(dict.fromkeys(due, time.monotonic()))

    def sweep(self, topic: str) -> bool:
        """Sweep one topic, and forget it if it is idle; returns whether it is forgotten."""
        if not self.sweeper.step(topic):
            return False
        for loop in self.loops:
            loop.due_heap.remove(topic)
            loop.topic_errors.forget(topic)
        for service in (
            self._promoter,
            self._reclaimer,
            self._zone_data,
            self.trimmer,
            self.sampler,
            self.sharder,
            self.idle,
        ):
            service.forget(topic)
        # Last: a later announcement must add the topic to the heaps again.
        self.registry.forget(topic)
        is_used = self.sweeper.relist_if_used(topic)
        if is_used:
            self.registry.learn([topic])
        return not is_used

    def pick_sharded(self, shards: Sequence[Shard]) -> list[Topic]:
        """The sharded topics of these shards, where the topic's own node is available."""
        return self.sharder.pick([one for one in shards if self._nodes.is_available(topic_of(one))])
