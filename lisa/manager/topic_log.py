"""Log lines that name their topic, and the current errors by topic, logged when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import MutableMapping
from typing import Any

from lisa.core.daemon.threads import count_unforeseen
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import LisaError, ServerUnavailable, SlotMoving
from lisa.manager.nodes import Nodes

log = logging.getLogger(__name__)


class TopicLog(logging.LoggerAdapter[logging.Logger]):
    """Begins each line with the topic and group, and gives them to the record as attributes."""

    def __init__(self, log: logging.Logger, topic: str, group: str = "") -> None:
        super().__init__(log, {"topic": topic, "group": group} if group else {"topic": topic})
        self._where = f"topic {topic}, group {group}" if group else f"topic {topic}"

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """The complete line, with its attributes."""
        extra = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return f"{self._where}: {msg}", {**kwargs, "extra": extra}


class TopicErrors:
    """The current errors of one service by topic, each with its own growing pause.

    Errors that concern no topic are kept under the empty name. `total` counts all failures so far.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._lock = threading.Lock()
        self.failures: dict[str, tuple[Backoff, str]] = {}
        """By topic: the pauses between attempts, and the error as it was logged."""
        self.total = 0

    def failed(self, topic: str, error: Exception, *, quietly: bool = False) -> float:
        """Record a failure; returns the pause in seconds before the next attempt.

        `quietly` suppresses the log line, because another component logs a server outage.
        """
        text = str(error)
        if not isinstance(error, LisaError):
            count_unforeseen()
        with self._lock:
            backoff, before = self.failures.get(topic) or (Backoff(), "")
            logged = before if quietly else text
            self.failures[topic] = (backoff, logged)
            self.total += 1
            pause_s = backoff.take()
        if not quietly and text != before:
            expected = isinstance(error, LisaError)
            log.error(
                "%s: %s; trying again",
                self._where(topic),
                text or repr(error),
                extra={"topic": topic},
                exc_info=None if expected else error,
            )
        return pause_s

    def failed_at(self, nodes: Nodes, topic: str, error: Exception) -> float:
        """As `failed`. If the topic's node did not answer, have it probed."""

        def is_available() -> bool:
            return nodes.is_available(topic) if topic else nodes.is_any_available

        away = isinstance(error, ServerUnavailable) and not isinstance(error, SlotMoving)
        if away and is_available():
            nodes.suspect(topic)
        return self.failed(topic, error, quietly=away and not is_available())

    def passed(self, topic: str) -> None:
        """Record a success, and log it if an error was logged before."""
        if topic not in self.failures:
            return
        with self._lock:
            _, logged = self.failures.pop(topic, (None, ""))
        if logged:
            log.info("%s works again", self._where(topic), extra={"topic": topic})

    def forget(self, topic: str) -> None:
        """Drop the error of a removed topic."""
        with self._lock:
            self.failures.pop(topic, None)

    def _where(self, topic: str) -> str:
        return f"{self._service}: topic {topic}" if topic else self._service

    def of(self, topic: str) -> str | None:
        """The current error of a topic, or None."""
        return self.failures.get(topic, (None, ""))[1] or None
