"""Back-off for topics with a full group: when to check its ready stream for room again.

A call of promote reads up to a batch of due messages, even if it can move none or only a few. So
plain reads check the room first, and promote follows once enough room is free. Only the full group
is delayed: messages of other groups are promoted when they are due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.core.model.backoff import Backoff
from lisa.core.model.options import TopicOptions
from lisa.core.store.store import SyncStore
from lisa.manager.bulk_reads import ask_all, head_command, head_ms, int_or
from lisa.manager.server_clock import ServerClock

FIRST_S = 0.001
LONGEST_S = 0.020
LONGEST_UNREAD_S = 0.250
"""Longest pause once no consumer has read the full stream for `CERTAIN_S`."""
CERTAIN_S = 1.0
"""Promote is called at least this often, because it also finds messages past their ttl."""
WORTH_IT = 4
"""A call is worth it with room for a batch, or for `max_ready / WORTH_IT` if that is less."""

MAX_READY = TopicOptions().max_ready
_Question = tuple[str | int, ...]


@dataclass(slots=True)
class _Full:
    """The state of one topic with full groups.

    groups: its full groups.
    backoff: the pauses between checks.
    asked: when promote was last called.
    due_at: when a message is due to another group; promote is then called without a check.
    unread: number of unread entries of each full group at the last check.
    since: when `unread` last changed.
    enough: for a topic with one group, the number of unread entries at which a call becomes worth
        it, once known. There, room is the only reason for a call.
    """

    groups: tuple[str, ...]
    backoff: Backoff
    asked: float
    due_at: float = math.inf
    unread: tuple[int, ...] = ()
    since: float = 0.0
    enough: int | None = None

    def is_patient(self, declared: Sequence[str], now: float) -> bool:
        """Whether to check with plain reads before the next call of promote."""
        is_known = set(self.groups) <= set(declared)
        return is_known and now < self.due_at and now - self.asked < CERTAIN_S


class Backpressure:
    """Remembers topics with full groups. `batch` returns the most messages per call by topic."""

    def __init__(self, store: SyncStore, clock: ServerClock, batch: Callable[[str], int]) -> None:
        self._store = store
        self._clock = clock
        self._batch = batch
        self._full: dict[str, _Full] = {}

    def record_full(
        self, topic: str, groups: tuple[str, ...], *, moved: int, now: float, due_at: float
    ) -> float:
        """Record that promote found full groups; returns the instant of the next check.

        The next check is at `due_at`, when a message is due to another group, or after a pause of
        1, 2, 4 .. 20 ms while no message moves. Moves to other groups do not shorten the pause.
        """
        full = self._full.get(topic)
        if full is None or full.groups != groups:
            full = self._full[topic] = _Full(groups, Backoff(FIRST_S, LONGEST_UNREAD_S), now)
        elif moved and len(self._store.known_groups(topic) or ()) == 1:
            full.backoff.reset()
        elif full.backoff.pause_s < LONGEST_S:
            full.backoff.lengthen(LONGEST_S)
        full.asked, full.due_at, full.enough = now, due_at, None
        return min(now + full.backoff.pause_s, due_at)

    def record_room(self, topic: str) -> None:
        """Record that a whole batch found room; resets the pause."""
        full = self._full.get(topic)
        if full is not None:
            full.backoff.reset()

    def forget(self, topic: str) -> None:
        """Drop the state of a topic whose groups have room, or which was removed."""
        self._full.pop(topic, None)

    def postponed(self, topics: Sequence[str]) -> dict[str, float]:
        """The topics for which a call is not worth it yet, each with the instant of its next check.

        Raises ServerUnavailable.
        """
        if not self._full:
            return {}
        now = time.monotonic()
        asked, questions = list[tuple[str, _Full, list[_Question]]](), list[_Question]()
        for topic in topics:
            full, groups = self._full.get(topic), self._store.known_groups(topic)
            if full and groups and full.is_patient(groups, now):
                asked.append((topic, full, self._questions(topic, groups, full)))
                questions += asked[-1][2]
        replies = iter(ask_all(self._store, questions))
        now_ms, again = self._clock.now_ms(), dict[str, float]()
        for topic, full, own in asked:
            idle_until = self._idle_until(topic, full, [next(replies) for _ in own], now_ms)
            if idle_until > 0:
                full.due_at = idle_until
                again[topic] = min(time.monotonic() + full.backoff.pause_s, idle_until)
        return again

    def _questions(self, topic: str, groups: Sequence[str], full: _Full) -> list[_Question]:
        """Commands for the full groups' room, `max_ready`, and the heads of all due-time ZSETs.

        The heads come in this order: waiting, retries of full groups, retries of other groups.
        """
        keys = self._store.keys.topic(topic)
        room: list[_Question] = [
            question
            for name in full.groups
            for question in (
                ("XLEN", keys.group(name).ready),
                ("XPENDING", keys.group(name).ready, name),
            )
        ]
        if full.enough is not None:
            return room
        others = [name for name in groups if name not in full.groups]
        return [
            *room,
            ("HGET", keys.options, "max_ready"),
            head_command(keys.waiting),
            *[head_command(keys.group(name).retry) for name in (*full.groups, *others)],
        ]

    def _idle_until(self, topic: str, full: _Full, replies: Sequence[Any], now_ms: int) -> float:
        """Until when only room can make a call worth it; 0 if a call is worth it now.

        A call is worth it when a group has room for its due messages, or another group has due
        messages.
        """
        if any(isinstance(reply, Exception) for reply in replies):
            return 0.0  # the script repairs or reports the error
        count = len(full.groups)
        unread = tuple(replies[2 * i] - replies[2 * i + 1][0] for i in range(count))
        now = time.monotonic()
        if unread != full.unread:
            full.unread, full.since = unread, now
        longest = LONGEST_UNREAD_S if now - full.since > CERTAIN_S else LONGEST_S
        full.backoff.lengthen(longest)
        if full.enough is not None:
            return math.inf if unread[0] > full.enough else 0.0
        most = int_or(replies[2 * count], MAX_READY)
        heads = [head_ms(head) for head in replies[2 * count + 1 :]]
        waits, *retries = [head is not None and head <= now_ms for head in heads]
        enough = most - max(1, min(self._batch(topic), most // WORTH_IT))
        owed = [held for held, due in zip(unread, retries, strict=False) if due]
        if len(retries) > 1:
            # A waiting message goes to all groups at once; a full group gets it as a retry.
            if waits or any(retries[count:]) or not owed or min(owed) <= enough:
                return 0.0
            later = [head for head in heads if head is not None and head > now_ms]
            return self._clock.instant(min(later)) if later else math.inf
        if not waits and not owed:
            return 0.0
        full.enough = enough
        return math.inf if unread[0] > enough else 0.0
