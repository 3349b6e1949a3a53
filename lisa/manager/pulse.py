"""Feels the server's pulse: is it there, is it still the same, was it emptied, what time has it."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from typing import NamedTuple

from lisa.core.errors import ConfigError, LisaError
from lisa.core.store import SyncStore
from lisa.core.transitions.base import text
from lisa.manager.server_clock import ServerClock

__all__ = ["Pulse", "Signs"]

log = logging.getLogger(__name__)


class Signs(NamedTuple):
    """What one look found.

    `first`: the first answer ever; `uptime_s`: since the server started; `gap_s`: since the look
    before that was answered, infinite for the first.
    """

    back: bool
    first: bool
    another_run: bool
    emptied: bool
    uptime_s: float
    gap_s: float


class Pulse:
    """Looks at the server; each change, either way, is logged once.

    `reachable` is clear while the server is away, and until `here` says that what its return asks
    for is done.
    """

    def __init__(self, store: SyncStore, clock: ServerClock) -> None:
        self.reachable = threading.Event()
        self._store = store
        self._clock = clock
        self._run_id: str | None = None
        self._answered = -math.inf
        self._error: LisaError | None = None

    def step(self) -> Signs | None:
        """Look once; None if there is no answer. Raises ConfigError: what no waiting will mend."""
        try:
            info = text(self._store.ask("INFO", "server"))
            known = self._store.ask("EXISTS", self._store.keys.schema)
            self._store.drive(self._store.check_schema())
            self._clock.sample(self._store)
        except ConfigError as error:
            self._away(error)
            raise
        except LisaError as error:
            self._away(error)
            return None
        run_id, uptime = _field(info, "run_id"), float(_field(info, "uptime_in_seconds") or 0)
        before, self._run_id = self._run_id, run_id
        last, self._answered = self._answered, time.monotonic()
        return Signs(
            back=not self.reachable.is_set(),
            first=before is None,
            another_run=before is not None and before != run_id,
            emptied=not known,
            uptime_s=uptime,
            gap_s=self._answered - last,
        )

    def here(self) -> None:
        """Everything may run."""
        if not self.reachable.is_set():
            log.info("%s is reachable", self._store.where)
            self._error = None
            self.reachable.set()

    @property
    def trouble(self) -> str | None:
        """Why the server is away, if it is."""
        return None if self._error is None else str(self._error)

    def _away(self, error: LisaError) -> None:
        self.reachable.clear()
        if type(error) is not type(self._error):
            log.error("%s; trying again", error)
        self._error = error


def _field(info: str, name: str) -> str:
    found = re.search(rf"^{name}:(\S*)", info, re.MULTILINE)
    return found[1] if found else ""
