"""The measures of Lisa, against raw Redis commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.bench.floor import BODY, RETENTION_MS, Floor, life
from benchmarks.bench.results import STEADY, Results
from benchmarks.bench.server import BenchServer, debian_binary, fresh_server
from benchmarks.bench.work import (
    TOPIC,
    Drained,
    FloorAtWork,
    LisaAtWork,
    drain,
    floor_at_work,
    lisa_at_work,
    paced,
    prepared,
    store_on,
)
from lisa import AsyncProducer, Producer
from lisa.admin.topics import set_options
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection

_AMOUNTS = (
    "life",
    "bulk",
    "single",
    "concurrent",
    "drain",
    "bodies",
    "memory",
)

BULK_SEND = "bulk_send"
SINGLE_SEND = "single_send"
TURNS = 10
HOUR = timedelta(hours=1)
CONCURRENT_SEND = "concurrent_send"
TASKS = 100
DRAIN = "drain"
BODIES = "bodies"
LARGE_BODY = 10_000
LANES = "lanes"
MANY_LANES = 10_000
LIGHT_LOAD = "light_load"
LATENESS = "lateness"
STEADY_RATE = 1_000.0
HALF = "half of capacity"
MEMORY = "memory"
FAR_MS = 4_000_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Numbers of messages, unless noted otherwise.

    repeats: how often to take each figure.
    slow_repeats: how often to take figures that need many seconds.
    life: messages of the floor's life cycle; bulk, single, concurrent: timed sends.
    drain: messages due at one instant; bodies: the same with larger bodies.
    paced_seconds: how long messages fall due at a constant rate.
    light_rates: messages per second, with one manager and one consumer.
    """

    mode: str = "full"
    repeats: int = 3
    slow_repeats: int = 3
    life: int = 50_000
    bulk: int = 100_000
    single: int = 5_000
    concurrent: int = 50_000
    drain: int = 100_000
    bodies: int = 10_000
    paced_seconds: float = 20.0
    memory: int = 50_000
    light_rates: tuple[int, ...] = (100, 300, 1_000, 3_000)

    def scaled(self, scale: float) -> Sizes:
        """Scale all amounts, as `--scale 0.01` does in tests."""
        if scale == 1.0:
            return self
        changed: dict[str, Any] = {
            name: max(20, int(getattr(self, name) * scale)) for name in _AMOUNTS
        }
        changed["paced_seconds"] = max(0.2, self.paced_seconds * scale)
        changed["light_rates"] = (1_000,)
        return replace(self, **changed)


FULL = Sizes()

QUICK = Sizes(
    mode="quick",
    slow_repeats=1,
    life=20_000,
    bulk=30_000,
    single=1_500,
    concurrent=10_000,
    drain=30_000,
    bodies=4_000,
    paced_seconds=3.0,
    light_rates=(1_000,),
)


@dataclass(frozen=True, slots=True)
class Run:
    """The sizes, the results, and a callback `say` for the current step."""

    sizes: Sizes
    results: Results
    say: Callable[[str], None]

    def repeats(self, what: str, *, slow: bool = False, most: int | None = None) -> Iterator[int]:
        """Count the repeats and report each one; at most `most`.

        slow: for measurements that take many seconds.
        """
        total = self.sizes.slow_repeats if slow else self.sizes.repeats
        if most is not None:
            total = min(total, most)
        for number in range(total):
            self.say(f"{what}, {number + 1} of {total}")
            yield number


def measure_bulk_send(run: Run) -> None:
    """Figures: rate, and the sender's and the server's CPU time per message."""
    for _ in run.repeats("sending in bulk"):
        with fresh_server() as server:
            _bulk_floor(run, server)
        with fresh_server() as server:
            _bulk_lisa(run, server)


def _bulk_floor(run: Run, server: BenchServer) -> None:
    count = run.sizes.bulk
    floor = Floor(server.client)
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    messages = {f"{number:022d}": due_ms for number in range(count)}
    floor.send({f"first {number}": due_ms for number in range(500)})
    clocks = _BulkClocks(server)
    floor.send(messages)
    clocks.add(run, "floor", count)


def _bulk_lisa(run: Run, server: BenchServer) -> None:
    count = run.sizes.bulk
    with prepared(server) as producer:
        producer.send_many(TOPIC, [BODY] * 500, delay=timedelta(hours=1))
        clocks = _BulkClocks(server)
        producer.send_many(TOPIC, [BODY] * count, delay=timedelta(hours=1))
        clocks.add(run, "lisa", count)


class _BulkClocks:
    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._redis_us = server.cpu_us()
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()

    def add(self, run: Run, subject: str, count: int) -> None:
        wall_s = time.perf_counter() - self._began_s
        cpu_s = time.process_time() - self._cpu_s
        redis_us = self._server.cpu_us() - self._redis_us
        run.results.add(BULK_SEND, subject, "rate", count / wall_s, "1/s")
        run.results.add(BULK_SEND, subject, "python", cpu_s * 1e6 / count, "us")
        run.results.add(BULK_SEND, subject, "redis", redis_us / count, "us")


def measure_single_send(run: Run) -> None:
    """Figures: calls per second. Both are measured in turns, for equal conditions."""
    each = max(1, run.sizes.single // TURNS)
    for _ in run.repeats("sending one by one"):
        with fresh_server() as server, prepared(server) as producer:
            ping_s, send_s = _in_turns(server, producer, each)
            redis_us = _send_redis_us(server, producer, each)
        run.results.add(SINGLE_SEND, "floor", "rate", each * TURNS / ping_s, "1/s")
        run.results.add(SINGLE_SEND, "lisa", "rate", each * TURNS / send_s, "1/s")
        run.results.add(SINGLE_SEND, "lisa", "redis", redis_us, "us")


def _in_turns(server: BenchServer, producer: Producer, each: int) -> tuple[float, float]:
    connection = Connection(Address.of(server.url))

    def ping() -> None:
        connection.execute(("PING",))

    def send() -> None:
        producer.send(TOPIC, BODY, delay=HOUR)

    ping()
    ping_s = send_s = 0.0
    for _ in range(TURNS):
        ping_s += _seconds(each, ping)
        send_s += _seconds(each, send)
    connection.close()
    return ping_s, send_s


def _send_redis_us(server: BenchServer, producer: Producer, count: int) -> float:
    """The server's CPU time per message."""
    before_us = server.cpu_us()
    for _ in range(count):
        producer.send(TOPIC, BODY, delay=HOUR)
    return (server.cpu_us() - before_us) / count


def _seconds(count: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - began


def measure_concurrent_send(run: Run) -> None:
    """Figures: messages per second with sequential sends and with a hundred tasks."""
    for _ in run.repeats("sending from many tasks"):
        with fresh_server() as server, prepared(server) as producer:
            count = max(TASKS, run.sizes.single)
            began = time.perf_counter()
            for _turn in range(count):
                producer.send(TOPIC, BODY, delay=HOUR)
            single_s = time.perf_counter() - began
            run.results.add(CONCURRENT_SEND, "lisa", "one at a time", count / single_s, "1/s")
            each = max(1, run.sizes.concurrent // TASKS)
            seconds = asyncio.run(_by_tasks(server, each))
            run.results.add(CONCURRENT_SEND, "lisa", "rate", each * TASKS / seconds, "1/s")


async def _by_tasks(server: BenchServer, each: int) -> float:
    async with AsyncProducer(server.url) as producer:

        async def one_task(count: int) -> None:
            for _ in range(count):
                await producer.send(TOPIC, BODY, delay=HOUR)

        await asyncio.gather(*(one_task(1) for _ in range(TASKS)))
        began = time.perf_counter()
        await asyncio.gather(*(one_task(each) for _ in range(TASKS)))
        return time.perf_counter() - began


def head_s(count: int) -> float:
    """Seconds between the start of sending and the due time: enough even on a busy machine."""
    return 1.0 + count * 20e-6


def measure_drain(run: Run) -> None:
    """Measure the cost and limit of the floor's life cycle, and drains of the floor and of Lisa."""
    for _ in run.repeats("draining"):
        _life(run, "floor")
        _life(run, "floor without index and tombstones", bare=True)
        _life(run, "floor with MSETEX", msetex=True)
        _drain_floor(run)
        _drain_lisa(run)


def _life(run: Run, subject: str, *, bare: bool = False, msetex: bool = False) -> None:
    with fresh_server() as server:
        if msetex and not server.knows("MSETEX"):
            return
        steps = life(server, run.sizes.life, bare=bare, msetex=msetex)
    whole_us = sum(steps.values())
    for name, step_us in steps.items():
        run.results.add(DRAIN, subject, f"redis, {name} alone", step_us, "us")
    run.results.add(DRAIN, subject, "redis, step by step", whole_us, "us")
    run.results.add(DRAIN, subject, "allowed", 1e6 / whole_us, "1/s")


def _drain_floor(run: Run) -> None:
    count = run.sizes.drain
    with fresh_server() as server, floor_at_work(server, "--whole") as work:
        add_drained(run, DRAIN, "floor", drain(work, count, head_s(count)))


def _drain_lisa(run: Run) -> None:
    count = run.sizes.drain
    with fresh_server() as server, lisa_at_work(server) as work:
        memory = server.memory()
        drained = drain(work, count, head_s(count))
        tombstone = max(0.0, (server.memory() - memory) / count)
    add_drained(run, DRAIN, "lisa", drained)
    run.results.add(DRAIN, "lisa", "tombstone", tombstone, "bytes")
    at_full_rate = tombstone * drained.rate * RETENTION_MS / 1000
    run.results.add(DRAIN, "lisa", "tombstones at full rate", at_full_rate / 2**20, "MiB")


def add_drained(
    run: Run, measure: str, subject: str, drained: Drained, *, on_redis: bool = True
) -> None:
    """Add the figures of one drain."""
    run.results.add(measure, subject, "rate", drained.rate, "1/s")
    if on_redis:
        run.results.add(measure, subject, "redis", drained.redis_us, "us")
    for part, spent_us in drained.cpu_us.items():
        run.results.add(measure, subject, part, spent_us, "us")
    early = sum(late < 0 for late in drained.lateness_us)
    run.results.add(measure, subject, "early", early, "")


def measure_bodies(run: Run) -> None:
    """Figures: the server's CPU time per message, by size of its body, and per kB of body."""
    count = run.sizes.bodies
    for _ in run.repeats("larger bodies"):
        with fresh_server() as server, lisa_at_work(server) as work:
            small_us = drain(work, count, head_s(count)).redis_us
            work.body = "x" * LARGE_BODY
            large_us = drain(work, count, 10 * head_s(count)).redis_us
        run.results.add(BODIES, "lisa", f"redis, {len(BODY):,} bytes", small_us, "us")
        run.results.add(BODIES, "lisa", f"redis, {LARGE_BODY:,} bytes", large_us, "us")
        per_kilobyte = max(0.0, large_us - small_us) * 1000 / (LARGE_BODY - len(BODY))
        run.results.add(BODIES, "lisa", "redis per kB", per_kilobyte, "us")


def measure_lanes(run: Run) -> None:
    """Figures: drains of messages with 10,000 keys, without lanes and with a slot for each key.

    And the server's CPU time per message of a key with few and with many parked messages.
    """
    count = run.sizes.drain
    for _ in run.repeats("lanes"):
        plain = _drain_keyed(count, MANY_LANES)
        limited = _drain_keyed(count, MANY_LANES, key_concurrency=1)
        add_drained(run, LANES, "no lanes", plain)
        add_drained(run, LANES, "lisa", limited)
        run.results.add(LANES, "lisa", "share of the rate", limited.rate / plain.rate, "")
        few = _drain_keyed(max(20, count // 100), 1, fair=True).redis_us
        many = _drain_keyed(count, 1, fair=True).redis_us
        run.results.add(LANES, "lisa", "redis, one key, many by few", many / few, "")


def _drain_keyed(count: int, keys: int, **options: object) -> Drained:
    with fresh_server() as server, lisa_at_work(server) as work:
        work.keys = keys
        if options:
            with closing(store_on(server)) as store:
                store.drive(set_options(store, TOPIC, options))
        return drain(work, count, 3 * head_s(count))


def measure_light_load(run: Run) -> None:
    """Figures: CPU time per message of Redis and of the workers, and lateness, by rate.

    The floor has neither index nor tombstones here, and polls every 2 ms.
    """
    for rate in run.sizes.light_rates:
        for _ in run.repeats(f"{rate:,} messages a second", slow=True):
            _light_load(run, rate, "floor", floor_at_work)
            _light_load(run, rate, "lisa", lisa_at_work)


def _light_load(
    run: Run,
    rate: int,
    subject: str,
    start: Callable[[BenchServer], AbstractContextManager[FloorAtWork | LisaAtWork]],
) -> None:
    count = max(20, int(rate * run.sizes.paced_seconds))
    with fresh_server() as server, start(server) as work:
        steady = paced(work, count, rate, head_s(count))
    label = at_rate(rate)
    run.results.add(LIGHT_LOAD, subject, f"redis {label}", steady.redis_us, "us")
    run.results.add(LIGHT_LOAD, subject, f"workers {label}", sum(steady.cpu_us.values()), "us")
    for part, spent_us in steady.cpu_us.items():
        run.results.add(LIGHT_LOAD, subject, f"{part} {label}", spent_us, "us")
    run.results.add_lateness(LIGHT_LOAD, subject, steady.lateness_us, label)


def at_rate(rate: int) -> str:
    """The last part of a figure's name."""
    return f"at {rate:,}/s"


def measure_lateness(run: Run) -> None:
    """Figures: percentiles at 1,000/s, against a 2 ms poller, and at half of capacity."""
    count = max(20, int(STEADY_RATE * run.sizes.paced_seconds))
    for _ in run.repeats("lateness at 1,000/s"):
        with fresh_server() as server, floor_at_work(server) as bare:
            late = paced(bare, count, STEADY_RATE, head_s(count)).lateness_us
            run.results.add_lateness(LATENESS, "floor", late, STEADY)
        with fresh_server() as server, lisa_at_work(server) as lisa:
            late = paced(lisa, count, STEADY_RATE, head_s(count)).lateness_us
            run.results.add_lateness(LATENESS, "lisa", late, STEADY)
    _at_half(run)


def _at_half(run: Run) -> None:
    for _ in run.repeats("lateness at half of capacity", slow=True):
        with fresh_server() as server, lisa_at_work(server) as work:
            capacity = run.results.median(DRAIN, "lisa", "rate")
            if capacity is None:
                count = run.sizes.drain
                capacity = drain(work, count, head_s(count)).rate
            rate = capacity / 2
            count = max(20, int(rate * run.sizes.paced_seconds / 2))
            late = paced(work, count, rate, head_s(count)).lateness_us
        run.results.add(LATENESS, "lisa", "rate at half of capacity", rate, "1/s")
        run.results.add_lateness(LATENESS, "lisa", late, HALF)


EMBEDDED, DEBIAN = "embedded server", "redis-server"


def measure_memory(run: Run) -> None:
    """Figures: bytes for a body of 100 bytes with a generated id, on two servers."""
    for _ in run.repeats("memory"):
        _memory_on(run, EMBEDDED, None)
        if (binary := debian_binary()) is not None:
            _memory_on(run, DEBIAN, binary)
    if debian_binary() is None:
        run.results.missing[DEBIAN] = "not on PATH (Debian: apt-get install redis-server)"


def _memory_on(run: Run, name: str, binary: Path | None) -> None:
    count = run.sizes.memory
    with fresh_server(binary) as server:
        if binary is not None:
            run.results.versions[DEBIAN] = server.describe()
        before = server.memory()
        Floor(server.client).send({f"{number:022d}": FAR_MS for number in range(count)})
        floor = (server.memory() - before) / count
    with fresh_server(binary) as server:
        with prepared(server):
            pass
        before = _without_buffers(server)
        with Producer(server.url) as producer:
            producer.send_many(TOPIC, [BODY] * count, delay=timedelta(hours=1))
        lisa = (_without_buffers(server) - before) / count
    run.results.add(MEMORY, "floor", name, floor, "bytes")
    run.results.add(MEMORY, "lisa", name, lisa, "bytes")


def _without_buffers(server: BenchServer) -> int:
    """The server's memory once it has freed the buffers of closed connections."""
    time.sleep(0.2)
    return server.memory()


MEASURES = {
    BULK_SEND: measure_bulk_send,
    SINGLE_SEND: measure_single_send,
    CONCURRENT_SEND: measure_concurrent_send,
    DRAIN: measure_drain,
    BODIES: measure_bodies,
    LANES: measure_lanes,
    LIGHT_LOAD: measure_light_load,
    LATENESS: measure_lateness,
    MEMORY: measure_memory,
}
"""In running order: some use the figures of `drain`."""
