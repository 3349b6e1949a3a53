"""Moves pending occurrences and messages with a wall time after a time zone data update.

A topic remembers the version of the data by which its ticks were last checked. A manager with newer
data computes them again, a few pages at a time. It lists its messages with a wall time by due time;
see `lisa.core.store.placing`.
"""

from __future__ import annotations

import logging
import re
import zoneinfo
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path

from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER
from lisa.core.model.recurring.ticks import next_tick
from lisa.core.model.windows.placing import LISTED, due_again
from lisa.core.redis import errors
from lisa.core.store import schedules
from lisa.core.store.schedules import record_page
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.change import Reschedule, Rescheduled
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.manager.bulk_reads import Turns, ask_all, ask_each
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicErrors, TopicLog

IDS = 500
"""Ids of one topic per command."""

MOST_REMOVED = 10_000
"""Once a call has removed this many ids, the rest is left to the next ones."""

PAST_MS = 60_000
"""How long ids stay listed after their due time; longer than a producer takes to send them."""

FIELD = "zones"
"""The field of a topic's options hash with the version of the data."""

PAGES = 4
"""Pages of schedules per step, so that a million take some minutes but little of a core."""

log = logging.getLogger(__name__)


@cache
def data_version() -> str:
    """The version of the time zone data, such as `2026a`; empty if it cannot be found out."""
    for folder in map(Path, zoneinfo.TZPATH):
        if folder.is_dir():
            try:
                with (folder / "tzdata.zi").open(encoding="utf-8") as data:
                    found = re.search(r"version (\d{4}[a-z]+)", data.readline())
            except OSError:
                found = None
            return found[1] if found else ""
    try:
        return str(import_module("tzdata").IANA_VERSION)
    except ImportError:
        return ""


class ZoneData:
    """Checks the ticks and the wall-time messages of each topic once.

    Also removes the ids of wall-time messages whose time has come from the list of their topic.
    """

    def __init__(self, store: SyncStore, clock: ServerClock, version: str | None = None) -> None:
        self._store = store
        self._clock = clock
        self._version = data_version() if version is None else version
        self._errors = TopicErrors("wall times")
        self._turns = Turns()
        self._checks: dict[str, Iterator[None]] = {}
        """The rest of the check of each topic that has begun; an item is a page."""
        self._done: set[str] = set()
        self._failed: set[str] = set()

    def step(self, topics: Sequence[str]) -> list[str]:
        """Check some pages of the next topic that is not checked yet. Raises LisaError.

        Returns the topics without remaining wall-time messages.
        """
        emptied = self._clean(topics)
        self._check(topics)
        return emptied

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._errors.forget(topic)
        self._checks.pop(topic, None)
        self._done.discard(topic)
        self._failed.discard(topic)

    def _check(self, topics: Sequence[str]) -> None:
        if not self._version:
            return
        self._done.intersection_update(topics)
        left = [topic for topic in topics if topic not in self._done]
        if self._failed.issuperset(left):
            self._failed.clear()
        for topic in left:
            if topic not in self._failed:
                self._failed.add(topic)  # an error must not keep the topics after it waiting
                pages = self._checks.pop(topic, None) or self._check_topic(topic)
                if len(list(islice(pages, PAGES))) == PAGES:
                    self._checks[topic] = pages
                else:
                    self._done.add(topic)
                self._failed.discard(topic)
                return

    def _check_topic(self, topic: str) -> Iterator[None]:
        """Check the schedules and messages of one topic, page by page. Raises LisaError."""
        key = self._store.keys.topic(topic).options
        if text(self._store.ask("HGET", key, FIELD) or b"") >= self._version:
            return
        cursor: str | None = "0"
        while cursor is not None:
            cursor = self._check_page(topic, cursor)
            yield
        cursor = None
        while cursor != "0":
            cursor = self._check_local_page(topic, cursor or "0")
            yield
        self._store.ask("HSET", key, FIELD, self._version)

    def _check_page(self, topic: str, cursor: str) -> str | None:
        """Check one page of schedules; returns the cursor of the next one, None at the end."""
        records, following = self._store.drive(record_page(self._store, topic, cursor))
        now_ms = self._clock.now_ms()
        for name, record in records.items():
            definition, tick = record.definition, record.tick
            if not definition.cron or tick is None or tick <= now_ms or record.is_queued:
                continue
            if next_tick(definition, record.made_ms, now_ms) != tick:
                self._store.drive(schedules.align(self._store, topic, name))
                TopicLog(log, topic).info(
                    "schedule %s: moved, because the time zone data changed", name
                )
        return following

    # -- messages with a wall time

    def _clean(self, topics: Sequence[str]) -> list[str]:
        """Remove past ids from the lists of some of the topics. Raises LisaError.

        Each call covers the next page of topics. Returns the topics whose lists that emptied, so
        that they can be unlisted.
        """
        left = self._turns.next(topics)
        cleaned, removed = dict[str, None](), 0
        while left and removed < MOST_REMOVED:
            found = self._past(left)
            ask_all(self._store, [("ZREM", self._list(topic), *ids) for topic, ids in found])
            cleaned |= dict.fromkeys(topic for topic, _ in found)
            removed += sum(len(ids) for _, ids in found)
            left = [topic for topic, ids in found if len(ids) == IDS]
        counts = ask_each(
            self._store, {topic: [("EXISTS", self._list(topic))] for topic in cleaned}
        )
        return [topic for topic, (count,) in counts.items() if count == 0]

    def _past(self, topics: Sequence[str]) -> list[tuple[str, list[bytes]]]:
        """Up to `IDS` past ids of each topic that has any."""
        past_ms, found = self._clock.now_ms() - PAST_MS, list[tuple[str, list[bytes]]]()
        reads = {
            topic: [("ZRANGEBYSCORE", self._list(topic), "-inf", past_ms, "LIMIT", 0, IDS)]
            for topic in topics
        }
        for topic, (reply,) in ask_each(self._store, reads).items():
            if isinstance(reply, Exception):
                self._errors.failed(topic, errors.translated(reply, self._store.where))
                continue
            self._errors.passed(topic)
            if reply:
                found.append((topic, reply))
        return found

    def _list(self, topic: str) -> str:
        return self._store.keys.topic(topic).local

    def _check_local_page(self, topic: str, cursor: str) -> str:
        """Compute the due times of one page again; returns the cursor of the next one."""
        key, now_ms = self._list(topic), self._clock.now_ms()
        following, pairs = self._store.ask("ZSCAN", key, cursor, "COUNT", IDS)
        scores = [
            (text(message_id), int(float(at)))
            for message_id, at in zip(*[iter(pairs)] * 2, strict=True)
        ]
        listed = [(message_id, at) for message_id, at in scores if at > now_ms]
        if listed:
            window = self._store.drive(self._store.options(topic)).window or ""
            for part in chunks(listed, self._store.batch_size(topic, Reschedule)):
                self._move(topic, part, window, now_ms)
        return text(following)

    def _move(
        self, topic: str, listed: Sequence[tuple[str, int]], window: str, now_ms: int
    ) -> None:
        call = Inspect(topic, [member.partition(LISTED)[0] for member, _ in listed])
        found = self._store.call_by_id(call)
        members, items = list[str](), list[tuple[str, str]]()
        for (member, listed_ms), message_id, seen in zip(listed, call.ids, found, strict=True):
            due_ms = _moved(seen, member, listed_ms, window, now_ms)
            if due_ms is not None:
                members.append(member)
                items.append((message_id, f"{due_ms}@{listed_ms}"))
        if not items:
            return
        outcomes = self._store.call_by_id(Reschedule(topic, items))
        key = self._list(topic)
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
    except InvalidMessage:  # the window no longer opens
        return None
    return None if due_ms == listed_ms else due_ms
