"""The deliveries that a consumer holds of one topic or shard, their leases, and their release."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from lisa.consumer.inflight import Held, take_many
from lisa.consumer.membership import Membership
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import shown_id
from lisa.core.model.options import TopicOptions
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.lease import Begun, Extend, Release
from lisa.core.transitions.retry import Deferral, Postpone

log = logging.getLogger("lisa.consumer")

Receipt = tuple[str, str]
"""Id and entry id of a delivery."""


class Releases:
    """Makes the releases of one subscription, and repeats those that the server did not answer.

    is_closing: whether the consumer is stopping. Then failed releases are not repeated, and the
        leases expire.
    """

    def __init__(
        self, store: SyncStore, membership: Membership, is_closing: Callable[[], bool]
    ) -> None:
        self._store, self._membership, self._is_closing = store, membership, is_closing
        self._owed: deque[Receipt] = deque()

    @property
    def are_owed(self) -> bool:
        """Whether an earlier release must be repeated."""
        return bool(self._owed)

    def owe(self, held: Held) -> None:
        """Release a delivery once the server answers again."""
        self._owed.append(held.receipt)

    def make(self, receipts: Sequence[Receipt]) -> bool:
        """Return deliveries to the group's stream without counting an attempt.

        Returns whether the server released them all. If the server does not answer, the rest is
        released later, unless the consumer is stopping.
        """
        released, shard = True, self._membership.shard
        for part in chunks(receipts, self._store.batch_size(shard, Release)):
            try:
                self._store.call(Release(shard, self._membership.group, part))
            except ServerUnavailable as error:
                left = receipts[receipts.index(part[0]) :]  # further calls would time out too
                if not self._is_closing():
                    self._owed.extend(left)
                self._failed("released", len(left), error)
                return False
            except LisaError as error:
                self._failed("released", len(part), error)
                released = False
        return released

    def make_owed(self) -> bool:
        """Repeat earlier failed releases; returns whether the server released them all."""
        return self.make(take_many(self._owed, len(self._owed)))

    def defer(self, held: Held) -> None:
        """Postpone a delivery until its window opens.

        If the server does not answer, the delivery is released later, and checked again when it is
        opened again.
        """
        if held.limits is None:
            return
        closes_ms, opens_ms = held.limits
        outside = Deferral(*held.receipt, opens_ms, closes_ms=closes_ms)
        try:
            self._store.call(Postpone(self._membership.shard, self._membership.group, [outside]))
        except ServerUnavailable:
            self.owe(held)
        except LisaError as error:
            self._failed("deferred", 1, error)

    def _failed(self, done: str, count: int, error: LisaError) -> None:
        is_owed = isinstance(error, ServerUnavailable) and not self._is_closing()
        again = "trying again" if is_owed else "redelivered when their leases expire"
        what = "topic %s: %d messages could not be %s (%s): %s"
        log.warning(what, self._membership.shard, count, done, error, again)


class Leases:
    """Deliveries by stream entry id, from `open` until Redis has confirmed their settlement.

    Any thread may add or drop deliveries. The heartbeat extends leases.

    shortened: called when the ack timeout became shorter.
    """

    def __init__(
        self, store: SyncStore, membership: Membership, shortened: Callable[[], None]
    ) -> None:
        self._store = store
        self._membership = membership
        self._shortened = shortened
        self.held: dict[str, Held] = {}
        self.hold = self.held.__setitem__
        """Add a delivery. Not a method, because that would take twice as long."""
        self.ack_timeout_s = TopicOptions().ack_timeout.total_seconds()
        self.handler_timeout_s = 0.0

    def forget(self, settled: Iterable[Held]) -> None:
        """Remove settled deliveries."""
        pop = self.held.pop
        for held in settled:
            pop(held.entry, None)

    def drop(self, held: Held) -> None:
        """Remove a delivery that this consumer no longer holds; ignores its handler's outcome."""
        held.ended = True
        self.held.pop(held.entry, None)

    def all(self) -> list[Held]:
        """All deliveries; other threads may add and drop some meanwhile."""
        return list(self.held.values())

    def bytes_ahead(self) -> int:
        """The total of bodies on which no handler has started."""
        return sum(len(held.data) for held in self.all() if not (held.started or held.ended))

    def running(self) -> list[Held]:
        """The deliveries in a running handler."""
        return [held for held in self.all() if held.is_running]

    def use_handler_timeout(self, seconds: float) -> None:
        """Set how long a handler may run before its leases are no longer extended."""
        self.handler_timeout_s = seconds

    def use_ack_timeout(self, seconds: float) -> None:
        """Set the topic's ack timeout; calls `shortened` if it became shorter."""
        was, self.ack_timeout_s = self.ack_timeout_s, seconds
        if seconds < was:
            self._shortened()

    def extend_now(self, held: Held) -> bool:
        """Extend a lease that may have ended; returns whether this consumer still holds it.

        Also tells that the handler of a suspect begins. Raises ServerUnavailable.
        """
        now, begun = time.monotonic(), Begun.YES if held.is_suspect else Begun.NO
        try:
            kept = self._store.call(self._extension([held], begun))[0]
        except ServerUnavailable:
            raise
        except LisaError:
            return False
        if kept:
            held.lease_ends = now + self.ack_timeout_s
        return kept

    def extend_due(self, now: float) -> bool | None:
        """Extend leases after a third of their time; returns None if none is due, else True.

        Raises LisaError.
        """
        due = [
            held
            for held in self.all()
            if held.lease_ends and not held.overdue and self._is_due(held.lease_ends - now)
        ]
        for part in chunks(due, self._store.batch_size(self._membership.shard, Extend)):
            asked = time.monotonic()
            kept = self._store.call(self._extension(part))
            for held, is_kept in zip(part, kept, strict=True):
                if is_kept:
                    held.lease_ends = asked + self.ack_timeout_s
                elif not held.ended and held.entry in self.held:
                    self._lose(held)
        return True if due else None

    def _extension(self, part: Sequence[Held], begun: Begun = Begun.NO) -> Extend:
        member, receipts = self._membership, [held.receipt for held in part]
        return Extend(member.shard, member.group, member.name, receipts, begun=begun)

    def _is_due(self, left_s: float) -> bool:
        """Whether a third of the lease has passed, or the ack timeout became shorter since then."""
        return left_s < self.ack_timeout_s * 2 / 3 or self.ack_timeout_s < left_s < math.inf

    def _lose(self, held: Held) -> None:
        """Mark a reclaimed delivery; if it is unstarted, `Subscription.start` drops it."""
        held.lose_lease()
        if held.started:
            log.warning(
                "topic %s: the lease of message %s ended while its handler was running",
                self._membership.shard,
                shown_id(held.message.id),
                extra=held.message.log_fields,
            )

    def end_overdue(self, now: float) -> None:
        """Stop extending leases of handlers past their timeout; cancel `async def` handlers.

        Tells Redis that these handlers had begun, so that they count as attempts.
        """
        overdue = [
            held
            for held in self.running()
            if not held.overdue and now - held.started > self.handler_timeout_s > 0
        ]
        with suppress(LisaError):  # then the messages return as if they had not begun
            for part in chunks(overdue, self._store.batch_size(self._membership.shard, Extend)):
                self._store.call(self._extension(part, Begun.AND_NO_LEASE))
        for held in overdue:
            log.error(
                "topic %s: the handler of message %s exceeded %g s; its lease is no longer renewed",
                self._membership.shard,
                shown_id(held.message.id),
                self.handler_timeout_s,
                extra=held.message.log_fields,
            )
            held.stop_extending()
