"""Read a topic's messages at the pace of its handlers, and pass them on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.handlers import Handlers
from lisa.consumer.inflight import Held
from lisa.consumer.invoke import Collector
from lisa.consumer.settler import Settler
from lisa.consumer.slots import SlotClaim
from lisa.consumer.stream_reader import StreamReader
from lisa.consumer.subscription import Subscription, Work
from lisa.core.daemon.threads import begin_round, rest
from lisa.core.model.backoff import FIRST_S

NEXT_LOOK_S = 0.005


class Intake:
    """Used on the reader's thread, except for `wake`.

    stream: the entries that were read.
    cap: the most unstarted messages, if limited.
    topics: returns the number of topics that share the slots.
    """

    def __init__(
        self,
        sub: Subscription,
        stream: StreamReader,
        *,
        cap: int | None,
        handlers: Handlers,
        dispatcher: Dispatcher,
        settler: Settler,
        topics: Callable[[], int],
    ) -> None:
        self._sub = sub
        self._stream = stream
        self._block = stream.longest
        self._cap = cap
        self._handlers = handlers
        self._dispatcher = dispatcher
        self._settler = settler
        self._topics = topics
        self._turn = SlotClaim(sub.slots)
        self._collector: Collector | None = None
        self._woken = threading.Event()

    def wake(self) -> None:
        """End a pause, or a wait for a slot."""
        self._woken.set()
        self._turn.wake()

    def pause(self, seconds: float) -> None:
        """Wait until `wake`, at most for `seconds`; settles finished deliveries meanwhile."""
        self._woken.clear()
        self._settler.flush_now_for(self._sub)
        if not self._sub.closing.is_set():
            self._woken.wait(seconds)

    def release_unstarted(self) -> None:
        """Release unopened entries and the deliveries of an incomplete batch."""
        self._stream.release_unopened()
        if self._collector:
            self._sub.give_back(self._collector.take())

    def drop_unopened(self) -> None:
        """Drop the unopened entries after their group was removed."""
        self._stream.drop_unopened()

    def drop_all(self) -> None:
        """Drop all deliveries after their group was removed."""
        if self._collector:
            self._collector.take()
        self._sub.drop_all()

    def close(self) -> None:
        """Settle finished deliveries and release the others."""
        self._settler.flush_now_for(self._sub)
        self.release_unstarted()
        self._stream.close()

    @property
    def is_plain(self) -> bool:
        """Whether plain reads suffice: the topic has no batch handler and is not degraded."""
        sub = self._sub
        return (
            not sub.stats.degradation.is_degraded
            and self._handlers.batch(sub.topic, sub.wanted) is None
            and not self._collector
        )

    def disconnect(self) -> None:
        """Settle finished deliveries, and close the connection, before others read the topic."""
        self._settler.flush_now_for(self._sub)
        self._stream.disconnect()

    def open(self) -> list[Held]:
        """Open the read entries. Raises LisaError, and keeps the rest."""
        deliveries = self._stream.open()
        if self._sub.outcomes.failures or self._sub.outcomes.expired:
            self._settler.notify(self._sub)
        return deliveries

    def step(self) -> None:
        """Read and hand over once. Raises LisaError and client errors."""
        # Do not build a plan here: it would keep weakly connected receivers alive during the
        # blocking read, and miss receivers that connect meanwhile.
        batch = self._handlers.batch(self._sub.topic, self._sub.wanted)
        if self._stream.has_unopened:
            self._hand_over()
        elif self._sub.stats.degradation.is_degraded:
            self._read_degraded()
        elif batch is not None:
            self._read_batch(batch.batch or 1, batch.within_s)
        else:
            self._read()

    def _read(self) -> None:
        """Read and dispatch as many messages as handlers can start soon."""
        sub, slots = self._sub, self._sub.slots
        topics = self._topics()
        several = topics > 1
        room = sub.pace.ahead(slots.size) // topics - len(sub.unstarted)
        if room > 0:
            self._fetch(room + slots.free, self._block, startable=slots.free)
            self._hand_over()
            return
        # Handlers are slow or not measured yet: read only once a slot is free.
        self._settler.flush_now_for(sub)
        if not self._turn.take_at_rest(sub.is_interrupted):
            return
        try:
            if several and not sub.unstarted:
                self._fetch(1, timedelta(0))
        finally:
            if not self._stream.has_unopened:
                self._turn.release()
        if self._stream.has_unopened:
            self._hand_over(has_slot=True)
            return
        if sub.unstarted:
            self._await_start()
            return
        self._fetch(1 if several else slots.free, self._block, startable=slots.free)
        self._hand_over()

    def _await_start(self) -> None:
        """Pause if granted work has not started, because a handler may block the event loop."""
        if self._sub.unstarted:
            self.pause(NEXT_LOOK_S)

    def _read_degraded(self) -> None:
        """Read one message at a time, with a growing pause until one succeeds."""
        sub = self._sub
        if self._collector:
            self._hand_over_work([self._collector.take()])
        if sub.leases.held:
            self.pause(FIRST_S)
            return
        self.pause(sub.stats.degradation.backoff.pause_s)
        if sub.is_interrupted():
            return
        self._fetch(1, self._block)
        if self._stream.has_unopened:
            sub.stats.degradation.backoff.lengthen()
            self._hand_over()

    def _read_batch(self, size: int, within_s: float) -> None:
        """Collect until a batch is full or its first message has waited for `within_s`."""
        sub = self._sub
        gathered = self._collector
        if gathered is None or gathered.size != size:
            kept = gathered.take() if gathered else []
            gathered = self._collector = Collector(size, within_s)
            gathered.add(kept)
        if not gathered and sub.unstarted:  # a batch waits for a handler; do not read another one
            if self._turn.take_at_rest(sub.is_interrupted):
                self._turn.release()
                self._await_start()
            return
        left_s = gathered.left_s()
        block = self._block
        if left_s is not None and left_s < block.total_seconds():
            block = timedelta(milliseconds=math.ceil(left_s * 1000))
        ahead = sub.pace.ahead(sub.slots.size) - len(sub.unstarted) * size
        wanted = size - len(gathered)
        self._fetch(max(wanted, ahead), block, least_cap=size, startable=wanted)
        self._hand_over()
        ready = gathered.ready()
        if ready:
            self._hand_over_work(ready)

    def _fetch(
        self, count: int, block: timedelta, *, least_cap: int = 1, startable: int = 1
    ) -> None:
        """Read up to `count` entries; handlers are free for `startable` of them."""
        if self._cap is not None:
            count = min(count, max(least_cap, self._cap - len(self._sub.unstarted)))
        self._stream.fetch(count, block, startable)

    def _hand_over(self, *, has_slot: bool = False) -> None:
        """Open the read entries and dispatch them. Raises LisaError and keeps the rest."""
        if not self._stream.has_unopened:
            return
        sub = self._sub
        try:
            if sub.is_interrupted():
                return  # a request to end the read that arrives just before it has no effect
            deliveries = self.open()
            if (
                self._collector is not None
                and self._handlers.batch(sub.topic, sub.wanted) is not None
            ):
                self._collector.add([held for held in deliveries if not held.is_suspect])
                deliveries = [held for held in deliveries if held.is_suspect]
            if deliveries:
                had_slot, has_slot = has_slot, False
                self._hand_over_work(deliveries, has_slot=had_slot)
        finally:
            if has_slot:
                self._turn.release()

    def _hand_over_work(self, work: Sequence[Work], *, has_slot: bool = False) -> None:
        """Run handlers on this thread, or submit the work. Uses up the caller's slot, if any."""
        sub, dispatcher = self._sub, self._dispatcher
        plan = self._handlers.plan(sub.topic, sub.wanted)
        sub.enqueue(work, plan.timeout_s)
        if not dispatcher.runs_inline(sub, plan):
            dispatcher.submit(sub, plan, len(work), has_slot=has_slot)
            return
        if not has_slot and not self._turn.take_at_rest(sub.closing.is_set):
            return
        keeps_slot = True
        rest()
        try:
            keeps_slot = dispatcher.inline(sub, plan, self._turn)
        finally:
            begin_round()
            if keeps_slot:
                self._turn.release()
