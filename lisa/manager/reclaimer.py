"""Reclaim messages whose lease has expired: move them to retry or garbage.

There are two kinds of leases. A lease with the topic's ack timeout is found by a full scan, window
by window through the group's pending list. The scan returns when the earliest of these leases can
expire; later deliveries do not expire before that. A lease with its own ack timeout has its
deadline in the ZSET `leases`. Plain reads of the first deadline, each second in `poll` and before
each scan, tell when the next one expires, and only then a script reclaims the expired ones.

Two scans of the same kind and group are at least `CLOSEST_S` apart, so that leases that expire one
after the other are reclaimed together.

Leases are not reclaimed until consumers could renew them after an outage of their server, and start
again when the server's clock was set.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lisa.core.metrics.numbers import Tally
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.keys import shown_id
from lisa.core.model.options import TopicOptions
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Patience
from lisa.core.store.store import SyncStore
from lisa.core.transitions.lease import ClockState, Reclaim, Reclaimed, ReclaimedMessage, Renew
from lisa.core.transitions.retry import Failed
from lisa.manager.bulk_reads import (
    ask_each,
    group_keys,
    head_command,
    head_ms,
    int_or,
    topics_with_keys,
)
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.loop import NextDue
from lisa.manager.server_clock import ServerClock
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.topic_log import TopicLog

POLL_S = 1.0
ACK_TIMEOUT_MS = duration_ms(TopicOptions().ack_timeout)
CLOSEST_S = 0.5
FARTHEST_S = 60.0  # longest time until a shortened ack timeout is noticed
HARMLESS = 0.25  # of an ack timeout; consumers renew leases with two thirds left
NO_ENTRY = "0-0"  # as a range's end: only deliveries' own leases; as its start: only entries

log = logging.getLogger(__name__)

_Outages = tuple[tuple[float, float], ...]
"""The end of each outage by `time.monotonic`, and its length in seconds."""


class LeaseHold:
    """The outages of nodes and topics, and until when they hold the leases of a topic.

    A topic alone has an outage if its node answers but refuses scripts: while a slot moves, the
    topic's keys lie on two nodes.

    node_of: returns the name of the node that holds a topic.
    """

    def __init__(
        self, store: SyncStore, node_of: Callable[[str], str | None] = lambda _: ""
    ) -> None:
        self.failing: dict[str, float] = {}
        """Topics whose last script failed, each with the instant of its first failure."""
        self._store = store
        self._node_of = node_of
        self._of_nodes: dict[str, _Outages] = {}
        self._of_topics: dict[str, _Outages] = {}
        self._until: dict[tuple[str, str], float] = {}
        self._added = 0

    def add(self, since: float, gap_s: float = math.inf, node: str = "") -> None:
        """Hold the leases on a node for one ack timeout from the end of an outage.

        Consumers could not renew them during the outage. One of a quarter of the ack timeout or
        less is ignored, so that a connection that breaks again and again does not postpone
        reclaiming forever.
        """
        self._add(self._of_nodes, node, since, gap_s)

    def observe(self, topic: str, result: object) -> None:
        """Take note of the result of a script for a topic: a LisaError if it failed.

        Once a script succeeds again, holds the topic's leases as `add` does.
        """
        if isinstance(result, ServerUnavailable):
            self.failing.setdefault(topic, time.monotonic())
        elif not isinstance(result, LisaError) and topic in self.failing:
            now, since = time.monotonic(), self.failing[topic]
            self._add(self._of_topics, topic, now, now - since)
            self.failing.pop(topic, None)

    def until(self, topic: str) -> float:
        """The end of the hold of a topic's leases, by `time.monotonic`. Raises LisaError."""
        node = self._node_of(topic) or ""
        outages = self._of_nodes.get(node, ()) + self._of_topics.get(topic, ())
        if not outages:
            return 0.0
        until = self._until.get((topic, node))
        if until is None:
            added = self._added
            options = self._store.drive(self._store.options(topic))
            timeout_s = options.ack_timeout.total_seconds()
            harmful = [since for since, gap_s in outages if gap_s > timeout_s * HARMLESS]
            until = max(harmful, default=-math.inf) + timeout_s
            if added == self._added:
                self._until[topic, node] = until
        return until

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self.failing.pop(topic, None)
        self._of_topics.pop(topic, None)
        for held in [held for held in self._until if held[0] == topic]:
            self._until.pop(held, None)

    def _add(self, outages: dict[str, _Outages], name: str, since: float, gap_s: float) -> None:
        # A later outage replaces earlier ones that were not longer.
        kept = tuple(outage for outage in outages.get(name, ()) if outage[1] > gap_s)
        outages[name] = (*kept, (since, gap_s))
        self._added += 1
        self._until.clear()


@dataclass(slots=True)
class _Group:
    """The state of a group.

    full_at: the next full scan.
    leases_at: the next scan of leases with own deadlines; never before `leases_not_before`.
    """

    full_at: float = -math.inf
    leases_at: float = -math.inf
    leases_not_before: float = -math.inf


@dataclass(slots=True)
class _Scan:
    """A call of a scan, and the latest instant of the next scan, as `time.monotonic`."""

    call: Reclaim
    latest: float


class Reclaimer:
    """Reclaims messages whose lease has expired.

    A call without a reply may have moved messages; only repeating it tells which. Until then, its
    scan makes no other call.

    window: number of pending entries that one call reads.
    hold: tells until when the leases of a topic are held after an outage.
    idle: knows the idle topics, which are scanned again only once they are active.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        signals: SignalQueue,
        window: int,
        *,
        hold: LeaseHold | None = None,
        idle: IdleTopics | None = None,
    ) -> None:
        self.moved = Tally()
        self.hold = hold or LeaseHold(store)
        self._store = store
        self._clock = clock
        self._signals = signals
        self._window = window
        self._idle = idle or IdleTopics()
        self._groups: dict[tuple[str, str], _Group] = {}
        self._unanswered: dict[tuple[str, str, str], Reclaim] = {}
        self._clocks: dict[str, ServerClock] = {}  # of the topics of a cluster
        self._handled_steps: dict[tuple[str, str], int] = {}
        """By group: after how many steps of the clock its leases were restarted."""

    def scan_all(self) -> None:
        """Make the next scan of every group a full scan."""
        self._groups.clear()

    def scan_again(self, topics: Iterable[str]) -> None:
        """Make the next scan of every group of these topics a full scan."""
        for topic in topics:
            for name in self._store.known_groups(topic) or ():
                self._groups.pop((topic, name), None)

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self.hold.forget(topic)
        self._clocks.pop(topic, None)
        kept: tuple[dict[Any, Any], ...] = (self._groups, self._unanswered, self._handled_steps)
        for by_group in kept:
            for key in [key for key in by_group if key[0] == topic]:
                by_group.pop(key, None)

    def poll(self, topics: Sequence[str]) -> dict[str, float]:
        """The instant of the next step by topic: now for new groups, else at the first deadline.

        Call this every `POLL_S`. Raises ServerUnavailable.
        """
        now = time.monotonic()
        instants: dict[str, float] = {}
        for topic in topics:
            for name in self._store.known_groups(topic) or ():
                if (topic, name) not in self._groups:
                    instants[topic] = now
        leases = {topic: [own.leases for own in group_keys(self._store, topic)] for topic in topics}
        reads = {
            (topic, name): [head_command(self._store.keys.topic(topic).group(name).leases)]
            for topic in topics_with_keys(self._store, leases)
            for name in self._store.known_groups(topic) or ()
        }
        for (topic, name), (head,) in ask_each(self._store, reads).items():
            group = self._groups.get((topic, name))
            if group is not None:
                at = group.leases_at = self._end_of(topic, group, head, now)
                instants[topic] = min(at, instants.get(topic, at))
        return instants

    def step(self, topics: Sequence[str]) -> list[NextDue]:
        """Scan the groups of each topic; returns when each topic is due next.

        The first windows of all scans share one round trip.
        """
        outcomes: dict[str, NextDue] = {}
        due: list[Reclaim] = []
        on_hold: set[str] = set()
        now = time.monotonic()
        # Scripts for these topics failed. Consumers could not renew leases either, so the next call
        # moves nothing; once it succeeds, they have one ack timeout.
        failing = {topic for topic in topics if topic in self.hold.failing}
        for topic in topics:
            try:
                held = self.hold.until(topic)
                farthest = math.inf if self._idle.is_idle(topic) else now + FARTHEST_S
                outcomes[topic] = held if held > now else farthest
                if held <= now:
                    due += self._due_scans(topic, now)
                else:
                    on_hold.add(topic)
            except LisaError as error:
                outcomes[topic] = error
        scans = self._needed([call for call in due if _key(call) not in self._unanswered], now)
        again = {*topics} - on_hold
        scans += [
            _Scan(call, now) for call in list(self._unanswered.values()) if call.topic in again
        ]
        results = self._run([scan.call for scan in scans], failing)
        received = time.monotonic()
        for scan, result in zip(scans, results, strict=True):
            topic = scan.call.topic
            self.hold.observe(topic, result)
            try:
                self._finish(scan, result, received, failing)
            except LisaError as error:
                if isinstance(outcomes[topic], float):
                    outcomes[topic] = error
        for topic, so_far in outcomes.items():
            if isinstance(so_far, float) and topic not in on_hold:
                outcomes[topic] = min(so_far, self._next_scan(topic))
        return [outcomes[topic] for topic in topics]

    def _next_scan(self, topic: str) -> float:
        known = self._store.known_groups(topic) or ()
        groups = [self._groups.get((topic, name)) for name in known]
        return min(
            (min(group.full_at, group.leases_at) for group in groups if group), default=math.inf
        )

    # -- which scans are needed

    def _end_of(self, topic: str, group: _Group, head: Any, now: float) -> float:
        """When to call the script for leases with own deadlines, by the first deadline."""
        if isinstance(head, Exception):
            return now  # the script reports the error for this topic
        first_ms = head_ms(head)
        if first_ms is None:
            return math.inf
        return max(self._clock_of(topic).instant(first_ms + 1), group.leases_not_before)

    def _due_scans(self, topic: str, now: float) -> list[Reclaim]:
        groups = self._store.known_groups(topic)
        if groups is None:
            groups = self._store.drive(self._store.groups(topic))
        if self._store.has_nodes:
            self._clock_of(topic).sample(self._store)
        scans: list[Reclaim] = []
        for name in groups:
            if self._renew_after_step(topic, name):
                self._groups.pop((topic, name), None)
            group = self._groups.setdefault((topic, name), _Group())
            if group.leases_at <= now:
                scans.append(Reclaim(topic, name, end=NO_ENTRY, window=self._window))
            if group.full_at <= now:
                scans.append(Reclaim(topic, name, start=NO_ENTRY, window=self._window))
        return scans

    def _needed(self, calls: Sequence[Reclaim], now: float) -> list[_Scan]:
        """The scans that plain reads show to be needed.

        A scan is needed if messages are in flight, or if a lease's own deadline has passed.
        """
        questions: dict[tuple[str, str, str], list[Command]] = {}
        for call in calls:
            keys = self._store.keys.topic(call.topic)
            own = keys.group(call.group)
            questions[_key(call)] = (
                [head_command(own.leases)]
                if call.end == NO_ENTRY
                else [("XPENDING", own.ready, call.group), ("HGET", keys.options, "ack_timeout")]
            )
        answers = ask_each(self._store, questions)
        for answer in chain.from_iterable(answers.values()):
            if isinstance(answer, Exception) and errors.passes(answer):
                raise errors.translated(answer, self._store.where)
        found: list[_Scan] = []
        for call in calls:
            reply, *timeout = answers[_key(call)]
            group = self._groups.setdefault((call.topic, call.group), _Group())
            if call.end == NO_ENTRY:
                group.leases_at = self._end_of(call.topic, group, reply, now)
                if group.leases_at <= time.monotonic():
                    found.append(_Scan(call, math.inf))
                continue
            # No later, because a message delivered from now on can expire then.
            latest = now + min(int_or(timeout[0], ACK_TIMEOUT_MS) / 1e3, FARTHEST_S)
            if not isinstance(reply, list) or reply[0] != 0:
                self._idle.mark_active(call.topic)
                found.append(_Scan(call, latest))
            else:
                self._postpone(call.topic, group, latest)
        return found

    def _postpone(self, topic: str, group: _Group, at: float) -> None:
        """Scan a group without messages in flight again later; never, while its topic is idle."""
        if self._idle.is_idle(topic):
            group.full_at = math.inf
        if not self._idle.is_idle(topic):  # another thread may have marked it active meanwhile
            group.full_at = at

    # -- calls of the script

    def _run(
        self, calls: Sequence[Reclaim], failing: Container[str]
    ) -> list[Reclaimed | LisaError]:
        """Run calls in one round trip, without retrying those that get no reply.

        A retry could reach the new primary after a failover, where leases have not been renewed.
        Calls for `failing` topics move nothing, because their latest allowed time is 0.
        """
        dated = [
            replace(
                call,
                latest_ms=0 if call.topic in failing else self._clock_of(call.topic).latest_ms(),
            )
            for call in calls
        ]
        return self._store.drive(self._store.run_many(dated, patience=Patience(0)))

    def _finish(
        self,
        scan: _Scan,
        result: Reclaimed | LisaError,
        received: float,
        failing: Container[str],
    ) -> None:
        """Scan the rest of a group's list, and record when to scan it again. Raises LisaError."""
        topic, name = scan.call.topic, scan.call.group
        try:
            ends = self._follow(scan.call, result, received, failing)
        except GroupRemoved:
            self._groups.pop((topic, name), None)
            self._store.drive(self._store.groups(topic))
            return
        group = self._groups.setdefault((topic, name), _Group())
        if ends is None:  # the clock was sampled again; the next scan shows whether it was set
            group.leases_at = group.full_at = time.monotonic()
            return
        closest = time.monotonic() + CLOSEST_S
        at = max(min(ends, scan.latest), closest)
        if scan.call.end == NO_ENTRY:
            group.leases_at, group.leases_not_before = at, closest
        else:
            group.full_at = at

    def _follow(
        self,
        call: Reclaim,
        result: Reclaimed | LisaError,
        received: float,
        failing: Container[str],
    ) -> float | None:
        """Handle a reply and finish its scan, window by window. Raises LisaError.

        Returns when the earliest scanned lease can expire. Like `received`, when the reply arrived,
        this is in `time.monotonic` seconds. Returns None if the server's time is later than
        estimated: the clock was set, a call was slow, or the topic is `failing`.
        """
        topic, group, ends = call.topic, call.group, math.inf
        moved, cleared, returned, is_ahead = 0, 0, 0, False
        self._unanswered[_key(call)] = call
        while True:
            if isinstance(result, GroupRemoved):
                self._unanswered.pop(_key(call))
            if isinstance(result, LisaError):
                raise result
            moved, cleared = moved + len(result.moved), cleared + result.cleared
            returned += result.returned
            self._signals.failed(topic, group, result.moved)
            _log_deaths(topic, group, result.moved)
            if result.next_end_ms is not None:
                ends = min(ends, received + (result.next_end_ms + 1) / 1e3)
            is_ahead = is_ahead or result.clock is ClockState.AHEAD
            # More leases with their own deadlines have expired than one call reclaims.
            has_more = call.end == NO_ENTRY and result.next_end_ms == 0
            if result.clock is ClockState.LATER or (result.cursor is None and not has_more):
                break
            start = result.cursor or call.start
            call = Reclaim(topic, group, start=start, end=call.end, window=self._window)
            self._unanswered[_key(call)] = call
            # The first reply may have been that of an earlier call, which ran before the failure.
            (result,) = self._run([call], failing)
            received = time.monotonic()
        self._unanswered.pop(_key(call))
        is_later = result.clock is ClockState.LATER
        if is_later:
            self._clock_of(topic).sample(self._store)
        elif is_ahead:  # the server dates deliveries in the future
            self._renew(Renew(topic, group, window=self._window))
        self._count(topic, group, moved, cleared, returned)
        return None if is_later else ends

    def _count(self, topic: str, group: str, moved: int, cleared: int, returned: int) -> None:
        if not (moved or cleared or returned):
            return
        self.moved.add(moved + returned, "reclaimed")
        self.moved.add(cleared, "cleared")
        TopicLog(log, topic, group).info(
            "%d reclaimed after the ack timeout, %d of them without an attempt, %d entries cleared",
            moved + returned,
            returned,
            cleared,
        )

    # -- the server's clock

    def _clock_of(self, topic: str) -> ServerClock:
        """The clock of a topic's server: one for all topics, or on a cluster one for each."""
        if not self._store.has_nodes:
            return self._clock
        clock = self._clocks.get(topic)
        if clock is None:
            clock = self._clocks[topic] = ServerClock(self._store.keys.topic(topic).options)
        return clock

    def _renew_after_step(self, topic: str, group: str) -> bool:
        """Restart all leases after a step of the clock, because their age is unknown.

        Returns whether there was a step. Raises LisaError.
        """
        steps = self._clock_of(topic).steps
        done = self._handled_steps.setdefault((topic, group), max(0, len(steps) - 1))
        if done == len(steps):
            return False
        by_ms = sum(step.by_ms for step in steps[done:])
        self._renew(Renew(topic, group, by_ms, steps[-1].since_ms, window=self._window))
        self._handled_steps[topic, group] = len(steps)
        return True

    def _renew(self, first: Renew) -> None:
        result = self._store.call(first)
        renewed = result.renewed
        while result.cursor is not None:
            result = self._store.call(replace(first, start=result.cursor))
            renewed += result.renewed
        if renewed:
            TopicLog(log, first.topic, first.group).warning(
                "restarted %d leases, because the server's clock was set", renewed
            )


def _key(call: Reclaim) -> tuple[str, str, str]:
    """Identifies a scan; at most one call per key is unanswered at a time."""
    return call.topic, call.group, call.end


def _log_deaths(topic: str, group: str, moved: Sequence[ReclaimedMessage]) -> None:
    for message_id, _, retried in moved:
        if retried.outcome is Failed.DEAD:
            TopicLog(log, topic, group).warning(
                "message %r moved to garbage after %d attempts",
                shown_id(message_id),
                retried.failed_attempts,
                extra={"id": message_id, "attempt": retried.failed_attempts},
            )
