"""Moves due messages from waiting and retry to ready, at each due time, until none is due.

A topic with a full group is checked after growing pauses. A call of promote reads up to a batch of
due messages, even if it can move none or only a few. So plain reads check the room first, and
promote follows once enough room is free. Only the full group is delayed: messages of other groups
are promoted when they are due.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.core.metrics.numbers import Tally
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import LisaError
from lisa.core.model.options import LARGEST_BATCH, TopicOptions
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promote, Promoted
from lisa.manager.bulk_reads import PAGE, ask_all, head_command, head_ms, int_or
from lisa.manager.expirer import Expirer
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.loop import Outcome
from lisa.manager.reclaimer import LeaseHold
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


class _Pace:
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

    def record(self, result: Promoted, groups: int, now: float) -> None:
        """Record a promotion: how much it moved, and how much all managers have moved so far."""
        if result.moved:
            elapsed = max(1e-6, now - self._at)
            self._at = now
            rate = result.moved / groups / elapsed
            self._per_s -= math.expm1(-elapsed / RATE_OVER_S) * (rate - self._per_s)
            fast_s = FAST_INTERVAL_S if self._per_s > FAST_RATE else 0.0
            self.earliest = now + (result.interval_ms / 1000 or fast_s)
            self.lag_s = 0.0
        elif self._total is not None and result.total > self._total:
            self.lag_s = SECOND_S
        self._total = result.total


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
    """Decides for topics with full groups when to check their ready streams for room again.

    batches: the most messages per call, for topics that limit them.
    """

    def __init__(self, store: SyncStore, clock: ServerClock, batches: Mapping[str, int]) -> None:
        self.full: dict[str, _Full] = {}
        self._store = store
        self._clock = clock
        self._batches = batches

    def record_full(self, topic: str, result: Promoted, now: float, due_at: float) -> float:
        """Record that promote found full groups; returns the instant of the next check.

        The next check is at `due_at`, when a message is due to another group, or after a pause of
        1, 2, 4 .. 20 ms while no message moves. Moves to other groups do not shorten the pause.
        """
        full = self.full.get(topic)
        if full is None or full.groups != result.full:
            backoff = Backoff(FIRST_S, LONGEST_UNREAD_S)
            full = self.full[topic] = _Full(result.full, backoff, now)
        elif result.moved and len(self._store.known_groups(topic) or ()) == 1:
            full.backoff.reset()
        elif full.backoff.pause_s < LONGEST_S:
            full.backoff.lengthen(LONGEST_S)
        full.asked, full.due_at, full.enough = now, due_at, None
        return min(now + full.backoff.pause_s, due_at)

    def record_room(self, topic: str) -> None:
        """Record that a whole batch found room; resets the pause."""
        full = self.full.get(topic)
        if full is not None:
            full.backoff.reset()

    def postponed(self, topics: Sequence[str]) -> dict[str, float]:
        """The topics for which a call is not worth it yet, each with the instant of its next check.

        Raises ServerUnavailable.
        """
        now = time.monotonic()
        asked, questions = list[tuple[str, _Full, list[_Question]]](), list[_Question]()
        for topic in topics:
            full, groups = self.full.get(topic), self._store.known_groups(topic)
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
        enough = most - max(1, min(self._batches.get(topic, LARGEST_BATCH), most // WORTH_IT))
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


class Promoter:
    """Moves due messages.

    batches: the most messages per call, for topics that limit them.
    hold: records whether scripts for a topic work.
    idle: records which topics are active.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        expirer: Expirer,
        batches: Mapping[str, int],
        *,
        hold: LeaseHold | None = None,
        idle: IdleTopics | None = None,
    ) -> None:
        self.moved = Tally()
        self._store = store
        self._clock = clock
        self._expirer = expirer
        self._batches = batches
        self._hold = hold or LeaseHold(store)
        self._idle = idle or IdleTopics()
        self._backpressure = Backpressure(store, clock, batches)
        self._last: dict[str, float] = {}
        self._paces = defaultdict[str, _Pace](_Pace)
        self._polled_up_to = ""
        self._unreadable: set[str] = set()

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Promote each topic in one round trip; returns when each topic is due next."""
        full = self._backpressure.full
        outcomes: dict[str, Outcome] = {**self._backpressure.postponed(topics)} if full else {}
        calls = [
            Promote(topic, self._batches.get(topic, LARGEST_BATCH))
            for topic in topics
            if topic not in outcomes
        ]
        sent = time.monotonic()
        results: Sequence[Promoted | LisaError]
        if len(calls) > 1:
            together = self._store.drive(self._store.run_many(calls))
            results = together
        else:
            try:
                results = [self._store.call(call) for call in calls]
            except LisaError as error:
                results = [error]
        received = time.monotonic()
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, LisaError):
                self._hold.observe(call.topic, result)
                self._idle.mark_active(call.topic)
                outcomes[call.topic] = result
            else:
                outcomes[call.topic] = self._settle(call.topic, result, sent, received)
        return list(map(outcomes.__getitem__, topics))

    def poll(self, topics: Sequence[str], others: Sequence[str] = ()) -> dict[str, float]:
        """The next due instant of some topics, by topic, from plain reads. Raises LisaError.

        A safety net in case an announcement was lost. Each call covers the next part of the topics,
        so that every topic is covered within `TICKS` calls, and all of the others. A topic with a
        newly unreadable key is due now, so that `step` reports the error.
        """
        part = [*self._next_part(topics), *others]
        keys = {topic: self._store.keys.topic(topic) for topic in part}
        retries = {
            topic: [keys[topic].group(name).retry for name in self._store.known_groups(topic) or ()]
            for topic in part
        }
        heads = ask_all(self._store, [head_command(keys[topic].waiting) for topic in part])
        now = time.monotonic()
        self._last |= dict.fromkeys(
            [topic for topic, head in zip(part, heads, strict=True) if isinstance(head, list)], now
        )
        asked = [topic for topic in part if retries[topic]]
        found = ask_all(self._store, [("EXISTS", *retries[topic]) for topic in asked])
        failing = [
            (topic, zset)
            for topic, count in zip(asked, found, strict=True)
            if count != 0
            for zset in retries[topic]
        ]
        heads += ask_all(self._store, [head_command(zset) for _, zset in failing])
        read = list(zip([*part, *[topic for topic, _ in failing]], heads, strict=True))
        unreadable = {topic for topic, head in read if isinstance(head, Exception)}
        instants = dict.fromkeys(unreadable - self._unreadable, now)
        self._unreadable = self._unreadable.difference(part) | unreadable
        for topic, head in read:
            due_ms = head_ms(head)
            if due_ms is not None:
                at = self._paced(topic, self._clock.instant(due_ms))
                instants[topic] = min(at, instants.get(topic, at))
        return instants

    def _next_part(self, topics: Sequence[str]) -> Sequence[str]:
        """The topics that follow those of the last call, in order of name."""
        most = max(PAGE, -(-len(topics) // TICKS))
        if len(topics) <= most:
            return topics
        later = [topic for topic in topics if topic > self._polled_up_to]
        part = (later + [topic for topic in topics if topic <= self._polled_up_to])[:most]
        self._polled_up_to = part[-1]
        return part

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
        self._backpressure.full.pop(topic, None)
        self._expirer.forget(topic)
        self._last.pop(topic, None)
        self._paces.pop(topic, None)
        self._unreadable.discard(topic)

    def _settle(self, topic: str, result: Promoted, sent: float, received: float) -> Outcome:
        """Record a promotion; returns when the topic is due next."""
        if topic in self._hold.failing:
            self._hold.observe(topic, result)
        if result.moved:
            self.moved.add(result.moved, "promoted")
            self._idle.mark_active(topic)
        else:
            self._idle.check(topic)
        self._last[topic] = received
        self._clock.observe(result.now_ms, sent, received)
        if result.paused:
            return None  # resuming the topic announces it
        if result.moved or result.next_due_ms is not None:
            groups = len(self._store.known_groups(topic) or ()) or 1
            self._paces[topic].record(result, groups, received)
        if result.expired or topic in self._expirer.unanswered:
            try:
                self._expirer.end(topic, result.expired)
            except LisaError as error:
                return error
        if result.full:
            due_at = self._next_of_others(topic, result, received)
            return self._backpressure.record_full(topic, result, received, due_at)
        if result.cut_short or result.expired:
            self._backpressure.record_room(topic)
            return received
        self._backpressure.full.pop(topic, None)
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
