"""The history of a topic's counters: a sample per minute for 7 days and per hour for 90 days.

The stream id of a sample is its minute, so several managers write only one sample. Unchanged
counters get no new sample; readers carry the last one forward.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lisa.core.model.errors import LisaError
from lisa.core.model.stream import entry_ms
from lisa.core.redis.flow import Command
from lisa.core.store.replies import pairs
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.manager.bulk_reads import ask_each

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
MINUTES_KEPT_MS = 7 * DAY_MS
HOURS_KEPT_MS = 90 * DAY_MS
PAGE = 200
MOST_PAGES = 100
AHEAD_MS = HOUR_MS
"""Samples further ahead of the clock were taken before it was set back."""
COPY_LIVES_MS = HOUR_MS
"""Expiry of a copy that a manager did not finish."""


class Sampler:
    """Writes the `history` stream of topics."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._last: dict[str, object] = {}  # raw counters in the latest sample

    def pick(self, topics: Sequence[str], now_ms: int) -> list[str]:
        """Topics whose counters may differ from the latest sample; all topics on the hour.

        Raises ServerUnavailable.
        """
        if now_ms // MINUTE_MS * MINUTE_MS % HOUR_MS == 0:
            return list(topics)
        reads = {topic: [("HGETALL", self._store.keys.topic(topic).stats)] for topic in topics}
        return [
            topic
            for topic, (stats,) in ask_each(self._store, reads).items()
            if topic not in self._last or self._last[topic] != stats
        ]

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._last.pop(topic, None)

    def step(self, topic: str, now_ms: int) -> bool:
        """Take this minute's sample; returns whether one was written. Raises LisaError."""
        keys = self._store.keys.topic(topic)
        minute_ms = now_ms - now_ms % MINUTE_MS
        reply = self._store.ask("HGETALL", keys.stats)
        stats = pairs(reply)
        if not stats:
            self._last[topic] = reply
            return False
        written = False
        last = self._latest(keys.history)
        if last and entry_ms(last[0][0]) > minute_ms + AHEAD_MS:
            self._drop_later(keys.history, minute_ms)
            last = self._latest(keys.history)
        known = bool(last) and pairs(last[0][1]) == stats
        if not known and not (last and entry_ms(last[0][0]) >= minute_ms):
            # In a fixed order, the server stores the field names once for many samples.
            fields = [part for name in sorted(stats) for part in (name, stats[name])]
            written = self._add(keys.history, minute_ms, fields)
        if known or written:
            self._last[topic] = reply
        if minute_ms % HOUR_MS == 0:
            self._thin(keys.history, _certain_ms(minute_ms))
        return written

    def _latest(self, history: str) -> Any:
        return self._store.ask("XREVRANGE", history, "+", "-", "COUNT", 1)

    def _drop_later(self, history: str, now_ms: int) -> None:
        """Replace a history by its samples up to now: a stream accepts no lower ids."""
        samples = list(samples_of(self._store, history, now_ms))
        if samples:
            copy = write_copy(self._store, history, samples)
            self._store.ask("PERSIST", copy)
            self._store.ask("RENAME", copy, history)
        else:
            self._store.ask("UNLINK", history)

    def _add(self, history: str, minute_ms: int, fields: list[bytes]) -> bool:
        oldest = _certain_ms(minute_ms) - HOURS_KEPT_MS
        try:
            self._store.ask("XADD", history, "MINID", "~", f"{oldest}-0", f"{minute_ms}-0", *fields)
        except LisaError as error:
            if "equal or smaller" in str(error):
                return False  # another manager wrote the sample first
            raise
        return True

    def _thin(self, history: str, now_ms: int) -> None:
        """Delete samples older than 7 days, except the last one up to each full hour."""
        start, end = "-", f"{now_ms - MINUTES_KEPT_MS}"
        for _ in range(MOST_PAGES):
            page = self._store.ask("XRANGE", history, start, end, "COUNT", PAGE)
            times = [entry_ms(entry) for entry, _ in page]
            last_of_hour = {-(-ms // HOUR_MS): ms for ms in times}
            surplus = [f"{ms}-0" for ms in times if last_of_hour[-(-ms // HOUR_MS)] != ms]
            if surplus:
                self._store.ask("XDEL", history, *surplus)
            if len(page) < PAGE:
                return
            # The page's last hour may continue in the next page, so read its sample again.
            start = text(page[-1][0])


def samples_of(
    store: SyncStore, history: str, end: int | str = "+"
) -> Iterator[tuple[bytes, list[bytes]]]:
    """The entries and fields of a history. Raises LisaError."""
    start = "-"
    while page := store.ask("XRANGE", history, start, end, "COUNT", PAGE):
        yield from page
        start = f"({text(page[-1][0])}"


def write_copy(store: SyncStore, history: str, samples: Sequence[tuple[Any, Sequence[Any]]]) -> str:
    """Write samples to a new key, which expires unless it replaces the history; returns the key."""
    copy = f"{history}:{secrets.token_hex(8)}"
    for page in chunks(samples, PAGE):
        commands: list[Command] = [("XADD", copy, entry, *fields) for entry, fields in page]
        store.drive(store.commands([*commands, ("PEXPIRE", copy, COPY_LIVES_MS)]))
    return copy


def _certain_ms(now_ms: int) -> int:
    """The earlier of the server's time and this machine's: what is deleted cannot be restored."""
    return min(now_ms, int(time.time() * 1_000))
