"""Limits of lanes with real managers and consumers: rates, slots, fair turns, handlers' limits."""

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from lisa import Batch, Consumer, Limited, Manager, Message, Outgoing, Producer
from lisa.core.model.keys import keyed_id
from lisa.core.transitions.promote import Promote
from lisa.testing import ClockedServer, LisaTestKit
from tests.consumers import Bench
from tests.roles import Cast
from tests.servers import no_clock, wait_until

TOPIC = "orders"


@pytest.fixture(scope="module")
def clock() -> Iterator[ClockedServer]:
    if reason := no_clock():
        pytest.skip(reason)
    with ClockedServer() as server:
        yield server


@pytest.fixture
def kit(clock: ClockedServer) -> Iterator[LisaTestKit]:
    with LisaTestKit(clock) as made:
        yield made


@pytest.mark.parametrize(
    ("option", "waits"),
    [
        ("rate", False),
        ("key_rate", True),
        pytest.param("rate", True, marks=pytest.mark.full),
        pytest.param("key_rate", False, marks=pytest.mark.full),
    ],
)
def test_a_rate_is_kept_and_used_up(kit: LisaTestKit, option: str, *, waits: bool) -> None:
    """Within a hundredth of the ideal, and a message that waits in the group changes nothing."""
    consumer = Consumer()
    consumer.on(TOPIC, lambda message: None)
    kit.attach(consumer)
    kit.configure(TOPIC, **{option: "10/m"})
    if waits:
        kit.producer.send(TOPIC, "waits", key="k", delay="2h")
    began = kit.now
    kit.producer.send_many(TOPIC, [Outgoing(n, key="k") for n in range(200)])
    kit.advance(hours=1)
    attempts = kit.attempts(TOPIC)
    assert sorted(one.message.body for one in attempts) == list(range(200))
    assert {one.message.attempt for one in attempts} == {1}
    instants = [one.at for one in attempts]
    assert min(later - one for one, later in pairwise(instants)) >= (timedelta(seconds=6))
    ideal = timedelta(seconds=199 * 6)
    assert ideal <= instants[-1] - began <= 1.01 * ideal


def test_a_rate_follows_a_clock_that_is_set_back(clock: ClockedServer) -> None:
    """A lane does not stay closed until the clock has caught up."""
    clock.clear()
    now_us = time.time_ns() // 1_000_000 * 1000
    clock.set_time(now_us)
    cast = Cast(clock.url).declare(key_rate="1,60000,1")
    for own_id in "123":
        cast.send(message_id=keyed_id("k", own_id))
    assert cast.store.call(Promote(TOPIC)).moved == 1
    now_us -= 86_400_000_000
    clock.set_time(now_us)
    for _ in range(2):  # for each of the others
        cast.store.call(Promote(TOPIC))
        now_us += 60_002_000  # the server adds up to a millisecond to its clock
        clock.set_time(now_us)
        assert cast.store.call(Promote(TOPIC)).moved == 1


@pytest.fixture
def manager(redis_url: str) -> Iterator[Manager]:
    with Manager(redis_url) as manager:
        wait_until(lambda: manager.health()["status"] == "ok")
        yield manager


class Gauge:
    """A handler that takes a while, and counts how many run at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.lock = threading.Lock()
        self.running = self.most = self.done = 0
        self.bodies: list[Any] = []

    async def __call__(self, message: Message) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.bodies.append(message.body)
        await asyncio.sleep(self.seconds)
        with self.lock:
            self.running -= 1
            self.done += 1

    def wait(self, done: int) -> None:
        """Wait until so many messages are handled."""
        wait_until(lambda: self.done >= done)


@pytest.mark.usefixtures("manager")
def test_a_limit_equal_to_the_slots_costs_no_throughput(redis_url: str, bench: Bench) -> None:
    """BullMQ loses a part of it, because its workers wait for the next look at the limit."""

    def duration_s(topic: str) -> float:
        gauge = Gauge(0.1)
        bench.send(topic, range(800))
        consumer = Consumer(redis_url, concurrency=40)
        consumer.on(topic, gauge)
        began = time.monotonic()
        with consumer:
            gauge.wait(800)
            took = time.monotonic() - began
        assert gauge.most == 40
        return took

    bench.declare("free")
    bench.declare("limited", concurrency=40)
    ratios: list[float] = []
    while not ratios or (max(ratios) < 0.9 and len(ratios) < 5):
        ratios.append(duration_s("free") / duration_s("limited"))
    assert max(ratios) >= 0.9, ratios


@pytest.mark.usefixtures("manager")
def test_a_limit_of_a_group_holds_over_all_consumers(redis_url: str, bench: Bench) -> None:
    gauge = Gauge(0.01)
    bench.declare(TOPIC, concurrency=3)
    bench.send(TOPIC, range(100))
    consumers = [Consumer(redis_url, concurrency=10) for _ in range(2)]
    for consumer in consumers:
        consumer.on(TOPIC, gauge)
    with consumers[0], consumers[1]:
        gauge.wait(100)
    assert gauge.most == 3


@pytest.mark.usefixtures("manager")
def test_quiet_tenants_wait_for_one_round_of_a_backlog(redis_url: str, bench: Bench) -> None:
    """Their message starts after at most one further message of each other tenant, and those that
    were let through before."""
    gauge, slots, quiet = Gauge(0.02), 2, 3
    bench.declare(TOPIC, fair=True, concurrency=slots)
    sent_at: dict[str, int] = {}
    consumer = Consumer(redis_url, concurrency=slots)
    consumer.on(TOPIC, gauge)
    with Producer(redis_url) as producer:
        producer.send_many(TOPIC, [Outgoing("loud", key="loud") for _ in range(300)])
        with consumer:
            for turn in range(1, 11):
                gauge.wait(15 * turn)
                for tenant in range(quiet):
                    body = f"{tenant} {turn}"
                    with gauge.lock:
                        sent_at[body] = len(gauge.bodies)
                    producer.send(TOPIC, body, key=f"quiet {tenant}")
            wait_until(lambda: set(sent_at) <= set(gauge.bodies))
    for body, sent in sent_at.items():
        between = gauge.bodies[sent : gauge.bodies.index(body)]
        # A manager takes the message up a few milliseconds after it was sent: within a handler.
        assert between.count("loud") <= 1 + 2 * slots, (body, between)


LIMIT_S = 0.5


class Remote:
    """A remote system that refuses calls for a while; `calls` has instants and bodies."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any, int]] = []
        self.refused_until = 0.0

    def call(self, message: Message) -> None:
        now = time.monotonic()
        self.calls.append((now, message.body, message.attempt))
        if message.body == "first" and not self.refused_until:
            self.refused_until = now + LIMIT_S
            raise Limited("busy", retry_after=timedelta(seconds=LIMIT_S))


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("kind", ["sync", "async", "batch"])
def test_a_handler_that_meets_a_limit_is_not_called_meanwhile(
    redis_url: str, bench: Bench, kind: str
) -> None:
    """No other message of its key either; those of other keys are handled, none loses attempts."""
    remote = Remote()
    bench.declare(TOPIC, retry_delays="")
    consumer = Consumer(redis_url, concurrency=1)
    if kind == "sync":
        consumer.on(TOPIC, remote.call)
    elif kind == "async":

        @consumer.on(TOPIC)
        async def handle(message: Message) -> None:
            remote.call(message)

    else:

        @consumer.on(TOPIC, batch=1, within="1ms")
        def handle_batch(batch: Batch) -> None:
            for message in batch:
                remote.call(message)

    with Producer(redis_url) as producer, consumer:
        producer.send(TOPIC, "first", key="a")
        wait_until(lambda: remote.refused_until)
        wait_until(lambda: bench.stat(TOPIC, "deferred") == 1)
        producer.send_many(TOPIC, [Outgoing("second", key="a"), Outgoing("other", key="b")])
        bench.wait_acked(3)
    calls = [(body, attempt) for _, body, attempt in remote.calls]
    assert sorted(calls) == [("first", 1), ("first", 1), ("other", 1), ("second", 1)]
    assert calls[:2] == [("first", 1), ("other", 1)]
    assert all(at >= remote.refused_until for at, *_ in remote.calls[2:])
    assert bench.stat(TOPIC, "retried") == 0
