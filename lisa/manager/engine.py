"""All services of a manager, wired to the threads that run them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from queue import SimpleQueue

from lisa.core import presence
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.keys import Keys
from lisa.core.metrics.numbers import Numbers
from lisa.core.shards import CHANGED, base, bases
from lisa.core.store import SyncStore, chunks
from lisa.manager.announcer import Announcer
from lisa.manager.expirer import Expirer
from lisa.manager.greeter import Greeter
from lisa.manager.jobs import Jobs
from lisa.manager.lookout import PAGE
from lisa.manager.loop import Loop, Service
from lisa.manager.metrics import own_numbers
from lisa.manager.plan import Plan, Schedules
from lisa.manager.promoter import Promoter
from lisa.manager.pruner import Pruner
from lisa.manager.pulse import Pulse, Signs
from lisa.manager.reclaimer import GLANCE_S, Reclaimer
from lisa.manager.registry import Registry
from lisa.manager.sampler import Sampler
from lisa.manager.server_clock import ServerClock
from lisa.manager.sharder import Sharder
from lisa.manager.sweeper import Sweeper
from lisa.manager.trimmer import Trimmer
from lisa.manager.waker import Waker

__all__ = ["Engine"]

PATIENCE = timedelta(milliseconds=60)
"""A loop tries again by itself: no need to insist within one call."""

PULSE_S = 1.0
REFRESH = timedelta(seconds=GLANCE_S)
SEARCH = timedelta(hours=6)
LONGEST_SEARCH_PAUSE_S = 60.0
PRUNE = timedelta(seconds=5)
SAMPLE = "2 * * * * ?"  # not at the full minute, where a clock that is a little off would miss it
STUCK_S = 10.0
PROMOTERS, RECLAIMERS = 4, 2
BATCH = 8
LOOKS = 64
"""So many topics are reclaimed together: most have nothing in flight, and a plain read says so."""

log = logging.getLogger(__name__)


class Engine:
    """Runs everything for one manager, once: `start`, then `stop`."""

    def __init__(self, address: Address, plan: Plan, prefix: str, name: str) -> None:
        self.name = name
        self.store = store = SyncStore(Connection(address), Keys(prefix), PATIENCE, who="manager")
        self._clock = ServerClock()
        self._pulse = Pulse(store, self._clock)
        self._nudge = threading.Event()
        self._looked = threading.Condition()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started_ms = 0
        self._announcer = Announcer(store)
        expirer = self._expirer = Expirer(store, self._announcer)
        self._registry = registry = Registry(store, plan, self._learnt)
        self._promoter = Promoter(store, self._clock, expirer, registry.batch)
        self._reclaimer = Reclaimer(store, self._announcer, plan.window)
        self._greeter = Greeter(store, registry)
        self._trimmer = Trimmer(store)
        self._pruner = Pruner(store)
        self._sampler = Sampler(store)
        self._sweeper = Sweeper(store, expirer, registry.is_kept, self._stopped.is_set)
        self._sharder = Sharder(store)
        # A cluster's pipeline is one command after the other: nothing is gained by batches.
        together = (1, 1) if address.kind == "cluster" else (BATCH, LOOKS)
        self._promoting = self._loop("promoter", self._promoter, PROMOTERS, together[0])
        self._reclaiming = self._loop("reclaimer", self._reclaimer, RECLAIMERS, together[1])
        self._greeting = self._loop("greeter", self._greeter, 1, 1)
        self._loops = (self._promoting, self._reclaiming, self._greeting)
        self._waker = Waker(store.connection, store.keys.wake, self._woken, self._was_deaf)
        self._split_anew: SimpleQueue[str] = SimpleQueue()
        self._may_be_split = threading.Event()
        self._jobs = self._schedule(plan.schedules)

    def _loop(self, name: str, service: Service, workers: int, batch: int) -> Loop:
        return Loop(
            name, service, reachable=self._pulse.reachable, suspect=self._suspect,
            workers=workers, batch=batch,
        )  # fmt: skip

    def _schedule(self, schedules: Schedules) -> Jobs:
        jobs = Jobs(self._pulse.reachable, self._suspect, lambda: self._registry.topics)
        jobs.add("move", schedules.move, self._glance)
        jobs.add("process-pending", schedules.process_pending, self._reclaim_all)
        jobs.add_for_each("clean", schedules.clean, self._trimmer.pick, self._trimmer.step)
        jobs.add_for_each("prune", PRUNE, self._pruner.pick, self._pruner.step)
        jobs.add_for_each("shards", schedules.sweep, self._sharder.pick, self._sharder.step)
        jobs.add_for_each("sweep", schedules.sweep, self._sweeper.pick, self._sweep)
        jobs.add_for_each(
            "sample", SAMPLE, lambda topics: self._sampler.pick(topics, self._clock.now_ms()),
            lambda topic: self._sampler.step(topic, self._clock.now_ms()),
        )  # fmt: skip
        jobs.add("managers", schedules.sweep, self._sweeper.managers)
        jobs.add("refresh", REFRESH, self._refresh)
        jobs.add("search", SEARCH, self._registry.search)
        jobs.add("presence", presence.BEAT, self._beat)
        return jobs

    def start(self) -> None:
        """Begin; a server that is not there is waited for.

        Raises ConfigError if it refuses us, or is of a newer layout.
        """
        try:
            self._feel_pulse()
        except ConfigError:
            self.store.close()
            raise
        self._announcer.start()
        for loop in self._loops:
            loop.start()
        self._waker.start()
        self._jobs.start()
        for name, work in (("pulse", self._watch), ("search", self._search_first)):
            thread = threading.Thread(target=work, name=f"lisa-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Finish the scripts that run, and end."""
        self._stopped.set()
        self._nudge.set()
        for loop in self._loops:
            loop.close()
        self._jobs.stop()
        self._waker.stop()
        for loop in self._loops:
            loop.stop()
        self._announcer.stop()
        for thread in self._threads:
            thread.join(2 * PULSE_S)
        if self._pulse.reachable.is_set():
            try:
                self.store.drive(presence.leave_manager(self.store, self.name))
            except LisaError as error:
                log.info("could not sign off: %s", error)
        self.store.close()

    def reconfigure(self, plan: Plan) -> list[str]:
        """Follow another plan's topics; what changed, in words."""
        said = self._registry.reconfigure(plan)
        try:
            self._registry.step()
        except LisaError as error:
            log.warning("declared as soon as the server answers: %s", error)
        return said

    def health(self) -> dict[str, object]:
        """What `/healthz` tells: `status` is ok, starting or failing."""
        alive = all(loop.alive for loop in self._loops) and self._waker.alive
        stuck = max(loop.agenda.overdue_s() for loop in self._loops) > STUCK_S
        reachable = self._pulse.reachable.is_set()
        begun = self._started_ms or self._pulse.trouble
        status = "ok" if reachable and alive and not stuck else "failing" if begun else "starting"
        return {
            "status": status,
            "name": self.name,
            "redis": {
                "address": self.store.where, "reachable": reachable, "error": self._pulse.trouble
            },
            "topics": self._health_of_topics(),
        }  # fmt: skip

    def _health_of_topics(self) -> Mapping[str, object]:
        """By topic; of several places the one that was promoted longest ago, and any error."""
        found: dict[str, dict[str, object]] = {}
        for place in self._registry.topics:
            age = self._promoter.age_s(place)
            error = self._promoting.troubles.of(place) or self._reclaiming.troubles.of(place)
            known = found.setdefault(base(place), {"promoted_s_ago": age, "error": error})
            known["promoted_s_ago"] = max(
                (one for one in (known["promoted_s_ago"], age) if isinstance(one, float)),
                default=None,
            )
            known["error"] = known["error"] or error
        return found

    @property
    def is_reachable(self) -> bool:
        """Whether the server answers, as far as is known."""
        return self._pulse.reachable.is_set()

    def numbers(self) -> Numbers:
        """What this manager did and does."""
        return own_numbers(
            self._loops, self._jobs, topics=len(bases(self._registry.topics)),
            moved=[one.moved for one in (self._promoter, self._reclaimer, self._expirer,
                                         self._trimmer, self._sweeper)],
            unannounced=self._announcer.dropped,
        )  # fmt: skip

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._nudge.wait(PULSE_S)
            self._nudge.clear()
            if self._stopped.is_set():
                return
            try:
                self._feel_pulse()
            except ConfigError:
                pass  # told by the pulse; a password may be set right while we wait
            except Exception:
                log.exception("the server's pulse could not be taken")
            if not self._pulse.reachable.is_set():
                self._stopped.wait(PULSE_S / 4)
                self._nudge.set()

    def _feel_pulse(self) -> None:
        try:
            signs = self._pulse.step()
        finally:
            with self._looked:
                self._looked.notify_all()
        if signs and (signs.back or signs.another_run or signs.emptied):
            self._meet(signs)

    def _suspect(self) -> None:
        """The server seems to be away: have a look, and wait a moment for what it shows."""
        with self._looked:
            self._nudge.set()
            if not self._stopped.is_set():
                self._looked.wait(PULSE_S)

    def _meet(self, signs: Signs) -> None:
        """The server is there, again or for the first time: nothing we knew of it is certain."""
        now = time.monotonic()
        # Leases did not age unfairly before we came, unless the server itself was away until then.
        if signs.back and not (signs.first or signs.another_run or signs.emptied):
            self._reclaimer.hold(now, signs.gap_s)
        else:
            self._reclaimer.hold(now - signs.uptime_s if signs.first else now)
        self._registry.declare_again()
        self._may_be_split.set()
        for work in (self._registry.step, self._beat):
            try:
                work()
            except LisaError as error:
                # Their jobs try again, and tell: a server at maxmemory has to be drained first.
                log.debug("not yet: %s", error)
        self._pulse.here()
        for loop in self._loops:
            loop.agenda.hurry_all()

    def _search_first(self) -> None:
        pause_s = PULSE_S
        while not self._stopped.is_set():
            if self._pulse.reachable.wait(PULSE_S):
                try:
                    self._registry.search()
                except LisaError as error:
                    log.debug("the search for topics is repeated: %s", error)
                else:
                    return
                self._stopped.wait(pause_s)  # it looks at all keys: not again and again
                pause_s = min(2 * pause_s, LONGEST_SEARCH_PAUSE_S)

    def _learnt(self, topic: str) -> None:
        for loop in self._loops:
            loop.agenda.add(topic)

    def _woken(self, topic: str) -> None:
        if topic.endswith(CHANGED):
            self._split_anew.put(topic.removesuffix(CHANGED))
            return
        self._registry.learn([topic])
        self._promoting.agenda.hurry(topic)
        if not self.store.known_groups(topic):
            self._greeting.agenda.hurry(topic)

    def _was_deaf(self) -> None:
        """Nobody says again what was announced meanwhile."""
        self._promoting.agenda.hurry_all()
        self._may_be_split.set()

    def _glance(self) -> None:
        agenda = self._promoting.agenda
        agenda.bring_forward(self._promoter.glance(self._registry.topics))

    def _refresh(self) -> None:
        # First what holds for messages in flight: a full server takes no declaration.
        topics = self._registry.topics
        for topic in self._reclaimer.glance(topics):
            self._reclaiming.agenda.hurry(topic)
        for topic in self._greeter.glance(topics):
            self._greeting.agenda.hurry(topic)
        self._registry.step()
        self._finish_splits()

    def _finish_splits(self) -> None:
        """Whoever changed a number of shards may have died half-way, also before we came."""
        heard = dict.fromkeys(self._split_anew.get() for _ in range(self._split_anew.qsize()))
        if self._may_be_split.is_set():
            self._may_be_split.clear()
            try:
                for page in chunks(self._registry.topics, PAGE):
                    heard |= dict.fromkeys(self._sharder.pick(page))
            except LisaError:
                self._may_be_split.set()
                self._put_back(heard)
                raise
        topics, failed = iter(heard), list[str]()
        for topic in topics if self._pulse.reachable.is_set() else ():
            error = self._finish_split(topic)
            if error is not None:
                failed.append(topic)
            if isinstance(error, ServerUnavailable):
                break  # each of a node that is away would take as long: the others come first then
        self._put_back([*topics, *failed])

    def _finish_split(self, topic: str) -> LisaError | None:
        """Why it is not done: one topic's trouble never stops another's."""
        troubles = self._jobs.troubles["refresh"]
        try:
            self._sharder.step(topic)
        except LisaError as error:
            away = isinstance(error, ServerUnavailable)
            if away:
                self._suspect()
            troubles.failed(topic, error, quietly=away and not self._pulse.reachable.is_set())
            return error
        troubles.passed(topic)
        return None

    def _put_back(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._split_anew.put(topic)

    def _reclaim_all(self) -> None:
        self._reclaimer.look_at_all()
        self._reclaiming.agenda.hurry_all()

    def _sweep(self, topic: str) -> None:
        if self._sweeper.step(topic):
            for loop in self._loops:
                loop.agenda.remove(topic)
            for service in (self._promoter, self._reclaimer, self._trimmer, self._sampler):
                service.forget(topic)
            # Last: who learns of it from now on puts it on the agendas again.
            self._registry.forget(topic)
            if self._sweeper.look_again(topic):
                self._registry.learn([topic])

    def _beat(self) -> None:
        if not self._started_ms:
            self._started_ms = self._clock.now_ms()
        me = presence.ManagerPresence(
            name=self.name, host=socket.gethostname(), pid=os.getpid(),
            started_ms=self._started_ms, topics=len(bases(self._registry.topics)),
        )  # fmt: skip
        self.store.drive(presence.announce_manager(self.store, me))
