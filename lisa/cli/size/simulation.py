"""A queueing simulation of one primary: its Redis, a manager, consumers and senders.

Discrete events in virtual microseconds. Redis serves one request at a time in order of arrival.
Every request and every reply travels for half of the round trip. Due times and send calls are
Poisson processes. The manager promotes a shard as soon as a message is due, but not within
`interval` of its last promotion. A consumer's reader waits for entries, opens them, calls the
handlers one after the other, and sends its acks with the next read.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count

from lisa.cli.size.costs import Costs

MOST = 250
"""Messages in one call."""

PROMOTE, READ, OPEN, ACK = 0.3, 0.12, 0.13, 0.45
"""The shares of the four steps in the cost of a life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of one primary.

    rate: messages per second that fall due, and are sent, evenly over the shards. batch: messages
    in a send call, or 0 if nothing is sent. managers: each repeats every promotion. readers:
    consumer processes that read each shard. round_trip_us: of the network. interval_us: shortest
    time between two promotions of a shard. groups: one is simulated; the others cost Redis as much.
    body_us: additional CPU time of Redis per message for bodies larger than those of `Costs`.
    """

    rate: float
    batch: int = 1
    shards: int = 1
    managers: int = 1
    readers: int = 1
    round_trip_us: float = 500.0
    interval_us: float = 0.0
    groups: int = 1
    body_us: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The behaviour of a primary.

    p50_ms, p99_ms: lateness. busy: the share of the time that Redis worked. rate: messages handled
    per second.
    """

    p50_ms: float
    p99_ms: float
    busy: float
    rate: float


class _Shard:
    __slots__ = ("due", "idle", "promoted", "ready")

    def __init__(self, due: list[float]) -> None:
        self.due = due
        self.promoted = 0
        self.ready: deque[float] = deque()
        self.idle: deque[_Reader] = deque()


class _Reader:
    __slots__ = ("shard", "taken")

    def __init__(self, shard: _Shard) -> None:
        self.shard = shard
        self.taken: list[float] = []


class Simulation:
    """One run of a load. The same seed gives the same result."""

    def __init__(self, load: Load, costs: Costs, messages: int = 20_000, seed: int = 1) -> None:
        self._load = load
        self._costs = costs
        self._half_us = load.round_trip_us / 2
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._redis_free_at = self._redis_worked = 0.0
        self._manager_free_at = 0.0
        self._late: list[float] = []
        self._last_us = 0.0
        chance = random.Random(seed)
        self._shards = [
            _Shard(_poisson(chance, load.rate / load.shards, messages // load.shards))
            for _ in range(load.shards)
        ]
        if load.batch:
            for at in _poisson(chance, load.rate / load.batch, messages // load.batch):
                self._at(at, self._send)

    def run(self) -> Simulated:
        """Handle all messages."""
        for shard in self._shards:
            for _ in range(self._load.readers):
                self._at(0.0, partial(self._read, _Reader(shard)))
            self._plan(shard, 0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        late = sorted(self._late)
        span_us = max(self._last_us, 1.0)
        return Simulated(
            p50_ms=late[len(late) // 2] / 1000,
            p99_ms=late[len(late) * 99 // 100] / 1000,
            busy=min(1.0, self._redis_worked / span_us),
            rate=len(late) * 1e6 / span_us,
        )

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _serve(self, now: float, spent_us: float) -> float:
        """Let Redis serve a request; returns when its reply leaves."""
        self._redis_free_at = max(now, self._redis_free_at) + spent_us
        self._redis_worked += spent_us
        return self._redis_free_at

    def _life_us(self, part: float, messages: int) -> float:
        group_us = self._costs.life_call + messages * self._costs.life_message
        return part * (self._load.groups * group_us + messages * self._load.body_us)

    def _send(self, now: float) -> None:
        batch = self._load.batch
        calls = -(-batch // MOST)
        self._serve(now, calls * self._costs.send_call + batch * self._costs.send_message)

    def _plan(self, shard: _Shard, earliest: float) -> None:
        """Have the manager send the next promotion of a shard."""
        if shard.promoted < len(shard.due):
            at = max(earliest, shard.due[shard.promoted])
            self._at(at, partial(self._ask, shard))

    def _ask(self, shard: _Shard, now: float) -> None:
        started = max(now, self._manager_free_at)
        self._manager_free_at = started + self._costs.manager_call / 2
        arrives = self._manager_free_at + self._half_us
        self._at(arrives, partial(self._promote, shard, started))

    def _promote(self, shard: _Shard, asked: float, now: float) -> None:
        begun = max(now, self._redis_free_at)
        first = shard.promoted
        last = min(first + MOST, len(shard.due))
        while shard.promoted < last and shard.due[shard.promoted] <= begun:
            shard.ready.append(shard.due[shard.promoted])
            shard.promoted += 1
        moved = shard.promoted - first
        left = self._serve(now, self._life_us(PROMOTE, moved))
        if shard.idle and shard.ready:
            self._deliver(shard.idle.popleft())
        costs = self._costs
        self._serve(now, (self._load.managers - 1) * PROMOTE * costs.life_call)
        back = max(left + self._half_us, self._manager_free_at)
        self._manager_free_at = back + costs.manager_call / 2 + moved * costs.manager_message
        self._plan(shard, max(self._manager_free_at, asked + self._load.interval_us))

    def _read(self, reader: _Reader, now: float) -> None:
        """A read arrives, with the acks of the last batch."""
        if reader.taken:
            self._serve(now, self._life_us(ACK, len(reader.taken)))
            reader.taken = []
        if reader.shard.ready:
            self._redis_free_at = max(now, self._redis_free_at)
            self._deliver(reader)
        else:
            reader.shard.idle.append(reader)

    def _deliver(self, reader: _Reader) -> None:
        ready = reader.shard.ready
        reader.taken = [ready.popleft() for _ in range(min(MOST, len(ready)))]
        left = self._serve(self._redis_free_at, self._life_us(READ, len(reader.taken)))
        back = left + self._half_us + self._costs.consumer_call / 3
        self._at(back + self._half_us, partial(self._open, reader))

    def _open(self, reader: _Reader, now: float) -> None:
        left = self._serve(now, self._life_us(OPEN, len(reader.taken)))
        opened = left + self._half_us + self._costs.consumer_call / 3
        each = self._costs.consumer_message
        ends = list(accumulate([each] * len(reader.taken), initial=opened))
        self._late += [end - due for end, due in zip(ends[1:], reader.taken, strict=True)]
        self._last_us = max(self._last_us, ends[-1])
        asks = ends[-1] + self._costs.consumer_call / 3 + self._half_us
        self._at(asks, partial(self._read, reader))


def _poisson(chance: random.Random, rate: float, events: int) -> list[float]:
    """The times of events in us, in ascending order."""
    return list(accumulate(chance.expovariate(rate / 1e6) for _ in range(events)))


def simulate(load: Load, costs: Costs, messages: int = 20_000, seed: int = 1) -> Simulated:
    """Simulate a number of messages of a load. The same seed gives the same result."""
    return Simulation(load, costs, messages, seed).run()
