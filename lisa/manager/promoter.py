"""waiting, retry -> ready: at each due instant, and again at once until nothing is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lisa.core.errors import LisaError
from lisa.core.store import SyncStore
from lisa.core.transitions.promote import Promote, Promoted
from lisa.manager.expirer import Expirer
from lisa.manager.loop import Outcome
from lisa.manager.server_clock import ServerClock

__all__ = ["Promoter"]

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.020
TOO_EARLY_S = 0.0003


class Promoter:
    """Moves what is due. `batch` says how many messages one call may move, by topic."""

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        expirer: Expirer,
        batch: Callable[[str], int],
    ) -> None:
        self._store = store
        self._clock = clock
        self._expirer = expirer
        self._batch = batch
        self._pauses: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """One call for each topic, in one round trip; when to look at each again."""
        calls = [Promote(topic, self._batch(topic)) for topic in topics]
        sent = time.monotonic()
        results = self._run(calls)
        received = time.monotonic()
        return [
            self._next(topic, result, sent, received)
            for topic, result in zip(topics, results, strict=True)
        ]

    def _run(self, calls: Sequence[Promote]) -> Sequence[Promoted | LisaError]:
        if len(calls) > 1:
            return self._store.drive(self._store.run_many(calls))
        try:
            return [self._store.call(calls[0])]
        except LisaError as error:
            return [error]

    def age_s(self, topic: str) -> float | None:
        """Seconds since a topic was last looked at with success; None if it never was."""
        last = self._last.get(topic)
        return None if last is None else time.monotonic() - last

    def forget(self, topic: str) -> None:
        """Keep nothing of a topic that is gone."""
        self._pauses.pop(topic, None)
        self._last.pop(topic, None)

    def _next(
        self, topic: str, result: Promoted | LisaError, sent: float, received: float
    ) -> Outcome:
        if isinstance(result, LisaError):
            return result
        self._last[topic] = received
        self._clock.witness(result.now_ms, sent, received)
        if result.paused:
            return None  # whoever resumes the topic wakes us
        if result.expired:
            try:
                self._expirer.end(topic, result.expired)
            except LisaError as error:
                return error
        if result.full:
            return received + self._pause(topic, result.moved)
        self._pauses.pop(topic, None)
        if result.cut_short or result.expired:
            return received
        if result.next_due_ms is None:
            return None
        at = self._clock.instant(result.next_due_ms)
        # Not due by the script's clock, but by ours: it became due on the way back, or our idea
        # of that clock is off by a trifle. Never call without any pause.
        early = result.now_ms < result.next_due_ms and at <= received
        return received + TOO_EARLY_S if early else at

    def _pause(self, topic: str, moved: int) -> float:
        """After `full`: 1, 2, 4 .. 20 ms while nothing moves, shorter again as room appears."""
        before = self._pauses.get(topic)
        if before is None:
            pause = FIRST_PAUSE_S
        elif moved:
            pause = max(before / 2, FIRST_PAUSE_S)
        else:
            pause = min(before * 2, LONGEST_PAUSE_S)
        self._pauses[topic] = pause
        return pause
