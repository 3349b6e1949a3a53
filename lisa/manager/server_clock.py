"""Redis's clock, as this process's own clock shows it.

A look at TIME that was sent at `sent` and answered at `received` bounds the distance between the
two clocks from both sides. Waking goes by the lower bound: by then Redis's clock has certainly
come to the instant, so a call is never early, and it is late by no more than one round trip.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from lisa.core.store import SyncStore

__all__ = ["ServerClock"]

KEPT_SAMPLES = 4


class ServerClock:
    """Maps Redis's epoch milliseconds to instants of `time.monotonic`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)
        self._offset_s = time.time() - time.monotonic()

    def sample(self, store: SyncStore) -> None:
        """Ask Redis for its time. Raises LisaError."""
        sent = time.monotonic()
        now_us = store.drive(store.server_time_us())
        received = time.monotonic()
        low, high = now_us / 1e6 - received, now_us / 1e6 - sent
        with self._lock:
            if not self._samples or not self._agrees(low, high):
                self._samples.clear()
            self._samples.append((high - low, low))
            # The quickest answer says most; its neighbours only that no clock was set.
            self._offset_s = min(self._samples)[1]

    def witness(self, now_ms: int, sent: float, received: float) -> None:
        """Learn from a reply that carried Redis's time in whole milliseconds, rounded down."""
        low, high = now_ms / 1e3 - received, (now_ms + 1) / 1e3 - sent
        with self._lock:
            if self._offset_s > high:
                self._samples.clear()
                self._offset_s = low
            self._offset_s = max(self._offset_s, low)

    def instant(self, epoch_ms: int) -> float:
        """When Redis's clock will show an epoch millisecond."""
        return epoch_ms / 1e3 - self._offset_s

    def now_ms(self) -> int:
        """Redis's present time."""
        return int((time.monotonic() + self._offset_s) * 1e3)

    def _agrees(self, low: float, high: float) -> bool:
        return low <= min(self._samples)[1] + min(self._samples)[0] and self._offset_s <= high
