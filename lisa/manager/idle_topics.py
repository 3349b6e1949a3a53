"""Which topics are idle. Periodic checks cover a few idle topics each time, and all others.

A topic stays idle only if a read showed that none of its messages is ready, in flight or in
retry. It is active again as soon as a client announces a message, a message falls due, or a check
finds something. So a check of an idle topic only makes up for announcements that were lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

from lisa.core.model.sharding import Shard
from lisa.core.store.store import SyncStore
from lisa.manager.bulk_reads import group_keys, lane_keys, topics_with_keys

FEW = 1_000
"""With up to this many topics none becomes idle: each check covers them all."""

ACTIVE_S = 90.0
"""How long a topic stays active at least: longer than a minute, so that a sample shows its end."""

PER_S = 64
"""Idle topics that each check covers per second since it last ran."""

AT_ONCE = 10_000
"""The most topics that become idle in one call."""


class IdleTopics:
    """The active and the idle topics of one manager. Thread-safe.

    on_active: called with an idle topic that became active.
    """

    def __init__(self, on_active: Callable[[Shard], None] = lambda _: None) -> None:
        self._on_active = on_active
        self._lock = threading.Lock()
        self._active: dict[Shard, float] = {}  # until when at least, as `time.monotonic`
        self._idle: dict[Shard, None] = {}
        self._unchecked: dict[Shard, None] = {}  # idle topics that may be in use after all
        self._rounds: dict[str, Iterator[Shard]] = {}  # the rest of each check's round
        self._last: dict[str, float] = {}  # when each check last took its share

    def mark_active(self, topic: str) -> None:
        """Treat a topic as active for the next `ACTIVE_S` seconds."""
        shard = Shard(topic)
        with self._lock:
            self._active[shard] = time.monotonic() + ACTIVE_S
            was_idle = shard in self._idle
            self._idle.pop(shard, None)
            self._unchecked.pop(shard, None)
        if was_idle:
            self._on_active(shard)

    def check(self, topic: str) -> None:
        """Have `retire` check a topic if it is idle."""
        with self._lock:
            if topic in self._idle:
                self._unchecked[Shard(topic)] = None

    def check_all(self) -> None:
        """Have `retire` check all idle topics, because another manager may have known more."""
        with self._lock:
            self._unchecked.update(self._idle)

    def add(self, topic: str) -> None:
        """Add a topic. Beyond `FEW`, it counts as idle until `retire` checks it."""
        shard = Shard(topic)
        with self._lock:
            if shard in self._active or shard in self._idle:
                return
            if len(self._active) + len(self._idle) < FEW:
                self._active[shard] = -math.inf
            else:
                self._idle[shard] = self._unchecked[shard] = None

    def forget(self, topic: str) -> None:
        """Remove a topic."""
        with self._lock:
            self._active.pop(Shard(topic), None)
            self._idle.pop(Shard(topic), None)
            self._unchecked.pop(Shard(topic), None)

    def is_idle(self, topic: str) -> bool:
        """Whether nothing of a topic is ready, in flight or in retry, as far as is known."""
        return topic in self._idle

    def active(self) -> list[Shard]:
        """All active topics, sorted by name."""
        return sorted(self._active)

    def share(self, check: str) -> list[Shard]:
        """The idle topics that follow those which the named check covered last."""
        now = time.monotonic()
        count = max(1, int(PER_S * (now - self._last.get(check, now - 1.0))))
        self._last[check] = now
        part = list(islice(self._rounds.get(check, iter(())), count))
        if not part:
            self._rounds[check] = iter(list(self._idle))
            part = list(islice(self._rounds[check], count))
        return [shard for shard in part if shard in self._idle]

    def due(self, check: str) -> list[Shard]:
        """The topics for the named check: all active ones, and its share of the idle ones."""
        return [*self.active(), *self.share(check)]

    def retire(self, store: SyncStore) -> None:
        """Find the topics that became idle, and check those that only seem idle.

        Raises ServerUnavailable.
        """
        now, is_many = time.monotonic(), len(self._active) + len(self._idle) > FEW
        ended = [
            (shard, until)
            for shard, until in list(self._active.items())
            if is_many and until <= now
        ]
        checked: dict[Shard, float | None] = dict.fromkeys(list(self._unchecked))
        checked.update(ended)
        known = [shard for shard in checked if store.known_groups(shard) is not None][:AT_ONCE]
        keys: dict[str, list[str]] = {
            shard: [
                *[key for own in group_keys(store, shard) for key in (own.entries, own.retry)],
                *[own.parked for own in lane_keys(store, shard)],
            ]
            for shard in known
        }
        used = {*topics_with_keys(store, keys)}
        for shard in known:
            if shard in used:
                self.mark_active(shard)
                continue
            with self._lock:
                self._unchecked.pop(shard, None)
                until = checked[shard]
                if until is not None and self._active.get(shard) == until:
                    del self._active[shard]
                    self._idle[shard] = None
