"""A rate limit shared by all tasks of a job."""

from __future__ import annotations

import math
import time

from lisa.core.store.store import SyncStore

BURST_S = 0.1
"""Length of a window in seconds; longer if the rate allows less than one row in this time."""

KEPT_MS = 60_000
"""Minimum time for which a window's count is kept; must exceed the clock skew between machines."""


class SharedRate:
    """A rate limit in rows per second, shared by tasks on any number of machines.

    Time is divided into windows. Before a task sends, it adds its rows to the window's counter on
    the server, and waits for the next window if the counter exceeds the limit. Unused capacity
    expires: a delayed job does not catch up at the cost of live traffic.
    """

    def __init__(self, store: SyncStore, run: str, rate: float) -> None:
        self._store = store
        self._run = run
        self.allowance = max(1, math.floor(rate * BURST_S))
        """Maximum number of rows per window, and thus per call."""
        self._window_s = self.allowance / rate
        self._kept_ms = KEPT_MS + math.ceil(1000 * self._window_s)

    def wait_for(self, rows: int) -> None:
        """Block until `rows` rows (at most `allowance`) may be sent."""
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
                # Smaller calls of other tasks may still fit into this window.
                self._store.ask("DECRBY", key, rows)
            time.sleep(max(0.0, (window + 1) * self._window_s - time.time()) + 0.001)
