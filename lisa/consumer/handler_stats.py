"""Counts and times of the handlers of one topic, for metrics and the degraded rule."""

from __future__ import annotations

import logging

from lisa.core.delivery.degradation import DEGRADED_AFTER, Degradation
from lisa.core.metrics.families import HANDLER_SECONDS
from lisa.core.metrics.numbers import Spread

log = logging.getLogger("lisa.consumer")

FAST_S = HANDLER_SECONDS[0]
"""Faster handlers share one update of the histogram, which would be too slow for each message."""


class HandlerStats:
    """Written by the threads that run handlers; read by the reader, metrics and health.

    succeeded, failed, discarded, deferred: numbers of messages by outcome.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.degradation = Degradation()
        self.succeeded = 0
        self.failed = 0
        self.discarded = 0
        self.deferred = 0
        self._slow = Spread(HANDLER_SECONDS)
        self._fast = 0
        self._fast_s = 0.0

    @property
    def handled(self) -> int:
        """The number of messages that handlers have finished."""
        return self.succeeded + self.failed + self.discarded + self.deferred

    def succeed(self) -> None:
        """Count a handled message, which ends a row of failures."""
        self.succeeded += 1
        if self.degradation.failed_in_row:
            self.end_row()

    def count_refusal(self, *, is_discard: bool, is_deferral: bool) -> None:
        """Count a message that was not handled."""
        if is_deferral:
            self.deferred += 1
        elif is_discard:
            self.discarded += 1
        else:
            self.failed += 1

    def end_row(self) -> None:
        """End a row of failures."""
        if self.degradation.succeeded():
            log.info("topic %s: a message succeeded; no longer degraded", self._topic)

    def fail_in_row(self, reason: str) -> None:
        """Count another failure in a row: a failed message, or a batch that failed completely."""
        if self.degradation.failed(reason):
            log.warning(
                "topic %s: degraded after %d failures in a row", self._topic, DEGRADED_AFTER
            )

    def observe(self, seconds: float, count: int) -> None:
        """Record that handlers took `seconds` for `count` messages in total."""
        if seconds > FAST_S * count:
            self._slow.observe(seconds / count, count)
        else:
            self.observe_fast(seconds, count)

    def observe_fast(self, seconds: float, count: int) -> None:
        """Record `count` messages that took at most `FAST_S` each, and `seconds` in total."""
        self._fast += count
        self._fast_s += seconds

    def seconds(self) -> list[float]:
        """The histogram of handler times."""
        numbers = self._slow.numbers()
        numbers[0] += self._fast
        numbers[-1] += self._fast_s
        return numbers
