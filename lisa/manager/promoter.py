"""Moves due messages from waiting and retry to ready, at each due time, until none is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import TopicKeys
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promote, Promoted
from lisa.manager.backpressure import Backpressure
from lisa.manager.bulk_reads import PAGE, ask_all, head_command, head_ms
from lisa.manager.expirer import Expirer
from lisa.manager.loop import Outcome
from lisa.manager.server_clock import ServerClock

TOO_EARLY_S = 0.0003
"""Pause after a call that found the next message due only by the local clock estimate."""

FAST_INTERVAL_S = 0.002
FAST_RATE = 1_500.0
"""At more messages per second, a topic without its own interval is promoted every 2 ms.

Below, calls for every millisecond cost little more, and messages are not delayed.
"""

RATE_OVER_S = 0.1

SECOND_S = 0.005
"""A manager promotes a topic this much after each due time while another manager is faster."""

TICKS = 8
"""`poll` covers all topics within this many calls, or a page of topics per call if more."""


class PromotionPace:
    """The rate of one topic, and when this manager may promote it again.

    earliest: the end of the interval after the last promotion, as `time.monotonic`.
    lag_s: how long this manager lets another one go first. The other one's work would be repeated
        in vain otherwise. It ends as soon as a promotion finds messages that the other one left.
    """

    __slots__ = ("_at", "_per_s", "_total", "earliest", "lag_s")

    def __init__(self) -> None:
        self.earliest = -math.inf
        self.lag_s = 0.0
        self._total: int | None = None
        self._at = -math.inf
        self._per_s = 0.0

    def record(self, messages: float, interval_ms: int, now: float) -> None:
        """Record a promotion; `interval_ms` is the topic's option."""
        elapsed = max(1e-6, now - self._at)
        self._at = now
        self._per_s -= math.expm1(-elapsed / RATE_OVER_S) * (messages / elapsed - self._per_s)
        fast_s = FAST_INTERVAL_S if self._per_s > FAST_RATE else 0.0
        self.earliest = now + (interval_ms / 1000 or fast_s)

    def compare(self, moved: int, total: int) -> None:
        """Compare how much a promotion moved with how much all managers have moved so far."""
        if moved:
            self.lag_s = 0.0
        elif self._total is not None and total > self._total:
            self.lag_s = SECOND_S
        self._total = total


class Promoter:
    """Moves due messages.

    batch: returns the maximum number of messages per call for a topic.
    observe: called with each topic and the result after each promotion.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        expirer: Expirer,
        batch: Callable[[str], int],
        observe: Callable[[str, Promoted | LisaError], None] = lambda _topic, _result: None,
    ) -> None:
        self.moved = Tally()
        self._observe = observe
        self._store = store
        self._clock = clock
        self._expirer = expirer
        self._batch = batch
        self._backpressure = Backpressure(store, clock, batch)
        self._last: dict[str, float] = {}
        self._paces: dict[str, PromotionPace] = {}
        self._polled_up_to = ""
        self._expected: dict[str, Sequence[str]] = {}
        self._unreadable: set[str] = set()

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Promote each topic in one round trip; returns when each topic is due next."""
        pauses = self._backpressure.postponed(topics)
        calls = [
            Promote(topic, self._batch(topic), self._expected.pop(topic, ()))
            for topic in topics
            if topic not in pauses
        ]
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

    def poll(self, topics: Sequence[str], others: Sequence[str] = ()) -> dict[str, float]:
        """The next due instant of some topics, by topic, from plain reads. Raises LisaError.

        A safety net in case an announcement was lost. Each call covers the next part of the topics,
        so that every topic is covered within `TICKS` calls, and all of the others. A topic with a
        newly unreadable key is due now, so that `step` reports the error.
        """
        some = [*self._next_part(topics), *others]
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
        read = list(zip([*some, *[topic for topic, _ in failing]], heads, strict=True))
        unreadable = {topic for topic, head in read if isinstance(head, Exception)}
        instants |= dict.fromkeys(unreadable - self._unreadable, now)
        self._unreadable = self._unreadable.difference(some) | unreadable
        for topic, head in read:
            due_ms = head_ms(head)
            if due_ms is not None:
                at = self._paced(topic, self._clock.instant(due_ms))
                instants[topic] = min(at, instants.get(topic, at))
        return instants

    def _retries(self, keys: TopicKeys) -> list[str]:
        return [keys.group(name).retry for name in self._store.known_groups(keys.topic) or ()]

    def _next_part(self, topics: Sequence[str]) -> Sequence[str]:
        """The topics that follow those of the last call, in order of name."""
        most = max(PAGE, -(-len(topics) // TICKS))
        if len(topics) <= most:
            return topics
        later = [topic for topic in topics if topic > self._polled_up_to]
        some = (later + [topic for topic in topics if topic <= self._polled_up_to])[:most]
        self._polled_up_to = some[-1]
        return some

    def lag_s(self, topic: str) -> float:
        """How long to let another manager go first after an announcement for a topic."""
        pace = self._paces.get(topic)
        return 0.0 if pace is None else pace.lag_s

    def age_s(self, topic: str) -> float | None:
        """Seconds since the last successful promotion or poll of a topic; None if there is none."""
        last = self._last.get(topic)
        return None if last is None else time.monotonic() - last

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._backpressure.forget(topic)
        self._expirer.forget(topic)
        self._last.pop(topic, None)
        self._paces.pop(topic, None)
        self._expected.pop(topic, None)
        self._unreadable.discard(topic)

    def _next(
        self, topic: str, result: Promoted | LisaError, sent: float, received: float
    ) -> Outcome:
        self._observe(topic, result)
        if isinstance(result, LisaError):
            return result
        self._last[topic] = received
        self._clock.observe(result.now_ms, sent, received)
        if result.next_ids and not self._store.has_nodes:  # readers of a cluster do not use them
            self._expected[topic] = result.next_ids
        if result.moved:
            self.moved.add(result.moved, "promoted")
            groups = len(self._store.known_groups(topic) or ()) or 1
            pace = self._paces.setdefault(topic, PromotionPace())
            pace.record(result.moved / groups, result.interval_ms, received)
        if result.paused:
            return None  # resuming the topic announces it
        if result.moved or result.next_due_ms is not None:
            pace = self._paces.setdefault(topic, PromotionPace())
            pace.compare(result.moved, result.total)
        if result.expired or self._expirer.has_unanswered(topic):
            try:
                self._expirer.end(topic, result.expired)
            except LisaError as error:
                return error
        if result.full:
            due_at = self._next_of_others(topic, result, received)
            return self._backpressure.record_full(
                topic, result.full, moved=result.moved, now=received, due_at=due_at
            )
        if result.cut_short or result.expired:
            self._backpressure.record_room(topic)
            return received
        self._backpressure.forget(topic)
        return self._next_due(topic, result, received)

    def _next_of_others(self, topic: str, result: Promoted, received: float) -> float:
        """When a message is due to a group that is not full; infinite for a single group."""
        if len(self._store.known_groups(topic) or ()) < 2:
            return math.inf
        if result.cut_short or result.expired:
            return received
        at = self._next_due(topic, result, received)
        return math.inf if at is None else at

    def _next_due(self, topic: str, result: Promoted, received: float) -> float | None:
        if result.next_due_ms is None:
            return None
        at = self._clock.instant(result.next_due_ms)
        # Due by the local estimate but not by the script's clock: the message became due meanwhile,
        # or the estimate is slightly off. Always pause, so that calls do not spin.
        if result.now_ms < result.next_due_ms and at <= received:
            at = received + TOO_EARLY_S
        return self._paced(topic, at)

    def _paced(self, topic: str, at: float) -> float:
        """An instant, after another manager's turn and the interval since the last promotion."""
        pace = self._paces.get(topic)
        return at if pace is None else max(at + pace.lag_s, pace.earliest)
