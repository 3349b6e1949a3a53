"""Caches one reading of Redis for many scrapes."""

from __future__ import annotations

import time

from lisa.core.metrics.numbers import Numbers, put
from lisa.core.model.errors import LisaError

METRICS = "/metrics"

LASTS_S = 1.0
SHARE = 20
"""A reading is valid for this multiple of the time it took, which bounds its cost."""

LASTS_AT_MOST_S = 5.0
"""Scrapes of one address at least this far apart never see a topic's counter decrease, although
several workers with their own readings may serve them."""


class Reading:
    """The last reading and its validity. Callers that share it renew it in turn."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}
        self._until = 0.0

    def get(self) -> Numbers | None:
        """The reading, or None after its expiry."""
        return self._numbers if time.monotonic() < self._until else None

    def keep(self, found: Numbers | LisaError, began: float) -> Numbers:
        """Store a new reading, or the error instead; `began` is when the reading started."""
        now = time.monotonic()
        self._numbers = {} if isinstance(found, LisaError) else found
        put(self._numbers, "lisa_up", float(not isinstance(found, LisaError)))
        self._until = now + min(max(LASTS_S, SHARE * (now - began)), LASTS_AT_MOST_S)
        return self._numbers
