"""One reading of Redis for many scrapes."""

from __future__ import annotations

import time

from lisa.core.errors import LisaError
from lisa.core.metrics.numbers import Numbers, put

__all__ = ["METRICS", "Reading"]

METRICS = "/metrics"

LASTS_S = 1.0
SHARE = 20
"""A reading lasts for so many times as long as it took, so that it costs little."""

LASTS_AT_MOST_S = 5.0
"""Scrapes of one address that are this far apart never see a topic's counter go back: behind it
may be several workers, each with a reading of its own."""


class Reading:
    """The last reading, and how long it counts. Whoever shares it takes turns at renewing it."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}
        self._until = 0.0

    def get(self) -> Numbers | None:
        """The reading, unless it is to be made anew."""
        return self._numbers if time.monotonic() < self._until else None

    def keep(self, found: Numbers | LisaError, began: float) -> Numbers:
        """Take a new one, or why there is none; `began` is when it was asked for."""
        now = time.monotonic()
        self._numbers = {} if isinstance(found, LisaError) else found
        put(self._numbers, "lisa_up", float(not isinstance(found, LisaError)))
        self._until = now + min(max(LASTS_S, SHARE * (now - began)), LASTS_AT_MOST_S)
        return self._numbers
