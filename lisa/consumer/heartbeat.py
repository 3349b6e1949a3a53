"""Keeps leases of what is held, tells that this consumer is alive, gives back what cannot start."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lisa.consumer.abreast import Abreast
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

_Work = Callable[[Any], bool | None]
"""Whether the server answered; None if there was nothing to ask. Raises LisaError."""

_Call = tuple[Subscription | None, _Work]


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
        self._failing: dict[_Call, None] = {}
        self._abreast: Abreast[Subscription] = Abreast("lisa-leases")
        self._closed = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lisa-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Take the next step now."""
        self._woken.set()

    def close(self, timeout_s: float) -> None:
        """End the thread; wait for it at most so long."""
        self._closed = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        tick = 0.0
        while True:
            self._woken.wait(tick)
            self._woken.clear()
            if self._closed:
                self._abreast.close()
                return
            try:
                tick = self.step()
            except Exception:
                log.exception("the heartbeat missed a beat")
                tick = LONGEST_TICK_S

    def step(self) -> float:
        """Do what is due for each subscription; how many seconds until the next step.

        Leases come first, and again once a tick has passed. A call may hang for longer than that,
        where one node of several does: so a step ends with the first that failed late, and what
        failed last time is tried after all else, one that still fails each step.
        """
        began, subscriptions = time.monotonic(), list(self._subscriptions())
        ticks = [max(SHORTEST_TICK_S, sub.ack_timeout_s / 6) for sub in subscriptions]
        ends = began + min([LONGEST_TICK_S, *ticks])
        listed = {None, *subscriptions}
        self._failing = {one: None for one in self._failing if one[0] in listed}
        is_well = self._keep_all(self._well(subscriptions, self._keep), ends)
        if is_well and self._tell_all(self._well(subscriptions, self._tell), ends):
            self._try_failing(ends)
        return max(0.0, ends - time.monotonic())

    def _keep_all(self, subscriptions: Sequence[Subscription], ends: float) -> bool:
        """False if one failed late. Once anything fails, whoever hangs too holds up nobody else."""
        if self._failing:
            kept: list[bool] = []
            for sub in subscriptions:
                self._abreast.start(sub, partial(self._keep_one, sub, kept))
            self._abreast.wait()
            return all(kept) or time.monotonic() <= ends
        for sub in subscriptions:
            if not self._try(sub, self._keep) and time.monotonic() > ends:
                return False
        return True

    def _keep_one(self, sub: Subscription, kept: list[bool]) -> None:
        kept.append(self._try(sub, self._keep))

    def _tell_all(self, subscriptions: Iterable[Subscription], ends: float) -> bool:
        """Of one at least, the next time of others; False if it failed late."""
        for sub in sorted(subscriptions, key=lambda one: self._told.get(one, -math.inf)):
            self._told[sub] = time.monotonic()
            is_well = self._try(sub, self._tell)
            if time.monotonic() > ends:
                return is_well
        return True

    def _try_failing(self, ends: float) -> None:
        """One at least, and others for as long as they work again."""
        failing = list(self._failing)
        if (None, self._look) not in self._failing and not self._try(None, self._look):
            return
        for sub, work in failing:
            if not self._try(sub, work) or time.monotonic() > ends:
                return

    def _well(self, subscriptions: Iterable[Subscription], work: _Work) -> list[Subscription]:
        return [sub for sub in subscriptions if (sub, work) not in self._failing]

    def _try(self, sub: Subscription | None, work: _Work) -> bool:
        """False if it failed."""
        is_answered: bool | None = False
        try:
            is_answered = work(sub)
        except GroupRemoved:
            is_answered = True  # the reader finds out, and says so
        except LisaError as error:
            if sub is not None and all(one is not sub for one, _ in list(self._failing)):
                log.warning("topic %s: no heartbeat: %s", sub.topic, error)
        if is_answered is not None:
            self._failing.pop((sub, work), None)
        if is_answered is False:
            self._failing[sub, work] = None  # behind all others
        return is_answered is not False

    def _look(self, _: None) -> bool | None:
        """Whether topics were split anew."""
        if time.monotonic() - self._followed < FOLLOW_S:
            return None
        try:
            self._follow()
        finally:
            self._followed = time.monotonic()
        return True

    def _keep(self, sub: Subscription) -> bool | None:
        """See to what it holds."""
        if not sub.group:
            return None
        now, is_answered = time.monotonic(), None
        if sub.unstarted:
            is_answered = give_back_late(sub, now)
        if sub.held and is_answered is not False:
            end_overdue(sub, now)
            is_answered = extend(sub, now) or is_answered
        return is_answered

    def _tell(self, sub: Subscription) -> bool | None:
        """That it is alive, or that it is through."""
        now = time.monotonic()
        if sub.closing.is_set() and not sub.held and not sub.unstarted:
            self._drained(sub)
        elif self._beats.get(sub, -math.inf) + presence.BEAT.total_seconds() <= now:
            self.beat(sub)
            self._beats[sub] = now
            return True
        return None

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


def give_back_late(sub: Subscription, now: float) -> bool | None:
    """Release what waits behind slow handlers: another consumer may be free.

    Whether the server took it; None if nothing waits for too long.
    """
    try:
        oldest = sub.unstarted[0]
    except IndexError:
        return None
    first = oldest[0] if isinstance(oldest, list) else oldest
    if now - first.opened <= START_WITHIN_S + _gathering_s(oldest):
        return None
    waiting = sub.withdraw()
    log.debug("topic %s: gives %d back that could not start", sub.topic, len(waiting))
    return sub.give_back(waiting)


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


def extend(sub: Subscription, now: float) -> bool | None:
    """Renew the leases that have used up a third of their time; None if there are none.

    Raises LisaError.
    """
    due = [
        held for held in list(sub.held.values())
        if held.lease_ends and not held.overdue
        and _wants_extension(held.lease_ends - now, sub.ack_timeout_s)
    ]  # fmt: skip
    for some in chunks(due, sub.store.batch_size(sub.topic, Extend)):
        asked = time.monotonic()
        receipts = [held.receipt for held in some]
        kept = sub.store.call(Extend(sub.topic, sub.group, sub.name, receipts))
        for held, is_kept in zip(some, kept, strict=True):
            if is_kept:
                held.lease_ends = asked + sub.ack_timeout_s
            elif not held.ended and held.entry in sub.held:
                _lost(sub, held)
    return True if due else None


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
