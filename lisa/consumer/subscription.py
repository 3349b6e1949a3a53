"""The subscription of a consumer to one topic or shard for one group."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lisa.consumer.inflight import Held, Outcome, Outcomes, Verdict
from lisa.consumer.leases import Leases, Releases
from lisa.consumer.membership import Membership
from lisa.core.delivery.opening import Opening, PlainState, unpack
from lisa.core.delivery.pace import AHEAD_BYTES, DEGRADED_AFTER, Average, BodySize, Degradation
from lisa.core.metrics.families import HANDLER_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import shown_id
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
        """Whether the readers hold `AHEAD_BYTES`. Counts again after that many more."""
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

        0 before the first measurement, and while the readers hold `AHEAD_BYTES`.
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

FAST_S = HANDLER_SECONDS[0]
"""Faster handlers share one update of the histogram, which would be too slow for each message."""


class HandlerStats:
    """Written by the threads that run handlers; read by the reader, metrics and health.

    succeeded, failed, discarded, deferred: numbers of messages by outcome.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.degradation = Degradation()
        self.succeeded = 0
        self.failed = 0
        self.discarded = 0
        self.deferred = 0
        self._slow = Spread(HANDLER_SECONDS)
        self._fast = 0
        self._fast_s = 0.0

    @property
    def handled(self) -> int:
        """The number of messages that handlers have finished."""
        return self.succeeded + self.failed + self.discarded + self.deferred

    def succeed(self) -> None:
        """Count a handled message, which ends a row of failures."""
        self.succeeded += 1
        if self.degradation.failed_in_row:
            self.end_row()

    def count_refusal(self, *, is_discard: bool, is_deferral: bool) -> None:
        """Count a message that was not handled."""
        if is_deferral:
            self.deferred += 1
        elif is_discard:
            self.discarded += 1
        else:
            self.failed += 1

    def end_row(self) -> None:
        """End a row of failures."""
        if self.degradation.succeeded():
            log.info("topic %s: a message succeeded; no longer degraded", self._topic)

    def fail_in_row(self, reason: str) -> None:
        """Count another failure in a row: a failed message, or a batch that failed completely."""
        if self.degradation.failed(reason):
            log.warning(
                "topic %s: degraded after %d failures in a row", self._topic, DEGRADED_AFTER
            )

    def observe(self, seconds: float, count: int) -> None:
        """Record that handlers took `seconds` for `count` messages in total."""
        if seconds > FAST_S * count:
            self._slow.observe(seconds / count, count)
        else:
            self.observe_fast(seconds, count)

    def observe_fast(self, seconds: float, count: int) -> None:
        """Record `count` messages that took at most `FAST_S` each, and `seconds` in total."""
        self._fast += count
        self._fast_s += seconds

    def seconds(self) -> list[float]:
        """The histogram of handler times."""
        numbers = self._slow.numbers()
        numbers[0] += self._fast
        numbers[-1] += self._fast_s
        return numbers


class Limit:
    """How many handlers may run at the same time, of the consumer or of one topic's shards.

    running: how many do; changed by the runner.
    """

    __slots__ = ("__weakref__", "running", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0

    @property
    def free(self) -> int:
        """How many more may begin now."""
        return self.size - self.running


Work = Held | list[Held]


def deliveries_of(work: Work) -> list[Held]:
    """The deliveries of a batch, or a list of the single delivery."""
    return work if isinstance(work, list) else [work]


class Collector:
    """Collects deliveries until a batch is full, or its first delivery has waited `within_s`."""

    def __init__(self, size: int, within_s: float) -> None:
        self.size = size
        self._within_s = within_s
        self._gathered: list[Held] = []
        self._ends = 0.0

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, deliveries: Sequence[Held]) -> None:
        """Add deliveries, the oldest first."""
        if deliveries and not self._gathered:
            self._ends = time.monotonic() + self._within_s
        self._gathered += deliveries

    def left_s(self) -> float | None:
        """Seconds until the collected deliveries must be handed out; None if there are none."""
        return max(0.0, self._ends - time.monotonic()) if self._gathered else None

    def ready(self) -> list[list[Held]]:
        """Remove and return the batches to hand out now; the last may be incomplete."""
        size, found = self.size, []
        while len(self._gathered) >= size:
            found.append(self._gathered[:size])
            self._gathered = self._gathered[size:]
            self._ends = time.monotonic() + self._within_s
        if self._gathered and time.monotonic() >= self._ends:
            found.append(self.take())
        return found

    def take(self) -> list[Held]:
        """Remove and return all collected deliveries."""
        gathered, self._gathered = self._gathered, []
        return gathered


class Subscription:
    """What the reader, the runner, the settler and the heartbeat share for one topic.

    shard, topic, wanted, name: see `Membership`.
    membership: the group that is read.
    leases: all deliveries that this consumer holds.
    unopened: entries that were read but not opened.
    unstarted, suspects: deliveries that no handler has started; of `unstarted` also batches.
    batch: the incomplete batch, if there is a batch handler.
    outcomes: ended deliveries that wait to be settled.
    releases: deliveries that return to the group.
    stats: counts and times of handlers.
    pace: how many messages to prefetch.
    shortened: called when the ack timeout became shorter.
    limit: how many handlers of the topic may run at the same time.
    ahead: what limits the bytes that all readers hold.
    lifespan_state: what the consumer's lifespan yielded, for `Message.state`.
    retry: returns the retry policy of the topic's handlers, if they give one.
    request_settling: called when deliveries end.
    """

    def __init__(
        self,
        store: SyncStore,
        shard: Shard,
        wanted: str,
        name: str,
        *,
        shortened: Callable[[], None],
        limit: Limit,
        ahead: AheadBytes,
        lifespan_state: Any,
        retry: Callable[[], RetryPolicy | None],
        request_settling: Callable[[Subscription], None],
    ) -> None:
        self.store = store
        self.membership = Membership(store, shard, wanted, name)
        self.shard = shard
        self.topic = self.membership.topic
        self.wanted = wanted
        self.name = name
        self.leases = Leases(store, self.membership, shortened)
        self.unopened: list[Entry] = []
        self.unstarted: deque[Work] = deque()
        self.suspects: deque[Held] = deque()
        self.batch: Collector | None = None
        self.outcomes = Outcomes()
        self.stats = HandlerStats(shard)
        self.pace = Pace(ahead)
        self._opening = Opening(store)
        self.is_paused_topic = False
        self.is_paused_here = False
        self.closing = threading.Event()
        self.releases = Releases(store, self.membership, self.closing.is_set)
        self.limit, self._lifespan_state = limit, lifespan_state
        self._retry, self._request_settling = retry, request_settling

    @property
    def group(self) -> str:
        """The group that is read; empty until known."""
        return self.membership.group

    @property
    def presence_state(self) -> str:
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

    @property
    def is_waiting(self) -> bool:
        """Whether deliveries wait for a handler."""
        return bool(self.unstarted or self.suspects)

    @property
    def waits_for_lanes(self) -> bool:
        """Whether handlers have nothing to start until an ack lets messages through their lanes."""
        return not self.is_waiting and self.store.uses_lanes(self.shard)

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

    def open(self, asked_at: float, startable: int, state: PlainState | None) -> list[Held]:
        """Open the entries of a read that was sent at `asked_at`; returns those for handlers.

        Expired and invalid messages are settled without a handler. Once all readers hold
        `AHEAD_BYTES`, entries beyond the startable ones are released. Raises LisaError, and keeps
        the entries that were not opened.

        state: the topic's, if the read asked for it.
        """
        taken, total, count = list[Held](), 0, 0
        while self.unopened:
            if count >= startable and self.pace.held.are_full():
                self.release_unopened()
                break
            try:
                deliveries, opened = self._open_some(self.unopened, asked_at, state)
            except Exception:
                if not taken:
                    raise
                break  # hand over the opened ones first; the next round tries again
            size = sum(len(held.data) for held in deliveries)
            self.pace.held.add(size)
            taken += deliveries
            total, count = total + size, count + opened
            del self.unopened[:opened]
            state = None  # it may change before the next call
        if count:
            self.pace.size.measured(total, count)
        return taken

    def _open_some(
        self, entries: Sequence[Entry], asked_at: float, state: PlainState | None
    ) -> tuple[list[Held], int]:
        """Open as many of the entries as one call allows; returns deliveries and their number.

        Leases begin when the entries are read. If a third of that time may have passed, the call
        restarts them.
        """
        now = time.monotonic()
        is_late = now - asked_at > self.leases.ack_timeout_s / 3
        call = Open(self.shard, self.group, entries, late=self.name if is_late else "")
        opened = self.store.drive(self._opening.open(call, state))
        self.leases.use_ack_timeout(opened.ack_timeout_ms / 1000)
        self.is_paused_topic = opened.paused
        count = len(opened.envelopes)
        taken = self._hold(entries[:count], opened, now, now if is_late else asked_at)
        for entry, limits in zip(entries, opened.limits, strict=False):
            if limits is not None and entry.entry in self.leases.held:
                # Counted from before the call: early by at most a round trip, and never late.
                self.leases.held[entry.entry].close_at(limits, opened.now_us, now)
        return taken, count

    def release_unopened(self) -> None:
        """Release entries that were read but not opened."""
        if self.unopened:
            self.releases.make([(entry.id, entry.entry) for entry in self.unopened])
            self.unopened.clear()

    def _hold(
        self, entries: Sequence[Entry], opened: Opened, opened_at: float, leased_at: float
    ) -> list[Held]:
        """Hold opened deliveries; returns those for handlers, and settles the others."""
        topic, group, now_us, hold = self.topic, self.group, opened.now_us, self.leases.hold
        lease_ends, state = leased_at + self.leases.ack_timeout_s, self._lifespan_state
        taken = []
        for entry, data, is_past in zip(entries, opened.envelopes, opened.past_ttl, strict=True):
            if data is None:
                continue
            # A suspect may end the process as it is decoded: see `make_startable`.
            is_unread = entry.is_suspect and not is_past
            message, fault = unpack(topic, group, entry, UNREAD if is_unread else data, state)
            entry_id = entry.entry
            held = Held(entry_id, message, data, now_us, opened_at, lease_ends)
            held.is_suspect = entry.is_suspect
            hold(entry_id, held)
            if fault is not None:
                self._refuse(held, Verdict(*fault))
            elif is_past:
                held.ended = True
                self.outcomes.expired.append(held)
                self._request_settling(self)
            else:
                taken.append(held)
        return taken

    def collect(self, size: int | None, within_s: float) -> None:
        """From now on collect deliveries into batches of `size`; into none if it is None."""
        if self.batch is not None and self.batch.size != size:
            self.unstarted.extend([self.batch.take()] if self.batch else [])
            self.batch = None
        if self.batch is None and size is not None:
            self.batch = Collector(size, within_s)

    def enqueue(self, deliveries: Sequence[Held]) -> bool:
        """Add deliveries for handlers; returns whether anything waits for a handler.

        A suspect is handled alone, also if the others are collected into batches.
        """
        if suspects := [held for held in deliveries if held.is_suspect]:
            self.suspects.extend(suspects)
            deliveries = [held for held in deliveries if not held.is_suspect]
        if self.batch is None:
            self.unstarted.extend(deliveries)
        else:
            self.batch.add(deliveries)
            self.unstarted.extend(self.batch.ready())
        return self.is_waiting

    def start(self, held: Held, now: float) -> bool:
        """Mark a delivery as running; returns False if no handler may start."""
        if not (held.is_startable(now) or self.make_startable(held)):
            return False
        held.started = time.monotonic() if held.is_suspect else now
        return True

    def make_startable(self, held: Held) -> bool:
        """Renew a lease that may have ended, or drop the delivery; returns whether it is held.

        A suspect's lease is always renewed, which tells Redis that the handler begins. Only then is
        the message decoded.

        The message of a dropped delivery moves until its window opens, or, if the server does not
        answer, is released later.
        """
        now = time.monotonic()
        if now >= held.closes:
            self.defer(held)
            return False
        try:
            is_due = held.is_suspect or now > held.lease_ends
            is_lost = is_due and not self.leases.extend_now(held)
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
        held.message, fault = unpack(self.topic, self.group, entry, held.data, self._lifespan_state)
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
        told = [outcome for outcome in outcomes if outcome is None or not outcome.is_deferral]
        failed = [outcome for outcome in told if outcome is not None and not outcome.is_discard]
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
        held.ended = True
        self.outcomes.acks.append(held)
        self._request_settling(self)

    def _fail(self, held: Held, outcome: Verdict) -> None:
        self.stats.count_refusal(is_discard=outcome.is_discard, is_deferral=outcome.is_deferral)
        log.log(
            logging.INFO if outcome.is_deferral else logging.WARNING,
            "topic %s: message %s, attempt %d, was %s: %s",
            self.shard,
            shown_id(held.message.id),
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
        held.ended = True
        queue = self.outcomes.deferrals if verdict.is_deferral else self.outcomes.failures
        queue.append((held, verdict))
        self._request_settling(self)

    def drop_all(self) -> None:
        """Drop all deliveries after their group was removed; ignores the handlers' outcomes."""
        self.withdraw()
        self.outcomes.take_all()
        for held in self.leases.all():
            self.leases.drop(held)

    def withdraw(self) -> list[Held]:
        """Remove and return all unstarted deliveries, also those of an incomplete batch."""
        taken = self.batch.take() if self.batch else []
        with suppress(IndexError):  # other threads take some, too
            while True:
                taken += deliveries_of(self.unstarted.popleft())
        with suppress(IndexError):
            while True:
                taken.append(self.suspects.popleft())
        return taken

    def give_back_late(self, now: float) -> bool | None:
        """Release deliveries that wait behind slow handlers, because another consumer may be free.

        Returns whether the server released them; None if none has waited too long.
        """
        oldest = None
        for waiting in (self.unstarted, self.suspects):
            with suppress(IndexError):
                # A batch waits for a handler only from its last message on.
                opened = deliveries_of(waiting[0])[-1].opened
                oldest = opened if oldest is None else min(oldest, opened)
        if oldest is None or now - oldest <= START_WITHIN_S:
            return None
        late = self.withdraw()
        log.debug("topic %s: releasing %d messages that wait for a handler", self.shard, len(late))
        return self.give_back(late)

    def give_back(self, deliveries: Sequence[Held]) -> bool:
        """Release unstarted deliveries; returns whether the server released them all."""
        released = self.releases.make([held.receipt for held in deliveries])
        for held in deliveries:
            self.leases.drop(held)
        return released


SHUTDOWN_CALLS_S = 2.0
"""How long all calls together may take once one has failed."""


class ShutdownCalls:
    """The deadline of a consumer's last calls.

    After the first failed call, the others share `SHUTDOWN_CALLS_S`. On a cluster, this time begins
    after the failed call, because other nodes may answer; on a single server, before it.
    """

    def __init__(self, store: SyncStore) -> None:
        self._has_nodes = store.has_nodes
        self._ends = math.inf

    @property
    def is_answered(self) -> bool:
        """Whether no call has failed yet."""
        return self._ends == math.inf

    def left_s(self, most_s: float = SHUTDOWN_CALLS_S) -> float:
        """The remaining time in seconds, at most `most_s`."""
        return max(0.0, min(most_s, self._ends - time.monotonic()))

    def make(self, call: Callable[[], bool]) -> bool:
        """Make a call unless time is up; returns its result, whether the server answered."""
        began = time.monotonic()
        if began > self._ends:
            return False
        is_taken = call()
        if not is_taken and self.is_answered:
            self._ends = (time.monotonic() if self._has_nodes else began) + SHUTDOWN_CALLS_S
        return is_taken


def end_handlers(subs: Iterable[Subscription], last: ShutdownCalls) -> None:
    """After the grace time, cancel `async def` handlers and release their deliveries.

    Deliveries of other handlers are redelivered when their leases expire.
    """
    taken: dict[Subscription, list[Held]] = {}
    for sub in subs:
        running = sub.leases.running()
        taken[sub] = cancelled = [held for held in running if held.task is not None]
        for held in cancelled:
            held.ended = True
        if left := len(running) - len(cancelled):
            log.warning(
                "topic %s: %d handlers did not finish in time; their messages will be "
                "redelivered when the leases expire",
                sub.shard,
                left,
            )
    give_back(taken, last)


def give_back(taken: Mapping[Subscription, Sequence[Held]], last: ShutdownCalls) -> None:
    """Release deliveries; those that cannot be released are redelivered when leases expire."""
    for sub, deliveries in taken.items():
        if not last.make(partial(sub.give_back, deliveries)):
            for held in deliveries:
                sub.leases.drop(held)
