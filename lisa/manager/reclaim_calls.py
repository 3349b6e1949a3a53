"""Calls `reclaim` for each window of a scan, and keeps the calls without a reply."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import GroupRemoved, LisaError
from lisa.core.redis.patience import Patience
from lisa.core.store.store import SyncStore
from lisa.core.transitions.reclaim import ClockState, Reclaim, Reclaimed, ReclaimedMessage
from lisa.core.transitions.retry import Failed
from lisa.manager.lease_clocks import LeaseClocks
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.topic_log import TopicLog

NO_ENTRY = "0-0"  # as a range's end: only deliveries' own leases; as its start: only entries

log = logging.getLogger(__name__)


class ReclaimCalls:
    """Runs the calls of all scans.

    A call without a reply may have moved messages; only repeating it tells which. Until then, its
    scan makes no other call.

    window: number of pending entries that one call reads.
    """

    def __init__(
        self, store: SyncStore, clocks: LeaseClocks, signals: SignalQueue, window: int
    ) -> None:
        self.moved = Tally()
        self._store = store
        self._clocks = clocks
        self._signals = signals
        self._window = window
        self._unanswered: dict[tuple[str, str, str], Reclaim] = {}

    def is_owed(self, scan: Reclaim) -> bool:
        """Whether a call of the same scan has no reply yet."""
        return _key(scan) in self._unanswered

    def owed(self, topics: Iterable[str]) -> list[Reclaim]:
        """The calls of these topics that have no reply yet."""
        wanted = {*topics}
        return [one for one in self._unanswered.values() if one.topic in wanted]

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        for call in self.owed([topic]):
            self._unanswered.pop(_key(call), None)

    def run(
        self, calls: Sequence[Reclaim], failing: Container[str] = ()
    ) -> list[Reclaimed | LisaError]:
        """Run calls in one round trip, without retrying those that get no reply.

        A retry could reach the new primary after a failover, where leases have not been renewed.
        Calls for `failing` topics move nothing, because their latest allowed time is 0.
        """
        dated = [
            replace(
                call,
                latest_ms=0 if call.topic in failing else self._clocks.of(call.topic).latest_ms(),
            )
            for call in calls
        ]
        return self._store.drive(self._store.run_many(dated, patience=Patience(0)))

    def follow(
        self,
        call: Reclaim,
        result: Reclaimed | LisaError,
        received: float,
        failing: Container[str] = (),
    ) -> float | None:
        """Handle a reply and finish its scan, window by window. Raises LisaError.

        Returns when the earliest scanned lease can expire. Like `received`, when the reply arrived,
        this is in `time.monotonic` seconds. Returns None if the server's time is later than
        estimated: the clock was set, a call was slow, or the topic is `failing`.
        """
        topic, group, ends = call.topic, call.group, math.inf
        moved, cleared, returned, is_ahead = 0, 0, 0, False
        self._unanswered[_key(call)] = call
        while True:
            if isinstance(result, GroupRemoved):
                self._unanswered.pop(_key(call))
            if isinstance(result, LisaError):
                raise result
            moved, cleared = moved + len(result.moved), cleared + result.cleared
            returned += result.returned
            self._signals.failed(topic, group, result.moved)
            _log_deaths(topic, group, result.moved)
            if result.next_end_ms is not None:
                ends = min(ends, received + (result.next_end_ms + 1) / 1e3)
            is_ahead = is_ahead or result.clock is ClockState.AHEAD
            # More leases with their own deadlines have expired than one call reclaims.
            has_more = call.end == NO_ENTRY and result.next_end_ms == 0
            if result.clock is ClockState.LATER or (result.cursor is None and not has_more):
                break
            start = result.cursor or call.start
            call = Reclaim(topic, group, start=start, end=call.end, window=self._window)
            self._unanswered[_key(call)] = call
            (result,) = self.run([call], failing)
            received = time.monotonic()
        self._unanswered.pop(_key(call))
        is_later = result.clock is ClockState.LATER
        if is_later:
            self._clocks.of(topic).sample(self._store)
        elif is_ahead:
            self._clocks.restart_ahead(topic, group)
        self._count(topic, group, moved, cleared, returned)
        return None if is_later else ends

    def _count(self, topic: str, group: str, moved: int, cleared: int, returned: int) -> None:
        if not (moved or cleared or returned):
            return
        self.moved.add(moved + returned, "reclaimed")
        self.moved.add(cleared, "cleared")
        TopicLog(log, topic, group).info(
            "%d reclaimed after the ack timeout, %d of them without an attempt, %d entries cleared",
            moved + returned,
            returned,
            cleared,
        )


def _key(call: Reclaim) -> tuple[str, str, str]:
    """Identifies a scan; at most one call per key is unanswered at a time."""
    return call.topic, call.group, call.end


def _log_deaths(topic: str, group: str, moved: Sequence[ReclaimedMessage]) -> None:
    for message_id, _, retried in moved:
        if retried.outcome is Failed.DEAD:
            TopicLog(log, topic, group).warning(
                "message %r moved to garbage after %d attempts",
                message_id,
                retried.failed_attempts,
                extra={"id": message_id, "attempt": retried.failed_attempts},
            )
