"""Keeps leases of what is held, tells that this consumer is alive, gives back what cannot start."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from lisa.consumer.held import Held
from lisa.consumer.joining import is_emptied
from lisa.consumer.subscription import Subscription
from lisa.core import presence
from lisa.core.errors import GroupRemoved, LisaError
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.forget import Forget

__all__ = ["FOLLOW_S", "START_WITHIN_S", "Heartbeat"]

log = logging.getLogger("lisa.consumer")

START_WITHIN_S = 1.0
"""A delivery that no handler could start on for so long is given back to its group."""

LONGEST_TICK_S = 0.5
FOLLOW_S = 1.0
"""How often it is asked whether topics were split anew."""
SHORTEST_TICK_S = 0.02


class Heartbeat:
    """One thread; `step` looks once at every subscription.

    `subscriptions` gives them; `drained` is told of a closing one that holds nothing any more;
    `follow` looks each second whether topics were split anew.
    """

    def __init__(
        self,
        store: SyncStore,
        subscriptions: Callable[[], Iterable[Subscription]],
        concurrency: int,
        drained: Callable[[Subscription], None],
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._concurrency = concurrency
        self._drained = drained
        self._follow = follow
        self._followed = -math.inf
        self._started_ms = int(time.time() * 1000)
        self._beats: dict[Subscription, float] = {}
        self._told: dict[Subscription, float] = {}
        self._trouble = False
        self._closed = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lisa-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Take the next step now."""
        self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _run(self) -> None:
        tick = 0.0
        while True:
            self._woken.wait(tick)
            self._woken.clear()
            if self._closed:
                return
            try:
                tick = self.step()
            except Exception:
                log.exception("the heartbeat missed a beat")
                tick = LONGEST_TICK_S

    def step(self) -> float:
        """Do what is due for each subscription; how many seconds until the next step.

        Leases come first, and again once a tick has passed: at a server that is slow to answer, all
        that may wait takes longer than a lease.
        """
        began, tick = time.monotonic(), LONGEST_TICK_S
        subscriptions = list(self._subscriptions())
        for sub in subscriptions:
            self._try(sub, self._keep)
            tick = min(tick, max(SHORTEST_TICK_S, sub.ack_timeout_s / 6))
        if began - self._followed >= FOLLOW_S:
            self._followed = began
            with suppress(LisaError):  # the subscriptions' own calls tell of it
                self._follow()
        for sub in sorted(subscriptions, key=lambda one: self._told.get(one, -math.inf)):
            if time.monotonic() - began > tick:
                return 0.0
            self._told[sub] = began
            self._try(sub, self._tell)
        return tick

    def _try(self, sub: Subscription, work: Callable[[Subscription], None]) -> None:
        try:
            work(sub)
            self._trouble = False
        except GroupRemoved:
            pass  # the reader finds out, and says so
        except LisaError as error:
            if not self._trouble:
                log.warning("topic %s: no heartbeat: %s", sub.topic, error)
            self._trouble = True

    def _keep(self, sub: Subscription) -> None:
        """See to what it holds."""
        if sub.group:
            now = time.monotonic()
            if sub.unstarted:
                give_back_late(sub, now)
            if sub.held:
                end_overdue(sub, now)
                extend(sub, now)

    def _tell(self, sub: Subscription) -> None:
        """That it is alive, or that it is through."""
        now = time.monotonic()
        if sub.closing.is_set() and not sub.held and not sub.unstarted:
            self._drained(sub)
        elif self._beats.get(sub, -1e9) + presence.BEAT.total_seconds() <= now:
            self.beat(sub)
            self._beats[sub] = now

    def beat(self, sub: Subscription) -> None:
        """Renew the presence record, and learn the topic's options. Raises LisaError."""
        if sub.is_announced and self._store.drive(is_emptied(self._store, sub.topic, sub.name)):
            sub.is_forgotten = True  # the record comes back now; the reader still has to know
        self._store.drive(presence.announce_consumer(self._store, presence.ConsumerPresence(
            name=sub.name, topic=sub.whole, group=sub.group, host=socket.gethostname(),
            pid=os.getpid(), started_ms=self._started_ms, concurrency=self._concurrency,
            running=sub.running(), held=len(sub.held), handled=sub.handled, state=sub.state,
        ), sub.topic))  # fmt: skip
        sub.is_announced = True
        self._store.drive(self._store.register([sub.topic]))
        options = self._store.drive(self._store.options(sub.topic))
        sub.learn_ack_timeout(options.ack_timeout.total_seconds())

    def leave(self, sub: Subscription, *, keeps_name: bool = False) -> None:
        """Take the record and the consumer's name away, unless needed. Raises LisaError."""
        self._beats.pop(sub, None)
        self._told.pop(sub, None)
        if keeps_name:
            return
        self._store.drive(presence.leave_consumer(self._store, sub.topic, sub.name))
        if sub.group:
            self._store.call(Forget(sub.topic, sub.group, [sub.name], 0))


def give_back_late(sub: Subscription, now: float) -> None:
    """Release what waits behind slow handlers: another consumer may be free. Raises LisaError."""
    try:
        oldest = sub.unstarted[0]
    except IndexError:
        return
    first = oldest[0] if isinstance(oldest, list) else oldest
    if now - first.opened > START_WITHIN_S + _gathering_s(oldest):
        waiting = sub.withdraw()
        sub.give_back(waiting)
        log.debug("topic %s: gave %d back that could not start", sub.topic, len(waiting))


def _gathering_s(work: Held | list[Held]) -> float:
    """How long a batch took to gather: its messages did not wait for a handler then."""
    return work[-1].opened - work[0].opened if isinstance(work, list) else 0.0


def end_overdue(sub: Subscription, now: float) -> None:
    """Stop extending deliveries whose handler hangs; `async def` handlers are cancelled too."""
    for held in list(sub.held.values()):
        if (
            held.started and not held.ended and not held.overdue
            and now - held.started > sub.handler_timeout_s > 0
        ):  # fmt: skip
            held.overdue = True
            log.error("topic %s: the handler of message %s runs longer than %g s: its lease ends",
                      sub.topic, held.message.id, sub.handler_timeout_s)  # fmt: skip
            if held.task is not None:
                held.task.cancel()


def extend(sub: Subscription, now: float) -> None:
    """Renew the leases that have used up a third of their time. Raises LisaError."""
    due = [
        held
        for held in list(sub.held.values())
        if not held.overdue and _wants_extension(held.lease_ends - now, sub.ack_timeout_s)
    ]
    for some in chunks(due, sub.store.batch_size(sub.topic, Extend)):
        asked = time.monotonic()
        receipts = [held.receipt for held in some]
        kept = sub.store.call(Extend(sub.topic, sub.group, sub.name, receipts))
        for held, is_kept in zip(some, kept, strict=True):
            if is_kept:
                held.lease_ends = asked + sub.ack_timeout_s
            elif not held.ended and held.entry in sub.held:
                _lost(sub, held)


def _wants_extension(left_s: float, ack_timeout_s: float) -> bool:
    """A third is used up, or the topic's ack timeout was cut since the lease began."""
    return left_s < ack_timeout_s * 2 / 3 or ack_timeout_s < left_s < math.inf


def _lost(sub: Subscription, held: Held) -> None:
    """The manager took it back. Unstarted it is dropped when its turn comes, by its lease."""
    if held.started:
        held.lease_ends = math.inf  # nothing to extend any more; its ack will count as late
        log.warning("topic %s: the lease of message %s ended while its handler runs", sub.topic,
                    held.message.id)  # fmt: skip
    else:
        held.lease_ends = 0.0
