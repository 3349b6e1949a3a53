"""Renews leases and presence, and releases deliveries that wait too long for a handler."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from lisa.consumer.inflight import Held
from lisa.consumer.subscription import Limit, Subscription
from lisa.core.daemon.threads import LONGEST_S, KeyedPool, ServiceThread, begin_round, unforeseen
from lisa.core.delivery.group_resolution import is_emptied
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.options import TopicOptions
from lisa.core.model.sharding import own_shard
from lisa.core.redis.flow import Command
from lisa.core.store import presence
from lisa.core.store.presence import LAST_LOOK_S, ManagerWatch
from lisa.core.store.replies import microseconds, pairs
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.groups import Forget


class OutageLog:
    """Remembers the errors that were logged and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def warn(self, what: str, error: LisaError) -> None:
        """Log what failed, unless the reason is an outage that was already logged."""
        with self._lock:
            is_known = str(error) in self._logged and isinstance(error, ServerUnavailable)
            self._logged.add(str(error))
        log.log(logging.DEBUG if is_known else logging.WARNING, "%s: %s", what, error)

    def end(self, what: str, error: BaseException) -> None:
        """Log what works again, unless the end of the same outage was already logged."""
        with self._lock:
            is_known = str(error) not in self._logged
            self._logged.discard(str(error))
        log.log(logging.DEBUG if is_known else logging.INFO, what)


class Announcer:
    """Used by the heartbeat's threads; one thread at a time for each subscription."""

    def __init__(
        self,
        store: SyncStore,
        limit: Limit,
        subscriptions: Callable[[], Iterable[Subscription]] = tuple,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._limit = limit
        self._started_ms = int(time.time() * 1000)
        self._written: dict[Subscription, float] = {}
        self._watch = ManagerWatch(store)

    def is_due(self, sub: Subscription, now: float) -> bool:
        """Whether a presence record must be renewed."""
        return self._written.get(sub, -math.inf) + presence.BEAT.total_seconds() <= now

    def announce(self, sub: Subscription) -> bool:
        """Renew a presence record that is due; returns whether it was. Raises LisaError."""
        now = time.monotonic()
        if not self.is_due(sub, now):
            return False
        self._write(sub)
        self._written[sub] = now
        return True

    def announce_together(self, subs: Sequence[Subscription]) -> None:
        """Renew records in two round trips, of topics without shards. Raises LisaError.

        What is not as expected is left to `announce`: a first or a lost record, and any error.
        """
        subs = [
            sub for sub in subs if sub.membership.is_announced and sub.shard == own_shard(sub.topic)
        ]
        if not subs:
            return
        keys, ask, now = self._store.keys, self._store.commands_once, time.monotonic()
        hashes = [keys.topic(sub.shard).consumers for sub in subs]
        exists = [("HEXISTS", key, sub.name) for key, sub in zip(hashes, subs, strict=True)]
        asked = ask([("TIME",), ("GET", keys.schema), *exists])
        clock, schema, *known = self._store.drive(asked)
        if schema is None or isinstance(schema, Exception) or isinstance(clock, Exception):
            return
        subs = [sub for sub, is_known in zip(subs, known, strict=True) if is_known == 1]
        seen_ms = microseconds(clock) // 1_000
        commands: list[Command] = []
        for sub in subs:
            topic = keys.topic(sub.shard)
            record = msgspec.json.encode(self._record(sub, seen_ms))
            commands += ("HSET", topic.consumers, sub.name, record), ("HGETALL", topic.options)
        replies = iter(self._store.drive(ask(commands)) if subs else ())
        self._store.drive(self._store.register([sub.shard for sub in subs]))
        for sub, written, options in zip(subs, replies, replies, strict=True):
            if not isinstance(written, Exception) and not isinstance(options, Exception):
                self._use(sub, TopicOptions.from_hash(pairs(options)))
                self._written[sub] = now
        self._store.drive(self._watch.look([(sub.shard, sub.group) for sub in subs]))

    def _write(self, sub: Subscription) -> None:
        """Renew the presence record, list the topic and read its options. Raises LisaError."""
        member = sub.membership
        if member.is_former_shard():
            return
        if member.is_announced and self._store.drive(is_emptied(self._store, sub.shard, sub.name)):
            member.record_missing()
        record = self._record(sub)
        self._store.drive(presence.announce_consumer(self._store, record, sub.shard))
        member.record_written()
        self._store.drive(self._store.register([sub.shard]))
        self._use(sub, self._store.drive(self._store.options(sub.shard)))
        self._store.drive(self._watch.look([(sub.shard, sub.group)]))

    def _record(self, sub: Subscription, seen_ms: int = 0) -> presence.ConsumerPresence:
        running, degradation = sub.leases.running(), sub.stats.degradation
        return presence.ConsumerPresence(
            name=sub.name,
            topic=sub.topic,
            group=sub.group,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            seen_ms=seen_ms,
            concurrency=self._limit.size,
            running=len(running),
            held=len(sub.leases.held),
            handled=sub.stats.handled,
            state=sub.presence_state,
            error=degradation.error,
            failing_ms=degradation.failing_ms,
            busy_ms=self._busy_ms(sub, running),
        )

    def _busy_ms(self, sub: Subscription, running: Sequence[Held]) -> int:
        """How long no handler has been free for this topic, and none has begun another message."""
        if sub.limit.free and self._limit.free:
            return 0
        if len(running) < sub.limit.size:  # those of other topics have the rest
            running = [held for sub in self._subscriptions() for held in sub.leases.running()]
        began = max((held.started for held in running), default=time.monotonic())
        return max(0, round((time.monotonic() - began) * 1000))

    @staticmethod
    def _use(sub: Subscription, options: TopicOptions) -> None:
        sub.leases.use_ack_timeout(options.ack_timeout.total_seconds())

    def last_look(self, subscriptions: Iterable[Subscription]) -> None:
        """Warn if messages are overdue because no manager runs; takes a quarter of a second."""
        ends = time.monotonic() + LAST_LOOK_S
        for sub in subscriptions:
            self._store.drive(self._watch.last_look(sub.shard, sub.group))
            if time.monotonic() > ends:
                return

    def leave(self, sub: Subscription) -> None:
        """Delete the presence record and the consumer. Raises LisaError."""
        self._written.pop(sub, None)
        self._store.drive(presence.leave_consumer(self._store, sub.shard, sub.name))
        if sub.group:
            self._store.call(Forget(sub.shard, sub.group, [sub.name], 0))


log = logging.getLogger("lisa.consumer")

LONGEST_TICK_S = 0.5
FOLLOW_S = 1.0
"""How often layouts are checked for changes."""
FOLLOWED_MOST = 1_000
"""The most topics whose layouts are checked per `FOLLOW_S`."""
SHORTEST_TICK_S = 0.02

MOST_TOGETHER = 250
"""The most topics that are announced in one round trip."""

MOST_PER_STEP = 1_000
"""The most topics that are announced together in one step."""

_Work = Callable[[Any], bool | None]
"""Returns whether the server answered; None if no call was needed. Raises LisaError."""

_Call = tuple[Subscription | None, _Work]


class Heartbeat:
    """A thread that calls `step`, which serves every subscription once.

    subscriptions: returns all subscriptions.
    drained: called with a closing subscription that no longer holds deliveries.
    follow: called each second to check layouts for changes.
    checks: called at each step.
    overslept: called before each step with the seconds by which it is late.

    On a cluster, each subscription is served on a separate thread, so that a hanging node delays
    only its own topics.
    """

    def __init__(
        self,
        store: SyncStore,
        subscriptions: Callable[[], Iterable[Subscription]],
        limit: Limit,
        drained: Callable[[Subscription], None],
        follow: Callable[[], None] = lambda: None,
        *,
        checks: Sequence[Callable[[], None]] = (),
        overslept: Callable[[float], None] = lambda _: None,
        longest_s: float = LONGEST_S,
        outages: OutageLog | None = None,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._drained = drained
        self._follow = follow
        self._checks = checks
        self._overslept = overslept
        self._followed = -math.inf
        self._announcer = Announcer(store, limit, subscriptions)
        self._announced_at: dict[Subscription, float] = {}
        self._failing: dict[_Call, LisaError | None] = {}
        self._pool: KeyedPool[Subscription | None] = KeyedPool("lisa-leases", longest_s=longest_s)
        self._outages = outages or OutageLog()
        self._closed = False
        self._woken = threading.Event()
        self._thread = ServiceThread("lisa-heartbeat", self._run, longest_s)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def threads(self) -> list[ServiceThread]:
        """The heartbeat's threads, for health checks."""
        return [self._thread, *self._pool.threads()]

    def wake(self) -> None:
        """Start the next step now."""
        self._woken.set()

    def close(self, timeout_s: float) -> None:
        """End the thread; waits up to `timeout_s`."""
        self._closed = True
        self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        tick = 0.0
        while True:
            self._thread.rest()
            asleep = time.monotonic()
            self._woken.wait(tick)
            late_s = time.monotonic() - asleep - tick
            self._woken.clear()
            if self._closed:
                self._pool.wait(LONGEST_TICK_S)
                self._pool.close()
                return
            self._thread.begin()
            try:
                self._overslept(late_s)
                for check in self._checks:
                    check()
                tick = self.step()
            except Exception as error:  # noqa: BLE001  logged; the next step follows
                unforeseen("heartbeat", error)
                tick = LONGEST_TICK_S

    def step(self) -> float:
        """Do all due work of each subscription; returns the seconds until the next step.

        Leases come first, and must be renewed again after a tick. A call may hang for longer than
        a tick, so the step ends with the first call that fails after it. Calls that failed in the
        last step come after all others, until one of them fails again.
        """
        began, subscriptions = time.monotonic(), list(self._subscriptions())
        ticks = [max(SHORTEST_TICK_S, sub.leases.ack_timeout_s / 6) for sub in subscriptions]
        ends = began + min([LONGEST_TICK_S, *ticks])
        listed = {None, *subscriptions}
        for gone in [call for call in list(self._failing) if call[0] not in listed]:
            self._failing.pop(gone, None)
        if self._store.has_nodes:
            self._start_all(subscriptions)
            self._pool.wait(max(0.0, ends - time.monotonic()))
        else:
            self._make(self._calls(subscriptions), ends)
        return max(0.0, ends - time.monotonic())

    def _calls(self, subscriptions: Sequence[Subscription]) -> Iterator[_Call]:
        """The calls of a step on a single server: leases, the longest waiting records, layouts."""
        for sub in subscriptions:
            if _has_work(sub):
                yield sub, self._renew_leases
        due = self._due(subscriptions)
        reading = [sub for sub in due if not sub.closing.is_set()]
        if len(reading) > 1:
            with suppress(LisaError):  # each one's own call will meet the error
                for part in chunks(reading[:MOST_PER_STEP], MOST_TOGETHER):
                    self._announcer.announce_together(part)
        for sub in sorted(self._due(due), key=lambda sub: self._announced_at.get(sub, -math.inf)):
            yield sub, self._announce
        yield None, self._check_layouts

    def _make(self, calls: Iterable[_Call], ends: float) -> None:
        """Make calls until the end of the tick; those for leases in any case, unless one fails."""
        failing, left = self._failing, list[_Call]()
        for call in calls:
            if call in failing:
                left.append(call)
                continue
            is_answered = self._try(*call)
            if time.monotonic() > ends and not (is_answered and call[1] == self._renew_leases):
                return
        for call in sorted(left, key=list(failing).index):  # the longest waiting one first
            if not self._try(*call) or time.monotonic() > ends:
                return

    def _start_all(self, subscriptions: Iterable[Subscription]) -> None:
        """Start the due work of all subscriptions, except those whose last call still runs."""
        for sub in subscriptions:
            if not self._pool.is_busy(sub):
                self._pool.start(sub, partial(self._serve, sub))
        if not self._pool.is_busy(None):
            self._pool.start(None, partial(self._try, None, self._check_layouts))

    def _serve(self, sub: Subscription) -> None:
        if self._try(sub, self._renew_leases):
            self._try(sub, self._announce)

    def _due(self, subscriptions: Iterable[Subscription]) -> list[Subscription]:
        """Those to announce, and those that are closing."""
        now = time.monotonic()
        return [
            sub for sub in subscriptions if sub.closing.is_set() or self._announcer.is_due(sub, now)
        ]

    def _try(self, sub: Subscription | None, work: _Work) -> bool:
        """Do the work of one subscription; returns False if it failed."""
        is_answered: bool | None = False
        failed: LisaError | None = None
        begin_round()  # each call may take as long as a whole round
        try:
            is_answered = work(sub)
        except GroupRemoved:
            is_answered = True  # the reader notices and logs it
        except LisaError as error:
            failed = error
            if sub is not None and all(failing is not sub for failing, _ in list(self._failing)):
                self._outages.warn(f"topic {sub.shard}: no heartbeat", error)
        except Exception as error:  # noqa: BLE001  logged; the other topics keep their leases
            unforeseen(f"topic {sub.shard if sub else '-'}: heartbeat", error)
        before = None if is_answered is None else self._failing.pop((sub, work), None)
        if is_answered is False:
            self._failing[sub, work] = failed  # at the end of the dict
        elif before is not None and sub is not None:
            self._outages.end(f"topic {sub.shard}: heartbeat again", before)
        return is_answered is not False

    def _check_layouts(self, _: None) -> bool | None:
        """Check layouts for changes, once per `FOLLOW_S`; less often with very many topics."""
        pause_s = FOLLOW_S * max(1.0, len(self._announced_at) / FOLLOWED_MOST)
        if time.monotonic() - self._followed < pause_s:
            return None
        try:
            self._follow()
        finally:
            self._followed = time.monotonic()
        return True

    def _renew_leases(self, sub: Subscription) -> bool | None:
        """Release late deliveries and renew leases."""
        if not sub.group:
            return None
        now, is_answered = time.monotonic(), None
        if sub.releases.are_owed and not sub.closing.is_set():
            is_answered = sub.releases.make_owed()
        if sub.is_waiting and is_answered is not False:
            given_back = sub.give_back_late(now)
            is_answered = is_answered if given_back is None else given_back
        if sub.leases.held and is_answered is not False:
            sub.leases.end_overdue(now)
            is_answered = sub.leases.extend_due(now) or is_answered
        return is_answered

    def _announce(self, sub: Subscription) -> bool | None:
        """Renew the presence record, or report a closing subscription without deliveries."""
        self._announced_at[sub] = time.monotonic()
        if sub.closing.is_set() and not sub.leases.held and not sub.is_waiting:
            self._drained(sub)
            return None
        return self._announcer.announce(sub) or None

    def last_look(self, subscriptions: Iterable[Subscription]) -> None:
        """Warn if messages are overdue because no manager runs; takes a quarter of a second."""
        self._announcer.last_look(subscriptions)

    def leave(self, sub: Subscription) -> None:
        """Delete the presence record and the consumer. Raises LisaError."""
        self._announced_at.pop(sub, None)
        self._announcer.leave(sub)


def _has_work(sub: Subscription) -> bool:
    """Whether there is something to extend or to release."""
    return bool(sub.leases.held or sub.is_waiting or sub.releases.are_owed)
