"""Runs the handlers of suspects one at a time.

A suspect is a message that a process held when it ended, without having told whether its handler
had begun. If the process of a suspect ends again, only that suspect has begun, and counts an
attempt; see decision 32.
"""

from __future__ import annotations

import threading
import time

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
        self._since = 0.0

    def begin(self, held: Held) -> bool:
        """Whether a suspect may begin now. If so, `end` must follow."""
        now = time.monotonic()
        with self._lock:
            if self._running is not None and now - self._since < LONGEST_S:
                return False
            self._running, self._since = held, now
            return True

    def end(self, held: Held) -> None:
        """Let the next suspect begin. Does nothing for another delivery than the running one."""
        with self._lock:
            if self._running is held:
                self._running = None


SUSPECTS = Suspects()
"""One for all consumers of the process, which would end together."""
