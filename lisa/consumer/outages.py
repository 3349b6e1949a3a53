"""Logs an outage once, though each topic's reader and the heartbeat notice it."""

from __future__ import annotations

import logging
import threading

from lisa.core.model.errors import LisaError, ServerUnavailable

log = logging.getLogger("lisa.consumer")


class OutageLog:
    """Remembers the errors that were logged and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def warn(self, what: str, error: LisaError) -> None:
        """Log what failed, unless the reason is an outage that was already logged."""
        with self._lock:
            is_known = str(error) in self._logged and isinstance(error, ServerUnavailable)
            self._logged.add(str(error))
        log.log(logging.DEBUG if is_known else logging.WARNING, "%s: %s", what, error)

    def end(self, what: str, error: BaseException) -> None:
        """Log what works again, unless the end of the same outage was already logged."""
        with self._lock:
            is_known = str(error) not in self._logged
            self._logged.discard(str(error))
        log.log(logging.DEBUG if is_known else logging.INFO, what)
