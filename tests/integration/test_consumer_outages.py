"""A consumer whose server, or one of its nodes, hangs, fails or loses data."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from redis.crc import key_slot

from lisa.consumer import Consumer
from lisa.consumer.runtime import PATIENCE
from lisa.consumer.subscription import SHUTDOWN_CALLS_S
from lisa.core.model.errors import GroupRemoved
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic
from lisa.core.redis.address import Address
from lisa.core.store import group_removal, presence
from lisa.core.transitions.groups import Undeclare
from lisa.embedded import EmbeddedServer
from tests import clusters
from tests.consumers import Bench, Blocking, ignore, presences_running, settled, state_of
from tests.servers import connect, flush, wait_until
from tests.shards import Split

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = Topic("orders")
SOCKET_TIMEOUT_S = 1.0
GRACE = timedelta(milliseconds=500)


# Hangs


@contextmanager
def hanging(pid: int) -> Iterator[None]:
    """The server does not run while the block does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_acks_and_leases_of_a_healthy_node_do_not_wait_for_a_node_that_hangs(
    two_nodes: list[str],
) -> None:
    hangs_s, lease_s = 10 * SOCKET_TIMEOUT_S, 3
    slots = {f"t{n}": key_slot(b"t%d" % n) for n in range(40)}
    well = next(topic for topic, slot in slots.items() if slot < 8192)
    hung = [topic for topic, slot in slots.items() if slot >= 8192][:3]
    bench = Bench(clusters.address([flush(url) for url in two_nodes]))
    with connect(two_nodes[1]) as other:
        pid = int(other.info("server")["process_id"])
    seen, go_on, finish = list[object](), threading.Event(), threading.Event()
    begun = list[str]()

    def handle(message: Message) -> None:
        if message.body == "held":
            begun.append(message.topic)
            (finish if message.topic == well else go_on).wait(60)
        seen.append((message.topic, message.body))

    consumer = Consumer(Address(bench.url, socket_timeout_s=hangs_s), concurrency=8)
    sent = {}
    for topic in (*hung, well):
        bench.declare(topic, ack_timeout=timedelta(seconds=lease_s if topic == well else 60))
        consumer.on(topic, handle)
        [sent[topic]] = bench.send(topic, ["held"])
    with consumer, bench.manager(well):
        wait_until(lambda: len(begun) == len(sent))
        with hanging(pid):
            go_on.set()
            wait_until(lambda: len(seen) == len(hung))
            began = time.monotonic()
            for body in range(3):
                [quick] = bench.send(well, [body])
                wait_until(settled(bench, quick, well))
            assert time.monotonic() - began < hangs_s / 2
            time.sleep(max(0, began + lease_s + 1 - time.monotonic()))
            assert bench.stat(well, "reclaimed") == 0, "a running handler has lost its lease"
        finish.set()
        bench.wait_acked(1, *hung)
        bench.wait_acked(4, well)


def test_results_of_handlers_that_end_during_an_outage_are_settled_after_it(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(own_server.url)
    bench.declare(TOPIC, ack_timeout="1h", retry_delays="1h")
    handler = Blocking()

    def handle(message: Message) -> None:
        handler(message)
        if message.body == "fails":
            raise ValueError("no")

    *_, bad = bench.send(TOPIC, ["a", "b", "fails"])
    with bench.consumer(handle, concurrency=3):
        wait_until(lambda: len(handler.begun) == 3)
        own_server.kill()
        handler.go_on.set()
        wait_until(lambda: "cannot settle" in caplog.text)
        own_server.restart()
        bench.wait_acked(2)
        wait_until(lambda: bench.states(TOPIC, bad) == ["retry"])
    assert len(handler.begun) == 3


@pytest.mark.parametrize("is_blocked", [pytest.param(True, marks=pytest.mark.full), False])
def test_stop_at_a_server_that_hangs(own_server: EmbeddedServer, *, is_blocked: bool) -> None:
    bench = Bench(own_server.url)
    topics, go_on, begun = ("a", "b", "c"), threading.Event(), list[str]()

    def handle(message: Message) -> None:
        begun.append(message.id)
        if len(begun) > 300:
            go_on.wait(60)

    address = Address(own_server.url, socket_timeout_s=SOCKET_TIMEOUT_S)
    consumer = Consumer(address, concurrency=4, grace=GRACE)
    for topic in topics:
        bench.declare(topic)
        consumer.on(topic, handle)
        if not is_blocked:
            bench.send(topic, range(600))
    consumer.start()
    if is_blocked:
        wait_until(lambda: all(presences_running(bench, topic)() for topic in topics))
    else:
        wait_until(lambda: len(begun) > 303)
    with hanging(own_server.pid):
        began = time.monotonic()
        consumer.stop()
        took_s = time.monotonic() - began
    go_on.set()
    # A failing call, some time for the rest, and one more call that had begun by then.
    assert took_s < GRACE.total_seconds() + 2 * SOCKET_TIMEOUT_S + SHUTDOWN_CALLS_S + 1


def test_a_puller_can_stop_while_the_server_is_away(own_server: EmbeddedServer) -> None:
    bench = Bench(own_server.url)
    consumer = Consumer(own_server.url)
    for topic in ("a", "b", "c", "d"):
        bench.declare(topic)
        consumer.pull(topic)
    own_server.kill()
    began = time.monotonic()
    consumer.stop()
    assert time.monotonic() - began < SHUTDOWN_CALLS_S + 2 * PATIENCE.total_seconds()


# Swept records and removed groups


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_group_that_is_removed_after_its_consumer_s_record_stays_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, is_written_again: bool
) -> None:
    """A manager sweeps the record, and the next heartbeat notices."""
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=50))
    consumer = bench.consumer(ignore, group="lisa", poll_timeout=timedelta(milliseconds=500))
    with consumer:
        [sent] = bench.send(TOPIC, [1])
        wait_until(settled(bench, sent))
        wait_until(presences_running(bench))
        bench.ask("DEL", bench.store.keys.topic(TOPIC).consumers)
        if is_written_again:
            wait_until(presences_running(bench))
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        wait_until(lambda: state_of(consumer) == "removed")
    assert bench.store.drive(bench.store.groups(TOPIC)) == ()


def test_a_group_that_is_removed_between_two_pulls_stays_removed(bench: Bench) -> None:
    consumer = Consumer(bench.url, group="lisa")
    bench.send(TOPIC, [1])
    [delivery] = consumer.pull(TOPIC)
    delivery.ack()
    bench.ask("DEL", bench.store.keys.topic(TOPIC).consumers)
    bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
    for _ in range(3):
        with pytest.raises(GroupRemoved):
            consumer.pull(TOPIC)
    assert bench.store.drive(bench.store.groups(TOPIC)) == ()
    bench.declare(TOPIC)
    sent = bench.send(TOPIC, [2])
    assert [one.id for one in consumer.pull(TOPIC, wait=timedelta(seconds=5))] == sent
    consumer.stop()


def test_a_pull_skips_a_shard_with_an_unfinished_removal(split_here: Split) -> None:
    split_here.into(2)
    bench = Bench(split_here.url)
    whole, shard, *_ = split_here.layout.active(TOPIC)
    for each in split_here.layout.active(TOPIC):
        bench.declare(each)
    bench.send(shard, [1])
    bench.store.call(Undeclare(shard, "lisa"))
    consumer = Consumer(bench.url, group="lisa")
    sent = bench.send(whole, [2])
    assert [one.id for _ in range(4) for one in consumer.pull(TOPIC)] == sent
    consumer.stop()
