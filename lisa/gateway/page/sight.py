"""What all viewers look at together: however many there are, the server answers one reader.

Whatever a page shows is asked for once and shared for a while; who comes meanwhile waits for the
same answer. Nothing is read while nobody looks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lisa.admin import history, live, roles, topics
from lisa.admin.live import Activity, Look
from lisa.admin.reading import ask_all, info
from lisa.admin.roles import Seen
from lisa.admin.topics import TopicCounts
from lisa.core.flow import Flow
from lisa.core.presence import ConsumerPresence
from lisa.gateway.hub import Hub

__all__ = ["LOOK_S", "Line", "Scene", "Server", "Sight"]

T = TypeVar("T")

LOOK_S = 1.0
ROLES_S = 2.0
SERVER_S = 5.0
LEISURE = 20
"""Looking takes at most one part in so many of the time, on a server with very many topics."""

RATE_US = 9_000_000
LATENESS_US = 60_000_000
FORGET_US = 15_000_000
RING_US = 2_000_000
MOST_SHARED = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One topic at this moment, its groups summed up. `activity` is None until it is known."""

    counts: TopicCounts
    activity: Activity | None
    lateness: Activity | None
    consumers: int

    @property
    def topic(self) -> str:
        """Its name."""
        return self.counts.topic

    @property
    def waiting(self) -> int:
        """Accepted, not due."""
        return self.counts.waiting

    @property
    def ready(self) -> int:
        """Due, not handed out."""
        return sum(group.ready for group in self.counts.groups)

    @property
    def in_flight(self) -> int:
        """Handed out, not settled."""
        return sum(group.in_flight for group in self.counts.groups)

    @property
    def retry(self) -> int:
        """Waiting for their next attempt."""
        return sum(group.retry for group in self.counts.groups)

    @property
    def garbage(self) -> int:
        """Given up."""
        return sum(group.garbage for group in self.counts.groups)

    @property
    def in_per_s(self) -> float | None:
        """Accepted a second, of late."""
        return self.activity.in_per_s if self.activity else None

    @property
    def out_per_s(self) -> float | None:
        """Acked a second, of late."""
        return self.activity.out_per_s if self.activity else None

    @property
    def p50_ms(self) -> float | None:
        """The median lateness of the last minute."""
        return self.lateness.p50_ms if self.lateness else None

    @property
    def p99_ms(self) -> float | None:
        """What one in a hundred hand-overs of the last minute was later than."""
        return self.lateness.p99_ms if self.lateness else None


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself; nothing where it may not be asked."""

    name: str = ""
    uptime_s: int | None = None
    memory: int | None = None
    most_memory: int | None = None
    clients: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything at one moment, by Redis's clock."""

    at_ms: int
    lines: Mapping[str, Line]
    consumers: tuple[Seen, ...]
    managers: tuple[Seen, ...]
    server: Server


class _Shared:
    """One answer that is being asked for, or is still good."""

    def __init__(self, work: Awaitable[Any], lasts_s: float) -> None:
        self.begun = time.monotonic()
        self.until: float | None = None
        self._lasts_s = lasts_s
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Future[Any]) -> None:
        now = time.monotonic()
        failed = task.cancelled() or task.exception() is not None
        self.until = now if failed else now + max(self._lasts_s, LEISURE * (now - self.begun))

    def is_good(self, now: float) -> bool:
        return self.until is None or now < self.until


class Sight:
    """The pages' eyes in one gateway process."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._shared: dict[object, _Shared] = {}
        self._looks: deque[Look] = deque()

    async def share(self, key: object, lasts_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question, asked again only when the last one is older. Raises LisaError.

        `key` says which question it is.
        """
        now = time.monotonic()
        known = self._shared.get(key)
        if known is None or not known.is_good(now):
            if len(self._shared) >= MOST_SHARED:
                self._shared = {k: one for k, one in self._shared.items() if one.is_good(now)}
            known = self._shared[key] = _Shared(ask(), lasts_s)
        answer: T = await asyncio.shield(known.task)
        return answer

    async def flow(self, key: object, lasts_s: float, flow: Callable[[], Flow[T]]) -> T:
        """The same for a flow over the store."""
        return await self.share(key, lasts_s, lambda: self._hub.store.drive(flow()))

    def look_again(self) -> None:
        """Something was changed from here: whoever looks next sees it."""
        self._shared.clear()

    async def scene(self) -> Scene:
        """Everything at this moment. Raises LisaError."""
        return await self.share("scene", LOOK_S, self._take)

    async def line(self, topic: str) -> Line | None:
        """One topic at this moment, also one that was registered since the last look, or is idle.

        None where nothing is known of it. Raises LisaError.
        """
        known = (await self.scene()).lines.get(topic)
        if known is not None:
            return known
        store = self._hub.store
        if not await self.flow(("exists", topic), LOOK_S, lambda: topics.exists(store, topic)):
            return None
        (counts,) = await self.flow(
            ("counts", topic), LOOK_S, lambda: topics.counts(store, [topic])
        )
        return Line(counts, None, None, 0)

    async def _take(self) -> Scene:
        store = self._hub.store
        managers = await self.flow("managers", ROLES_S, lambda: roles.managers(store))
        look = self._remember(await store.drive(live.look(store)))
        names = tuple(look.topics)
        consumers = await self.flow("consumers", ROLES_S, lambda: roles.consumers(store, names))
        server = await self.flow("server", SERVER_S, self._server)
        if not self._looks or self._looks[-1].at_us < look.at_us - FORGET_US:
            await self._begin(look, any(one.alive for one in managers))
        rates, late = self._since(look, RATE_US), self._since(look, LATENESS_US)
        if not self._looks or self._looks[-1].at_us <= look.at_us - RING_US:
            self._looks.append(look)
        alive: dict[str, int] = {}
        for one in consumers:
            if one.alive and isinstance(one.record, ConsumerPresence):
                alive[one.record.topic] = alive.get(one.record.topic, 0) + 1
        lines = {
            name: Line(counts, rates.get(name), late.get(name), alive.get(name, 0))
            for name, counts in sorted(look.topics.items())
        }
        return Scene(look.at_us // 1000, lines, tuple(consumers), tuple(managers), server)

    def _remember(self, look: Look) -> Look:
        """The same look; topics in which nothing changed share what the last look holds."""
        before = self._looks[-1].topics if self._looks else {}
        return replace(look, topics={
            name: before[name] if before.get(name) == counts else counts
            for name, counts in look.topics.items()
        })  # fmt: skip

    async def _begin(self, look: Look, has_manager: bool) -> None:  # noqa: FBT001  one caller
        """The first look in a while: compare with the manager's sample of a minute ago."""
        self._looks.clear()
        if not has_manager or not look.topics:
            return
        minute_ms = (look.at_us // 60_000_000 - 1) * 60_000
        names = list(look.topics)
        found = await self._hub.store.drive(history.counters_at(self._hub.store, names, minute_ms))
        then = {name: replace(look.topics[name], stats=stats) for name, stats in found.items()}
        if then:
            self._looks.append(Look(minute_ms * 1000, then))

    def _since(self, look: Look, span_us: int) -> dict[str, Activity]:
        """What happened in about the last `span_us`, for each topic that was seen before."""
        looks = self._looks
        if span_us == LATENESS_US:
            while len(looks) > 1 and looks[1].at_us <= look.at_us - span_us:
                looks.popleft()
        before = next((one for one in reversed(looks) if one.at_us <= look.at_us - span_us),
                      looks[0] if looks else None)  # fmt: skip
        if before is None or before.at_us >= look.at_us:
            return {}
        found = live.activity(before, look)
        return {one.counts.topic: one for one in found if one.counts.topic in before.topics}

    def _server(self) -> Flow[Server]:
        sections = ("server", "memory", "clients")
        replies = yield from ask_all(self._hub.store, [("INFO", one) for one in sections])
        said: dict[str, str] = {}
        for reply in replies:
            said |= info(reply) if reply is not None else {}
        kind = next((k for k in ("valkey", "redis") if f"{k}_version" in said), "")
        return Server(
            name=f"{kind.capitalize()} {said[f'{kind}_version']}" if kind else "",
            uptime_s=_number(said.get("uptime_in_seconds")),
            memory=_number(said.get("used_memory")),
            most_memory=_number(said.get("maxmemory")) or None,
            clients=_number(said.get("connected_clients")),
        )


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
