"""The last calls of a consumer that stops, or of a topic that it lets go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lisa.consumer.held import Held
from lisa.consumer.subscription import Subscription
from lisa.core.address import Address

__all__ = ["LAST_CALLS_S", "LastCalls", "give_back"]

LAST_CALLS_S = 2.0
"""How long they may take together once one has failed."""


class LastCalls:
    """What a consumer that stops still asks of the server.

    Once it fails, the rest is tried for a while only, all of it together. On a cluster that while
    begins after the first failure: other nodes may answer. A server by itself would not.
    """

    def __init__(self, address: Address) -> None:
        self._has_nodes = address.kind == "cluster"
        self._ends = math.inf

    @property
    def is_answered(self) -> bool:
        """Whether nothing has failed so far."""
        return self._ends == math.inf

    def left_s(self, most_s: float = LAST_CALLS_S) -> float:
        """How long to wait for something else at most."""
        return max(0.0, min(most_s, self._ends - time.monotonic()))

    def make(self, call: Callable[[], bool]) -> bool:
        """Make a call that says whether the server took it, unless time is up; whether it did."""
        began = time.monotonic()
        if began > self._ends:
            return False
        is_taken = call()
        if not is_taken and self.is_answered:
            self._ends = (time.monotonic() if self._has_nodes else began) + LAST_CALLS_S
        return is_taken


def give_back(taken: Mapping[Subscription, Sequence[Held]], last: LastCalls) -> None:
    """Give back what no handler is to see any more; what cannot be is left to the leases."""
    for sub, deliveries in taken.items():
        if not last.make(partial(sub.give_back, deliveries)):
            for held in deliveries:
                sub.drop(held)
