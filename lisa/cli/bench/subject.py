"""Runs Lisa and the floor: their processes and senders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

from lisa import Outgoing, Producer
from lisa.admin.groups import add
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.floor import BODY, Floor, Keyring
from lisa.cli.bench.ledger import Ledger
from lisa.cli.bench.processes import tree_cpu_seconds
from lisa.cli.bench.server import BenchServer
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import RoleProcess

TOPIC = "bench"
GROUP = "lisa"
START_S = 20.0
QUIET = ("--log-level", "warning")


def store_on(server: BenchServer) -> SyncStore:
    """A store on the server; close it."""
    return SyncStore(Connection(Address.of(server.url)), Keys())


@contextmanager
def prepared(server: BenchServer, topics: Sequence[str] = (TOPIC,)) -> Iterator[Producer]:
    """A producer, and topics with a group and one message that is due in an hour."""
    with closing(store_on(server)) as store:
        for topic in topics:
            store.drive(add(store, topic, GROUP))
    with Producer(server.url) as producer:
        for topic in topics:
            producer.send(topic, BODY, delay=timedelta(hours=1))
        yield producer


class WorkProcesses:
    """Role processes, each with a log."""

    def __init__(self, server: BenchServer, stack: ExitStack, topics: Sequence[str]) -> None:
        self.server = server
        self._stack = stack
        folder = stack.enter_context(TemporaryDirectory(prefix="lisa-bench-"))
        self.ledger = Ledger(Path(folder))
        self._env = {
            "LISA_REDIS_URL": server.url,
            "BENCH_LEDGER": folder,
            "BENCH_TOPICS": ",".join(topics),
        }
        self._running: list[tuple[str, RoleProcess]] = []

    def start(self, part: str, module: str, *arguments: str) -> None:
        """Start a process that ends with the stack."""
        log = self.ledger.folder / f"{part}-{len(self._running)}.log"
        process = RoleProcess(module, *arguments, env=self._env, log=log)
        self._running.append((part, self._stack.enter_context(process)))

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of the processes so far, summed by part."""
        found: dict[str, float] = {}
        for part, process in self._running:
            found[part] = found.get(part, 0.0) + tree_cpu_seconds(process.pid)
        return found

    def check(self) -> None:
        """Raise Fault if a process has ended."""
        for part, process in self._running:
            if (code := process.poll()) is not None:
                last = process.log_tail().splitlines()[-1:]
                raise Fault(f"the {part} exited with {code}: {' '.join(last)}")


class LisaAtWork(WorkProcesses):
    """A producer in this process, and manager and consumer processes. See `work.AtWork`.

    topics: the topics that consumers read; `send` sends to the first, `send_paced` to all in turn.
    body: what `send` sends.
    """

    slowest = 1_000.0

    def __init__(
        self, server: BenchServer, stack: ExitStack, topics: Sequence[str], idle: Sequence[str]
    ) -> None:
        super().__init__(server, stack, topics)
        self.topics = topics
        self.body = BODY
        self.producer = stack.enter_context(prepared(server, (*topics, *idle)))
        self._groups = [Keys().topic(topic).group(GROUP) for topic in topics]

    def send(self, count: int, due_ms: int) -> float:
        """See `work.AtWork`."""
        began = time.perf_counter()
        self.producer.send_many(self.topics[0], repeat(self.body, count), at_ms=due_ms)
        return time.perf_counter() - began

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """See `work.AtWork`."""
        began = time.perf_counter()
        step = len(self.topics)
        for first, topic in enumerate(self.topics):
            messages = (
                Outgoing(BODY, at_ms=start_ms + int(number * 1000 / rate))
                for number in range(first, count, step)
            )
            self.producer.send_many(topic, messages)
        return time.perf_counter() - began

    def settled(self) -> bool:
        """See `work.AtWork`."""
        pipeline = self.server.client.pipeline(transaction=False)
        for group in self._groups:
            pipeline.xlen(group.ready)
            pipeline.hlen(group.entries)
        return not any(pipeline.execute())

    def start_consumers(self, consumers: int) -> None:
        """Start consumers, and wait until each has handled a message."""
        for _ in range(consumers):
            self.start("consumer", "lisa.cli.consumer", *QUIET, "lisa.cli.bench.handlers")
        deadline = time.monotonic() + START_S
        while self.ledger.writers() < consumers:
            if time.monotonic() > deadline:
                raise Fault("the consumers handled no message after their start")
            self.producer.send_many(self.topics[0], repeat(BODY, 20 * consumers))
            time.sleep(0.05)
            self.check()
        while not self.settled():
            time.sleep(0.05)
            self.check()
        time.sleep(0.1)


@contextmanager
def lisa_at_work(
    server: BenchServer,
    *,
    managers: int = 1,
    consumers: int = 1,
    topics: Sequence[str] = (TOPIC,),
    idle: Sequence[str] = (),
) -> Iterator[LisaAtWork]:
    """Run all roles on one server with default settings; no consumer reads the `idle` topics."""
    with ExitStack() as stack:
        work = LisaAtWork(server, stack, topics, idle)
        for _ in range(managers):
            work.start("manager", "lisa.cli.manager", *QUIET)
        work.start_consumers(consumers)
        yield work


class RawProcesses(WorkProcesses):
    """A poller and a consumer with raw commands. See `work.AtWork`.

    send_dues: sends a message for each due time (ms).
    """

    slowest = 500.0

    def __init__(
        self,
        server: BenchServer,
        stack: ExitStack,
        topics: Sequence[str],
        send_dues: Callable[[list[int]], None],
    ) -> None:
        super().__init__(server, stack, topics)
        self._send_dues = send_dues

    def send(self, count: int, due_ms: int) -> float:
        """See `work.AtWork`."""
        return self._send([due_ms] * count)

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """See `work.AtWork`."""
        return self._send([start_ms + int(number * 1000 / rate) for number in range(count)])

    def _send(self, dues: list[int]) -> float:
        began = time.perf_counter()
        self._send_dues(dues)
        return time.perf_counter() - began


class FloorAtWork(RawProcesses):
    """The floor's poller and consumer processes."""

    def __init__(self, server: BenchServer, stack: ExitStack) -> None:
        floor = Floor(server.client)
        floor.create()
        self._ready = Keyring().ready

        def send(dues: list[int]) -> None:
            floor.send({f"{due:013d}{number:09d}": due for number, due in enumerate(dues)})

        super().__init__(server, stack, (TOPIC,), send)

    def settled(self) -> bool:
        """See `work.AtWork`."""
        return not self.server.client.xlen(self._ready)


@contextmanager
def floor_at_work(server: BenchServer, *options: str) -> Iterator[FloorAtWork]:
    """Run the floor's poller and consumer; `options` are those of `bench.bare`."""
    with ExitStack() as stack:
        work = FloorAtWork(server, stack)
        work.start("poller", "lisa.cli.bench.bare", "poll", *options)
        work.start("consumer", "lisa.cli.bench.bare", "consume", *options)
        work.send(20, time.time_ns() // 1_000_000)
        work.ledger.wait(20, START_S, work.check)
        time.sleep(0.1)
        yield work
