"""Search for topics at the start, every six hours, and after each outage or gap.

Announcements may be lost meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time

from lisa.core.daemon.threads import ServiceThread, unforeseen
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import LisaError
from lisa.manager.nodes import Nodes
from lisa.manager.registry import Registry
from lisa.manager.server_monitor import PROBE_INTERVAL_S

LONGEST_S = 60.0
REST = 10
"""How many times as long as a search, which scans all keys, the next one waits."""

log = logging.getLogger(__name__)


class TopicSearch:
    """A thread that searches once a search is due and a node is available."""

    def __init__(self, registry: Registry, nodes: Nodes) -> None:
        self._registry = registry
        self._nodes = nodes
        self._is_due = threading.Event()
        self._is_due.set()
        self._stopped = threading.Event()
        self._backoff = Backoff(PROBE_INTERVAL_S, LONGEST_S)
        self._thread = ServiceThread("lisa-search", self._work, is_over=self._stopped.is_set)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def schedule(self) -> None:
        """Search as soon as possible."""
        self._is_due.set()

    def close(self) -> None:
        """Start no further search."""
        self._stopped.set()
        self._is_due.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._stopped.is_set():
            self._is_due.wait()
            if self._stopped.is_set():
                return
            if not self._nodes.is_any_available:
                self._stopped.wait(PROBE_INTERVAL_S / 4)
                continue
            self._is_due.clear()
            began = time.monotonic()
            if self._has_searched():
                self._backoff.reset()
                self._stopped.wait(min(REST * (time.monotonic() - began), LONGEST_S))
            elif not self._is_due.wait(self._backoff.take()):  # the end of an outage ends the wait
                self._is_due.set()

    def _has_searched(self) -> bool:
        try:
            self._registry.search()
        except LisaError as error:
            log.debug("the search for topics will be repeated: %s", error)
        except Exception as error:  # noqa: BLE001  logged; the search is repeated
            unforeseen("search", error)
        else:
            return True
        return False
