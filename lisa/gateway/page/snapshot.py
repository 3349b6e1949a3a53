"""All topics, roles and the server at one time, as the pages show them.

Any number of viewers costs the server one reader: each query runs once and its result is shared for
a while; concurrent requests wait for the same result. Nothing is read while no page is open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Concatenate, ParamSpec, TypeVar

from lisa.admin import history, live, roles, schedules, topics
from lisa.admin.live import Interval, TopicsSnapshot
from lisa.admin.reading import ask_all
from lisa.admin.roles import RolePresence
from lisa.admin.schedules import LateTicks
from lisa.admin.topics import NextReady, TopicState, total_of
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.redis.errors import Refusal
from lisa.core.redis.flow import Flow
from lisa.core.store import server_checks
from lisa.core.store.presence import (
    OVERDUE,
    ConsumerPresence,
    ManagerPresence,
    RelayPresence,
    write_refusals,
)
from lisa.core.store.schedules import scheduled_topics
from lisa.core.store.server_checks import Check, CheckResult, check_clock, info, with_refusal
from lisa.core.store.store import Store
from lisa.gateway.context import GatewayContext

GARBAGE_MS = 15 * 60_000
"""The period in which new garbage is counted."""

LOOK_S = 1.0
ROLES_S = 2.0
SERVER_S = 5.0

CACHE_FACTOR = 20
"""A slow query is cached for at least this many times its duration."""

RATE_US = 9_000_000
LATENESS_US = 60_000_000
GARBAGE_S = 30.0
FORGET_US = 15_000_000
RING_US = 2_000_000
MOST_SHARED = 512

MOST_PROBED = 500
"""Topics of a cluster for which to look whether their node refuses writes."""


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
    activity: Interval | None
    lateness: Interval | None
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
        dues = [self.waits_since_ms, *(ready.due_ms for ready in self.next_ready.values())]
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    def late_ms(self, now_ms: int) -> int:
        """How long the oldest due message has waited for this delivery; 0 if there is none."""
        due_ms = self.oldest_due_ms
        return 0 if due_ms is None else max(0, now_ms - due_ms)

    def due_for_ms(self, now_ms: int) -> int:
        """How long the oldest due message has been due, from its first attempt on."""
        firsts = [ready.first_due_ms for ready in self.next_ready.values()]
        return max(self.late_ms(now_ms), *(now_ms - first_ms for first_ms in firsts), 0)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.counts.topic

    @property
    def in_per_s(self) -> float | None:
        """Messages accepted per second."""
        return self.activity.per_s("sent") if self.activity else None

    @property
    def out_per_s(self) -> float | None:
        """Messages acked per second."""
        return self.activity.per_s("acked") if self.activity else None

    @property
    def p50_ms(self) -> float | None:
        """The median lateness of the last minute."""
        return self.lateness.lateness_ms(0.5) if self.lateness else None

    @property
    def p99_ms(self) -> float | None:
        """The 99th percentile of lateness in the last minute."""
        return self.lateness.lateness_ms(0.99) if self.lateness else None


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
    relays: tuple[RolePresence[RelayPresence], ...] = ()
    refusal: Refusal | None = None
    refused: frozenset[str] = frozenset()

    def shown_to(self, *, operators: bool) -> Snapshot:
        """The snapshot without relays, whose errors tell of databases, unless for operators."""
        return self if operators else replace(self, relays=())

    def may_run(self, topic: str = "") -> bool:
        """Whether roles without a heartbeat may run: managers, or the consumers of a topic."""
        return topic in self.refused

    def overdue_ms(self, lines: Iterable[Line]) -> int | None:
        """How long messages or ticks of these topics are overdue without a manager, else None."""
        lines = list(lines)
        late_ms = topics.overdue_ms((line.counts for line in lines), self.at_ms)
        late_ms = max([late_ms, *(self.at_ms - line.late.since_ms for line in lines if line.late)])
        if late_ms < duration_ms(OVERDUE) or any(manager.alive for manager in self.managers):
            return None
        return late_ms


P = ParamSpec("P")
T = TypeVar("T")


class SnapshotCache:
    """Cached queries of one gateway process, shared by all page requests."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        # Each query that runs or was cached, and when its result is outdated.
        self._shared: dict[object, tuple[asyncio.Future[Any], float]] = {}
        self._looks: deque[TopicsSnapshot] = deque()

    async def share(self, key: object, lasts_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, cached under `key` for `lasts_s` seconds. Raises LisaError."""
        now = time.monotonic()
        task, ends = self._shared.get(key, (None, 0.0))
        if task is None or ends <= now:
            if len(self._shared) >= MOST_SHARED:
                self._shared = {k: query for k, query in self._shared.items() if query[1] > now}
            task = asyncio.ensure_future(ask())
            self._shared[key] = task, inf
            task.add_done_callback(partial(self._keep, key, lasts_s, now))
        answer: T = await asyncio.shield(task)
        return answer

    def _keep(self, key: object, lasts_s: float, began: float, task: asyncio.Future[Any]) -> None:
        """Cache the result of a query that has ended, unless it failed or was dropped."""
        now = time.monotonic()
        failed = task.cancelled() or task.exception() is not None
        if self._shared.get(key, (None, 0.0))[0] is task:
            ends = 0.0 if failed else now + max(lasts_s, CACHE_FACTOR * (now - began))
            self._shared[key] = task, ends

    async def ask(
        self,
        lasts_s: float,
        flow: Callable[Concatenate[Any, P], Flow[T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """The result of a flow on the store, cached for `lasts_s` seconds. Raises LisaError.

        Calls share it if their positional arguments are equal; keyword arguments may differ, such
        as the present time.
        """
        ask = partial(self._gateway.ask, flow, *args, **options)
        return await self.share((flow, *args), lasts_s, ask)

    def clear(self) -> None:
        """Drop all cached results, so that the next page shows a change just made."""
        self._shared.clear()

    async def current(self) -> Snapshot:
        """The current snapshot; show only lines that the visitor may see. Raises LisaError."""
        return await self.share("snapshot", LOOK_S, self._take)

    async def line(self, topic: str) -> Line | None:
        """One topic, including topics that are idle or newer than the snapshot; None if unknown.

        Raises LisaError.
        """
        known = (await self.current()).lines.get(topic)
        if known is not None:
            return known
        if not await self.ask(LOOK_S, topics.exists, topic):
            return None
        (counts,) = await self.ask(LOOK_S, topics.counts, (topic,))
        return Line(counts, None, None)

    async def _take(self) -> Snapshot:
        gateway = self._gateway
        managers = await self.ask(ROLES_S, roles.managers)
        relays = await self.ask(ROLES_S, _relays)
        look = self._remember(await gateway.ask(live.look))
        at_ms, names = look.at_us // 1000, tuple(look.topics)
        consumers = await self.ask(ROLES_S, roles.consumers, topics=names)
        server = await self.ask(SERVER_S, _server)
        refusals = await gateway.ask(_refusals, names)
        refusal = next(iter(refusals.values()), None)
        rates, late = await self._activity(look, managers)
        heard = (consumer.record for consumer in consumers if consumer.alive)
        alive = _by_topic(Counter((role.topic, group) for role in heard for group in role.groups))
        ready = _by_topic(await gateway.ask(topics.next_ready, look.topics.values()))
        due = await gateway.ask(topics.due_waiting, look.topics.values(), at_ms)
        garbage = await self._new_garbage(look)
        late_ticks = await self.ask(ROLES_S, _late_ticks, now_ms=at_ms)
        lines = {
            name: Line(
                counts,
                rates.get(name),
                late.get(name),
                alive=alive.get(name, {}),
                next_ready=ready.get(name, {}),
                waits_since_ms=_past(counts.next_due_ms, at_ms),
                waiting_due=due.get(name, 0),
                new_garbage=garbage.get(name, 0),
                late=late_ticks.get(name),
            )
            for name, counts in sorted(look.topics.items())
        }
        return Snapshot(
            at_ms,
            lines,
            tuple(consumers),
            tuple(managers),
            replace(server, problems=tuple(with_refusal(server.problems, refusal))),
            relays=tuple(relays),
            refusal=refusal,
            refused=frozenset(refusals),
        )

    async def _new_garbage(self, look: TopicsSnapshot) -> dict[str, int]:
        """The messages in garbage that died within `GARBAGE_MS`, by topic."""
        dead = {name: counts for name, counts in look.topics.items() if counts.garbage}
        before = await self.ask(
            GARBAGE_S,
            history.counters_at,
            topics=list(dead),
            at_ms=look.at_us // 1000 - GARBAGE_MS,
        )
        risen = {
            name: counts.total("garbage") - total_of(before.get(name, {}), "garbage")
            for name, counts in dead.items()
        }
        return {name: min(dead[name].garbage, max(0, rise)) for name, rise in risen.items()}

    def _remember(self, look: TopicsSnapshot) -> TopicsSnapshot:
        """The look with unchanged topics sharing the previous look's objects, to save memory."""
        before = self._looks[-1].topics if self._looks else {}
        return replace(
            look,
            topics={
                name: before[name] if before.get(name) == counts else counts
                for name, counts in look.topics.items()
            },
        )

    async def _activity(
        self, look: TopicsSnapshot, managers: Iterable[RolePresence[ManagerPresence]]
    ) -> tuple[dict[str, Interval], dict[str, Interval]]:
        """Each topic's activity in about the last ten seconds, and in about the last minute."""
        # Start over after a gap, or when the server's clock was set back.
        if not self._looks or not 0 <= look.at_us - self._looks[-1].at_us <= FORGET_US:
            self._looks.clear()
            if look.topics and any(manager.alive for manager in managers):
                await self._begin(look)
        found = self._since(look, RATE_US), self._since(look, LATENESS_US)
        if not self._looks or self._looks[-1].at_us <= look.at_us - RING_US:
            self._looks.append(look)
        return found

    async def _begin(self, look: TopicsSnapshot) -> None:
        """Start comparing from the manager's sample of a minute ago."""
        minute_ms = (look.at_us // 60_000_000 - 1) * 60_000
        found = await self._gateway.ask(history.counters_at, list(look.topics), minute_ms)
        then = {name: replace(look.topics[name], stats=stats) for name, stats in found.items()}
        if then:
            self._looks.append(TopicsSnapshot(minute_ms * 1000, then))

    def _since(self, look: TopicsSnapshot, span_us: int) -> dict[str, Interval]:
        """Each topic's activity in about the last `span_us`, for topics in the earlier look."""
        looks = self._looks
        if span_us == LATENESS_US:
            while len(looks) > 1 and looks[1].at_us <= look.at_us - span_us:
                looks.popleft()
        before = next(
            (earlier for earlier in reversed(looks) if earlier.at_us <= look.at_us - span_us),
            looks[0] if looks else None,
        )
        if before is None or before.at_us >= look.at_us:
            return {}
        found = live.activity(before, look)
        return {topic: interval for topic, interval in found.items() if topic in before.topics}


def _server(store: Store) -> Flow[ServerFacts]:
    sections = ("server", "memory", "clients", "persistence", "replication")
    before = time.time_ns()
    server_us = yield from store.server_time_us()
    clock = check_clock((server_us - (before + time.time_ns()) // 2_000) / 1_000)
    facts: dict[str, str] = {}
    for reply in (yield from ask_all(store, [("INFO", section) for section in sections])):
        facts |= info(reply) if reply is not None else {}
    kind = next((k for k in ("valkey", "redis") if f"{k}_version" in facts), "")
    return ServerFacts(
        name=f"{kind.capitalize()} {facts[f'{kind}_version']}" if kind else "",
        uptime_s=_number(facts.get("uptime_in_seconds")),
        memory=_number(facts.get("used_memory")),
        most_memory=_number(facts.get("maxmemory")) or None,
        clients=_number(facts.get("connected_clients")),
        problems=(
            *(server_checks.problems(facts) if facts else ()),
            *([clock] if clock.verdict is not CheckResult.OK else ()),
        ),
    )


def _relays(store: Store) -> Flow[list[RolePresence[RelayPresence]]]:
    """The relays; none if their node, or the user's ACL, does not answer for them."""
    try:
        return (yield from roles.relays(store))
    except (ServerUnavailable, ConfigError):
        return []


def _late_ticks(store: Store, now_ms: int) -> Flow[dict[str, LateTicks]]:
    topics = yield from scheduled_topics(store)
    return (yield from schedules.late(store, topics, now_ms))


def _refusals(store: Store, topics: Sequence[str]) -> Flow[dict[str, Refusal]]:
    """Why writes are refused, by topic, and for managers under the name ""."""
    step = max(1, len(topics) // MOST_PROBED) if store.has_nodes else 1
    names = ["", *topics[::step]]
    keys = [store.keys.topic(name).waiting if name else store.keys.managers for name in names]
    try:
        found = yield from write_refusals(store, keys)
    except ServerUnavailable:  # one node of several; the others' reads fail by themselves
        return {}
    return {
        name: refusal for name, refusal in zip(names, found, strict=True) if refusal is not None
    }


def _by_topic(found: Mapping[tuple[str, str], T]) -> dict[str, dict[str, T]]:
    """What was found, by topic and then group."""
    by_topic: dict[str, dict[str, T]] = {}
    for (topic, group), value in found.items():
        by_topic.setdefault(topic, {})[group] = value
    return by_topic


def _past(ms: int | None, now_ms: int) -> int | None:
    return ms if ms is not None and ms <= now_ms else None


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
