"""Measurements with running workers, and the processes of Lisa and of the floor."""

from __future__ import annotations

import subprocess
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from benchmarks.bench.floor import BODY, Floor, Keyring
from benchmarks.bench.ledger import Ledger
from benchmarks.bench.results import Fault
from benchmarks.bench.server import BenchServer
from lisa import Outgoing, Producer
from lisa.admin.groups import add
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import RoleProcess

JUST_BEFORE_S = 0.05
PATIENCE_S = 20.0


PROC = Path("/proc/self/stat").exists()
"""Whether /proc exists: on Linux, not on macOS."""

TOPIC = "bench"
GROUP = "lisa"
START_S = 20.0
QUIET = ("--log-level", "warning")


class AtWork(Protocol):
    """Lisa, the floor or a peer, with running workers."""

    server: BenchServer
    ledger: Ledger
    slowest: float
    """Lower bound of the messages handled per second, for time-outs."""

    def send(self, count: int, due_ms: int) -> float:
        """Send messages that are due at one instant; returns the seconds taken."""

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """Send messages that fall due at `rate` per second; returns the seconds taken."""

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of the workers so far, by part."""

    def settled(self) -> bool:
        """Whether all handled messages are removed."""

    def check(self) -> None:
        """Raise Fault if a worker has ended."""


def now_ms() -> int:
    """The current time in ms, by the clock that handlers and the server share."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a drain.

    rate: messages per second, from the due time until the last message is handled.
    redis_us: the server's CPU time per message, from sending until all messages are removed.
    cpu_us: the workers' CPU time per message, by part, from just before the due time.
    """

    send_s: float
    rate: float
    redis_us: float
    cpu_us: dict[str, float]
    lateness_us: list[int]


def drain(work: AtWork, count: int, head_s: float) -> Drained:
    """Send messages that are due in `head_s` seconds, and wait until all are handled.

    Raises:
        Fault: sending took too long, not all messages were handled in time, or a worker ended.
    """
    work.ledger.mark()
    before_us = work.server.cpu_us()
    due_ms = now_ms() + int(head_s * 1000)
    send_s = work.send(count, due_ms)
    _wait_until(due_ms, before_s=JUST_BEFORE_S)
    cpu = work.cpu_seconds()
    work.ledger.wait(count, PATIENCE_S + count / work.slowest, work.check)
    wait_settled(work)
    cpu_us = {part: (s - cpu[part]) * 1e6 / count for part, s in work.cpu_seconds().items()}
    redis_us = (work.server.cpu_us() - before_us) / count
    due, handled = work.ledger.read()
    seconds = max(max(handled) / 1e6 - due_ms / 1000, 1e-6)
    return Drained(send_s, count / seconds, redis_us, cpu_us, _late(due, handled))


@dataclass(frozen=True, slots=True)
class Paced:
    """The result of a constant rate.

    redis_us, cpu_us: CPU time per message of the server and of the workers by part, from the first
        due time until all messages are removed: without sending.
    """

    redis_us: float
    cpu_us: dict[str, float]
    lateness_us: list[int]


def paced(work: AtWork, count: int, rate: float, head_s: float) -> Paced:
    """Send messages that fall due at `rate` per second, and wait until all are handled.

    Raises:
        Fault: as for `drain`.
    """
    work.ledger.mark()
    start_ms = now_ms() + int(head_s * 1000)
    work.send_paced(count, start_ms, rate)
    _wait_until(start_ms, before_s=0.0)
    before_us, cpu = work.server.cpu_us(), work.cpu_seconds()
    seconds = count / rate + count / work.slowest
    work.ledger.wait(count, PATIENCE_S + seconds, work.check)
    wait_settled(work)
    cpu_us = {part: (s - cpu[part]) * 1e6 / count for part, s in work.cpu_seconds().items()}
    redis_us = (work.server.cpu_us() - before_us) / count
    return Paced(redis_us, cpu_us, _late(*work.ledger.read()))


def wait_settled(work: AtWork) -> None:
    """Wait until all handled messages are removed."""
    deadline = time.monotonic() + PATIENCE_S
    while not work.settled():
        if time.monotonic() > deadline:
            raise Fault("the handled messages were not removed in time")
        work.check()
        time.sleep(0.01)


def _late(due: array[int], handled: array[int]) -> list[int]:
    return [end - start for start, end in zip(due, handled, strict=True)]


def _wait_until(due_ms: int, before_s: float) -> None:
    left_s = due_ms / 1000 - before_s - time.time()
    if left_s < 0:
        raise Fault(f"sending took {-left_s:.1f} s longer than the head start")
    time.sleep(left_s)


def tree_cpu_seconds(root: int) -> float:
    """User and system time of a process and its running descendants, in seconds."""
    return sum(cpu_seconds(pid) for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """The pids of a process and all its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process in seconds; 0 if the process does not exist."""
    if PROC:
        try:
            # The id of the process's CPU clock, as in clock_getcpuclockid(3). /proc/PID/stat has
            # a resolution of 10 ms only.
            return time.clock_gettime((~pid << 3) | 2)
        except OSError:
            return 0.0
    return _ps_seconds(pid)


def _parents() -> list[tuple[int, int]]:
    if not PROC:
        listed = _ps("-A", "-o", "pid=,ppid=")
        return [(int(pid), int(parent)) for pid, parent in map(str.split, listed.splitlines())]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # the process has ended
            # "PID (NAME) STATE PARENT ..."; NAME may contain any character.
            found.append((int(entry.name), int(stat.rpartition(")")[2].split()[1])))
    return found


def _ps_seconds(pid: int) -> float:
    shown = _ps("-p", str(pid), "-o", "time=").strip()
    total = 0.0
    for part in shown.replace("-", ":").split(":") if shown else ():
        total = total * 60 + float(part)
    return total


def _ps(*arguments: str) -> str:
    command = ("/bin/ps", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


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
    body: what `send` sends. keys: with how many different keys; 0 for none.
    """

    slowest = 1_000.0

    def __init__(
        self, server: BenchServer, stack: ExitStack, topics: Sequence[str], idle: Sequence[str]
    ) -> None:
        super().__init__(server, stack, topics)
        self.topics = topics
        self.body = BODY
        self.keys = 0
        self.producer = stack.enter_context(prepared(server, (*topics, *idle)))
        self._groups = [Keys().topic(topic).group(GROUP) for topic in topics]

    def send(self, count: int, due_ms: int) -> float:
        """See `work.AtWork`."""
        began = time.perf_counter()
        bodies: Iterable[object] = repeat(self.body, count)
        if self.keys:
            keys = (f"key-{number % self.keys}" for number in range(count))
            bodies = (Outgoing(self.body, key=key) for key in keys)
        self.producer.send_many(self.topics[0], bodies, at_ms=due_ms)
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
            self.start("consumer", "lisa.cli.consumer", *QUIET, "benchmarks.bench.handlers")
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
    """Run the floor's poller and consumer; `options` are those of `benchmarks.bench.floor`."""
    with ExitStack() as stack:
        work = FloorAtWork(server, stack)
        work.start("poller", "benchmarks.bench.floor", "poll", *options)
        work.start("consumer", "benchmarks.bench.floor", "consume", *options)
        work.send(20, time.time_ns() // 1_000_000)
        work.ledger.wait(20, START_S, work.check)
        time.sleep(0.1)
        yield work
