"""Estimate Redis's clock from the local monotonic clock.

A TIME call sent at `sent` and answered at `received` gives a lower and an upper bound of the offset
between the two clocks, and so does each script reply that contains the time. The estimate is the
middle of the intersection of these bounds, as in Marzullo's algorithm. Its error is half the
difference between the fastest request and the fastest reply. A request takes longer than this
error, so when a call sent at a due time arrives, the server's clock has reached the due time.

Bounds that contradict the earlier ones show that the clock was set. A slow reply never contradicts
them, because its bounds are only wider.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import NamedTuple

from lisa.core.model.clock import human
from lisa.core.store.store import SyncStore

DRIFT = 50e-6
"""Assumed drift between two machines' clocks, in seconds per second."""

STEP_S = 0.25
"""The smallest change of the clock that counts as a step; leases tolerate smaller ones."""

log = logging.getLogger(__name__)


class ClockStep(NamedTuple):
    """A change of the clock by `by_ms` (negative: back), after which it showed at least `since_ms`.

    Both in milliseconds.
    """

    by_ms: int
    since_ms: int


class ServerClock:
    """Maps Redis's epoch milliseconds to instants of `time.monotonic`.

    key: on a cluster, a key on the node whose clock is read.
    """

    def __init__(self, key: str = "") -> None:
        self.steps: tuple[ClockStep, ...] = ()
        self._set_forward = -math.inf
        self._key = key
        self._lock = threading.Lock()
        self._low, self._high, self._at = -math.inf, math.inf, time.monotonic()
        self._sent, self._took = self._at, 0.0
        self._offset_s = time.time() - time.monotonic()

    def sample(self, store: SyncStore) -> None:
        """Update the estimate with a TIME call. Raises LisaError."""
        sent = time.monotonic()
        now_us = store.drive(store.server_time_us(self._key))
        received = time.monotonic()
        self._narrow(now_us / 1e6 - received, now_us / 1e6 - sent, sent, received)

    def observe(self, now_ms: int, sent: float, received: float) -> None:
        """Update the estimate with a reply that contained Redis's time, rounded down to 1 ms."""
        self._narrow(now_ms / 1e3 - received, (now_ms + 1) / 1e3 - sent, sent, received)

    def instant(self, epoch_ms: float) -> float:
        """The `time.monotonic` instant at which Redis's clock shows an epoch millisecond."""
        return epoch_ms / 1e3 - self._offset_s

    def now_ms(self) -> int:
        """Redis's current time in epoch milliseconds."""
        return int((time.monotonic() + self._offset_s) * 1e3)

    def was_set_forward(self, within_s: float) -> bool:
        """Whether this process saw the clock being set forward within the last seconds."""
        return time.monotonic() - self._set_forward < within_s

    @property
    def forward_ms(self) -> int:
        """How far this process saw the clock being set forward, less how far back; at least 0."""
        return max(0, sum(step.by_ms for step in self.steps))

    def latest_ms(self) -> int | None:
        """The latest server time at which a call sent now can arrive, in epoch milliseconds.

        Assumes that the call takes no longer than the last one. None before the first sample.
        """
        with self._lock:
            if self._high == math.inf:
                return None
            now = time.monotonic()
            grown = max(now - self._at, 0.0) * DRIFT
            return int((now + self._high + grown + STEP_S + 2 * self._took) * 1e3)

    def _narrow(self, low: float, high: float, sent: float, received: float) -> None:
        with self._lock:
            grown = max(received - self._at, 0.0) * DRIFT
            least, most = self._low - grown, self._high + grown
            if least <= high and low <= most:
                low, high = max(low, least), min(high, most)
            elif sent < self._at:
                return  # two concurrent calls contradict each other; a later sample decides
            else:
                self._record_step(low, high)
            self._low, self._high, self._at = low, high, received
            self._sent, self._took = sent, received - sent
            self._offset_s = (low + high) / 2

    def _record_step(self, low: float, high: float) -> None:
        by_s = (low + high) / 2 - (self._low + self._high) / 2
        if abs(by_s) < STEP_S:
            return
        if by_s > 0:
            self._set_forward = time.monotonic()
        self.steps += (ClockStep(round(by_s * 1e3), math.floor((self._sent + low) * 1e3)),)
        log.warning(
            "the server's clock was set %s by %s",
            "forward" if by_s > 0 else "back",
            human(round(abs(by_s) * 1e3)),
        )
