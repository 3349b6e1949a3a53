"""Schedules under load and under faults: many of them, many processes, killed managers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lisa import Producer
from lisa.manager.zone_data import data_version
from tests.integration.test_schedules import TOPIC, assert_complete, ids_of, ids_waiting
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Processes

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]


@pytest.fixture
def cast(redis_url: str) -> Iterator[Cast]:
    cast = Cast(redis_url).declare()
    yield cast
    cast.store.close()


@pytest.mark.parametrize(
    ("managers", "kills"),
    [(3, 8), pytest.param(5, 600, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_each_tick_is_created_once_while_managers_are_killed(
    cast: Cast, producer: Producer, processes: Processes, managers: int, kills: int
) -> None:
    command = ("-m", "lisa.cli.manager", "--redis", cast.store.connection.address.url)
    producer.schedule("s", topic=TOPIC, body=1, every="1s", catch_up="all")
    alive = [processes.start(*command) for _ in range(managers)]
    for process in alive:
        process.wait_for("is reachable")
    for _ in range(kills):
        time.sleep(1.0)  # the rate of the kills, not a wait for anything
        alive.pop(0).kill()
        alive.append(processes.start(*command))
    alive[-1].wait_for("is reachable")
    wait_until(lambda: len(ids_of(cast)) >= kills)
    assert_complete(ids_of(cast), 1000)
    sent = int(cast.store.ask("HGET", cast.keys.stats, "sent"))
    assert abs(sent - len(ids_of(cast))) <= 1  # a tick may pass between the two reads


DEFINE = """
import sys, lisa
with lisa.Producer(sys.argv[1]) as producer:
    producer.schedules("orders")  # connected: all begin at once
    print("ready", file=sys.stderr)
    sys.stdin.readline()
    changes = [producer.schedule(f"s{i}", topic="orders", body=i, every="1h")
               for i in range(int(sys.argv[2]))]
    print("changed", sum(changes), "of", len(changes), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("processes", "schedules"),
    [(4, 50), pytest.param(50, 1_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_many_processes_define_the_same_schedules_at_once(
    redis_url: str, cast: Cast, processes: int, schedules: int
) -> None:
    command = [sys.executable, "-c", DEFINE, redis_url, str(schedules)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        for one in started:
            assert one.stderr is not None
            assert one.stderr.readline() == "ready\n"
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        said = [one.communicate()[1].split() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [int(words[3]) for words in said] == [schedules] * processes, said
    assert sum(int(words[1]) for words in said) == schedules
    ids = ids_waiting(cast)
    assert {one.partition("@")[0] for one in ids} == {f"s{number}" for number in range(schedules)}
    assert len(ids) == schedules
    assert cast.store.ask("ZCARD", cast.keys.ticks) == schedules
    assert int(cast.store.ask("HGET", cast.keys.stats, "sent")) == schedules


def fill(cast: Cast, producer: Producer, count: int) -> None:
    """Many copies of one schedule, with their waiting occurrences, without the calls of each."""
    producer.schedule("s", topic=TOPIC, body={"kind": "daily"}, cron="0 9 1 1 *")
    record = cast.store.ask("HGET", cast.keys.schedules, "s")
    tick = int(cast.store.ask("ZSCORE", cast.keys.ticks, "s"))
    envelope = cast.store.ask("GET", cast.keys.body(f"s@{tick}"))
    for begin in range(0, count, 1_000):
        names = [f"s{number:07}" for number in range(begin, min(begin + 1_000, count))]
        ids = [f"{name}@{tick}" for name in names]
        records = [part for name in names for part in (name, record)]
        bodies = [part for one in ids for part in (cast.keys.body(one), envelope)]
        cast.store.ask("HSET", cast.keys.schedules, *records)
        cast.store.ask("ZADD", cast.keys.ticks, *[part for name in names for part in (tick, name)])
        cast.store.ask("ZADD", cast.keys.waiting, *[part for one in ids for part in (tick, one)])
        cast.store.ask("MSET", *bodies)


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text("utf-8"))
    assert found
    return int(found[1]) / 1024


def cost(url: str, processes: Processes, seconds: float) -> tuple[float, float]:
    """The share of a core that an idle manager uses, and its memory in MB."""
    process = processes.start("-m", "lisa.cli.manager", "--redis", url)
    process.wait_for("is reachable")

    def share(span: float) -> float:
        begun, used = time.monotonic(), cpu_s(process.pid)
        time.sleep(span)  # the span that is measured
        return (cpu_s(process.pid) - used) / (time.monotonic() - begun)

    wait_until(lambda: share(1.0) < 0.03)
    found = share(seconds), rss_mb(process.pid)
    process.end()
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("count", "seconds"),
    [
        (20_000, 4.0),
        pytest.param(1_000_000, 60.0, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_idle_schedules_cost_a_manager_nothing(
    cast: Cast,
    producer: Producer,
    processes: Processes,
    count: int,
    seconds: float,
) -> None:
    url = cast.store.connection.address.url
    _, alone_mb = cost(url, processes, 1.0)
    fill(cast, producer, count)
    cast.store.ask("HSET", cast.keys.options, "zones", data_version())  # checked by an earlier one
    share, with_mb = cost(url, processes, seconds)
    said = f"{share:.2%} of a core, {alone_mb:.0f} -> {with_mb:.0f} MB"
    sys.stdout.write(said + "\n")  # shown with -s
    assert share < 0.03, said
    assert with_mb < alone_mb + 15, said
