"""One topic, or one place of it, taken for one group: what is held, and what is known of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lisa.consumer.held import Held, Outcome, Verdict
from lisa.consumer.opening import unpack
from lisa.consumer.pace import Pace
from lisa.core.errors import LisaError, ServerUnavailable
from lisa.core.metrics.families import HANDLER_SECONDS
from lisa.core.metrics.numbers import Spread
from lisa.core.shards import base
from lisa.core.store import SyncStore, chunks
from lisa.core.stream import Entry
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.open import Open, Opened
from lisa.core.transitions.release import Release

__all__ = ["DEGRADED_AFTER", "FAST_S", "Subscription", "Work", "deliveries_of"]

log = logging.getLogger("lisa.consumer")

DEGRADED_AFTER = 20
"""Failures without a success, after which a topic is taken one message at a time."""

FAST_S = HANDLER_SECONDS[0]
"""Handlers that take no longer are counted together: a histogram's work for each would show."""

Work = Held | list[Held]


def deliveries_of(work: Work) -> list[Held]:
    """The deliveries of a batch, or the one."""
    return work if isinstance(work, list) else [work]


class Subscription:
    """State shared by the reader, the handlers' threads, the settler and the heartbeat.

    `topic` is the place that is read, which the calls to the server name; `whole` the topic that it
    belongs to, as handlers and people know it.

    Each field has one writer, or is a deque or dict whose single steps are atomic. `wanted` is
    the group that was asked for, or empty; `group` is empty until it is known. `unstarted` holds
    deliveries, or whole batches of them. `shortened` is told when the ack timeout was cut. `slow`
    has the times of handlers above `FAST_S`, `fast` and `fast_s` number and sum of the others.
    """

    def __init__(
        self,
        store: SyncStore,
        topic: str,
        wanted: str,
        name: str,
        shortened: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.topic = topic
        self.whole = base(topic)
        self.wanted = wanted
        self.group = ""
        self.name = name
        self.held: dict[str, Held] = {}
        self.unstarted: deque[Work] = deque()
        self.acks: deque[Held] = deque()
        self.failures: deque[tuple[Held, Verdict]] = deque()
        self.expired: deque[Held] = deque()
        self.pace = Pace()
        self.ack_timeout_s = 10.0
        self._shortened = shortened
        self.handler_timeout_s = 0.0
        self.failed_in_row = 0
        self.went_well = 0
        self.failed = 0
        self.discarded = 0
        self.slow = Spread(HANDLER_SECONDS)
        self.fast = 0
        self.fast_s = 0.0
        self.is_paused_topic = False
        self.is_paused_here = False
        self.is_announced = False
        self.is_forgotten = False
        self.closing = threading.Event()

    @property
    def state(self) -> str:
        """The word for it in presence records."""
        if self.closing.is_set():
            return "stopping"
        if not self.group:
            return "waiting"
        if self.is_paused_topic or self.is_paused_here:
            return "paused"
        return "degraded" if self.is_degraded else "running"

    @property
    def handled(self) -> int:
        """Messages that a handler finished with."""
        return self.went_well + self.failed + self.discarded

    @property
    def is_degraded(self) -> bool:
        """Whether it failed too often in a row."""
        return self.failed_in_row >= DEGRADED_AFTER

    def is_interrupted(self) -> bool:
        """Whether nothing more is to be read here just now."""
        return self.closing.is_set() or self.is_paused_here

    def running(self) -> int:
        """How many deliveries a handler works on."""
        return sum(1 for held in list(self.held.values()) if held.started and not held.ended)

    def open(self, entries: Sequence[Entry], read_at: float) -> list[Held]:
        """What XREADGROUP gave, ready for the handlers; the rest is settled. Raises LisaError.

        `read_at`: when it was given. Leases run from there, however late it is opened.
        """
        opened = self.store.call(Open(self.topic, self.group, entries))
        self.learn_ack_timeout(opened.ack_timeout_ms / 1000)
        self.is_paused_topic = opened.paused
        return self._take(entries, opened, read_at)

    def learn_ack_timeout(self, seconds: float) -> None:
        """Keep to the topic's option; the heartbeat has to know at once if it got shorter."""
        was, self.ack_timeout_s = self.ack_timeout_s, seconds
        if seconds < was:
            self._shortened()

    def _take(self, entries: Sequence[Entry], opened: Opened, read_at: float) -> list[Held]:
        topic, group, now_us, held = self.whole, self.group, opened.now_us, self.held
        lease_ends = read_at + self.ack_timeout_s
        taken = []
        for entry, data, is_past in zip(entries, opened.envelopes, opened.past_ttl, strict=True):
            if data is None:
                continue
            message, fault = unpack(topic, group, entry, data)
            place = entry.entry
            one = held[place] = Held(place, message, data, now_us, read_at, lease_ends)
            if fault:
                self.end(one, Verdict(fault, "discard"))
            elif is_past:
                one.ended = True
                self.expired.append(one)
            else:
                taken.append(one)
        return taken

    def start(self, held: Held, now: float) -> bool:
        """Mark a delivery as running; False if it was lost while it waited for its turn."""
        if now > held.lease_ends and not self.renew(held):
            self.drop(held)
            return False
        held.started = now
        return True

    def finish(self, held: Held, outcome: Outcome) -> None:
        """Take a handler's word on a message; the settler does the rest."""
        if outcome is None:
            self.went_well += 1
            if self.failed_in_row:
                self._healed()
            held.ended = True
            self.acks.append(held)
            return
        if outcome.is_discard:
            self._healed()
        else:
            self._failed()
        self._refuse(held, outcome)

    def finish_batch(self, batch: Sequence[Held], outcomes: Sequence[Outcome]) -> None:
        """Take a handler's word on a batch: one call, so at most one failure in a row."""
        if all(outcome is not None and not outcome.is_discard for outcome in outcomes):
            self._failed()
        else:
            self._healed()
        for held, outcome in zip(batch, outcomes, strict=True):
            if outcome is None:
                self.went_well += 1
                held.ended = True
                self.acks.append(held)
            else:
                self._refuse(held, outcome)

    def took(self, seconds: float, count: int) -> None:
        """Handlers took so long for so many messages together."""
        if seconds > FAST_S * count:
            self.slow.observe(seconds / count, count)
        else:
            self.fast += count
            self.fast_s += seconds

    def _refuse(self, held: Held, outcome: Verdict) -> None:
        if outcome.is_discard:
            self.discarded += 1
        else:
            self.failed += 1
        log.warning("topic %s: message %s, attempt %d, was not handled: %s", self.topic,
                    held.message.id, held.message.attempt, outcome.reason,
                    exc_info=outcome.error)  # fmt: skip
        self.end(held, outcome)

    def end(self, held: Held, verdict: Verdict) -> None:
        """Have a delivery settled as failed."""
        held.ended = True
        self.failures.append((held, verdict))

    def _failed(self) -> None:
        self.failed_in_row += 1
        if self.failed_in_row == DEGRADED_AFTER:
            log.warning("topic %s: degraded after %d failures in a row", self.topic,
                        DEGRADED_AFTER)  # fmt: skip

    def _healed(self) -> None:
        if self.is_degraded:
            log.info("topic %s: handled again, no longer degraded", self.topic)
        self.failed_in_row = 0

    def renew(self, held: Held) -> bool:
        """Extend one lease that may have ended; whether it is still this consumer's."""
        now = time.monotonic()
        try:
            kept = self.store.call(Extend(self.topic, self.group, self.name, [held.receipt]))[0]
        except LisaError:
            return False
        if kept:
            held.lease_ends = now + self.ack_timeout_s
        return kept

    def drop(self, held: Held) -> None:
        """Forget a delivery that is no longer this consumer's."""
        held.ended = True
        self.held.pop(held.entry, None)

    def next_work(self) -> Work | None:
        """The next unstarted delivery or batch."""
        try:
            return self.unstarted.popleft()
        except IndexError:
            return None

    def withdraw(self) -> list[Held]:
        """Take back all that no handler has started on."""
        taken: list[Held] = []
        while (work := self.next_work()) is not None:
            taken += deliveries_of(work)
        return taken

    def give_back(self, deliveries: Sequence[Held]) -> bool:
        """Release deliveries that no handler saw; whether the server took all of them.

        What fails is left to its lease.
        """
        released = self.release([held.receipt for held in deliveries])
        for held in deliveries:
            self.drop(held)
        return released

    def release(self, receipts: Sequence[tuple[str, str]]) -> bool:
        """Put deliveries back into the group's stream, no attempt counted; whether all are."""
        released, left = True, len(receipts)
        for some in chunks(receipts, self.store.batch_size(self.topic, Release)):
            try:
                self.store.call(Release(self.topic, self.group, some))
            except LisaError as error:
                away = isinstance(error, ServerUnavailable)
                log.warning("topic %s: %d messages could not be given back (%s): they come back "
                            "when their lease ends", self.topic, left if away else len(some),
                            error)  # fmt: skip
                released = False
                if away:  # each further call would wait as long
                    break
            left -= len(some)
        return released
