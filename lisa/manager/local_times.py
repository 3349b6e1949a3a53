"""Moves messages with a wall time after the time zone data of this machine was updated.

A topic lists the ids of these messages by due time; see `lisa.core.store.placing`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.windows.placing import due_again
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.reschedule import Reschedule, Rescheduled
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicLog

PAGE = 500
PAST_MS = 60_000
"""How long ids stay listed after their due time; longer than a producer takes to send them."""

log = logging.getLogger(__name__)


class LocalTimes:
    """Checks the listed messages of topics, and removes ids whose time has come."""

    def __init__(self, store: SyncStore, clock: ServerClock) -> None:
        self._store = store
        self._clock = clock
        self._cursors: dict[str, str] = {}
        self._cleaned_up_to = ""

    def clean(self, topics: Sequence[str]) -> str | None:
        """Remove up to a page of past ids from the next topic's list. Raises LisaError.

        Returns the topic if that emptied the list, so that the topic can be unlisted.
        """
        if not topics:
            return None
        topic = min((one for one in topics if one > self._cleaned_up_to), default=min(topics))
        self._cleaned_up_to = topic
        key, past_ms = self._store.keys.topic(topic).local, self._clock.now_ms() - PAST_MS
        past = self._store.ask("ZRANGEBYSCORE", key, "-inf", past_ms, "LIMIT", 0, PAGE)
        if not past:
            return None
        self._store.ask("ZREM", key, *past)
        return None if self._store.ask("EXISTS", key) else topic

    def check_page(self, topic: str) -> bool:
        """Compute the due times of one page again; returns whether it was the last."""
        key, now_ms = self._store.keys.topic(topic).local, self._clock.now_ms()
        reply: Any = self._store.ask("ZSCAN", key, self._cursors.pop(topic, "0"), "COUNT", PAGE)
        cursor, pairs = text(reply[0]), reply[1]
        scores = {text(one): int(float(at)) for one, at in zip(*[iter(pairs)] * 2, strict=True)}
        ids = [one for one, at in scores.items() if at > now_ms]
        if ids:
            window = self._store.drive(self._store.options(topic)).window or ""
            for some in chunks(ids, self._store.batch_size(topic, Reschedule)):
                self._check(topic, [(one, scores[one]) for one in some], window, now_ms)
        if cursor == "0":
            return True
        self._cursors[topic] = cursor
        return False

    def _check(
        self, topic: str, listed: Sequence[tuple[str, int]], window: str, now_ms: int
    ) -> None:
        call = Inspect(topic, [one for one, _ in listed])
        found = self._store.drive(self._store.run_by_id(call))
        moves: dict[str, tuple[int, int]] = {}
        for (message_id, listed_ms), seen in zip(listed, found, strict=True):
            due_ms = _moved(seen, listed_ms, window, now_ms)
            if due_ms is not None:
                moves[message_id] = (listed_ms, due_ms)
        if not moves:
            return
        items = [(one, f"{due}@{was}") for one, (was, due) in moves.items()]
        outcomes = self._store.drive(self._store.run_by_id(Reschedule(topic, items)))
        key = self._store.keys.topic(topic).local
        for (message_id, (_, due_ms)), outcome in zip(moves.items(), outcomes, strict=True):
            if outcome is Rescheduled.RESCHEDULED:
                self._store.ask("ZADD", key, due_ms, message_id)
                TopicLog(log, topic).info(
                    "message %s: moved, because the time zone data changed", message_id
                )


def _moved(seen: Inspection, listed_ms: int, window: str, now_ms: int) -> int | None:
    """The new due time of a message that still waits until the listed one; None to keep it."""
    if not seen.envelope or seen.waiting_due_ms != listed_ms:
        return None
    try:
        due_ms = due_again(headers_of(seen.envelope), window, now_ms)
    except InvalidMessage:  # the window does not open any more
        return None
    return None if due_ms == listed_ms else due_ms
