"""A call with `durability=replicas(n)` returns once n replicas have its writes."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.client import Monitor

from lisa import ConfigError, NotReplicated, Producer, ServerUnavailable, replicas
from lisa.core.model.keys import Keys
from tests import topologies
from tests.producers import Either
from tests.proxies import LossyProxy
from tests.servers import PATIENCE, connect, wait_until
from tests.topologies import Node

KEYS = Keys().topic("orders")
HOUR = timedelta(hours=1)
BRIEF = timedelta(seconds=0.25)
"""The patience of calls that have to fail."""
Pair = tuple[Node, Node]
Make = Callable[..., Either]


@pytest.fixture(scope="module")
def pair_of(kind: str) -> Iterator[Pair]:
    with topologies.replicated(kind) as nodes:
        yield nodes


@pytest.fixture
def pair(pair_of: Pair) -> Iterator[Pair]:
    """A primary and its replica, both empty."""
    primary, replica = pair_of
    primary.ask("FLUSHALL")
    primary.ask("WAIT", 1, 5_000)
    yield primary, replica
    replica.go_on()
    wait_until(lambda: primary.ask("INFO").count(b"state=online") == 1)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Creates either kind of producer; a patient one has made its first call already."""
    with ExitStack() as stack:

        def make(url: str, **options: Any) -> Either:
            producer = Either(request.param, url, durability=replicas(1), **options)
            stack.callback(producer.close)
            if options.get("patience", HOUR) > 2 * BRIEF:
                producer.send("orders", "first", id="first", delay=HOUR)
            return producer

        yield make


def test_a_send_returns_once_the_replica_has_it(pair: Pair, make: Make) -> None:
    primary, replica = pair
    producer = make(primary.server.url)
    replica.stop_for_a_while()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send, "orders", "x", id="x", delay=HOUR)
        wait_until(lambda: primary.ask("EXISTS", KEYS.body("x")))
        wait_until(lambda: primary.info("blocked_clients") == "1")  # WAIT
        assert not sending.done()
        replica.go_on()
        assert sending.result(PATIENCE.total_seconds()) == "x"
    assert replica.ask("EXISTS", KEYS.body("x")) == 1


CALLS: dict[str, Callable[[Either], object]] = {
    "send": lambda one: one.send("orders", "x", id="x", delay=HOUR),
    "send_many": lambda one: one.send_many("orders", ["x", "y"], delay=HOUR),
    "stream": lambda one: one.stream("orders", ["x", "y"], 2),
    "reschedule": lambda one: one.ask("reschedule", "orders", "first", delay=2 * HOUR),
    "fire_now": lambda one: one.ask("fire_now", "orders", "first"),
    "cancel": lambda one: one.ask("cancel", "orders", "first"),
    "cancel_many": lambda one: one.ask("cancel_many", "orders", ["first"]),
}


def test_no_call_that_writes_returns_unconfirmed(pair: Pair, make: Make) -> None:
    primary, replica = pair
    make(primary.server.url)
    producer = make(primary.server.url, patience=BRIEF)
    replica.stop_for_a_while()
    for name, call in CALLS.items():
        began = time.monotonic()
        with pytest.raises(NotReplicated) as raised:
            call(producer)
        assert isinstance(raised.value, ServerUnavailable), name
        assert time.monotonic() - began >= BRIEF.total_seconds()
        said = r"written by \S+, but only 0 replicas confirmed within 0.25 s; replicas\(1\) is req"
        assert re.search(said, str(raised.value))
        assert raised.value.ids, name
        producer.ask("get", "orders", "first")  # reading does not wait for replicas


def test_a_call_without_writes_waits_for_earlier_writes_to_replicate(
    pair: Pair, make: Make
) -> None:
    """On another connection without writes, WAIT would confirm immediately."""
    primary, replica = pair
    at_ms = int(time.time() * 1000) + 3_600_000
    calls: dict[str, Callable[[Either], object]] = {
        "send": lambda one: one.send("orders", "x", id="x", delay=HOUR),
        "reschedule": lambda one: one.ask("reschedule", "orders", "x", at_ms=at_ms),
        "cancel": lambda one: one.ask("cancel", "orders", "first"),
    }
    patient = make(primary.server.url)
    first, second = (make(primary.server.url, patience=BRIEF) for _ in range(2))
    for call in calls.values():
        replica.stop_for_a_while()
        for producer in (first, second):
            with pytest.raises(NotReplicated):
                call(producer)
        replica.go_on()
        call(patient)
    assert int(replica.ask("ZSCORE", KEYS.waiting, "x")) == at_ms
    assert replica.ask("EXISTS", KEYS.body("first")) == 0


def test_a_lost_reply_confirms_nothing(pair: Pair, make: Make) -> None:
    primary, replica = pair
    proxy = LossyProxy(primary.server.url)
    producer, brief = make(proxy.url), make(proxy.url, patience=2 * BRIEF)
    brief.ask("get", "orders", "first")
    replica.stop_for_a_while()
    proxy.lose(1)
    with pytest.raises(NotReplicated):
        brief.send("orders", "x", id="x", delay=HOUR)
    assert proxy.lost == 1
    replica.go_on()
    proxy.lose(1)
    assert producer.send("orders", "y", id="y", delay=HOUR) == "y"
    assert proxy.lost == 2
    assert replica.ask("ZCARD", KEYS.waiting) == 3
    proxy.close()


def test_an_unconfirmed_write_is_reported_if_the_server_then_fails(pair: Pair, make: Make) -> None:
    primary, replica = pair
    proxy = LossyProxy(primary.server.url)
    producer = make(f"{proxy.url}?socket_timeout=1.5", patience=timedelta(seconds=5))
    replica.stop_for_a_while()

    def calls_of_wait() -> int:
        with connect(primary.server.url) as client:
            return int(client.info("commandstats").get("cmdstat_wait", {}).get("calls", 0))

    waits = calls_of_wait()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send, "orders", "x", id="x", delay=HOUR)
        # At least one reply has arrived, also if another exceeded the socket timeout.
        wait_until(lambda: calls_of_wait() > waits + 2)
        proxy.close()
        with pytest.raises(NotReplicated) as raised:
            sending.result(PATIENCE.total_seconds())
    assert list(raised.value.ids) == ["x"]


def test_without_durability_no_wait_is_sent(pair: Pair) -> None:
    primary, replica = pair
    replica.stop_for_a_while()
    primary.ask("CONFIG", "RESETSTAT")
    with Producer(primary.server.url) as producer:
        producer.cancel("orders", producer.send("orders", "x"))
    said = primary.info_text("commandstats")
    assert "cmdstat_evalsha" in said
    assert "cmdstat_wait" not in said


def test_script_and_wait_share_a_connection(pair: Pair) -> None:
    """Many threads, one producer, and connections that are killed continuously."""
    primary, _ = pair
    ids = {f"m{n}" for n in range(200)}
    with (
        connect(primary.server.url).monitor() as monitor,
        Producer(primary.server.url, durability=replicas(1)) as producer,
        ThreadPoolExecutor(5) as pool,
    ):
        watching = pool.submit(commands_by_connection, monitor, "ECHO the end")
        sending = [pool.submit(producer.send, "orders", "x", id=one, delay=HOUR) for one in ids]
        for _ in range(20):
            kill_connections(primary)
            time.sleep(0.005)
        assert {one.result(PATIENCE.total_seconds()) for one in sending} == ids
        primary.ask("ECHO", "the end")
        by_connection = watching.result(PATIENCE.total_seconds())
    waits = 0
    for commands in by_connection.values():
        for number, name in enumerate(commands):
            if name == "wait":
                waits += 1
                assert commands[number - 2 : number] == ["evalsha", "set"], commands
    assert waits >= 200


def commands_by_connection(monitor: Monitor, last: str) -> dict[str, list[str]]:
    """The names of the commands that a server receives until the last one."""
    found = defaultdict(list)
    while (said := monitor.next_command())["command"] != last:
        if said["client_type"] == "tcp":  # not a script's
            found[said["client_port"]].append(said["command"].split()[0].lower())
    return found


def kill_connections(node: Node) -> None:
    """Kill all clients' connections except those of this function, monitors and replicas."""
    with node.admin as admin:
        for client in admin.client_list():
            if client["flags"] in ("N", "b") and client["cmd"] != "client|list":
                admin.client_kill_filter(_id=client["id"])


def test_a_primary_that_wants_replicas_is_waited_for(pair: Pair) -> None:
    primary, replica = pair
    with Producer(primary.server.url, patience=timedelta(seconds=15)) as producer:
        producer.send("orders", "first")
        try:
            for name, value in (("to-write", 1), ("max-lag", 1)):
                primary.ask("CONFIG", "SET", f"min-replicas-{name}", value)
            replica.stop_for_a_while()
            wait_until(lambda: primary.info("min_slaves_good_slaves") == "0")
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(producer.send, "orders", "x", id="x", delay=HOUR)
                wait_until(lambda: "NOREPLICAS" in primary.info_text("errorstats"))
                assert not sending.done()
                replica.go_on()
                assert sending.result(PATIENCE.total_seconds()) == "x"
        finally:
            primary.ask("CONFIG", "SET", "min-replicas-to-write", 0)


def test_fsync_counts_disks(kind: str, pair: Pair) -> None:
    primary, replica = pair
    url = primary.server.url
    with Producer(url, durability=replicas(1, fsync=True), patience=BRIEF) as producer:
        if kind == "redis" and primary.info("redis_version").startswith(("6.", "7.0")):
            with pytest.raises(ConfigError, match=r"has no WAITAOF: fsync=True needs Redis 7\.2"):
                producer.send("orders", "x")
            return
        with pytest.raises(NotReplicated, match="fsync=True"):  # it has no append-only file
            producer.send("orders", "x", id="x", delay=HOUR)
    replica.ask("CONFIG", "SET", "appendonly", "yes")
    wait_until(lambda: replica.info("aof_rewrite_in_progress") == "0")
    with Producer(url, durability=replicas(1, fsync=True)) as producer:  # fsync once per second
        assert producer.send("orders", "x", id="x", delay=HOUR) == "x"
    replica.ask("CONFIG", "SET", "appendonly", "no")


@pytest.mark.parametrize("said", ["replicas(0)", "{replicas: 1, of: 2}"])
def test_an_invalid_durability_in_a_file_is_refused(tmp_path: Path, said: str) -> None:
    file = tmp_path / "producer.yml"
    file.write_text(f"lisa-delay-queue:\n  durability: {said}\n")
    with pytest.raises(ConfigError, match=rf"{file}: durability: .*replicas"):
        Producer.from_config(file)
