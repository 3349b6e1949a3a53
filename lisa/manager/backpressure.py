"""Topics with a group whose ready stream is full: when to ask whether it has room again.

Asking by promote would read and compare up to a batch of due messages, to move none or a few. So
plain reads tell how much room there is, and promote is called once that is worth it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.core.options import TopicOptions
from lisa.core.store import SyncStore
from lisa.manager.lookout import ask_all, head_command, head_ms, whole
from lisa.manager.server_clock import ServerClock

__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "Backpressure"]

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.020
CERTAIN_S = 1.0
"""At least so often promote itself is asked: it also sees to what is past its ttl."""
WORTH_IT = 4
"""Room for a batch is worth a call, or this part of what a stream may hold if that is less."""

MAX_READY = TopicOptions().max_ready
_Question = tuple[str | int, ...]


@dataclass(slots=True)
class _Full:
    """One topic: how long the next pause is, and when promote was last asked.

    `enough` is how few unread entries make a call worth it, once that is known; with one group
    nothing else can.
    """

    pause_s: float
    asked: float
    enough: int | None = None


class Backpressure:
    """Remembers which topics are full. `batch` says how many messages one call may move."""

    def __init__(self, store: SyncStore, clock: ServerClock, batch: Callable[[str], int]) -> None:
        self._store = store
        self._clock = clock
        self._batch = batch
        self._full: dict[str, _Full] = {}

    def met(self, topic: str, moved: int, now: float) -> float:
        """Promote found a full group: for how many seconds to leave the topic alone.

        1, 2, 4 .. 20 ms while nothing moves.
        """
        full = self._full.get(topic)
        if full is None:
            full = self._full[topic] = _Full(FIRST_PAUSE_S, now)
        else:
            full.pause_s = FIRST_PAUSE_S if moved else min(full.pause_s * 2, LONGEST_PAUSE_S)
        full.asked, full.enough = now, None
        return full.pause_s

    def eased(self, topic: str) -> None:
        """A whole batch found room: whoever made it is quick, and not to be kept waiting."""
        full = self._full.get(topic)
        if full is not None:
            full.pause_s = FIRST_PAUSE_S

    def forget(self, topic: str) -> None:
        """The topic is not full any more, or gone."""
        self._full.pop(topic, None)

    def still(self, topics: Sequence[str]) -> dict[str, float]:
        """Of some topics, those for which a call is not yet worth it, and when to ask again.

        Raises ServerUnavailable.
        """
        if not self._full:
            return {}
        now = time.monotonic()
        asked, questions = list[tuple[str, _Full, list[_Question]]](), list[_Question]()
        for topic in topics:
            full, groups = self._full.get(topic), self._store.known_groups(topic)
            if full and groups and now - full.asked < CERTAIN_S:
                asked.append((topic, full, self._questions(topic, groups, full)))
                questions += asked[-1][2]
        replies = iter(ask_all(self._store, questions))
        now_ms, again = self._clock.now_ms(), dict[str, float]()
        for topic, full, own in asked:
            idle_until = self._idle_until(topic, full, [next(replies) for _ in own], now_ms)
            if idle_until > 0:
                full.pause_s = min(full.pause_s * 2, LONGEST_PAUSE_S)
                again[topic] = min(time.monotonic() + full.pause_s, idle_until)
        return again

    def _questions(self, topic: str, groups: Sequence[str], full: _Full) -> list[_Question]:
        keys = self._store.keys.topic(topic)
        own = [keys.group(name) for name in groups]
        room: list[_Question] = [
            one
            for group, name in zip(own, groups, strict=True)
            for one in (("XLEN", group.ready), ("XPENDING", group.ready, name))
        ]
        if full.enough is not None:
            return room
        return [
            *room, ("HGET", keys.options, "max_ready"), head_command(keys.waiting),
            *[head_command(group.retry) for group in own],
        ]  # fmt: skip

    def _idle_until(self, topic: str, full: _Full, replies: Sequence[Any], now_ms: int) -> float:
        """The instant before which only room could make a call worth it; 0 if one is worth it now.

        It is: a group has room for what is due to it, or there is another reason to ask.
        """
        if any(isinstance(reply, Exception) for reply in replies):
            return 0.0  # the script mends what it can, or tells
        if full.enough is not None:
            return math.inf if replies[0] - replies[1][0] > full.enough else 0.0
        groups = (len(replies) - 2) // 3
        unread = [replies[2 * i] - replies[2 * i + 1][0] for i in range(groups)]
        most = whole(replies[2 * groups], MAX_READY)
        heads = [head_ms(head) for head in replies[2 * groups + 1 :]]
        waits, *retries = [head is not None and head <= now_ms for head in heads]
        enough = most - max(1, min(self._batch(topic), most // WORTH_IT))
        if groups > 1:
            # What waits is dealt out at once: a full group gets it as a retry.
            owed = [count for count, due in zip(unread, retries, strict=True) if due]
            if waits or not owed or min(owed) <= enough:
                return 0.0
            later = [head for head in heads if head is not None and head > now_ms]
            return self._clock.instant(min(later)) if later else math.inf
        if not waits and not retries[0]:
            return 0.0
        full.enough = enough
        return math.inf if unread[0] > enough else 0.0
