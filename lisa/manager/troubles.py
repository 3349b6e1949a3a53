"""Errors of single topics: told once per change of state, with growing pauses of their own.

An empty topic stands for what concerns none.
"""

from __future__ import annotations

import logging
import threading

from lisa.core.errors import LisaError

__all__ = ["Troubles"]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

log = logging.getLogger(__name__)


class Troubles:
    """What goes wrong in one service, topic by topic. `total` counts the failures so far."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._failures: dict[str, tuple[int, str]] = {}
        self.total = 0

    def failed(self, topic: str, error: Exception, *, quietly: bool = False) -> float:
        """Note a failure; answers for how many seconds to leave the topic alone.

        `quietly` when somebody else tells about it, as when the whole server is away.
        """
        said = str(error)
        with self._lock:
            failures, before = self._failures.get(topic, (0, ""))
            told = before if quietly else said
            self._failures[topic] = (failures + 1, told)
            self.total += 1
        if not quietly and said != before:
            expected = isinstance(error, LisaError)
            log.error(
                "%s: %s; trying again", self._where(topic), said or repr(error),
                extra={"topic": topic}, exc_info=None if expected else error,
            )  # fmt: skip
        return float(min(FIRST_PAUSE_S * 2 ** min(failures, 16), LONGEST_PAUSE_S))

    def passed(self, topic: str) -> None:
        """Note a success."""
        if topic not in self._failures:
            return
        with self._lock:
            _, told = self._failures.pop(topic, (0, ""))
        if told:
            log.info("%s works again", self._where(topic), extra={"topic": topic})

    def _where(self, topic: str) -> str:
        return f"{self._service}: topic {topic}" if topic else self._service

    def __len__(self) -> int:
        """How many topics something is wrong with now."""
        return len(self._failures)

    def of(self, topic: str) -> str | None:
        """What is wrong with a topic, if anything."""
        return self._failures.get(topic, (0, ""))[1] or None
