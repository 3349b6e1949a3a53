"""Server calls at the shutdown of a consumer or of a topic, within a common time limit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from lisa.consumer.inflight import Held
from lisa.consumer.subscription import Subscription
from lisa.core.store.store import SyncStore

log = logging.getLogger("lisa.consumer")

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
        taken[sub] = cancelled = [one for one in running if one.task is not None]
        for one in cancelled:
            one.end()
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
