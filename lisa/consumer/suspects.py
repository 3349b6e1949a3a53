"""Runs the handlers of suspects one at a time.

A suspect is a message that a process held when it ended, without having told whether its handler
had begun. If the process of a suspect ends again, only that suspect has begun, and counts an
attempt; see decision 33.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container

from lisa.consumer.inflight import Held

WAIT_S = 1.0
"""How long a suspect waits for others in a slot, before it is released for other consumers."""

LOOK_S = 0.005
"""How often a waiting suspect looks."""

LONGEST_S = 10.0
"""After this time the next suspect may begin, so that long handlers do not hold up all others."""


class Suspects:
    """Which suspect runs in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Held | None = None
        self._holder: Container[str] = ()
        self._since = 0.0

    def begin(self, held: Held, holder: Container[str]) -> bool:
        """Whether a suspect may begin now, because the one before is settled.

        holder: the entries of deliveries that its subscription holds, without settled ones.
        """
        now = time.monotonic()
        with self._lock:
            before = self._running
            if before and before.entry in self._holder and now - self._since < LONGEST_S:
                return False
            self._running, self._holder, self._since = held, holder, now
            return True


SUSPECTS = Suspects()
"""One for all consumers of the process, which would end together."""
