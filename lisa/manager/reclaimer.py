"""Reclaim messages whose lease has expired: move them to retry or garbage.

There are two kinds of leases. A lease with the topic's ack timeout is found by a full scan, window
by window through the group's pending list. The scan returns when the earliest of these leases can
expire; later deliveries do not expire before that. A lease with its own ack timeout has its
deadline in the ZSET `leases`. Plain reads of the first deadline, each second in `poll` and before
each scan, tell when the next one expires, and only then a script reclaims the expired ones.

Two scans of the same kind and group are at least `CLOSEST_S` apart, so that leases that expire one
after the other are reclaimed together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.core.metrics.numbers import Tally
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.options import TopicOptions
from lisa.core.redis import errors
from lisa.core.store.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim, Reclaimed
from lisa.manager.bulk_reads import ask_all, head_command, head_ms, int_or, topics_with_keys
from lisa.manager.idle_topics import IdleTopics
from lisa.manager.lease_clocks import LeaseClocks
from lisa.manager.lease_hold import LeaseHold
from lisa.manager.loop import Outcome
from lisa.manager.reclaim_calls import NO_ENTRY, ReclaimCalls
from lisa.manager.server_clock import ServerClock
from lisa.manager.signal_queue import SignalQueue

POLL_S = 1.0
ACK_TIMEOUT_MS = duration_ms(TopicOptions().ack_timeout)
CLOSEST_S = 0.5
FARTHEST_S = 60.0  # longest time until a shortened ack timeout is noticed


@dataclass(slots=True)
class _Group:
    """The instants of a group's next scans.

    full_at: the next full scan.
    leases_at: the next scan of leases with own deadlines; never before `leases_not_before`.
    """

    full_at: float = -math.inf
    leases_at: float = -math.inf
    leases_not_before: float = -math.inf


class Reclaimer:
    """Reclaims messages whose lease has expired.

    window: number of pending entries that one call reads.
    node_of: returns the name of the node that holds a topic.
    idle: knows the idle topics, which are scanned again only once they are active.
    """

    def __init__(
        self,
        store: SyncStore,
        clock: ServerClock,
        signals: SignalQueue,
        window: int,
        node_of: Callable[[str], str | None] = lambda _: "",
        *,
        idle: IdleTopics | None = None,
    ) -> None:
        self._store = store
        self._window = window
        self._clocks = LeaseClocks(store, clock, window)
        self._calls = ReclaimCalls(store, self._clocks, signals, window)
        self._hold = LeaseHold(store, node_of)
        self._idle = idle or IdleTopics()
        self._groups: dict[tuple[str, str], _Group] = {}

    @property
    def moved(self) -> Tally:
        """The counts of reclaimed messages and cleared entries."""
        return self._calls.moved

    def hold(self, since: float, gap_s: float = math.inf, node: str = "") -> None:
        """Reclaim nothing on a node until one ack timeout after the end of an outage.

        Consumers could not renew their leases during the outage.
        """
        self._hold.add(since, gap_s, node)

    def observe(self, topic: str, result: object) -> None:
        """Take note of the result of a script for a topic: a LisaError if it failed."""
        if isinstance(result, ServerUnavailable):
            self._hold.failed(topic)
        elif not isinstance(result, LisaError):
            self._hold.passed(topic)

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
        for part in (self._hold, self._clocks, self._calls):
            part.forget(topic)
        for key in [key for key in self._groups if key[0] == topic]:
            self._groups.pop(key, None)

    def poll(self, topics: Sequence[str]) -> dict[str, float]:
        """The instant of the next step by topic: now for new groups, else at the first deadline.

        Call this every `POLL_S`. Raises ServerUnavailable.
        """
        now = time.monotonic()
        instants: dict[str, float] = {}
        leases: dict[str, list[str]] = {}
        for topic in topics:
            for name in self._store.known_groups(topic) or ():
                if (topic, name) not in self._groups:
                    instants[topic] = now
                leases.setdefault(topic, []).append(self._leases(topic, name))
        found = [
            (topic, name)
            for topic in topics_with_keys(self._store, leases)
            for name in self._store.known_groups(topic) or ()
            if (topic, name) in self._groups
        ]
        heads = ask_all(self._store, [head_command(self._leases(*key)) for key in found])
        for key, head in zip(found, heads, strict=True):
            group = self._groups.get(key)
            if group is not None:
                at = group.leases_at = self._end_of(group, self._clocks.of(key[0]), head, now)
                instants[key[0]] = min(at, instants.get(key[0], at))
        return instants

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Scan the groups of each topic; returns when each topic is due next.

        The first windows of all scans share one round trip.
        """
        outcomes: dict[str, Outcome] = {}
        scans: list[Reclaim] = []
        on_hold: set[str] = set()
        now = time.monotonic()
        # Scripts for these topics failed. Consumers could not renew leases either, so the next call
        # moves nothing; once it succeeds, they have one ack timeout.
        failing = {topic for topic in topics if self._hold.is_failing(topic)}
        for topic in topics:
            try:
                held = self._hold.until(topic)
                farthest = math.inf if self._idle.is_idle(topic) else now + FARTHEST_S
                outcomes[topic] = held if held > now else farthest
                if held <= now:
                    scans += self._due_scans(topic, now)
                else:
                    on_hold.add(topic)
            except LisaError as error:
                outcomes[topic] = error
        scans = [one for one in scans if not self._calls.is_owed(one)]
        calls, latest = self._needed(scans, now)
        again = self._calls.owed({*topics} - on_hold)
        calls, latest = [*calls, *again], [*latest, *[now] * len(again)]
        results = self._calls.run(calls, failing) if calls else []
        received = time.monotonic()
        for call, at_latest, result in zip(calls, latest, results, strict=True):
            self.observe(call.topic, result)
            failed = self._settle(call, result, received, at_latest, failing)
            if failed and isinstance(outcomes[call.topic], float):
                outcomes[call.topic] = failed
        for topic, so_far in outcomes.items():
            if isinstance(so_far, float) and topic not in on_hold:
                outcomes[topic] = min(so_far, self._next_scan(topic))
        return [outcomes[topic] for topic in topics]

    def _next_scan(self, topic: str) -> float:
        known = self._store.known_groups(topic) or ()
        groups = [self._groups.get((topic, name)) for name in known]
        return min((min(one.full_at, one.leases_at) for one in groups if one), default=math.inf)

    def _leases(self, topic: str, group: str) -> str:
        return self._store.keys.topic(topic).group(group).leases

    def _end_of(self, group: _Group, clock: ServerClock, head: Any, now: float) -> float:
        """When to call the script for leases with own deadlines, by the first deadline."""
        if isinstance(head, Exception):
            return now  # the script reports the error for this topic
        first_ms = head_ms(head)
        if first_ms is None:
            return math.inf
        return max(clock.instant(first_ms + 1), group.leases_not_before)

    def _due_scans(self, topic: str, now: float) -> list[Reclaim]:
        groups = self._store.known_groups(topic)
        if groups is None:
            groups = self._store.drive(self._store.groups(topic))
        clock = self._clocks.of(topic)
        if self._store.has_nodes:
            clock.sample(self._store)
        scans: list[Reclaim] = []
        for name in groups:
            if self._clocks.renew_after_step(topic, name):
                self._groups.pop((topic, name), None)
            group = self._groups.setdefault((topic, name), _Group())
            if group.leases_at <= now:
                scans.append(Reclaim(topic, name, end=NO_ENTRY, window=self._window))
            if group.full_at <= now:
                scans.append(Reclaim(topic, name, start=NO_ENTRY, window=self._window))
        return scans

    def _needed(self, scans: Sequence[Reclaim], now: float) -> tuple[list[Reclaim], list[float]]:
        """The scans that plain reads show to be needed, and the latest instant of each next scan.

        A scan is needed if messages are in flight, or if a lease's own deadline has passed.
        """
        questions: list[tuple[str | int, ...]] = []
        for scan in scans:
            keys = self._store.keys.topic(scan.topic)
            own = keys.group(scan.group)
            if scan.end == NO_ENTRY:
                questions.append(head_command(own.leases))
            else:
                questions.append(("XPENDING", own.ready, scan.group))
                questions.append(("HGET", keys.options, "ack_timeout"))
        answers = ask_all(self._store, questions)
        for answer in answers:
            if isinstance(answer, Exception) and errors.passes(answer):
                raise errors.translated(answer, self._store.where)
        replies = iter(answers)
        found, latest = list[Reclaim](), list[float]()
        for scan in scans:
            reply = next(replies)
            group = self._groups.setdefault((scan.topic, scan.group), _Group())
            if scan.end == NO_ENTRY:
                at = math.inf
                group.leases_at = self._end_of(group, self._clocks.of(scan.topic), reply, now)
                is_needed = group.leases_at <= time.monotonic()
            else:
                # No later, because a message delivered from now on can expire then.
                at = now + min(int_or(next(replies), ACK_TIMEOUT_MS) / 1e3, FARTHEST_S)
                is_needed = not isinstance(reply, list) or reply[0] != 0
                if is_needed:
                    self._idle.mark_active(scan.topic)
                else:
                    self._postpone(scan.topic, group, at)
            if is_needed:
                found.append(scan)
                latest.append(at)
        return found, latest

    def _postpone(self, topic: str, group: _Group, at: float) -> None:
        """Scan a group without messages in flight again later; never, while its topic is idle."""
        if self._idle.is_idle(topic):
            group.full_at = math.inf
        if not self._idle.is_idle(topic):  # another thread may have marked it active meanwhile
            group.full_at = at

    def _settle(
        self,
        call: Reclaim,
        result: Reclaimed | LisaError,
        received: float,
        latest: float,
        failing: Container[str],
    ) -> LisaError | None:
        """Scan the rest of a group's list, and record when to scan the group again."""
        try:
            ends = self._calls.follow(call, result, received, failing)
        except GroupRemoved:
            return self._forget_group(call.topic, call.group)
        except LisaError as error:
            return error
        group = self._groups.setdefault((call.topic, call.group), _Group())
        if ends is None:  # the clock was sampled again; the next scan shows whether it was set
            group.leases_at = group.full_at = time.monotonic()
            return None
        closest = time.monotonic() + CLOSEST_S
        at = max(min(ends, latest), closest)
        if call.end == NO_ENTRY:
            group.leases_at, group.leases_not_before = at, closest
        else:
            group.full_at = at
        return None

    def _forget_group(self, topic: str, group: str) -> LisaError | None:
        self._groups.pop((topic, group), None)
        try:
            self._store.drive(self._store.groups(topic))
        except LisaError as error:
            return error
        return None
