"""waiting, retry -> ready: at each due instant, and again at once until nothing is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lisa.core.errors import LisaError
from lisa.core.keys import TopicKeys
from lisa.core.metrics.numbers import Tally
from lisa.core.store import SyncStore
from lisa.core.transitions.promote import Promote, Promoted
from lisa.manager.backpressure import Backpressure
from lisa.manager.expirer import Expirer
from lisa.manager.lookout import PAGE, ask_all, head_command, head_ms
from lisa.manager.loop import Outcome
from lisa.manager.server_clock import ServerClock

__all__ = ["Promoter"]

TOO_EARLY_S = 0.0003
TICKS = 8
"""A glance takes a page of topics, or this part of them if that is more."""


class Promoter:
    """Moves what is due. `batch` says how many messages one call may move, by topic."""

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        expirer: Expirer,
        batch: Callable[[str], int],
    ) -> None:
        self.moved = Tally()
        self._store = store
        self._clock = clock
        self._expirer = expirer
        self._batch = batch
        self._full = Backpressure(store, clock, batch)
        self._last: dict[str, float] = {}
        self._turn = ""

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """One call for each topic, in one round trip; when to look at each again."""
        pauses = self._full.still(topics)
        calls = [Promote(topic, self._batch(topic)) for topic in topics if topic not in pauses]
        sent = time.monotonic()
        results = iter(self._run(calls))
        received = time.monotonic()
        return [
            pauses[topic] if topic in pauses else self._next(topic, next(results), sent, received)
            for topic in topics
        ]

    def _run(self, calls: Sequence[Promote]) -> Sequence[Promoted | LisaError]:
        if len(calls) > 1:
            return self._store.drive(self._store.run_many(calls))
        try:
            return [self._store.call(call) for call in calls]
        except LisaError as error:
            return [error]

    def glance(self, topics: Sequence[str]) -> dict[str, float]:
        """When something is due next, by topic, for those whose turn it is. Raises LisaError.

        This is the net below the instants that are known and the wake-ups that are heard. It asks
        for heads, with plain reads; every topic has its turn within `TICKS` calls.
        """
        some = self._whose_turn(topics)
        keys = {topic: self._store.keys.topic(topic) for topic in some}
        retries = {topic: self._retries(keys[topic]) for topic in some}
        heads = ask_all(self._store, [head_command(keys[topic].waiting) for topic in some])
        now = time.monotonic()
        self._last |= dict.fromkeys(
            [one for one, head in zip(some, heads, strict=True) if isinstance(head, list)], now
        )
        asked = [topic for topic in some if retries[topic]]
        found = ask_all(self._store, [("EXISTS", *retries[topic]) for topic in asked])
        failing = [
            (topic, zset)
            for topic, count in zip(asked, found, strict=True)
            if count != 0
            for zset in retries[topic]
        ]
        heads += ask_all(self._store, [head_command(zset) for _, zset in failing])
        instants: dict[str, float] = {}
        for topic, head in zip([*some, *[topic for topic, _ in failing]], heads, strict=True):
            due_ms = head_ms(head)
            if due_ms is not None:
                at = self._clock.instant(due_ms)
                instants[topic] = min(at, instants.get(topic, at))
        return instants

    def _retries(self, keys: TopicKeys) -> list[str]:
        return [keys.group(name).retry for name in self._store.known_groups(keys.topic) or ()]

    def _whose_turn(self, topics: Sequence[str]) -> Sequence[str]:
        """The topics, in order of name, that follow those of the last glance."""
        most = max(PAGE, -(-len(topics) // TICKS))
        if len(topics) <= most:
            return topics
        later = [topic for topic in topics if topic > self._turn]
        some = (later + [topic for topic in topics if topic <= self._turn])[:most]
        self._turn = some[-1]
        return some

    def age_s(self, topic: str) -> float | None:
        """Seconds since a topic was last looked at with success; None if it never was."""
        last = self._last.get(topic)
        return None if last is None else time.monotonic() - last

    def forget(self, topic: str) -> None:
        """Keep nothing of a topic that is gone."""
        self._full.forget(topic)
        self._last.pop(topic, None)

    def _next(
        self, topic: str, result: Promoted | LisaError, sent: float, received: float
    ) -> Outcome:
        if isinstance(result, LisaError):
            return result
        self._last[topic] = received
        self._clock.witness(result.now_ms, sent, received)
        if result.moved:
            self.moved.add(result.moved, "promoted")
        if result.paused:
            return None  # whoever resumes the topic wakes us
        if result.expired:
            try:
                self._expirer.end(topic, result.expired)
            except LisaError as error:
                return error
        if result.full:
            return received + self._full.met(topic, result.moved, received)
        if result.cut_short or result.expired:
            self._full.eased(topic)
            return received
        self._full.forget(topic)
        if result.next_due_ms is None:
            return None
        at = self._clock.instant(result.next_due_ms)
        # Not due by the script's clock, but by ours: it became due on the way back, or our idea
        # of that clock is off by a trifle. Never call without any pause.
        early = result.now_ms < result.next_due_ms and at <= received
        return received + TOO_EARLY_S if early else at
