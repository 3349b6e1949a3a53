"""Returns unstarted deliveries to their group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lisa.consumer.inflight import Held
from lisa.consumer.membership import Membership
from lisa.consumer.thread_queue import ThreadQueue
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.defer import Deferral, Postpone
from lisa.core.transitions.release import Release

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
        self._owed: ThreadQueue[Receipt] = ThreadQueue()

    @property
    def are_owed(self) -> bool:
        """Whether an earlier release must be repeated."""
        return bool(self._owed)

    def owe(self, held: Held) -> None:
        """Release a delivery once the server answers again."""
        self._owed.put(held.receipt)

    def make(self, receipts: Sequence[Receipt]) -> bool:
        """Return deliveries to the group's stream without counting an attempt.

        Returns whether the server released them all. If the server does not answer, the rest is
        released later, unless the consumer is stopping.
        """
        released, shard = True, self._membership.shard
        for some in chunks(receipts, self._store.batch_size(shard, Release)):
            try:
                self._store.call(Release(shard, self._membership.group, some))
            except ServerUnavailable as error:
                left = receipts[receipts.index(some[0]) :]  # further calls would time out too
                if not self._is_closing():
                    self._owed.put_all(left)
                self._failed("released", len(left), error)
                return False
            except LisaError as error:
                self._failed("released", len(some), error)
                released = False
        return released

    def make_owed(self) -> bool:
        """Repeat earlier failed releases; returns whether the server released them all."""
        return self.make(self._owed.take_all())

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
