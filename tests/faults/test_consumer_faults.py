"""Consumers as real processes, killed, stopped, frozen or disconnected at bad moments."""

import os
import re
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from lisa.core.model.message import Message
from lisa.embedded import EmbeddedServer
from tests.consumers import Bench, presences, presences_running, settled
from tests.servers import Process, Processes, runs, wait_until

TOPIC = "orders"
ACK_TIMEOUT = timedelta(seconds=0.5)

HANDLERS = """
import os, sys, time
from lisa.consumer import Consumer

consumer = Consumer()

@consumer.on("orders")
def handle(message):
    sleeps = message.body == "slow" and not os.path.exists("slept")
    if sleeps:  # noted first: the test may stop this process as soon as it has printed
        open("slept", "w").close()
    print(f"start {message.body} attempt {message.attempt} in {os.getpid()}", flush=True)
    if sleeps:
        time.sleep(float(os.environ.get("SLOW", "60")))
    with open("ledger", "a") as ledger:
        print(message.body, message.attempt, file=ledger)
    print(f"end {message.body}", flush=True)
"""


@pytest.fixture
def bench(redis_url: str) -> Bench:
    bench = Bench(redis_url)
    bench.declare(TOPIC, ack_timeout=ACK_TIMEOUT, retry_delays="0,0,0")
    return bench


class Daemons:
    """Starts `lisa-consumer` with a module of handlers, and reads their records."""

    def __init__(self, processes: Processes, directory: Path, url: str) -> None:
        self._processes = processes
        self._command = ("-m", "lisa.cli.consumer", "--redis", url, "shop")
        self._ledger = directory / "ledger"
        self._ledger.touch()
        (directory / "shop.py").write_text(HANDLERS)

    def start(self, *arguments: str, slow_s: float = 60, kind: str = "") -> Process:
        env = {"SLOW": str(slow_s), "KIND": kind}
        return self._processes.start(*self._command, *arguments, env=env)

    def ledger(self) -> list[str]:
        return self._ledger.read_text().splitlines()


@pytest.fixture
def daemons(processes: Processes, tmp_path: Path, redis_url: str) -> Daemons:
    return Daemons(processes, tmp_path, redis_url)


def test_a_second_signal_leaves_at_once(bench: Bench, daemons: Daemons) -> None:
    bench.send(TOPIC, ["slow"])
    process = daemons.start()
    process.wait_for("start slow")
    process.signal(signal.SIGTERM)
    process.wait_for("running handlers have")  # two signals at once may arrive as one
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_consumer_frozen_beyond_its_lease_acks_late_and_loses_nothing(
    bench: Bench, daemons: Daemons
) -> None:
    [sent] = bench.send(TOPIC, ["slow"])
    process = daemons.start(slow_s=0.5)
    process.wait_for("start slow")
    process.signal(signal.SIGSTOP)
    with bench.manager(TOPIC):
        wait_until(lambda: bench.states(TOPIC, sent) == ["ready"])
        process.signal(signal.SIGCONT)
        wait_until(settled(bench, sent))
    assert bench.stat(TOPIC, "acked_late") == 1
    assert set(daemons.ledger()) == {"slow 1"}, "it may come again, with the same attempt"
    assert process.stop() == 0


def test_messages_not_started_by_a_frozen_consumer_are_not_handled_twice(
    bench: Bench, daemons: Daemons
) -> None:
    """Leases of prefetched messages ended meanwhile; the consumer must notice on resuming."""
    process = daemons.start(slow_s=0.3)
    wait_until(presences_running(bench))
    bench.send(TOPIC, range(200))
    wait_until(lambda: bench.stat(TOPIC, "acked") == 200)  # none of these comes again
    bench.send(TOPIC, ["slow", *range(1000, 1050)])
    process.wait_for("start slow")
    process.signal(signal.SIGSTOP)
    other = daemons.start()
    with bench.manager(TOPIC):
        other.wait_for("end 1049")
        process.signal(signal.SIGCONT)
        process.wait_for("end slow")
        wait_until(lambda: bench.stat(TOPIC, "acked") == 251)
        assert process.stop() == 0
        assert other.stop() == 0
    handled = Counter(line.split()[0] for line in daemons.ledger())
    # The lease of the slow message ended while its consumer was frozen, which it cannot know.
    assert {name for name, times in handled.items() if times > 1} <= {"slow"}


def test_a_consumer_frozen_before_it_reads_a_delivery_handles_it_alone(
    bench: Bench, daemons: Daemons
) -> None:
    """The lease begins with the delivery; most of it has passed when the consumer resumes."""
    timeout_s = 5.0
    bench.configure(TOPIC, ack_timeout=timedelta(seconds=timeout_s))
    process = daemons.start(slow_s=0.5 * timeout_s)
    wait_until(presences_running(bench))
    [first] = bench.send(TOPIC, ["first"])
    wait_until(settled(bench, first))
    wait_until(bench.is_reading)
    process.signal(signal.SIGSTOP)
    [sent] = bench.send(TOPIC, ["slow"])
    wait_until(lambda: bench.states(TOPIC, sent) == ["in_flight"])
    time.sleep(0.75 * timeout_s)
    process.signal(signal.SIGCONT)
    with bench.manager(TOPIC):
        wait_until(settled(bench, sent))
    assert daemons.ledger() == ["first 1", "slow 1"]
    assert bench.stat(TOPIC, "reclaimed") == 0
    assert process.stop() == 0


def test_a_server_that_starts_after_its_consumer_and_is_killed_in_the_middle(
    own_server: EmbeddedServer,
) -> None:
    """Each start cuts all connections and flushes the scripts."""
    bench = Bench(own_server.url)
    bench.declare(TOPIC, ack_timeout="1s", retry_delays="0,0,0")
    bench.send(TOPIC, range(600))
    own_server.kill()
    seen: list[int] = []

    def handle(message: Message) -> None:
        time.sleep(0.002)
        seen.append(message.body)

    consumer = bench.consumer(handle, concurrency=4)
    with consumer, bench.manager(TOPIC):
        own_server.restart()
        wait_until(lambda: len(seen) > 100)
        own_server.kill()
        wait_until(lambda: consumer.health()["status"] == "failing")
        own_server.restart()
        wait_until(lambda: bench.stat(TOPIC, "acked") == 600)
    assert set(seen) == set(range(600))
    keys = bench.store.keys.topic(TOPIC).group("lisa")
    assert bench.ask("HLEN", keys.entries) == 0


# Several processes

POISON = """
import asyncio, os, time
from lisa.consumer import Consumer
from lisa.core.delivery import opening as unpacking
from lisa.core.model.envelope import decode_content

consumer = Consumer()

def handle(message):
    with open("ledger", "a") as ledger:
        print(message.body, message.attempt, file=ledger)
    if KIND == "slow":
        time.sleep(0.2)  # longer than a third of the ack timeout
    if message.body in ("poison", "venom"):
        os._exit(1)

async def handle_async(message):
    await asyncio.sleep(0)
    handle(message)

def handle_batch(messages):
    for message in messages:
        handle(message)

def decode(data):
    if b"poison" in data or b"venom" in data:
        os._exit(1)
    return decode_content(data)

KIND = os.environ["KIND"]
if KIND == "decode":
    unpacking.decode_content = decode
for topic in ("orders", "mails"):
    if KIND == "batch":
        consumer.on(topic, batch=50, within="10ms")(handle_batch)
    else:
        consumer.on(topic)(handle_async if KIND == "async" else handle)
"""


@pytest.mark.parametrize(
    ("kind", "concurrency"), [("sync", 1), ("slow", 8), ("async", 20), ("batch", 1), ("decode", 1)]
)
def test_a_poison_message_costs_only_itself_its_attempts(
    kind: str, concurrency: int, bench: Bench, daemons: Daemons, tmp_path: Path
) -> None:
    """Messages that were read ahead, handled without an ack, or running in other handlers lose
    none, in other topics neither. The poison message has its attempts, and one run more, also if
    it ends the process before its handler."""
    bench.configure(TOPIC, retry_delays="")
    bench.declare("mails", ack_timeout=ACK_TIMEOUT, retry_delays="0")
    (tmp_path / "shop.py").write_text(POISON)
    consumers: list[Process] = []

    def are_settled(topic: str, acked: int) -> bool:
        if not consumers or not consumers[-1].alive:
            consumers.append(daemons.start("--concurrency", str(concurrency), kind=kind))
        return (bench.stat(topic, "acked"), bench.stat(topic, "garbage")) == (acked, 1)

    bench.send("mails", range(30))
    bench.send(TOPIC, [*range(150), "poison", *range(151, 300)])
    with bench.manager(TOPIC, "mails"):
        wait_until(lambda: are_settled(TOPIC, 299))
        bench.send("mails", [*range(30, 40), "venom", *range(40, 60)])
        wait_until(lambda: are_settled("mails", 60))
    consumers[-1].wait_for("topic mails: reading")  # it may have started a moment ago
    assert consumers[-1].stop() == 0
    handled = Counter(daemons.ledger())
    mortal = {name: times for name, times in handled.items() if name[0] in "pv"}
    expected = {} if kind == "decode" else {"poison 1": 2, "venom 1": 2, "venom 2": 1}
    assert mortal == expected
    assert not [name for name in handled if name.endswith(" 2") and name not in mortal]
    assert len(consumers) == 6


PARENT = """
import sys
from lisa.core.daemon.processes import ChildProcesses
sys.exit(ChildProcesses({}, [sys.executable, "child.py"]).run())
"""


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("this system does not list a process's children under /proc")
    return [int(child) for child in listed.read_text().split()]


def test_processes_share_the_work_and_one_that_died_is_replaced(
    bench: Bench, daemons: Daemons
) -> None:
    [sent] = bench.send(TOPIC, ["slow"])
    parent = daemons.start("--processes", "2")
    wait_until(lambda: len(presences(bench)) == 2)
    [killed] = re.findall(r"start slow attempt 1 in (\d+)", parent.wait_for("start slow attempt 1"))
    assert int(killed) in children(parent.pid)
    os.kill(int(killed), signal.SIGKILL)
    with bench.manager(TOPIC):
        wait_until(settled(bench, sent))
    assert daemons.ledger() == ["slow 1"]
    wait_until(lambda: len([pid for pid in children(parent.pid) if runs(pid)]) == 2)
    bench.send(TOPIC, range(50))
    wait_until(lambda: bench.stat(TOPIC, "acked") == 51)
    everyone = children(parent.pid)
    parent.kill()
    wait_until(lambda: not [pid for pid in everyone if runs(pid)])
    wait_until(lambda: len(presences(bench)) == 1)  # they left in order, but for the killed child


CHILD = """
import os, signal, sys, time

stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
file = os.open("started", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(file, b".")
number = os.lseek(file, 0, os.SEEK_CUR)
while number == 1 and os.path.getsize("started") < 3:
    time.sleep(0.01)
while number > 1 and not stops:
    time.sleep(0.01)
if number == 3:
    time.sleep(1)
    print(len(stops), "stops", flush=True)
sys.exit(0 if number == 3 else 2)
"""


def test_children_are_stopped_once(processes: Processes, tmp_path: Path) -> None:
    """The first child exits with a configuration error, as does the second when stopped."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = processes.start("-c", PARENT.format(3))
    assert parent.wait() == 2
    assert "1 stops" in parent.output


SHORT_OF_PROCESSES = """
import errno, os, subprocess
from lisa.core.daemon import processes

starts, real = [], subprocess.Popen

def start(*arguments, **options):
    starts.append(1)
    if len(starts) == 3:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real(*arguments, **options)

subprocess.Popen, processes.FIRST_RESTART_S = start, 0.1
"""


def test_a_child_that_cannot_be_restarted_costs_no_other_child(
    processes: Processes, tmp_path: Path
) -> None:
    """The machine has no process left for the restart; the other child works on."""
    child = "import os, signal; os.write(1, b'child %d\\n' % os.getpid()); signal.pause()"
    (tmp_path / "child.py").write_text(child, encoding="utf-8")
    parent = processes.start("-c", SHORT_OF_PROCESSES + PARENT.format(2))
    first, second = re.findall(r"child (\d+)", parent.wait_for("child ", times=2))
    os.kill(int(first), signal.SIGKILL)
    parent.wait_for("cannot start a process")
    parent.wait_for("child ", times=3)
    assert runs(int(second))
    assert parent.stop() == 0
