"""Moves messages with a wall time after the time zone data of this machine was updated.

A topic lists these messages by due time; see `lisa.core.store.placing`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.windows.local_time import LISTED, LOCAL_HEADER
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
        scores = [(text(one), int(float(at))) for one, at in zip(*[iter(pairs)] * 2, strict=True)]
        listed = [(one, at) for one, at in scores if at > now_ms]
        if listed:
            window = self._store.drive(self._store.options(topic)).window or ""
            for some in chunks(listed, self._store.batch_size(topic, Reschedule)):
                self._check(topic, some, window, now_ms)
        if cursor == "0":
            return True
        self._cursors[topic] = cursor
        return False

    def _check(
        self, topic: str, listed: Sequence[tuple[str, int]], window: str, now_ms: int
    ) -> None:
        call = Inspect(topic, [member.partition(LISTED)[0] for member, _ in listed])
        found = self._store.drive(self._store.run_by_id(call))
        members, items = list[str](), list[tuple[str, str]]()
        for (member, listed_ms), message_id, seen in zip(listed, call.ids, found, strict=True):
            due_ms = _moved(seen, member, listed_ms, window, now_ms)
            if due_ms is not None:
                members.append(member)
                items.append((message_id, f"{due_ms}@{listed_ms}"))
        if not items:
            return
        outcomes = self._store.drive(self._store.run_by_id(Reschedule(topic, items)))
        key = self._store.keys.topic(topic).local
        for member, (message_id, due), outcome in zip(members, items, outcomes, strict=True):
            if outcome is Rescheduled.RESCHEDULED:
                self._store.ask("ZADD", key, due.partition("@")[0], member)
                TopicLog(log, topic).info(
                    "message %s: moved, because the time zone data changed", message_id
                )


def _moved(seen: Inspection, member: str, listed_ms: int, window: str, now_ms: int) -> int | None:
    """The new due time of a message that still waits until the listed one; None to keep it."""
    if not seen.envelope or seen.waiting_due_ms != listed_ms:
        return None
    headers, wall = headers_of(seen.envelope), member.partition(LISTED)[2]
    try:
        due_ms = due_again({**headers, LOCAL_HEADER: wall} if wall else headers, window, now_ms)
    except InvalidMessage:  # the window does not open any more
        return None
    return None if due_ms == listed_ms else due_ms
