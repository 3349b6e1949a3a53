"""Reads one topic for one group, and sees that the handlers get what it read."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from lisa.consumer.batches import Collector
from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.handlers import Handlers
from lisa.consumer.intake import Intake
from lisa.consumer.joining import ask_for_group, has_traces, is_emptied, join
from lisa.consumer.pace import MOST
from lisa.consumer.settler import Settler
from lisa.consumer.slots import Turn
from lisa.consumer.subscription import Subscription, Work
from lisa.core import failures
from lisa.core.address import Address
from lisa.core.errors import ConfigError, GroupRemoved, LisaError, ServerUnavailable
from lisa.core.patience import LONGEST_AWAY_S
from lisa.core.stream import Entry
from lisa.core.transitions.declare import Declare

__all__ = ["LOOK_AGAIN_S", "Reader"]

log = logging.getLogger("lisa.consumer")

LOOK_AGAIN_S = 1.0
"""How often a paused topic, or one without a group, is looked at."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
NEXT_LOOK_S = 0.005
FIRST_DEGRADED_PAUSE_S = 0.25
LONGEST_DEGRADED_PAUSE_S = 30.0


class Reader:
    """One thread: join, then read, open and hand over until the subscription closes.

    `topics` says how many share the slots; `failed` is told of an error that ends the consumer.
    """

    def __init__(
        self,
        sub: Subscription,
        address: Address,
        *,
        poll: timedelta,
        cap: int | None,
        handlers: Handlers,
        dispatcher: Dispatcher,
        settler: Settler,
        topics: Callable[[], int],
        failed: Callable[[LisaError], None],
    ) -> None:
        self._intake = Intake(sub, address, poll, settler)
        self._block = self._intake.longest
        self._sub = sub
        self._cap = cap
        self._handlers = handlers
        self._dispatcher = dispatcher
        self._settler = settler
        self._topics = topics
        self._failed = failed
        self._turn = Turn(dispatcher.slots)
        self._unopened: list[Entry] = []
        self._read_at = 0.0
        self._collector: Collector | None = None
        self._trouble = False
        self._pause_s = FIRST_PAUSE_S
        self._degraded_pause_s = FIRST_DEGRADED_PAUSE_S
        self._woken = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"lisa-{sub.topic}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    @property
    def is_in_trouble(self) -> bool:
        """Whether the server did not answer, or not as it should."""
        return self._trouble

    def wake(self) -> None:
        """Make it look up from what it waits for in this process."""
        self._woken.set()
        self._turn.wake()

    def interrupt(self) -> bool:
        """Make it look up from its read, too, without losing what it may just be given.

        False if the server could not be asked to end the read.
        """
        self.wake()
        return self._intake.interrupt()

    def end(self, ends: float, *, is_answered: bool) -> bool:
        """Wait until an instant for the thread to stop. A handler that runs on it holds it.

        `is_answered`, and the answer: whether the server ends reads when it is asked to.
        """
        while self.thread.is_alive() and time.monotonic() < ends:
            is_answered = is_answered and self.interrupt()
            self.thread.join(0.05)
            if not self._intake.is_reading and self._sub.running():
                break
        return is_answered

    def _run(self) -> None:
        closing = self._sub.closing
        while not closing.is_set():
            try:
                self._step()
                if self._trouble:
                    log.info("topic %s: reading again", self._sub.topic)
                self._trouble, self._pause_s = False, FIRST_PAUSE_S
            except GroupRemoved as error:
                self._group_removed(error)
            except failures.ClientError as error:
                self._recover(error)
            except ConfigError as error:
                if not self._sub.group:
                    self._failed(error)
                    break
                self._wait_out(error)
            except Exception as error:  # noqa: BLE001  logged; a reader never ends by itself
                self._wait_out(error)
        self._leave()

    def _leave(self) -> None:
        self._settler.hurry_for(self._sub)
        if self._unopened:
            self._sub.release([(entry.id, entry.entry) for entry in self._unopened])
        self._give_back_gathered()
        self._intake.close()

    def _give_back_gathered(self) -> None:
        if self._collector:
            self._sub.give_back(self._collector.take())

    def _recover(self, error: BaseException) -> None:
        """After an error of the blocking read: what can be mended at once is."""
        sub = self._sub
        if failures.is_missing_group(error) or str(error).startswith("UNBLOCKED"):
            try:
                if sub.group in sub.store.drive(sub.store.groups(sub.topic)):
                    sub.store.call(Declare(sub.topic, sub.group, only_mend=True))
                else:
                    self._group_removed(error)
                return
            except LisaError as another:
                self._wait_out(another)
                return
        self._wait_out(failures.translated(error, sub.store.where))

    def _group_removed(self, error: BaseException) -> None:
        sub = self._sub
        try:
            flow = is_emptied(sub.store, sub.topic, sub.name)
            emptied = sub.is_forgotten or sub.store.drive(flow)
            if emptied:
                emptied = not sub.store.drive(has_traces(sub.store, sub.topic, sub.group))
        except LisaError as another:
            self._wait_out(another)
            return
        self._unopened.clear()
        if emptied:
            log.warning("topic %s: the server was emptied; joining again", sub.topic)
            sub.group, sub.is_forgotten = "", False
            self._pausing(FIRST_PAUSE_S)
            return
        log.error("topic %s: group %s was removed; no longer reading it (%s)", sub.topic,
                  sub.group, error)  # fmt: skip
        sub.closing.set()

    def _wait_out(self, error: BaseException) -> None:
        if not self._trouble:
            unforeseen = None if isinstance(error, LisaError) else error
            log.warning("topic %s: trying again until it works: %s", self._sub.topic, error,
                        exc_info=unforeseen)  # fmt: skip
        self._trouble = True
        away = isinstance(error, ServerUnavailable)
        pause = min(self._pause_s, LONGEST_AWAY_S) if away else self._pause_s
        self._pausing(pause)
        self._pause_s = min(2 * pause, LONGEST_PAUSE_S)

    def _pausing(self, seconds: float) -> None:
        self._woken.clear()
        self._settler.hurry_for(self._sub)
        if not self._sub.closing.is_set():
            self._woken.wait(seconds)

    def _step(self) -> None:
        """One round: whatever this topic needs just now. Raises LisaError, client errors."""
        sub = self._sub
        if not sub.group:
            self._join()
        elif sub.is_paused_here:
            self._give_back_gathered()
            self._pausing(LOOK_AGAIN_S)
        elif sub.is_paused_topic:
            self._give_back_gathered()
            self._pausing(LOOK_AGAIN_S)
            sub.is_paused_topic = sub.store.drive(sub.store.options(sub.topic)).paused
        else:
            # Only who wants batches is asked here: a plan would keep receivers that are weakly
            # connected alive for as long as the read blocks, and miss those that come meanwhile.
            batch = self._handlers.batch(sub.whole)
            if self._unopened:
                self._hand_over()
            elif sub.is_degraded:
                self._read_degraded()
            else:
                self._degraded_pause_s = FIRST_DEGRADED_PAUSE_S
                if batch is not None:
                    self._read_batch(batch.batch or 1, batch.within_s)
                else:
                    self._read()

    def _join(self) -> None:
        sub = self._sub
        group = sub.store.drive(join(sub.store, sub.topic, sub.wanted))
        if group is None:
            log.info("topic %s has no group yet; waiting for one", sub.topic)
            sub.store.drive(ask_for_group(sub.store, sub.topic, sub.name))
            pause = FIRST_PAUSE_S
            while not sub.closing.is_set() and not sub.store.drive(sub.store.groups(sub.topic)):
                self._pausing(pause)
                pause = min(2 * pause, LOOK_AGAIN_S)
            return
        sub.group = group
        log.info("topic %s: reading for group %s as %s", sub.topic, group, sub.name)

    def _read(self) -> None:
        """Read as much as handlers can start on soon, and hand it over."""
        sub, slots = self._sub, self._dispatcher.slots
        topics = self._topics()
        several = topics > 1
        room = sub.pace.ahead(slots.size) // topics - len(sub.unstarted)
        if room > 0:
            self._fetch(room + slots.free, self._block)
            self._hand_over()
            return
        # Handlers are slow, or not yet known: read only once one of them is free.
        self._settler.hurry_for(sub)
        if not self._turn.take(sub.is_interrupted):
            return
        try:
            if several and not sub.unstarted:
                self._fetch(1, timedelta(0))
        finally:
            if not self._unopened:
                self._turn.leave()
        if self._unopened:
            self._hand_over(has_slot=True)
            return
        if sub.unstarted:
            self._await_start()
            return
        self._fetch(1 if several else slots.free, self._block)
        self._hand_over()

    def _await_start(self) -> None:
        """A slot is free, yet granted work is not begun: an event loop may be blocked."""
        if self._sub.unstarted:
            self._pausing(NEXT_LOOK_S)

    def _read_degraded(self) -> None:
        """One message at a time, after a pause that grows until one succeeds."""
        sub = self._sub
        if self._collector:
            self._hand_over_work([self._collector.take()])
        if sub.held:
            self._pausing(FIRST_PAUSE_S)
            return
        self._pausing(self._degraded_pause_s)
        if sub.is_interrupted():
            return
        self._fetch(1, self._block)
        if self._unopened:
            self._degraded_pause_s = min(2 * self._degraded_pause_s, LONGEST_DEGRADED_PAUSE_S)
            self._hand_over()

    def _read_batch(self, size: int, within_s: float) -> None:
        """Gather until a batch is full or its first message has waited long enough."""
        sub = self._sub
        gathered = self._collector
        if gathered is None or gathered.size != size:
            kept = gathered.take() if gathered else []
            gathered = self._collector = Collector(size, within_s)
            gathered.add(kept)
        if not gathered and sub.unstarted:  # a batch waits for a handler: no other behind it
            if self._turn.take(sub.is_interrupted):
                self._turn.leave()
                self._await_start()
            return
        left_s = gathered.left_s()
        block = self._block
        if left_s is not None:
            block = min(block, timedelta(milliseconds=math.ceil(left_s * 1000)))
        ahead = sub.pace.ahead(self._dispatcher.slots.size) - len(sub.unstarted) * size
        self._fetch(max(size - len(gathered), ahead), block, least_cap=size)
        self._hand_over()
        ready = gathered.ready()
        if ready:
            self._hand_over_work(ready)

    def _fetch(self, count: int, block: timedelta, *, least_cap: int = 1) -> None:
        """XREADGROUP into `_unopened`. Raises client errors."""
        sub = self._sub
        if self._cap is not None:
            count = min(count, max(least_cap, self._cap - len(sub.unstarted)))
        self._unopened = self._intake.read(max(1, min(count, MOST)), block)
        self._read_at = time.monotonic()

    def _hand_over(self, *, has_slot: bool = False) -> None:
        """Open what was read and give it to the handlers. Raises LisaError; then it is kept."""
        if not self._unopened:
            return
        sub = self._sub
        try:
            if sub.closing.is_set():
                return
            deliveries = sub.open(self._unopened, self._read_at)
            self._unopened = []
            if sub.failures or sub.expired:
                self._settler.ring()
            if self._collector is not None and self._handlers.batch(sub.whole) is not None:
                self._collector.add(deliveries)
            elif deliveries:
                had_slot, has_slot = has_slot, False
                self._hand_over_work(deliveries, has_slot=had_slot)
        finally:
            if has_slot:
                self._turn.leave()

    def _hand_over_work(self, work: Sequence[Work], *, has_slot: bool = False) -> None:
        """Run on this thread, or submit. The caller's slot, if it has one, is used up."""
        sub, dispatcher = self._sub, self._dispatcher
        plan = self._handlers.plan(sub.whole)
        sub.handler_timeout_s = plan.timeout_s
        # Who gathers batches has to go on meanwhile: what is gathered would wait for this handler.
        if dispatcher.slots.size > 1 or plan.is_async or plan.batch is not None:
            dispatcher.submit(sub, plan, work, has_slot=has_slot)
            return
        sub.unstarted.extend(work)
        if not has_slot and not self._turn.take(sub.closing.is_set):
            return
        keeps_slot = True
        try:
            keeps_slot = dispatcher.inline(sub, plan, self._turn)
        finally:
            if keeps_slot:
                self._turn.leave()
