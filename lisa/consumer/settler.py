"""Settle finished deliveries, many per call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from lisa.consumer.inflight import Held
from lisa.consumer.keyed_pool import KeyedPool
from lisa.consumer.settle_calls import ReadAcks, SettleCalls
from lisa.consumer.settled import SettleWatch
from lisa.consumer.signal_queue import SignalSender
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import LONGEST_S, ServiceThread, begin_round, unforeseen
from lisa.core.model.backoff import Backoff, longest_after
from lisa.core.model.errors import GroupRemoved, LisaError

log = logging.getLogger("lisa.consumer")

FLUSH_AFTER_S = 0.005
"""How long a finished delivery waits for others to share a call."""

SHARED_CHECKS = 4
"""After so many checks without acks of a reader, the settler stops checking."""

CLOSING_S = 1.0
"""Grace period for calls still running at the shutdown deadline."""

CLOSING_RETRY_S = 0.1
"""Interval of attempts while closing."""


class Settler:
    """A thread that collects finished deliveries for 5 ms, then settles them topic by topic.

    Failed calls are retried with growing pauses, separately for each topic.

    subscriptions: returns the subscriptions to flush.
    has_nodes: whether the server is a cluster. Then each subscription is flushed on a separate
        thread, so that a hanging node does not delay the others.
    watch: is told about each call.
    """

    def __init__(
        self,
        subscriptions: Callable[[], Iterable[Subscription]],
        signal_sender: SignalSender,
        *,
        has_nodes: bool = False,
        longest_s: float = LONGEST_S,
        watch: SettleWatch | None = None,
    ) -> None:
        self._subscriptions = subscriptions
        self._calls = SettleCalls(signal_sender, watch or SettleWatch())
        self._has_nodes = has_nodes
        self._pool = KeyedPool("lisa-settler", self._ended, longest_s)
        self._requested: dict[Subscription, None] = {}
        self._shared: dict[Subscription, _SharedAcks] = {}
        self._is_flush_due = threading.Event()
        self._is_urgent = threading.Event()
        self._closes: float | None = None
        self._pauses: dict[Subscription, tuple[float, Backoff]] = {}
        self._thread = ServiceThread("lisa-settler", self._run, longest_s)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def threads(self) -> list[ServiceThread]:
        """The settler's threads, for health checks."""
        return [self._thread, *self._pool.threads()]

    def notify(self, sub: Subscription) -> None:
        """Request a flush of a subscription within 5 ms. Cheap if one is already requested."""
        if sub not in self._requested:
            self._requested[sub] = None
            self._is_flush_due.set()

    def flush_now(self) -> None:
        """End the 5 ms wait of a requested flush, because none will follow soon."""
        self._is_urgent.set()

    def flush_now_for(self, sub: Subscription) -> None:
        """Flush immediately if a subscription has finished deliveries."""
        if sub.outcomes:
            self.notify(sub)
            self.flush_now()

    def flush_waiting(self) -> None:
        """Flush all finished deliveries: a reader whose acks wait may be in a long handler."""
        for sub in self._subscriptions():
            self.flush_now_for(sub)

    def share_acks(self, sub: Subscription) -> None:
        """A reader lets acks wait for others: flush them if it is in a long handler meanwhile.

        The thread checks every 5 ms while a reader's messages arrive fast, so that this costs
        nothing per message.
        """
        if sub not in self._shared:
            self._shared[sub] = _SharedAcks()
            self._is_flush_due.set()

    def _request_overdue(self) -> bool:
        """Request a flush of acks that have waited since the last check; returns whether any."""
        is_overdue = False
        for sub, acks in list(self._shared.items()):
            if acks.are_overdue(sub.outcomes.acks.first()):
                self._requested[sub] = None
                is_overdue = True
            elif acks.missing >= SHARED_CHECKS:
                self._shared.pop(sub, None)
        return is_overdue

    def acks_for_read(self, sub: Subscription) -> ReadAcks | None:
        """A few acks that the reader sends with its next read, so that no other thread must wake.

        Returns None if there are no acks, or too many, or other outcomes; those are flushed
        immediately. If the reader's call fails, its acks are queued again and flushed immediately.
        """
        acks = self._calls.acks_for_read(sub, self.flush_now_for)
        if acks is None:
            self.flush_now_for(sub)
        return acks

    def close(self, timeout_s: float) -> None:
        """Flush the rest for up to `timeout_s`, then end the thread."""
        self._closes = time.monotonic() + timeout_s
        self._is_urgent.set()
        self._is_flush_due.set()
        self._thread.join(timeout_s + CLOSING_S)

    def _run(self) -> None:
        while True:
            self._thread.rest()
            self._is_flush_due.wait(self._next_try_s())
            self._thread.begin()
            if self._shared and not self._is_flush_due.is_set():
                if not self._request_overdue() and not self._pauses:
                    continue
                self._is_urgent.set()
            if self._closes is None:
                self._is_urgent.wait(FLUSH_AFTER_S)
            self._is_urgent.clear()
            # Clear before reading the queues, so that later outcomes request another flush.
            self._is_flush_due.clear()
            requested = self._take_requested()
            # Read before the flush, so that a flush after the request to close finds everything.
            closes = self._closes
            try:
                left = self.flush(requested if closes is None else None)
            except BaseException:
                self._requested.update(requested)
                self._is_flush_due.set()  # the restarted thread must flush again
                raise
            requested.clear()  # else a removed subscription would be kept until the next flush
            if closes is not None:
                late_s = time.monotonic() - closes
                if not left or late_s > 0:
                    self._pool.wait(max(0.0, CLOSING_S - late_s))
                    self._pool.close()
                    return
                if self._pool.wait(CLOSING_RETRY_S) and self._pauses:
                    time.sleep(CLOSING_RETRY_S)
                self._is_flush_due.set()

    def _next_try_s(self) -> float | None:
        tries = [
            again for sub, (again, _) in list(self._pauses.items()) if not self._pool.is_busy(sub)
        ]
        next_s = max(0.0, min(tries) - time.monotonic()) if tries else None
        if self._shared:
            return FLUSH_AFTER_S if next_s is None else min(next_s, FLUSH_AFTER_S)
        return next_s

    def _take_requested(self) -> dict[Subscription, None]:
        taken: dict[Subscription, None] = {}
        for sub in list(self._requested):
            taken[sub] = self._requested.pop(sub)
        return taken

    def flush(self, some: Iterable[Subscription] | None = None) -> bool:
        """Settle the finished deliveries of some subscriptions, or of all.

        Returns whether work or a pause is still under way.
        """
        if self._pauses:
            for sub in set(self._pauses).difference(self._subscriptions()):  # unsubscribed
                self._pauses.pop(sub, None)
        if some is None:
            subscriptions = list(self._subscriptions())
        else:
            subscriptions = list(dict.fromkeys([*some, *self._pauses]))
        is_busy = False
        one_by_one = not self._has_nodes or len(list(self._subscriptions())) == 1
        for sub in subscriptions:
            if self._pool.is_busy(sub):
                is_busy = True
                continue
            if not sub.outcomes:
                self._end_pause(sub)  # a read has settled the rest
                continue
            again, _ = self._pauses.get(sub, (0.0, None))
            if again > time.monotonic() and self._closes is None:
                continue
            if one_by_one:
                self._settle(sub)
            else:
                is_busy = True
                self._pool.start(sub, partial(self._settle, sub))
        return is_busy or bool(self._pauses)

    def _settle(self, sub: Subscription) -> None:
        begin_round()  # each topic may take as long as a whole round
        try:
            self._calls.flush(sub)
        except GroupRemoved as error:
            self._give_up(sub, error)
        except Exception as error:  # noqa: BLE001  logged and retried
            self._postpone(sub, error)
        else:
            self._end_pause(sub)

    def _ended(self, sub: Subscription) -> None:
        """Flush again if a subscription finished more while its flush ran."""
        if sub in self._pauses or sub.outcomes:
            self.notify(sub)

    def _end_pause(self, sub: Subscription) -> None:
        if self._pauses.pop(sub, None):
            log.info("topic %s: settling again", sub.shard)

    def _postpone(self, sub: Subscription, error: Exception) -> None:
        _, backoff = self._pauses.get(sub, (0.0, None))
        if not isinstance(error, LisaError):
            unforeseen(f"topic {sub.shard}: settling", error)
        elif backoff is None:
            log.warning("topic %s: cannot settle, trying again: %s", sub.shard, error)
        backoff = backoff or Backoff()
        pause_s = backoff.take(longest_after(error))
        self._pauses[sub] = (time.monotonic() + pause_s, backoff)

    def _give_up(self, sub: Subscription, error: GroupRemoved) -> None:
        self._pauses.pop(sub, None)
        lost = sub.outcomes.take_all()
        for held in lost:
            sub.leases.drop(held)
        log.warning("topic %s: dropped %d settlements: %s", sub.shard, len(lost), error)


class _SharedAcks:
    """The acks that a reader lets wait, as a check has seen them.

    missing: the number of checks since acks were last seen.
    """

    __slots__ = ("_first", "missing")

    def __init__(self) -> None:
        self._first: Held | None = None
        self.missing = 0

    def are_overdue(self, first: Held | None) -> bool:
        """Whether the first ack was there at the last check, too."""
        self.missing = self.missing + 1 if first is None else 0
        was, self._first = self._first, first
        return first is not None and first is was
