"""Redis's clock, as this process's own clock shows it.

A look at TIME that was sent at `sent` and answered at `received` bounds the distance between the
two clocks from both sides, and so does each reply of a script that tells the time. Where all those
bounds overlap, in the middle, the distance is taken to lie: the error is half of the difference
between the quickest way there and the quickest way back. A call that is sent at an instant meets a
server whose clock has come to it, as the way there takes longer than that. (Marzullo's algorithm
intersects clocks' bounds in this way.)
"""

from __future__ import annotations

import math
import threading
import time

from lisa.core.store import SyncStore

__all__ = ["ServerClock"]

DRIFT = 50e-6
"""By how much two machines' clocks go apart, in seconds a second."""


class ServerClock:
    """Maps Redis's epoch milliseconds to instants of `time.monotonic`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._low, self._high, self._at = -math.inf, math.inf, time.monotonic()
        self._offset_s = time.time() - time.monotonic()

    def sample(self, store: SyncStore) -> None:
        """Ask Redis for its time. Raises LisaError."""
        sent = time.monotonic()
        now_us = store.drive(store.server_time_us())
        received = time.monotonic()
        self._narrow(now_us / 1e6 - received, now_us / 1e6 - sent, received)

    def witness(self, now_ms: int, sent: float, received: float) -> None:
        """Learn from a reply that carried Redis's time in whole milliseconds, rounded down."""
        self._narrow(now_ms / 1e3 - received, (now_ms + 1) / 1e3 - sent, received)

    def instant(self, epoch_ms: int) -> float:
        """When Redis's clock will show an epoch millisecond."""
        return epoch_ms / 1e3 - self._offset_s

    def now_ms(self) -> int:
        """Redis's present time."""
        return int((time.monotonic() + self._offset_s) * 1e3)

    def _narrow(self, low: float, high: float, at: float) -> None:
        with self._lock:
            grown = max(at - self._at, 0.0) * DRIFT
            least, most = self._low - grown, self._high + grown
            if least <= high and low <= most:
                low, high = max(low, least), min(high, most)
            # Otherwise one of the clocks was set: only what is said now counts.
            self._low, self._high, self._at = low, high, at
            self._offset_s = (low + high) / 2
