"""All topics, roles and the server at one time, as the pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lisa.admin import topics
from lisa.admin.live import TopicActivity
from lisa.admin.roles import RolePresence
from lisa.admin.schedules import LateTicks
from lisa.admin.topics import NextReady, TopicState
from lisa.core.model.clock import duration_ms
from lisa.core.redis.errors import Refusal
from lisa.core.store.manager_watch import OVERDUE
from lisa.core.store.presence import ConsumerPresence, ManagerPresence
from lisa.core.store.server_checks import Check

GARBAGE_MS = 15 * 60_000
"""The period in which new garbage is counted."""


@dataclass(frozen=True, slots=True)
class Line:
    """One topic in a snapshot.

    `activity` (last ten seconds) and `lateness` (last minute) are None until two reads exist.

    alive: consumers that are alive, by group; "" counts those that wait for a group.
    next_ready: the next message to deliver, by group.
    waits_since_ms: due time of the first waiting message or retry, if it is due.
    waiting_due: waiting messages that are due.
    new_garbage: messages in garbage that died within `GARBAGE_MS`.
    late: its schedules that are late.
    """

    counts: TopicState
    activity: TopicActivity | None
    lateness: TopicActivity | None
    alive: Mapping[str, int] = field(default_factory=dict)
    next_ready: Mapping[str, NextReady] = field(default_factory=dict)
    waits_since_ms: int | None = None
    waiting_due: int = 0
    new_garbage: int = 0
    late: LateTicks | None = None

    @property
    def consumers(self) -> int:
        """Consumers that are alive."""
        return sum(self.alive.values())

    @property
    def oldest_due_ms(self) -> int | None:
        """Due time of the oldest message that is due and not delivered; None if there is none."""
        dues = [self.waits_since_ms, *(one.due_ms for one in self.next_ready.values())]
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    def late_ms(self, now_ms: int) -> int:
        """How long the oldest due message has waited for this delivery; 0 if there is none."""
        due_ms = self.oldest_due_ms
        return 0 if due_ms is None else max(0, now_ms - due_ms)

    def due_for_ms(self, now_ms: int) -> int:
        """How long the oldest due message has been due, from its first attempt on."""
        firsts = [one.first_due_ms for one in self.next_ready.values()]
        return max(self.late_ms(now_ms), *(now_ms - first_ms for first_ms in firsts), 0)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.counts.topic

    @property
    def in_per_s(self) -> float | None:
        """Messages accepted per second."""
        return self.activity.in_per_s if self.activity else None

    @property
    def out_per_s(self) -> float | None:
        """Messages acked per second."""
        return self.activity.out_per_s if self.activity else None

    @property
    def p50_ms(self) -> float | None:
        """The median lateness of the last minute."""
        return self.lateness.p50_ms if self.lateness else None

    @property
    def p99_ms(self) -> float | None:
        """The 99th percentile of lateness in the last minute."""
        return self.lateness.p99_ms if self.lateness else None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts from the server's INFO; empty where the ACL forbids INFO."""

    name: str = ""
    uptime_s: int | None = None
    memory: int | None = None
    most_memory: int | None = None
    clients: int | None = None
    problems: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All topics and roles at one time; `at_ms` is from the Redis clock.

    refusal: why a server refuses writes.
    refused: the topics on such a server, and "" if managers cannot write their heartbeats there.
    """

    at_ms: int
    lines: Mapping[str, Line]
    consumers: tuple[RolePresence[ConsumerPresence], ...]
    managers: tuple[RolePresence[ManagerPresence], ...]
    server: ServerFacts
    refusal: Refusal | None = None
    refused: frozenset[str] = frozenset()

    def may_run(self, topic: str = "") -> bool:
        """Whether roles without a heartbeat may run: managers, or the consumers of a topic."""
        return topic in self.refused

    def overdue_ms(self, lines: Iterable[Line]) -> int | None:
        """How long messages or ticks of these topics are overdue without a manager, else None."""
        lines = list(lines)
        late_ms = topics.overdue_ms((line.counts for line in lines), self.at_ms)
        late_ms = max([late_ms, *(self.at_ms - one.late.since_ms for one in lines if one.late)])
        if late_ms < duration_ms(OVERDUE) or any(one.alive for one in self.managers):
            return None
        return late_ms
