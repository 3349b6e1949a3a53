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
from lisa.core.redis.flow import Command
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promote, Promoted
from lisa.manager.bulk_reads import (
    PAGE,
    Turns,
    ask_each,
    group_keys,
    head_command,
    head_ms,
    int_or,
    lane_keys,
    topics_with_keys,
)
from lisa.manager.expirer import Expirer
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.loop import NextDue
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

FOLLOWER_LAG_S = 0.005
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

DEFAULT_MAX_READY = TopicOptions().max_ready


@dataclass(slots=True)
class _Full:
    """The full groups of one topic.

    groups: their names.
    backoff: the pauses between checks.
    asked: when promote was last called.
    due_at: when a message is due to another group; promote is then called without a check.
    unread: number of unread entries of each of them at the last check.
    since: when `unread` last changed.
    """

    groups: tuple[str, ...]
    backoff: Backoff
    asked: float
    due_at: float = math.inf
    unread: tuple[int, ...] = ()
    since: float = 0.0


@dataclass(slots=True)
class _Topic:
    """The state of one topic. Instants are `time.monotonic` seconds.

    earliest: when the next promotion may be made, one interval after the last one.
    lag_s: how long this manager lets another one go first. The other one's work would be repeated
        in vain otherwise. It ends as soon as a promotion finds messages that the other one left.
    seen_at: the last successful promotion or poll.
    moved_at, per_s: the last promotion that moved messages, and their rate.
    total: how many messages all managers have moved.
    next_ids: what the next promotion should expect.
    """

    earliest: float = -math.inf
    lag_s: float = 0.0
    seen_at: float | None = None
    moved_at: float = -math.inf
    per_s: float = 0.0
    total: int | None = None
    next_ids: Sequence[str] = ()


def _record_rate(state: _Topic, result: Promoted, groups: int, now: float) -> None:
    """Record how much a promotion moved, and how much all managers have moved so far."""
    if result.moved:
        elapsed = max(1e-6, now - state.moved_at)
        state.moved_at = now
        rate = result.moved / groups / elapsed
        state.per_s -= math.expm1(-elapsed / RATE_OVER_S) * (rate - state.per_s)
        fast_s = FAST_INTERVAL_S if state.per_s > FAST_RATE else 0.0
        state.earliest = now + (result.interval_ms / 1000 or fast_s)
        state.lag_s = 0.0
    elif state.total is not None and result.total > state.total:
        state.lag_s = FOLLOWER_LAG_S
    state.total = result.total


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
        self._topics = defaultdict[str, _Topic](_Topic)
        self._full: dict[str, _Full] = {}
        self._turns = Turns()
        self._unreadable: set[str] = set()

    def step(self, topics: Sequence[str]) -> list[NextDue]:
        """Promote each topic in one round trip; returns when each topic is due next."""
        due: dict[str, NextDue] = {**self._postponed(topics)} if self._full else {}
        calls = [
            Promote(topic, self._batches.get(topic, LARGEST_BATCH), self._topics[topic].next_ids)
            for topic in topics
            if topic not in due
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
                due[call.topic] = result
            else:
                due[call.topic] = self._record(call.topic, result, sent, received)
        return list(map(due.__getitem__, topics))

    def poll(self, topics: Sequence[str], others: Sequence[str] = ()) -> dict[str, float]:
        """The next due instant of some topics, by topic, from plain reads. Raises LisaError.

        A safety net in case an announcement was lost. Each call covers the next part of the topics,
        so that every topic is covered within `TICKS` calls, and all of the others. A topic with a
        newly unreadable key is due now, so that `step` reports the error.
        """
        part = [*self._turns.next(topics, max(PAGE, -(-len(topics) // TICKS))), *others]
        retries = {
            topic: [
                *[own.retry for own in group_keys(self._store, topic)],
                *[own.closed for own in lane_keys(self._store, topic)],
            ]
            for topic in part
        }
        zsets = {topic: [self._store.keys.topic(topic).waiting] for topic in part}
        for topic in topics_with_keys(self._store, retries):
            zsets[topic] += retries[topic]
        heads = ask_each(
            self._store, {topic: [head_command(zset) for zset in zsets[topic]] for topic in part}
        )
        now = time.monotonic()
        unreadable = {
            topic for topic in part if any(isinstance(h, Exception) for h in heads[topic])
        }
        instants = dict.fromkeys(unreadable - self._unreadable, now)
        self._unreadable = self._unreadable.difference(part) | unreadable
        for topic in part:
            state = self._topics[topic]
            if isinstance(heads[topic][0], list):
                state.seen_at = now
            dues = [due_ms for head in heads[topic] if (due_ms := head_ms(head)) is not None]
            if dues:
                at = max(self._clock.instant(min(dues)) + state.lag_s, state.earliest)
                instants[topic] = min(at, instants.get(topic, at))
        return instants

    def lag_s(self, topic: str) -> float:
        """How long to let another manager go first after an announcement for a topic."""
        state = self._topics.get(topic)
        return 0.0 if state is None else state.lag_s

    def age_s(self, topic: str) -> float | None:
        """Seconds since the last successful promotion or poll of a topic; None if there is none."""
        state = self._topics.get(topic)
        return None if state is None or state.seen_at is None else time.monotonic() - state.seen_at

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._topics.pop(topic, None)
        self._full.pop(topic, None)
        self._expirer.forget(topic)
        self._unreadable.discard(topic)

    def _record(self, topic: str, result: Promoted, sent: float, received: float) -> NextDue:
        """Record a promotion, and end what it found to end; returns when the topic is due next."""
        state = self._topics[topic]
        if topic in self._hold.failing:
            self._hold.observe(topic, result)
        if result.moved:
            self.moved.add(result.moved, "promoted")
            self._idle.mark_active(topic)
        else:
            self._idle.check(topic)
        state.seen_at = received
        state.next_ids = result.next_ids
        self._clock.observe(result.now_ms, sent, received)
        if result.paused:
            return None  # resuming the topic announces it
        groups = len(self._store.known_groups(topic) or ())
        if result.moved or result.next_due_ms is not None:
            _record_rate(state, result, groups or 1, received)
        if result.expired or topic in self._expirer.unanswered:
            try:
                self._expirer.end(topic, result.expired)
            except LisaError as error:
                return error
        if result.full:
            return self._record_full(topic, result, groups, received)
        full = self._full.pop(topic, None)
        if full is not None and (result.cut_short or result.expired):  # a whole batch found room
            full.backoff.reset()
            self._full[topic] = full
        return self._next_due(topic, result, received)

    def _next_due(self, topic: str, result: Promoted, received: float) -> float | None:
        """When a message is due that has room."""
        if result.cut_short or result.expired:
            return received
        if result.next_due_ms is None:
            return None
        at = self._clock.instant(result.next_due_ms)
        # Due by the local estimate but not by the script's clock: the message became due meanwhile,
        # or the estimate is slightly off. Always pause, so that calls do not spin.
        if result.now_ms < result.next_due_ms and at <= received:
            at = received + TOO_EARLY_S
        state = self._topics[topic]
        return max(at + state.lag_s, state.earliest)

    # -- topics with full groups

    def _record_full(self, topic: str, result: Promoted, groups: int, now: float) -> float:
        """Record that promote found full groups; returns the instant of the next check.

        It is when a message is due to another group, or after a pause of 1, 2, 4 .. 20 ms while no
        message moves. Moves to other groups do not shorten the pause.
        """
        full = self._full.get(topic)
        if full is None or full.groups != result.full:
            backoff = Backoff(FIRST_S, LONGEST_UNREAD_S)
            full = self._full[topic] = _Full(result.full, backoff, now)
        elif result.moved and groups == 1:
            full.backoff.reset()
        elif full.backoff.pause_s < LONGEST_S:
            full.backoff.lengthen(LONGEST_S)
        due_at = self._next_due(topic, result, now) if groups > 1 else None
        full.asked, full.due_at = now, math.inf if due_at is None else due_at
        return min(now + full.backoff.pause_s, full.due_at)

    def _postponed(self, topics: Sequence[str]) -> dict[str, float]:
        """The topics for which a call is not worth it yet, each with the instant of its next check.

        Raises ServerUnavailable.
        """
        now, fulls = time.monotonic(), dict[str, _Full]()
        for topic in topics:
            full = self._full.get(topic)
            if full is None or now >= full.due_at or now - full.asked >= CERTAIN_S:
                continue
            if set(full.groups).issubset(self._store.known_groups(topic) or ()):
                fulls[topic] = full
        found = ask_each(self._store, {t: self._questions(t, full) for t, full in fulls.items()})
        now_ms, again = self._clock.now_ms(), dict[str, float]()
        for topic, full in fulls.items():
            full.due_at = self._idle_until(topic, full, found[topic], now_ms)
            if full.due_at > 0:
                again[topic] = min(time.monotonic() + full.backoff.pause_s, full.due_at)
        return again

    def _questions(self, topic: str, full: _Full) -> list[Command]:
        """Commands for the full groups' room, `max_ready`, and the heads of all due-time ZSETs.

        The heads come in this order: waiting, retries of full groups, retries of other groups.
        """
        keys = self._store.keys.topic(topic)
        groups = self._store.known_groups(topic) or ()
        room: list[Command] = [
            command
            for name in full.groups
            for command in (
                ("XLEN", keys.group(name).ready),
                ("XPENDING", keys.group(name).ready, name),
            )
        ]
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
        full.backoff.lengthen(LONGEST_UNREAD_S if now - full.since > CERTAIN_S else LONGEST_S)
        most = int_or(replies[2 * count], DEFAULT_MAX_READY)
        enough = most - max(1, min(self._batches.get(topic, LARGEST_BATCH), most // WORTH_IT))
        heads = [head_ms(head) for head in replies[2 * count + 1 :]]
        waits, *retries = [head is not None and head <= now_ms for head in heads]
        is_only = len(retries) == 1
        # With several groups, a waiting message goes to all at once; a full one gets it as a retry.
        if not is_only and (waits or any(retries[count:])):
            return 0.0
        owed = [held for held, due in zip(unread, retries, strict=False) if due or waits]
        if not owed or min(owed) <= enough:
            return 0.0
        later = [head for head in heads if head is not None and head > now_ms and not is_only]
        return self._clock.instant(min(later)) if later else math.inf
