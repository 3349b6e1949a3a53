"""The subscription of a consumer to one topic or shard for one group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lisa.consumer.handler_stats import HandlerStats
from lisa.consumer.inflight import Held, Outcome, Outcomes, ThreadQueue, Verdict
from lisa.consumer.leases import Leases, Releases
from lisa.consumer.membership import Membership
from lisa.consumer.slots import AnySlots
from lisa.consumer.suspects import LOOK_S, SUSPECTS, WAIT_S
from lisa.core.delivery.opening import (
    AHEAD_BYTES,
    Average,
    BodySize,
    Opening,
    StreamRead,
    from_entries,
    unpack,
)
from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.outcomes import reason_of
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.sharding import Shard
from lisa.core.model.stream import Entry
from lisa.core.store.store import SyncStore
from lisa.core.transitions.delivery import Open, Opened

AHEAD_S = 0.05
MOST = 250
"""The most entries per read and per call of open."""

MOST_AHEAD = 1_000
"""The most unstarted messages: supplies 20,000 handlers a second while a read takes 50 ms."""


class AheadBytes:
    """The bodies that all readers of a consumer hold before handlers start on them.

    count: returns their exact total, which takes long if they are many.
    """

    __slots__ = ("_at_most", "_count")

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._at_most = 0

    def add(self, total: int) -> None:
        """Add bodies that were opened."""
        self._at_most += total

    def are_full(self) -> bool:
        """Whether the readers hold `AHEAD_BYTES`. Counts once for so many bytes."""
        if self._at_most < AHEAD_BYTES:
            return False
        self._at_most = self._count()
        return self._at_most >= AHEAD_BYTES


class Pace:
    """The average time of a message's handlers, and the average size of bodies.

    A much slower message replaces the average time: prefetching too few messages costs
    microseconds, but prefetching too many makes them wait behind a slow one.

    measured: adds the time of one message, or the mean time of several, in seconds.
    """

    __slots__ = ("_seconds", "held", "measured", "size")

    def __init__(self, held: AheadBytes) -> None:
        self._seconds = Average()
        self.held = held
        self.measured = self._seconds.add
        self.size = BodySize()

    def ahead(self, handlers: int) -> int:
        """The number of messages that `handlers` finish in 50 ms, within the limits.

        0 before the first measurement, and while readers hold as many bytes as they may.
        """
        seconds = self._seconds.value
        if seconds is None or self.held.are_full():
            return 0
        in_time = int(handlers * AHEAD_S / max(seconds, 1e-6))
        return min(MOST_AHEAD, in_time, self.size.fitting())


log = logging.getLogger("lisa.consumer")

START_WITHIN_S = 1.0
"""How long a delivery may wait for a handler before it is released to its group."""

UNREAD = encode_envelope(new_token(), None)
"""Stands for the envelope of a suspect until its handler begins."""

Work = Held | list[Held]


def deliveries_of(work: Work) -> list[Held]:
    """The deliveries of a batch, or a list of the single delivery."""
    return work if isinstance(work, list) else [work]


class Subscription:
    """What the reader, the handlers' threads, the settler and the heartbeat share for one topic.

    Each part changes its own state; other classes call its methods.

    shard, topic, wanted, name: see `Membership`.
    membership: the group that is read.
    leases: all deliveries that this consumer holds.
    unstarted: deliveries or batches that no handler has started.
    outcomes: ended deliveries that wait to be settled.
    releases: deliveries that return to the group.
    stats: counts and times of handlers.
    pace: how many messages to prefetch.
    shortened: called when the ack timeout became shorter.
    slots: what limits the number of handlers that run at the same time.
    ahead: what limits the bytes that all readers hold.
    state: what the consumer's lifespan yielded.
    retry: returns the retry policy of the topic's handlers, if they give one.
    """

    def __init__(
        self,
        store: SyncStore,
        shard: Shard,
        wanted: str,
        name: str,
        shortened: Callable[[], None] = lambda: None,
        *,
        slots: AnySlots,
        ahead: AheadBytes,
        state: Any = None,
        retry: Callable[[], RetryPolicy | None] = lambda: None,
    ) -> None:
        self.store = store
        self.membership = Membership(store, shard, wanted, name)
        self.shard = shard
        self.topic = self.membership.topic
        self.wanted = wanted
        self.name = name
        self.leases = Leases(store, self.membership, shortened)
        self.unstarted: ThreadQueue[Work] = ThreadQueue()
        self.outcomes = Outcomes()
        self.stats = HandlerStats(shard)
        self.pace = Pace(ahead)
        self._opening = Opening(store)
        self.is_paused_topic = False
        self.is_paused_here = False
        self.closing = threading.Event()
        self.releases = Releases(store, self.membership, self.closing.is_set)
        self.slots, self._state, self._retry = slots, state, retry

    @property
    def group(self) -> str:
        """The group that is read; empty until known."""
        return self.membership.group

    @property
    def state(self) -> str:
        """The state in the presence record."""
        if self.closing.is_set():
            return "stopping"
        if not self.group:
            return "waiting"
        if self.membership.is_removed:
            return "removed"
        if self.is_paused_topic or self.is_paused_here:
            return "paused"
        return "degraded" if self.stats.degradation.is_degraded else "running"

    def close(self) -> None:
        """Stop reading; what is held is still settled."""
        self.closing.set()

    def pause(self, *, paused: bool) -> None:
        """Pause or resume reading in this consumer."""
        self.is_paused_here = paused

    def check_paused(self) -> None:
        """Read whether the topic is paused. Raises LisaError."""
        self.is_paused_topic = self.store.drive(self.store.options(self.shard)).paused

    def is_interrupted(self) -> bool:
        """Whether reading must stop now."""
        return self.closing.is_set() or self.is_paused_here

    def open(self, entries: Sequence[Entry], read: StreamRead) -> tuple[list[Held], int]:
        """Open the first of the entries that XREADGROUP returned, as many as one call allows.

        Returns the deliveries for handlers and the number of opened entries. Expired and invalid
        messages are settled without a handler. The leases of the entries began during the read. If
        a third of a lease may have passed, the call restarts all leases. Raises LisaError.
        """
        now = time.monotonic()
        opened, leased_at = from_entries(entries, read) or (None, read.asked_at)
        is_late = now - leased_at > self.leases.ack_timeout_s / 3
        if opened is None or is_late:
            call = Open(self.shard, self.group, entries, late=self.name if is_late else "")
            opened = self.store.drive(self._opening.open(call))
            leased_at = now if is_late else read.asked_at
        self.leases.use_ack_timeout(opened.ack_timeout_ms / 1000)
        self.is_paused_topic = opened.paused
        count = len(opened.envelopes)
        taken = self._take(entries[:count], opened, read.read_at, leased_at)
        for entry, limits in zip(entries, opened.limits, strict=False):
            if limits is not None and entry.entry in self.leases.held:
                # Counted from before the call: early by at most a round trip, and never late.
                self.leases.held[entry.entry].close_at(limits, opened.now_us, now)
        return taken, count

    def _take(
        self, entries: Sequence[Entry], opened: Opened, read_at: float, leased_at: float
    ) -> list[Held]:
        topic, group, now_us, hold = self.topic, self.group, opened.now_us, self.leases.hold
        lease_ends, state = leased_at + self.leases.ack_timeout_s, self._state
        taken = []
        for entry, data, is_past in zip(entries, opened.envelopes, opened.past_ttl, strict=True):
            if data is None:
                continue
            # A suspect may end the process as it is decoded: see `may_start`.
            is_unread = entry.is_suspect and not is_past
            message, fault = unpack(topic, group, entry, UNREAD if is_unread else data, state)
            entry_id = entry.entry
            one = Held(entry_id, message, data, now_us, read_at, lease_ends)
            one.is_suspect = entry.is_suspect
            hold(entry_id, one)
            if fault is not None:
                self._refuse(one, Verdict(*fault))
            elif is_past:
                one.end()
                self.outcomes.expired.put(one)
            else:
                taken.append(one)
        return taken

    def enqueue(self, work: Sequence[Work], handler_timeout_s: float) -> None:
        """Add deliveries or batches for handlers."""
        self.leases.use_handler_timeout(handler_timeout_s)
        self.unstarted.put_all(work)

    def start(self, held: Held, now: float) -> bool:
        """Mark a delivery as running; False if `may_start` is, or other suspects take too long."""
        if held.is_suspect:
            if not self._wait_for_suspects(held):
                return False
            now = time.monotonic()
        if not self.may_start(held, now):
            return False
        held.begin(now)
        return True

    def _wait_for_suspects(self, held: Held) -> bool:
        ends = time.monotonic() + WAIT_S
        while not SUSPECTS.begin(held, self.leases.held):
            if time.monotonic() > ends or self.closing.is_set():
                self.give_back([held])
                return False
            time.sleep(LOOK_S)
        return True

    def may_start(self, held: Held, now: float) -> bool:
        """Whether a delivery has its lease, renewed if necessary, and its window is open.

        A suspect's lease is always renewed, which tells Redis that the handler begins. Only then is
        the message decoded.

        Otherwise the delivery is dropped: its message moves until the window opens, or, if the
        server does not answer, is released later.
        """
        if now >= held.closes:
            self.defer(held)
            return False
        try:
            is_due = held.is_suspect or now > held.lease_ends
            is_lost = is_due and not self.leases.renew(held)
        except ServerUnavailable:
            self.releases.owe(held)
            is_lost = True
        if is_lost:
            self.leases.drop(held)
        return not is_lost and (not held.is_suspect or self._decode(held))

    def _decode(self, held: Held) -> bool:
        """Decode a suspect; returns whether that was possible."""
        unread = held.message
        entry = Entry(held.entry, unread.id, unread.due_ms, unread.attempt)
        held.message, fault = unpack(self.topic, self.group, entry, held.data, self._state)
        if fault is not None:
            self._refuse(held, Verdict(*fault))
        return fault is None

    def defer(self, held: Held) -> None:
        """Drop a delivery, and move its message until its window opens."""
        self.releases.defer(held)
        self.leases.drop(held)

    def finish(self, held: Held, outcome: Outcome) -> None:
        """Queue a handler's outcome of a message for the settler."""
        if held.ended:  # the group was removed meanwhile
            return
        if outcome is None:
            self._succeed(held)
            return
        if outcome.is_discard:
            self.stats.end_row()
        elif not outcome.is_deferral:
            self.stats.fail_in_row(outcome.reason)
        self._fail(held, outcome)

    def finish_batch(self, batch: Sequence[Held], outcomes: Sequence[Outcome]) -> None:
        """Queue a handler's outcomes of a batch, which counts as at most one failure in a row."""
        told = [one for one in outcomes if one is None or not one.is_deferral]
        failed = [one for one in told if one is not None and not one.is_discard]
        if len(failed) < len(told):
            self.stats.end_row()
        elif failed:
            self.stats.fail_in_row(failed[-1].reason)
        for held, outcome in zip(batch, outcomes, strict=True):
            if held.ended:
                continue
            if outcome is None:
                self._succeed(held)
            else:
                self._fail(held, outcome)

    def _succeed(self, held: Held) -> None:
        self.stats.succeed()
        held.end()
        self.outcomes.acks.put(held)

    def _fail(self, held: Held, outcome: Verdict) -> None:
        self.stats.count_refusal(is_discard=outcome.is_discard, is_deferral=outcome.is_deferral)
        log.log(
            logging.INFO if outcome.is_deferral else logging.WARNING,
            "topic %s: message %s, attempt %d, was %s: %s",
            self.shard,
            held.message.id,
            held.message.attempt,
            "deferred" if outcome.is_deferral else "not handled",
            outcome.reason,
            exc_info=outcome.error,
            extra=held.message.log_fields,
        )
        self._refuse(held, outcome.under(self._retry(), held.message.attempt))

    def fail_unhandled(self, work: Work, error: BaseException) -> None:
        """Fail deliveries whose handling ended with an error that nothing else handles."""
        for held in deliveries_of(work):
            if not held.ended:
                self._refuse(held, Verdict(reason_of(error), None, error))

    def _refuse(self, held: Held, verdict: Verdict) -> None:
        held.end()
        queue = self.outcomes.deferrals if verdict.is_deferral else self.outcomes.failures
        queue.put((held, verdict))

    def drop_all(self) -> None:
        """Drop all deliveries after their group was removed; ignores the handlers' outcomes."""
        self.withdraw()
        self.outcomes.take_all()
        for held in self.leases.all():
            self.leases.drop(held)

    def withdraw(self) -> list[Held]:
        """Remove and return all unstarted deliveries."""
        taken: list[Held] = []
        while (work := self.unstarted.take()) is not None:
            taken += deliveries_of(work)
        return taken

    def give_back_late(self, now: float) -> bool | None:
        """Release deliveries that wait behind slow handlers, because another consumer may be free.

        Returns whether the server released them; None if none has waited too long.
        """
        oldest = self.unstarted.first()
        if oldest is None:
            return None
        last = deliveries_of(oldest)[-1]
        # A batch waits for a handler only from its last message on.
        if now - last.opened <= START_WITHIN_S:
            return None
        waiting = self.withdraw()
        log.debug(
            "topic %s: releasing %d messages that wait for a handler", self.shard, len(waiting)
        )
        return self.give_back(waiting)

    def give_back(self, deliveries: Sequence[Held]) -> bool:
        """Release unstarted deliveries; returns whether the server released them all."""
        released = self.releases.make([held.receipt for held in deliveries])
        for held in deliveries:
            self.leases.drop(held)
        return released
