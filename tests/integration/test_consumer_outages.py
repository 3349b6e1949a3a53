"""A consumer whose server, or one of its nodes, hangs, fails or loses data."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

from lisa.consumer import Consumer
from lisa.consumer.options import WantedTopic
from lisa.consumer.runtime import PATIENCE
from lisa.consumer.shutdown import SHUTDOWN_CALLS_S
from lisa.core.model.errors import GroupRemoved, ServerUnavailable
from lisa.core.model.sharding import Topic
from lisa.core.redis.address import Address
from lisa.core.store import group_removal, presence
from lisa.core.transitions.undeclare import Undeclare
from tests import clusters
from tests.consumers import Bench, ignore, presences_running, settled
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lisa.consumer.subscription import Subscription
    from lisa.core.model.message import Message
    from lisa.core.model.sharding import Layout
    from lisa.embedded import EmbeddedServer
    from tests.shards import Split

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = Topic("orders")
SOCKET_TIMEOUT_S = 1.0
GRACE = timedelta(milliseconds=500)


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=50))


# Hangs


def topic_of_each_node() -> tuple[str, str]:
    slots = {f"t{n}": key_slot(b"t%d" % n) for n in range(40)}
    return (
        next(topic for topic, slot in slots.items() if slot < 8192),
        next(topic for topic, slot in slots.items() if slot >= 8192),
    )


def all_finished(consumer: Consumer, topic: str) -> bool:
    """True if all messages that it holds of a topic are only to be settled."""
    assert consumer._runtime is not None
    held = [
        one
        for sub in consumer._runtime.readers.subscriptions()
        if sub.shard == topic
        for one in sub.leases.held.values()
    ]
    return bool(held) and all(one.ended for one in held)


def test_messages_of_a_healthy_node_are_handled_once_while_another_node_hangs() -> None:
    ack_timeout = timedelta(seconds=4 * SOCKET_TIMEOUT_S)
    with clusters.two_nodes() as nodes, connect(nodes[1]) as other:
        bench = Bench(clusters.address(nodes))
        slots = {f"t{n}": key_slot(b"t%d" % n) for n in range(40)}
        well = next(topic for topic, slot in slots.items() if slot < 8192)
        hung = [topic for topic, slot in slots.items() if slot >= 8192][:3]
        handled, go_on = list[str](), threading.Event()

        def handle(message: Message) -> None:
            handled.append(message.topic)
            go_on.wait(60)

        address = Address(bench.url, socket_timeout_s=SOCKET_TIMEOUT_S)
        consumer = Consumer(address, concurrency=8, grace=GRACE)
        for topic in (*hung, well):
            bench.declare(topic, ack_timeout=ack_timeout, retry_delays=["0"])
            consumer.on(topic, handle)
            bench.send(topic, [1])
        pid = int(other.info("server")["process_id"])
        with consumer:
            wait_until(lambda: sorted(handled) == sorted([*hung, well]))
            os.kill(pid, signal.SIGSTOP)
            try:
                with bench.manager(well):
                    time.sleep(2.5 * ack_timeout.total_seconds())
            finally:
                os.kill(pid, signal.SIGCONT)
                go_on.set()
            assert handled.count(well) == 1
            assert bench.stat(well, "reclaimed") == 0
        bench.store.close()


def test_acks_of_a_healthy_node_do_not_wait_for_a_node_that_hangs() -> None:
    hangs_s = 5 * SOCKET_TIMEOUT_S
    with clusters.two_nodes() as nodes, connect(nodes[1]) as other:
        bench = Bench(clusters.address(nodes))
        well, hung = topic_of_each_node()
        begun, go_on = threading.Event(), threading.Event()

        def finish_once_it_hangs(_: Message) -> None:
            begun.set()
            go_on.wait(60)

        consumer = Consumer(Address(bench.url, socket_timeout_s=hangs_s), concurrency=4)
        consumer.on(well, ignore)
        consumer.on(hung, finish_once_it_hangs)
        for topic in (well, hung):
            bench.declare(topic, ack_timeout=timedelta(minutes=1))
        [late] = bench.send(hung, [1])
        pid = int(other.info("server")["process_id"])
        with consumer:
            assert begun.wait(20)
            os.kill(pid, signal.SIGSTOP)
            try:
                go_on.set()
                wait_until(lambda: all_finished(consumer, hung))
                began = time.monotonic()
                for body in range(3):
                    [sent] = bench.send(well, [body])
                    wait_until(settled(bench, sent, well))
                took_s = time.monotonic() - began
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(settled(bench, late, hung))
        assert took_s < hangs_s / 2
        bench.store.close()


@pytest.mark.parametrize("is_blocked", [True, False])
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
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        consumer.stop()
        took_s = time.monotonic() - began
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
        go_on.set()
    # A failing call, some time for the rest, and one more call that had begun by then.
    assert took_s < GRACE.total_seconds() + 2 * SOCKET_TIMEOUT_S + SHUTDOWN_CALLS_S + 1
    bench.store.close()


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
    bench.store.close()


def test_shards_behind_one_that_cannot_be_left_are_left_by_a_puller(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(bench.url)
    for topic in "abc":
        bench.declare(topic)
        consumer.pull(topic)
    crew = consumer._runtime
    assert crew is not None
    drive, flows = crew._store.drive, list[Any]()

    def away_at_first(flow: Any) -> Any:
        flows.append(flow)
        if len(flows) == 1:
            raise ServerUnavailable("its node is away")
        return drive(flow)

    monkeypatch.setattr(crew._store, "drive", away_at_first)
    consumer.stop()
    left = [one for one in "abc" if bench.ask("HLEN", bench.store.keys.topic(one).consumers)]
    assert left == ["a"]


def test_a_hanging_node_does_not_delay_following_other_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = Consumer("redis+cluster://127.0.0.1:1")
    crew = consumer._new_runtime()
    asked, go_on = list[str](), threading.Event()

    def layouts(topics: Sequence[str]) -> list[Layout]:
        [topic] = topics
        if topic != "well":
            go_on.wait(SOCKET_TIMEOUT_S)
            raise ServerUnavailable("its node hung")
        asked.append(topic)
        go_on.set()
        return []

    monkeypatch.setattr(crew._store, "layouts", layouts)
    monkeypatch.setattr(crew._store, "drive", lambda found: found)
    for topic in map(Topic, ("hung", "hung-too", "well")):
        crew.readers._wanted[topic, ""] = WantedTopic(topic, None, None)
    for rounds in (1, 2):
        with pytest.raises(ServerUnavailable):
            crew.readers.follow()
        assert asked == ["well"] * rounds
    consumer.stop()


# Swept records and removed groups


def sole(consumer: Consumer) -> Subscription:
    assert consumer._runtime is not None
    [sub] = consumer._runtime.readers.subscriptions()
    return sub


def sweep(bench: Bench, sub: Subscription) -> None:
    """Sweep the consumer's record as a manager does; the next heartbeat notices."""
    bench.ask("HDEL", bench.store.keys.topic(TOPIC).consumers, sub.name)
    wait_until(lambda: sub.membership.is_forgotten)


@pytest.mark.usefixtures("quick_beats")
def test_a_swept_record_is_ignored_after_the_next_read(bench: Bench) -> None:
    consumer = Consumer(bench.url, group="lisa", poll_timeout=timedelta(milliseconds=200))
    consumer.on(TOPIC, ignore)
    with consumer:
        wait_until(presences_running(bench))
        sub = sole(consumer)
        sweep(bench, sub)
        wait_until(lambda: not sub.membership.is_forgotten)
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        wait_until(lambda: sub.membership.is_removed)
    assert bench.store.drive(bench.store.groups(TOPIC)) == ()


@pytest.mark.usefixtures("quick_beats")
def test_a_group_that_is_removed_just_after_its_consumer_s_record_stays_removed(
    bench: Bench,
) -> None:
    consumer = Consumer(bench.url, group="lisa", poll_timeout=timedelta(seconds=60))
    consumer.on(TOPIC, ignore)
    with consumer:
        [sent] = bench.send(TOPIC, [1])
        wait_until(settled(bench, sent))
        wait_until(presences_running(bench))
        sub = sole(consumer)
        sweep(bench, sub)
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        wait_until(lambda: sub.membership.is_removed)
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
    bench.store.close()
