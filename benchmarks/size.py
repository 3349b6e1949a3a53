"""`python -m benchmarks.size`: the cluster that a load needs, from measured costs.

The capacity model: Redis runs one command at a time, so a primary's capacity is the inverse of the
CPU time that a message costs there. This time falls with the load, because the calls at higher
rates hold more messages. docs/why/scale.md derives the formulas, and the simulation checks them.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, count
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Self

import click
import msgspec
from pydantic import ByteSize, TypeAdapter, ValidationError
from redis.crc import key_slot

from lisa.cli.options import duration
from lisa.cli.output import print_json, print_table
from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import check_topic
from lisa.core.model.sharding import MOST_SHARDS, Topic, name
from lisa.manager.promoter import FAST_INTERVAL_S, FAST_RATE

BODY_BYTES = 100
"""The size of the bodies behind all costs but `kilobyte`."""

Figures = Callable[[str, str], float]
"""Lisa's figure by measure and name. Raises KeyError."""

_WORKERS = ("manager", "consumer")

MOST = 250
"""Messages in one call."""

SLOTS = 16_384

MANAGERS = 2
"""One works, the other is its standby. Both promote due messages, so every second call is empty."""


SPARE_MEMORY = 1.25
"""Memory including fragmentation, replication buffers and streams, per byte of messages."""


ENVELOPE_BYTES = 200
"""Bytes on the wire per message in addition to its body, in each direction."""


class _Figure(msgspec.Struct):
    measure: str
    subject: str
    name: str
    values: list[float]


class _Report(msgspec.Struct):
    figures: list[_Figure]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """CPU time in microseconds, and memory in bytes.

    A step on a batch of k messages costs `call + k * message`.

    send: Redis, per send call. life: Redis, from the promotion to the ack of a batch. manager,
    consumer: these processes. kilobyte: Redis, per kB of a body for its whole life. waiting: server
    memory per waiting message besides its body. tombstone: server memory per settled message until
    its `retention` ends.
    """

    send_call: float
    send_message: float
    life_call: float
    life_message: float
    kilobyte: float
    manager_call: float
    manager_message: float
    consumer_call: float
    consumer_message: float
    waiting: float
    tombstone: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """The costs in the report.json of `python -m benchmarks.bench --out`.

        Raises ConfigError if the file is not a benchmark report or lacks a measurement.
        """
        try:
            report = msgspec.json.decode(path.read_bytes(), type=_Report)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not a report of benchmarks.bench: {error}") from error
        found = {
            (one.measure, one.name): median(one.values)
            for one in report.figures
            if one.subject == "lisa" and one.values
        }
        try:
            return cls.of(lambda measure, name: found[measure, name])
        except KeyError as error:
            measure, name = error.args[0]
            raise ConfigError(
                f"{path} lacks the figure {name!r} of {measure}: repeat the benchmark with"
                f" --only {measure}, or without --only"
            ) from error

    @classmethod
    def of(cls, figure: Figures) -> Self:
        """Derive the costs: a drain has large batches, the light load batches of one message."""
        send_message = figure("bulk_send", "redis")
        life_message = figure("drain", "redis") - send_message
        singly = {part: figure("light_load", f"{part} at 1,000/s") for part in ("redis", *_WORKERS)}
        batched = {part: figure("drain", part) for part in _WORKERS}
        return cls(
            send_call=_beyond(figure("single_send", "redis"), send_message),
            send_message=send_message,
            life_call=_beyond(singly["redis"], life_message),
            life_message=life_message,
            kilobyte=figure("bodies", "redis per kB"),
            manager_call=_beyond(singly["manager"], batched["manager"]),
            manager_message=batched["manager"],
            consumer_call=_beyond(singly["consumer"], batched["consumer"]),
            consumer_message=batched["consumer"],
            waiting=figure("memory", "embedded server") - BODY_BYTES,
            tombstone=figure("drain", "tombstone"),
        )


def _beyond(single: float, message: float) -> float:
    """The part of a single message's cost that occurs once per batch."""
    return max(0.0, single - message)


MEASURED = Costs(
    send_call=54.0,
    send_message=2.9,
    life_call=243.0,
    life_message=16.0,
    kilobyte=4.9,
    manager_call=187.0,
    manager_message=1.6,
    consumer_call=314.0,
    consumer_message=11.5,
    waiting=199.0,
    tombstone=148.0,
)
"""Measured on two shared cores (AMD EPYC, Valkey 9.1, Python 3.11); the default costs."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakLoad:
    """A load at its peak.

    rate: messages sent, and due, per second. body: its mean size in bytes. waiting: messages.
    batch: messages in a send call. retention_s: how long tombstones stay. round_trip_us: of the
    network. busy: the largest share of its core that a Redis or a consumer may use. memory: bytes
    of a primary.
    """

    topic: Topic
    rate: float
    body: int
    waiting: float
    batch: int
    groups: int
    retention_s: float
    round_trip_us: float
    busy: float
    memory: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a topic's shards. most: shards on the primary with the most shards."""

    primaries: int
    shards: int
    most: int

    @property
    def share(self) -> float:
        """The busiest primary's share of the messages."""
        return self.most / self.shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The cluster for a peak load. Shares are of one core.

    redis: used on the busiest primary. managers: processes, one of them a standby. manager: used
    by each. consumers: processes of each group. memory, inbound, outbound: bytes, and bytes per
    second, of the busiest primary. drain: messages per second of the whole cluster that are due at
    one instant. load: of the busiest primary.
    """

    placement: Placement
    redis: float
    managers: int
    manager: float
    consumers: int
    memory: float
    inbound: float
    outbound: float
    drain: float
    load: Load


def size(peak: PeakLoad, costs: Costs) -> Size:
    """The smallest cluster for a peak load. Raises ConfigError if one topic cannot carry it."""
    for placement in placements(peak.topic):
        found = _sized(peak, costs, placement)
        if found.redis <= peak.busy and found.memory <= peak.memory:
            return found
    raise ConfigError(
        f"one topic has at most {MOST_SHARDS} shards, too few for this load: spread it over several"
        " topics, and size each on its own"
    )


def sized(peak: PeakLoad, costs: Costs, primaries: int) -> Size:
    """The size with a given number of primaries, even if they are too few."""
    return _sized(peak, costs, best_placement(peak.topic, primaries))


def _sized(peak: PeakLoad, costs: Costs, placement: Placement) -> Size:
    rate = peak.rate * placement.share
    load = _load(peak, costs, placement)
    while load.rate / load.shards > peak.busy * load.readers * reader_rate(load, costs):
        load = replace(load, readers=load.readers + 1)
    consumer_us = costs.consumer_message + costs.consumer_call / read_batch(load, costs)
    consumers = max(load.readers, ceil(peak.rate * consumer_us / 1e6 / peak.busy))
    manager_us = costs.manager_message + costs.manager_call / promote_batch(load, costs)
    managing = peak.rate * manager_us / 1e6
    managers = max(MANAGERS, ceil(managing / peak.busy) + 1)
    kept = peak.waiting * (costs.waiting + peak.body)
    kept += peak.rate * peak.retention_s * costs.tombstone
    wire = rate * (peak.body + ENVELOPE_BYTES)
    return Size(
        placement=placement,
        redis=rate * redis_us(load, costs) / 1e6,
        managers=managers,
        manager=managing / (managers - 1),
        consumers=consumers,
        memory=kept * placement.share * SPARE_MEMORY,
        inbound=wire,
        outbound=wire * peak.groups,
        drain=_drain(load, costs, consumers, placement),
        load=load,
    )


def _load(peak: PeakLoad, costs: Costs, placement: Placement) -> Load:
    """The load of the busiest primary."""
    rate = peak.rate * placement.share
    fast_us = FAST_INTERVAL_S * 1e6 if rate / placement.most > FAST_RATE else 0.0
    kilobytes = max(0, peak.body - BODY_BYTES) / 1000
    return Load(
        rate=rate,
        batch=peak.batch,
        shards=placement.most,
        managers=MANAGERS,
        round_trip_us=peak.round_trip_us,
        # One core of a manager serves all shards in turn.
        interval_us=max(fast_us, costs.manager_call * placement.shards),
        groups=peak.groups,
        # A body is written once and read by each group, at about half of its cost each.
        body_us=costs.kilobyte * kilobytes * (1 + peak.groups) / 2,
    )


def promote_batch(load: Load, costs: Costs) -> float:
    """The mean number of messages in a promotion."""
    rate = load.rate / load.shards / 1e6
    # Messages that fall due during the call for the first one.
    joined = rate * (load.round_trip_us + costs.manager_call) / 2
    cycle_us = load.round_trip_us + costs.manager_call + PROMOTE * costs.life_call
    return min(MOST, max(1.0 + joined, rate * max(cycle_us, load.interval_us)))


def read_batch(load: Load, costs: Costs) -> float:
    """The mean number of messages that a consumer reads, opens and settles together."""
    rate = load.rate / load.shards / load.readers / 1e6
    message_us = costs.consumer_message + (1 - PROMOTE) * (costs.life_message + load.body_us)
    idle = max(1 / MOST, 1 - rate * message_us)
    joined = rate * (2 * load.round_trip_us + costs.consumer_call) / idle
    return min(MOST, max(joined, promote_batch(load, costs)))


def reader_rate(load: Load, costs: Costs) -> float:
    """The most messages per second that one consumer process handles from one shard."""
    redis_us = (1 - PROMOTE) * (costs.life_call + MOST * (costs.life_message + load.body_us))
    cycle_us = 2 * load.round_trip_us + costs.consumer_call + MOST * costs.consumer_message
    return MOST * 1e6 / (cycle_us + redis_us)


def redis_us(load: Load, costs: Costs) -> float:
    """Redis's CPU time per message, from the send to the ack."""
    sent = costs.send_message + costs.send_call / min(load.batch, MOST)
    promoted = load.managers * PROMOTE * costs.life_call / promote_batch(load, costs)
    read = (1 - PROMOTE) * costs.life_call / read_batch(load, costs)
    return sent + load.groups * (costs.life_message + promoted + read) + load.body_us


def _drain(load: Load, costs: Costs, consumers: int, placement: Placement) -> float:
    """Messages per second of the whole cluster if all are due at one instant."""
    lives_us = load.groups * (costs.life_message + costs.life_call / MOST) + load.body_us
    consumer_us = costs.consumer_message + costs.consumer_call / MOST
    primary = min(1e6 / lives_us, load.shards * load.readers * reader_rate(load, costs))
    return min(primary / placement.share, consumers * 1e6 / consumer_us)


def placements(topic: Topic) -> Iterator[Placement]:
    """The best placement for each number of primaries, up to the number that one topic can use.

    Two primaries are left out, because Redis Cluster needs three.
    """
    yield Placement(1, 1, 1)
    for primaries in range(3, MOST_SHARDS + 1):
        yield best_placement(topic, primaries)


@cache
def best_placement(topic: Topic, primaries: int) -> Placement:
    """The number of shards with which a topic's busiest primary has the smallest share.

    Primaries own equal ranges of slots, as `redis-cli --cluster create` and `rebalance` leave them.
    """
    if primaries == 1:
        return Placement(1, 1, 1)
    found = []
    for shards in range(1, MOST_SHARDS + 1):
        slots = (key_slot(name(topic, number, shards).encode()) for number in range(shards))
        owners = Counter(slot * primaries // SLOTS for slot in slots)
        found.append(Placement(primaries, shards, max(owners.values())))
    return min(found, key=lambda placement: (placement.share, placement.shards))


def byte_size(value: Any) -> int:
    """The value of an option: bytes with an optional unit, as in 800, 2kB, 1.5MB, 32GiB."""
    try:
        return TypeAdapter(ByteSize).validate_python(value)
    except ValidationError:
        raise click.BadParameter(f"{value!r} is not a size; write 800, 2kB or 32GiB") from None


@click.command()
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    required=True,
    metavar="N",
    help="Messages per second at the peak, sent and due.",
)
@click.option(
    "--body",
    type=byte_size,
    metavar="SIZE",
    default="1kB",
    show_default=True,
    help="Mean size of a body.",
)
@click.option(
    "--delay",
    type=duration,
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="How long a message waits on average.",
)
@click.option(
    "--waiting",
    type=click.FloatRange(0),
    metavar="N",
    help="Messages that wait, instead of --delay.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Messages in a send call.",
)
@click.option(
    "--groups",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Consumer groups that each receive every message.",
)
@click.option("--at-once", type=click.IntRange(1), metavar="N", help="Messages due at one instant.")
@click.option(
    "--retention",
    type=duration,
    default="1m",
    show_default=True,
    metavar="DURATION",
    help="The topic's retention of tombstones.",
)
@click.option(
    "--round-trip",
    type=duration,
    default="0.5ms",
    show_default=True,
    metavar="DURATION",
    help="Network round trip, as `redis-cli --latency` measures it.",
)
@click.option(
    "--busy",
    type=click.FloatRange(0.05, 0.95),
    default=0.6,
    show_default=True,
    help="Largest share of its core that a Redis or a consumer may use.",
)
@click.option(
    "--memory",
    type=byte_size,
    metavar="SIZE",
    default="32GiB",
    show_default=True,
    help="Memory of a primary.",
)
@click.option(
    "--topic",
    default="orders",
    show_default=True,
    metavar="NAME",
    help="The topic: its name decides on which primaries its shards lie.",
)
@click.option(
    "--costs",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The report.json that `python -m benchmarks.bench --out` wrote on your hardware.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(*, as_json: bool, at_once: int | None, **options: Any) -> None:
    """Estimate the Redis Cluster that a topic needs: primaries, shards, memory, processes.

    Needs no server. Derives the load of each part from the costs that `make bench` measures, and
    simulates the busiest primary for the lateness.
    """
    try:
        costs = Costs.read(options["costs"]) if options["costs"] is not None else MEASURED
        peak = _demand(options)
        found = size(peak, costs)
    except LisaError as error:
        raise click.UsageError(str(error)) from error
    simulated = simulate(found.load, costs)
    if as_json:
        print_json(_document(found, simulated, at_once))
    else:
        print_table(("", " ", ""), _rows(peak, found, simulated, at_once))


def _demand(options: dict[str, Any]) -> PeakLoad:
    waiting = options["waiting"]
    return PeakLoad(
        topic=Topic(check_topic(options["topic"])),
        rate=options["rate"],
        body=options["body"],
        waiting=options["rate"] * options["delay"].total_seconds() if waiting is None else waiting,
        batch=options["batch"],
        groups=options["groups"],
        retention_s=options["retention"].total_seconds(),
        round_trip_us=options["round_trip"].total_seconds() * 1e6,
        busy=options["busy"],
        memory=options["memory"],
    )


def _rows(
    peak: PeakLoad, found: Size, simulated: Simulated, at_once: int | None
) -> list[tuple[str, str, str]]:
    placement = found.placement
    rows = [
        ("primaries", f"{placement.primaries:,}", f"the busiest uses {found.redis:.0%} of a core"),
        ("shards", f"{placement.shards}", f"at most {placement.most} on a primary"),
        (
            "memory of a primary",
            f"{found.memory / 2**30:,.1f} GiB",
            f"{peak.waiting:,.0f} messages wait in all",
        ),
        (
            "network of a primary",
            f"{found.outbound * 8e-6:,.0f} Mbit/s",
            f"out; {found.inbound * 8e-6:,.0f} Mbit/s in",
        ),
        (
            "managers",
            f"{found.managers}",
            f"each uses {found.manager:.0%} of a core; one may fail",
        ),
        (
            "consumer processes",
            f"{found.consumers * peak.groups:,}",
            "at least; handlers need time of their own",
        ),
        (
            "lateness p50 / p99",
            f"{simulated.p50_ms:.1f} / {simulated.p99_ms:.1f} ms",
            "simulated, with idle handlers",
        ),
        ("drain", f"{found.drain:,.0f}/s", "messages due at one instant"),
    ]
    if at_once is not None:
        took_ms = round(at_once / found.drain * 1000)
        rows.append((f"{at_once:,} at once", human(took_ms), "until the last is handled"))
    return rows


def _document(found: Size, simulated: Simulated, at_once: int | None) -> dict[str, Any]:
    return {
        "primaries": found.placement.primaries,
        "shards": found.placement.shards,
        "shards_of_busiest": found.placement.most,
        "redis_share": found.redis,
        "managers": found.managers,
        "manager_share": found.manager,
        "consumers_per_group": found.consumers,
        "memory_bytes": round(found.memory),
        "inbound_bytes_per_s": found.inbound,
        "outbound_bytes_per_s": found.outbound,
        "drain_per_s": found.drain,
        "at_once_s": None if at_once is None else at_once / found.drain,
        "lateness_p50_ms": simulated.p50_ms,
        "lateness_p99_ms": simulated.p99_ms,
        "simulated_redis_share": simulated.busy,
    }


if __name__ == "__main__":
    main()
