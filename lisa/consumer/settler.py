"""Settles what handlers have finished, many deliveries a call."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from blinker import Signal

from lisa.consumer.abreast import Abreast
from lisa.consumer.held import Held, Verdict
from lisa.consumer.opening import settlements_of
from lisa.consumer.signalling import Announcer
from lisa.consumer.subscription import Subscription
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.flow import Command, Execute
from lisa.core.patience import LONGEST_AWAY_S
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.retry import Failed, Failure, Retried
from lisa.core.transitions.retry import Retry as Fail

__all__ = ["FLUSH_AFTER_S", "Settler"]

log = logging.getLogger("lisa.consumer")

T = TypeVar("T")

FLUSH_AFTER_S = 0.005
"""A handler's word waits at most so long for others to share its call."""

MOST_ALONG = 32
"""So few acks go along with the next read; more have a call, and a thread, of their own."""

CLOSING_S = 1.0
"""Calls that run when the time to close is up may take so much longer."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Along(NamedTuple):
    """Acks that go along with a read. `take` is given the reply or the error, once."""

    command: Command
    take: Callable[[Any], None]


class Settler:
    """One thread: waits for the first word, a moment for more, then flushes topic by topic.

    `subscriptions` gives those to look at. What the server does not take is kept and tried again,
    with growing pauses for its topic alone. Of a server that `has_nodes` one may hang: then each
    subscription is flushed on a thread of its own, and waits for no other.
    """

    def __init__(
        self,
        subscriptions: Callable[[], Iterable[Subscription]],
        announcer: Announcer,
        *,
        has_nodes: bool = False,
    ) -> None:
        self._subscriptions = subscriptions
        self._announcer = announcer
        self._has_nodes = has_nodes
        self._abreast = Abreast("lisa-settler", self._ended)
        self._awake = False
        self._rung = threading.Event()
        self._hurried = threading.Event()
        self._closes: float | None = None
        self._pauses: dict[Subscription, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="lisa-settler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def owns_this_thread(self) -> bool:
        """Whether the caller is a receiver that is told what was settled."""
        return threading.current_thread() is self._thread or self._abreast.owns_this_thread()

    def ring(self) -> None:
        """Something was finished: flush within 5 ms. Cheap if the settler knows already."""
        if not self._awake:
            self._awake = True
            self._rung.set()

    def hurry(self) -> None:
        """Nothing else is coming soon: flush at once."""
        self._hurried.set()

    def hurry_for(self, sub: Subscription) -> None:
        """Flush at once what a subscription has finished, if anything."""
        if _has_finished(sub):
            self.ring()
            self.hurry()

    def along(self, sub: Subscription) -> Along | None:
        """A few acks for the reader to send along with its next read: no other thread wakes.

        What cannot go that way is flushed at once, and so is what the reader brings back because
        its call was not simply answered.
        """
        fits = 0 < len(sub.acks) <= min(MOST_ALONG, sub.store.batch_size(sub.topic, Ack))
        if not fits or sub.failures or sub.expired or self._announcer.heard(self._announcer.acked):
            self.hurry_for(sub)
            return None
        some = _first(sub.acks, MOST_ALONG)
        if not some:  # the settler was quicker
            return None
        flow = sub.store.run(Ack(sub.topic, sub.group, settlements_of(some)))

        def take(reply: Any) -> None:
            try:
                if isinstance(reply, Exception):
                    flow.throw(reply)
                else:
                    flow.send(reply)
            except StopIteration as end:
                self._acked(sub, some, end.value, self._announcer.acked)
                return
            except Exception as error:  # noqa: BLE001  the settler's own call meets it, and judges
                log.debug("topic %s: acks come back from the reader: %s", sub.topic, error)
            sub.acks.extendleft(reversed(some))
            self.hurry_for(sub)

        try:
            step = next(flow)
        except LisaError as error:
            take(error)
            return None
        if isinstance(step, Execute) and step.command[0] == "EVALSHA":
            return Along(step.command, take)
        sub.acks.extendleft(reversed(some))
        self.hurry_for(sub)
        return None

    def close(self, timeout_s: float) -> None:
        """Flush what is left, for at most so long, and end."""
        self._closes = time.monotonic() + timeout_s
        self._hurried.set()
        self._rung.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s + CLOSING_S)

    def _run(self) -> None:
        while True:
            self._rung.wait(self._next_try_s())
            if self._closes is None:
                self._hurried.wait(FLUSH_AFTER_S)
            self._hurried.clear()
            # Whoever finishes from here on rings again: cleared before the queues are looked at.
            self._rung.clear()
            self._awake = False
            # Asked first: what was finished by the end is found by a flush that begins behind it.
            closes = self._closes
            left = self.flush()
            if closes is not None:
                late_s = time.monotonic() - closes
                if not left or late_s > 0:
                    self._abreast.wait(max(0.0, CLOSING_S - late_s))
                    self._abreast.close()
                    return
                if self._abreast.wait(FIRST_PAUSE_S) and self._pauses:
                    time.sleep(FIRST_PAUSE_S)
                self._rung.set()

    def _next_try_s(self) -> float | None:
        tries = [
            again for sub, (again, _) in list(self._pauses.items())
            if not self._abreast.is_at(sub)
        ]  # fmt: skip
        return max(0.0, min(tries) - time.monotonic()) if tries else None

    def flush(self) -> bool:
        """Settle all that is finished; False if nothing was left to do, or to wait for."""
        subscriptions = list(self._subscriptions())
        for sub in set(self._pauses).difference(subscriptions):  # it was let go meanwhile
            self._pauses.pop(sub, None)
        is_busy = False
        one_by_one = not self._has_nodes or len(subscriptions) == 1
        for sub in subscriptions:
            if self._abreast.is_at(sub):
                is_busy = True
                continue
            if not _has_finished(sub):
                self._goes_on(sub)  # whatever was left went along with a read
                continue
            again, _ = self._pauses.get(sub, (0.0, 0.0))
            if again > time.monotonic() and self._closes is None:
                continue
            if one_by_one:
                self._settle(sub)
            else:
                is_busy = True
                self._abreast.start(sub, partial(self._settle, sub))
        return is_busy or bool(self._pauses)

    def _settle(self, sub: Subscription) -> None:
        try:
            self._flush_one(sub)
        except GroupRemoved as error:
            self._give_up(sub, error)
        except Exception as error:  # noqa: BLE001  logged, and tried again
            self._postpone(sub, error)
        else:
            self._goes_on(sub)

    def _ended(self, sub: Subscription) -> None:
        """While it was flushed, the settler has not looked at it."""
        if sub in self._pauses or _has_finished(sub):
            self._rung.set()

    def _goes_on(self, sub: Subscription) -> None:
        if self._pauses.pop(sub, None):
            log.info("topic %s: settling again", sub.topic)

    def _postpone(self, sub: Subscription, error: Exception) -> None:
        _, last = self._pauses.get(sub, (0.0, 0.0))
        if not last:
            unforeseen = None if isinstance(error, LisaError) else error
            log.warning("topic %s: cannot settle, trying again: %s", sub.topic, error,
                        exc_info=unforeseen)  # fmt: skip
        longest = LONGEST_AWAY_S if isinstance(error, ServerUnavailable) else LONGEST_PAUSE_S
        pause = min(2 * last, longest) if last else FIRST_PAUSE_S
        self._pauses[sub] = (time.monotonic() + pause, pause)

    def _give_up(self, sub: Subscription, error: GroupRemoved) -> None:
        self._pauses.pop(sub, None)
        # Taken one by one: what another thread adds meanwhile is for the next look.
        lost = _first(sub.acks, len(sub.acks)) + _first(sub.expired, len(sub.expired))
        lost += [held for held, _ in _first(sub.failures, len(sub.failures))]
        for held in lost:
            sub.drop(held)
        log.warning("topic %s: %d settlements count no more: %s", sub.topic, len(lost), error)

    def _flush_one(self, sub: Subscription) -> None:
        while sub.acks:
            self._ack(sub, sub.acks, "acked")
        while sub.expired:
            self._ack(sub, sub.expired, "expired")
        while sub.failures:
            self._fail(sub)

    def _ack(self, sub: Subscription, queue: deque[Held], state: str) -> None:
        some = _first(queue, sub.store.batch_size(sub.topic, Ack))
        if not some:  # the reader was quicker
            return
        try:
            settlements = settlements_of(some)
            if state == "expired":  # no attempt was made
                settlements = [one._replace(attempt=one.attempt - 1) for one in settlements]
            outcomes = sub.store.call(Ack(sub.topic, sub.group, settlements, state))
        except Exception:
            queue.extendleft(reversed(some))
            raise
        pair = self._announcer.expired if state == "expired" else self._announcer.acked
        self._acked(sub, some, outcomes, pair)

    def _acked(
        self,
        sub: Subscription,
        some: Sequence[Held],
        outcomes: Sequence[Acked],
        pair: tuple[Signal, Signal],
    ) -> None:
        heard = self._announcer.heard(pair)
        forget = sub.held.pop
        for held, outcome in zip(some, outcomes, strict=True):
            forget(held.entry, None)
            if outcome is Acked.STALE:
                log.info("topic %s: message %s was settled by someone else, or is another by now",
                         sub.topic, held.message.id)  # fmt: skip
            elif heard:
                self._announcer.fire(pair, held.message)

    def _fail(self, sub: Subscription) -> None:
        some = _first(sub.failures, sub.store.batch_size(sub.topic, Fail))
        settlements = settlements_of(held for held, _ in some)
        failures = [
            Failure(one.id, one.entry, verdict.reason, verdict.delay, one.lateness)
            for one, (_, verdict) in zip(settlements, some, strict=True)
        ]
        try:
            outcomes = sub.store.call(Fail(sub.topic, sub.group, failures))
        except Exception:
            sub.failures.extendleft(reversed(some))
            raise
        for (held, verdict), outcome in zip(some, outcomes, strict=True):
            sub.held.pop(held.entry, None)
            self._announce_failure(held, verdict, outcome)

    def _announce_failure(self, held: Held, verdict: Verdict, outcome: Retried) -> None:
        if outcome.outcome is Failed.STALE:
            return
        dead = outcome.outcome is Failed.DEAD
        if dead:
            log.error("topic %s: message %s went to garbage after %d failed attempts: %s",
                      held.message.topic, held.message.id, outcome.failed_attempts,
                      verdict.reason)  # fmt: skip
        pair = self._announcer.dead if dead else self._announcer.retrying
        if self._announcer.heard(pair):
            self._announcer.fire(pair, msgspec.structs.replace(
                held.message, reason=verdict.reason, next_due_ms=outcome.due_ms))  # fmt: skip


def _has_finished(sub: Subscription) -> bool:
    return bool(sub.acks or sub.failures or sub.expired)


def _first(queue: deque[T], size: int) -> list[T]:
    """At most so many, fewer if another thread takes from the queue as well: none, even."""
    some: list[T] = []
    with suppress(IndexError):
        while len(some) < size:
            some.append(queue.popleft())
    return some
