"""Lanes while consumers, managers and clocks fail: one lease per key, each slot given back once."""

import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lisa import Outgoing, Producer
from tests.consumers import Bench
from tests.servers import Process, Processes, least, wait_until
from tests.shifted_server import ShiftedServer, missing

TOPIC = "orders"
ACK_TIMEOUT = timedelta(seconds=2)
KEYS = [f"k{n}" for n in range(6)]
RULES: dict[str, dict[str, Any]] = {
    "key_concurrency": {"key_concurrency": 1},
    "order": {"order": "continue"},
}

HANDLERS = """
import os, time
from lisa.consumer import Consumer

consumer = Consumer(concurrency=4)
log = os.open("ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(what, message):
    line = f"{what} {message.key} {message.body} {os.getpid()} {time.time()}\\n"
    os.write(log, line.encode())

@consumer.on("orders")
def handle(message):
    note("start", message)
    if str(message.body).startswith("hold"):
        gate = f"{message.body}.{os.environ['NAME']}"
        while not os.path.exists(gate):
            time.sleep(0.01)
    time.sleep(0.02)
    note("end", message)
"""


class Note(NamedTuple):
    """A line of the handlers' ledger."""

    what: str
    key: str
    body: str
    pid: int
    at: float


class Stage:
    """One topic with lanes, `lisa-manager`, and consumers in processes."""

    def __init__(self, url: str, processes: Processes, directory: Path, **options: Any) -> None:
        self.url, self.processes = url, processes
        self.bench = Bench(url)
        self.bench.declare(
            TOPIC, ack_timeout=ACK_TIMEOUT, retry_delays=",".join(["0"] * 30), **options
        )
        keys = self.bench.store.keys.topic(TOPIC)
        self.keys, self.lanes = keys.group("lisa"), keys.lanes("lisa")
        self.ledger = directory / "ledger"
        self.ledger.touch()
        (directory / "shop.py").write_text(HANDLERS)

    def manager(self) -> Process:
        process = self.processes.start("-m", "lisa.cli.manager", "--redis", self.url)
        process.wait_for("is reachable")
        return process

    def consumer(self, name: str = "x") -> Process:
        command = ("-m", "lisa.cli.consumer", "--redis", self.url, "shop")
        return self.processes.start(*command, env={"NAME": name})

    def notes(self) -> list[Note]:
        rows = [line.split() for line in self.ledger.read_text().splitlines()]
        return [Note(what, key, body, int(pid), float(at)) for what, key, body, pid, at in rows]

    def started(self, body: str, times: int = 1) -> None:
        """Wait until handlers have begun with a message that often."""
        wait_until(
            lambda: [one.body for one in self.notes() if one.what == "start"].count(body) >= times
        )

    def ended_more(self, body: str, times: int) -> None:
        """Wait until handlers have ended with messages more often."""
        wait_until(lambda: len(ended(self, body)) > times)

    def acked(self, count: int) -> None:
        """Wait until so many messages are handled."""
        wait_until(lambda: self.bench.stat(TOPIC, "acked") >= count)

    def held(self) -> Counter[str]:
        """How many messages of each key are ready or in flight."""
        ids = [one.decode() for one in self.bench.ask("HKEYS", self.keys.entries)]
        return Counter(one.partition("\x1f")[0] for one in ids)

    def check_leases(self) -> None:
        """At most one consumer holds a lease of a key."""
        assert max(self.held().values(), default=0) <= 1

    def used(self) -> dict[str, int]:
        """The slots that lanes say are taken."""
        stored = self.bench.ask("HGETALL", self.lanes.lanes)
        lanes = dict(zip(stored[::2], stored[1::2], strict=True))
        return {
            key.decode(): int(lane.split()[0])
            for key, lane in lanes.items()
            if not key.startswith(b"\x1f")
        }

    def check_end(self, total: int) -> None:
        """All is handled, and nothing is left of any lane."""
        wait_until(lambda: self.bench.stat(TOPIC, "acked") == total)
        wait_until(lambda: self.used() == {})
        assert self.bench.ask("EXISTS", self.keys.entries, *self.lanes[1:]) == 0
        assert self.bench.stat(TOPIC, "garbage") == 0


def check_runs(notes: list[Note], kills: dict[int, float]) -> float:
    """No two handlers of a key ran at once. Returns the longest pause of a key after a kill."""
    worst = 0.0
    by_key = defaultdict(list)
    for note in notes:
        by_key[note.key].append(note)
    for runs in by_key.values():
        running: Note | None = None
        for note in sorted(runs, key=lambda note: note.at):
            if note.what == "end":
                assert running is not None
                assert (running.body, running.pid) == (note.body, note.pid)
                running = None
            else:
                if running is not None:
                    assert running.pid in kills, f"{note} began while {running} ran"
                    killed = kills[running.pid]
                    assert killed <= note.at
                    worst = max(worst, note.at - killed)
                running = note
        assert running is None
    return worst


def kill_and_send(stage: Stage, seconds: float) -> float:
    """Kill a consumer each second, while messages are sent. Returns the longest pause of a key."""
    kills: dict[int, float] = {}
    before, total = len(stage.notes()), stage.bench.stat(TOPIC, "acked")
    consumers = [stage.consumer(), stage.consumer()]
    ends = time.monotonic() + seconds
    with Producer(stage.url) as producer:
        while time.monotonic() < ends:
            keys = random.choices(KEYS, k=12)
            producer.send_many(TOPIC, [Outgoing(f"m{n}", key=key) for n, key in enumerate(keys)])
            total += len(keys)
            until = time.monotonic() + 1
            while time.monotonic() < until:
                stage.check_leases()
                time.sleep(0.01)
            # On a busy machine it takes longer to start than consumers are left to live.
            consumers[-1].wait_for("reading")
            victim = consumers.pop(0)
            victim.kill()
            kills[victim.pid] = time.time()
            consumers.append(stage.consumer())
    stage.check_end(total)
    for consumer in consumers:
        consumer.wait_for("reading")
        assert consumer.stop() == 0
    return check_runs(stage.notes()[before:], kills)


@pytest.fixture(params=RULES)
def stage(
    request: pytest.FixtureRequest, redis_url: str, processes: Processes, tmp_path: Path
) -> Stage:
    return Stage(redis_url, processes, tmp_path, **RULES[request.param])


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_consumers_killed_again_and_again(stage: Stage, seconds: float) -> None:
    stage.manager()
    limit_s = ACK_TIMEOUT.total_seconds() + 1
    assert least(lambda: kill_and_send(stage, seconds), limit_s, rounds=3) < limit_s


def test_a_late_ack_frees_its_slot_once(stage: Stage, tmp_path: Path) -> None:
    """Of a consumer frozen beyond its lease, while another handles the same message again. The late
    ack settles it, and the ack of the other is stale: the slot is the next message's by then."""
    stage.manager()
    frozen = stage.consumer("a")
    frozen.wait_for("reading")
    with Producer(stage.url) as producer:
        for body in ("hold1", "hold2", "last"):
            producer.send(TOPIC, body, key="k")
        stage.started("hold1")
        frozen.signal(signal.SIGSTOP)
        other = stage.consumer("b")
        stage.started("hold1", times=2)
        stage.check_leases()
        (tmp_path / "hold1.a").touch()
        frozen.signal(signal.SIGCONT)
        wait_until(lambda: stage.bench.stat(TOPIC, "acked_late") == 1)
        stage.started("hold2")
        (tmp_path / "hold1.b").touch()
        wait_until(lambda: ended(stage, "hold1") == [frozen.pid, other.pid])
        pings = ping(stage, producer, other.pid)  # it acks in order
        stage.acked(1 + pings)
        assert stage.used() == {"k": 1}
        assert stage.held() == {"k": 1}
        assert "last" not in [one.body for one in stage.notes()]
        for name in "ab":
            (tmp_path / f"hold2.{name}").touch()
    stage.check_end(3 + pings)


def ended(stage: Stage, body: str) -> list[int]:
    """The processes that have ended with a message, in order."""
    return [one.pid for one in stage.notes() if (one.what, one.body) == ("end", body)]


def ping(stage: Stage, producer: Producer, pid: int) -> int:
    """Send messages without a key until a process has handled one; returns how many were sent."""
    while pid not in (before := ended(stage, "ping")):
        producer.send(TOPIC, "ping")
        stage.ended_more("ping", len(before))
    return len(before)


def test_managers_killed_scripts_flushed_and_the_clock_set_back(
    shifted: ShiftedServer, processes: Processes, tmp_path: Path
) -> None:
    """Rates, orders and slots go on at once, not when the clock has caught up."""
    stage = Stage(shifted.url, processes, tmp_path, order="continue", key_rate="20/s")
    manager, consumer = stage.manager(), stage.consumer()
    consumer.wait_for("reading")
    total = 40 * len(KEYS)
    with Producer(stage.url) as producer:
        producer.send_many(TOPIC, [Outgoing(n, key=key) for n in range(40) for key in KEYS])
    for part in range(1, 5):
        stage.acked(part * total // 6)
        if part == 1:
            stage.bench.ask("SCRIPT", "FLUSH")
        elif part == 2:
            manager.kill()
            manager = stage.manager()
        else:
            shifted.step(-timedelta(hours=1))
        stage.check_leases()
    stage.check_end(total)
    assert check_runs(stage.notes(), {}) == 0
    for key in KEYS:
        bodies = [int(one.body) for one in stage.notes() if (one.what, one.key) == ("start", key)]
        assert bodies == list(range(40))
    assert (manager.stop(), consumer.stop()) == (0, 0)


@pytest.fixture
def shifted(tmp_path: Path) -> Iterator[ShiftedServer]:
    if why := missing():
        pytest.skip(why)
    with ShiftedServer(tmp_path / "server") as server:
        yield server
