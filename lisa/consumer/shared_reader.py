"""Reads many quiet topics on one thread and one connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from lisa.consumer.backlog import Backlog
from lisa.consumer.blocking_reads import LOST, is_about_group
from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.handlers import HandlerPlan
from lisa.consumer.inflight import Held
from lisa.consumer.member import Member, Members, Return
from lisa.consumer.outages import OutageLog
from lisa.consumer.shared_reads import Found, SharedReads
from lisa.consumer.slots import TURN_S, SlotClaim
from lisa.consumer.subscription import AHEAD_S, Subscription
from lisa.core.daemon.threads import ServiceThread, begin_round, rest, unforeseen
from lisa.core.model.backoff import Backoff, longest_after
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.redis import errors

MOST_TOPICS = 50
"""Topics of one shared reader. Each message costs the server a read of them all."""

MOST_EACH = 8
"""The most entries of one topic per read."""

INTERRUPTS = 20
"""Attempts to end a read, 1 ms apart: one that arrives just before the read has no effect."""


class SharedReader:
    """A thread that reads its members' topics, for one group and under one consumer name.

    It serves the plain case only. A topic that closes, pauses, fails, is degraded or busy, or whose
    handler takes batches, goes back to the thread of its own `Reader`.

    plan: returns the handlers of a topic for a requested group.
    readers: returns the readers that share the slots.
    refused: called if the server reads only one topic at a time.
    cap: the most unstarted messages of a topic, if limited.
    is_handling: whether the thread runs handlers, or waits for a slot for them.
    unstarted: the number of opened messages without a handler, when the reader last counted them.
    """

    def __init__(
        self,
        reads: SharedReads,
        dispatcher: Dispatcher,
        plan: Callable[[str, str], HandlerPlan],
        *,
        readers: Callable[[], Collection[SharedReader]],
        refused: Callable[[], None],
        cap: int | None,
        number: int,
        longest_s: float,
        outages: OutageLog,
    ) -> None:
        self.reads = reads
        self._outages = outages
        self._dispatcher = dispatcher
        self._plan = plan
        self._readers = readers
        self._refused = refused
        self._most_each = min(MOST_EACH, cap or MOST_EACH)
        self._slots = dispatcher.slots
        self._turn = SlotClaim(self._slots)
        self.members = Members(MOST_TOPICS)
        self._last: list[Member] = []
        self._backlog = Backlog(self._most_each)
        self._began: dict[Member, int] = {}
        self._rounds = 0
        self._error: LisaError | None = None
        self._backoff = Backoff()
        self._woken = threading.Event()
        self._is_repeated = False
        self.is_handling = False
        self.unstarted = 0
        self.thread = ServiceThread(f"lisa-shared-{number}", self._run, longest_s)

    def join(self, member: Member) -> bool:
        """Read a topic after the running read; returns False if this reader is over or full."""
        return self.members.join(member, self)

    def leave(self, member: Member) -> None:
        """Give a topic back to its own thread after the running read; see `interrupt`."""
        self.members.give_back([member], Return())
        self._wake()

    def _wake(self) -> None:
        self._turn.wake()
        self._woken.set()

    def interrupt(self) -> bool:
        """End a running read, for changes that were made. False if the server does not answer."""
        rounds = self._rounds
        self._wake()
        for _ in range(INTERRUPTS):
            if not self.reads.is_reading or self._rounds != rounds:
                break
            if not self.reads.interrupt():
                return False
            time.sleep(0.001)
        return True

    @property
    def is_failing(self) -> bool:
        """Whether the last read failed."""
        return self._error is not None

    def _run(self) -> None:
        while self._change_members():
            self.thread.begin()
            try:
                self._round()
            except LOST as error:
                self.reads.reply_lost()
                self._failed(error)
            except (*errors.ClientError, LisaError) as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001  logged; the topics' own threads go on
                unforeseen("reading several topics", error)
                self.reads.reply_lost()
                self.members.give_back(self.members.current, Return(failed=True))
            self._rounds += 1
        self.reads.close()

    def _failed(self, error: Exception) -> None:
        """Wait for the server, or give back the topic that fails; all, if it is not known."""
        member = self.reads.missing(error)
        if member is not None:
            self.members.give_back([member], Return(failed=True))
            return
        # A blocked read does not tell which stream or group was removed; the next one does.
        if is_about_group(error) and not self._is_repeated:
            self._is_repeated = True
            return
        known = error if isinstance(error, LisaError) else self.reads.translated(error)
        if isinstance(known, ServerUnavailable):
            self._wait_out(known)
        else:
            if "CROSSSLOT" in str(known):
                self._refused()
            self.members.give_back(self.members.current, Return(failed=True))

    def _wait_out(self, error: LisaError) -> None:
        if self._error is None:
            self._outages.warn(f"{len(self.members)} topics: cannot read, trying again", error)
        self._error = self._error or error
        self.reads.flush()
        self._woken.clear()
        if not self.members.is_changed:
            rest()
            self._woken.wait(self._backoff.take(longest_after(error)))

    def _succeeded(self) -> None:
        if self._error is not None:
            self._outages.end(f"{len(self.members)} topics: reading again", self._error)
        self._error, self._is_repeated = None, False
        self._backoff.reset()

    def _change_members(self) -> bool:
        """Take in members and give others back; returns False if none is left."""
        if self.members.is_changed:
            self.members.regroup()
            current = self.members.current
            self._last = [one for one in self._last if one in current]
            self._began = {one: at for one, at in self._began.items() if one in current}
            self._backlog.keep(current)
            self.reads.use(current)
        return self.members.let_return()

    def _round(self) -> None:
        """Read once, and hand over what was found. Raises client errors."""
        degraded = [one for one in self._last if one.sub.stats.degradation.is_degraded]
        self.members.give_back(degraded, Return())
        if self.members.is_changed or not self.members.current:
            return  # all others may wait for their own threads
        self.reads.release_lost()
        room = self._room()
        if room > 0 and room >= len(self._backlog):  # a read may find one of each at least
            each = max(1, min(room // len(self._last), self._most_each))
            self._hand_over(self._open(each, blocks=True))
        elif self._backlog or not self._slots.free:
            self._round_in_slot()
        else:
            self._hand_over(self._open(1, blocks=True))

    def _round_in_slot(self) -> None:
        """Read once a slot is free: messages of each topic, if all handlers are fast.

        Else one message of a backlog, or of each topic the first one. More messages would wait for
        slow handlers here, although others may be free.
        """
        soon = self._ahead(self.members.current) // len(self.members)
        each = min(self._most_each, max(1, int(soon * TURN_S / AHEAD_S))) if soon else 0
        if not each:
            self.reads.flush()
        if not self._turn.take_at_rest(lambda: self.members.is_changed):
            return
        opened: list[tuple[Member, list[Held]]] = []
        try:
            for member in self._backlog.turns() if not each else ():
                if opened := self._open(1, blocks=False, only=member):
                    break
            else:
                opened = self._open(max(1, each), blocks=False)
        finally:
            if not opened:
                self._turn.release()
        if opened:
            self._hand_over(opened, has_slot=True)

    def _ahead(self, members: Collection[Member]) -> int:
        """How many messages handlers finish soon; 0 if that is unknown for one of the topics."""
        return min((one.sub.pace.ahead(self._slots.size) for one in members), default=0)

    def _room(self) -> int:
        """How many messages to read ahead: this reader's share of what handlers finish soon.

        If that is none, one, unless handlers are busy for long enough with what all readers hold.
        Otherwise many readers would read in turn, each in a slot, and most would find nothing.
        """
        self._count_unstarted()
        ahead, readers = self._ahead(self._last), self._readers()
        room = ahead // max(1, len(readers)) - self.unstarted
        if room <= 0 and ahead > sum(one.unstarted for one in readers):
            return 1
        return room

    def _count_unstarted(self) -> None:
        self.unstarted = sum(len(one.sub.unstarted) for one in self._last)

    def _open(
        self, each: int, *, blocks: bool, only: Member | None = None
    ) -> list[tuple[Member, list[Held]]]:
        """Read and open up to `each` entries of each topic, or of one. Raises client errors."""
        self.reads.begin()
        try:
            if self.members.is_changed:
                return []
            all_found = self.reads.read(each, blocks=blocks, only=only)
        finally:
            self.reads.end()
        self._succeeded()
        opened: list[tuple[Member, list[Held]]] = []
        try:
            self._receive(all_found, opened)
        except BaseException:
            for member, deliveries in opened:
                member.sub.give_back(deliveries)
            raise
        self.members.give_back(self._backlog.note(all_found, each, only), Return(busy=True))
        if opened:
            # The next handler may be slow, and meanwhile all others' messages would be released.
            opened.sort(key=lambda one: self._began.get(one[0], -1))
            self._last = [member for member, _ in opened]
            self._began[self._last[0]] = self._rounds
        return opened

    def _receive(self, all_found: Sequence[Found], opened: list[tuple[Member, list[Held]]]) -> None:
        """Open what a read found, at least one message, as memory allows; adds to `opened`."""
        for member, entries, read in all_found:
            deliveries, stays = member.receive(entries, read, startable=0 if opened else 1)
            if not stays:
                self.members.give_back([member], Return())
            if deliveries:
                opened.append((member, deliveries))
                self.reads.will_ack(member)

    def _hand_over(
        self, opened: Sequence[tuple[Member, list[Held]]], *, has_slot: bool = False
    ) -> None:
        """Run handlers on this thread, or submit the work. Uses up the slot, if there is one."""
        inline: list[tuple[Subscription, HandlerPlan]] = []
        planned = [(one.sub, self._plan(one.sub.topic, one.sub.wanted)) for one, _ in opened]
        for (sub, plan), (_, deliveries) in zip(planned, opened, strict=True):
            sub.enqueue(deliveries, plan.timeout_s)  # all, so that an error leaves none behind
        self._count_unstarted()
        keeps_slot = has_slot
        try:
            for (sub, plan), (_, deliveries) in zip(planned, opened, strict=True):
                if self._dispatcher.runs_inline(sub, plan):
                    inline.append((sub, plan))
                    if len(inline) == 1 and not keeps_slot:  # before the event loop claims it
                        keeps_slot = self._turn.take_free()
                else:
                    gives_slot, keeps_slot = keeps_slot and not inline, keeps_slot and bool(inline)
                    self._dispatcher.submit(sub, plan, len(deliveries), has_slot=gives_slot)
            self.is_handling = bool(inline)
            rest()
            for sub, plan in inline:
                if keeps_slot or self._turn.take(sub.closing.is_set):
                    keeps_slot = True
                    keeps_slot = self._dispatcher.inline(sub, plan, self._turn)
                if len(inline) > 1:  # the next handler may be slow
                    self.reads.share_acks(sub)
        finally:
            begin_round()
            self.is_handling = False
            self._count_unstarted()
            if keeps_slot:
                self._turn.release()
