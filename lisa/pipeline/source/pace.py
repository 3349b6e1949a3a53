"""How fast the tasks of one job may send, all together."""

from __future__ import annotations

import math
import time

from lisa.core.store import SyncStore

__all__ = ["Pace"]

BURST_S = 0.1
"""What is sent at once is what the rate allows in such a time, or one row."""

KEPT_MS = 60_000
"""How long a window's count is kept at least: longer than clocks of machines lie apart."""


class Pace:
    """A rate that tasks share, wherever they run and however many there are.

    Time is cut into windows. Before a task sends it counts what it is about to send in the
    window's key on the server, and waits for the next window where that is used up. What a window
    leaves unused is gone: a job that was held up does not catch up at the cost of live traffic.
    """

    def __init__(self, store: SyncStore, run: str, rate: float) -> None:
        self._store = store
        self._run = run
        self.allowance = max(1, math.floor(rate * BURST_S))
        """Rows that one window holds: no call may be larger."""
        self._window_s = self.allowance / rate
        self._kept_ms = KEPT_MS + math.ceil(1000 * self._window_s)

    def wait_for(self, rows: int) -> None:
        """Return once so many rows, at most `allowance`, may be sent."""
        while True:
            now = time.time()
            window = int(now / self._window_s)
            key = self._store.keys.pace(self._run, window)
            used, _ = self._store.drive(
                self._store.commands([("INCRBY", key, rows), ("PEXPIRE", key, self._kept_ms)])
            )
            if int(used) <= self.allowance:
                return
            if int(used) - rows < self.allowance:
                # Others may still fit in where this call does not.
                self._store.ask("DECRBY", key, rows)
            time.sleep(max(0.0, (window + 1) * self._window_s - time.time()) + 0.001)
