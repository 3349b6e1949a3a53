"""Batches, leases, slots and prefetching, on a real server."""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from lisa.consumer import Batch, Consumer
from lisa.core.delivery.pace import AHEAD_BYTES
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Defer, Discard
from tests.consumers import Bench, Blocking, settled, state_of
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


class Order(msgspec.Struct):
    order: int


# Batches


def test_a_batch_is_handled_when_it_is_full_or_its_first_message_has_waited(bench: Bench) -> None:
    """However large the bodies are."""
    limits: dict[str, tuple[int, str | timedelta]] = {
        TOPIC: (100, "200ms"),
        "large": (25, "5s"),
        "short": (9, "300ms"),
        "full": (2, timedelta.max),
    }
    sizes, times = defaultdict[str, list[int]](list), dict[str, float]()

    def handle(batch: Batch) -> None:
        sizes[batch[0].topic].append(len(batch))
        times[batch[0].topic] = time.monotonic()

    consumer = Consumer(bench.url, concurrency=2)
    bench.declare_all(*limits)
    for topic, (size, within) in limits.items():
        consumer.on(topic, handle, batch=size, within=within)
    bench.send(TOPIC, range(250))
    for _ in range(25):
        bench.send("large", [b"x" * 1_000_000])
    with consumer:
        bench.wait_acked(250, TOPIC)
        bench.wait_acked(25, "large")
        bench.send("full", [1])
        sent = time.monotonic()
        bench.send("short", [1])
        bench.wait_acked(1, "short")
        wait_until(lambda: bench.pending("full") == 1)
        bench.send("full", [2])
        bench.wait_acked(2, "full")
    assert sizes == {TOPIC: [100, 100, 50], "large": [25], "short": [1], "full": [2]}
    assert times["short"] - sent >= 0.3


def test_an_async_batch_fails_message_by_message(bench: Bench) -> None:
    """A batch that fails as a whole is one failure in a row, and sets its discards aside."""
    bench.declare_all(TOPIC, "mails", retry_delays="1h")
    consumer = Consumer(bench.url)

    @consumer.on(TOPIC, batch=3, within="300ms", model=Order)
    async def handle(batch: Batch) -> None:
        await asyncio.sleep(0)
        batch.fail(batch[1], Discard("this one"))
        with pytest.raises(InvalidMessage, match="not in this batch"):
            batch.fail(msgspec.structs.replace(batch[0]), "a copy")

    @consumer.on("mails", batch=30, within="1m")
    def fail(batch: Batch) -> None:
        batch.fail(batch[0], Discard)  # type: ignore[arg-type]
        batch.fail(batch[1], Defer("busy", delay="1h"))
        raise ValueError("all")

    orders = [{"order": 1}, {"order": 2}, {"order": 3}, {"order": "x"}]
    first, second, third, odd = bench.send(TOPIC, orders)
    hopeless, *others = bench.send("mails", range(30))
    with consumer:
        wait_until(lambda: bench.states(TOPIC, odd) == ["garbage"])
        wait_until(lambda: bench.states(TOPIC, second) == ["garbage"])
        wait_until(settled(bench, third))
        wait_until(lambda: bench.pending("mails") == 0)
        assert state_of(consumer, "mails") == "running"
    assert bench.settled_as(TOPIC, first) == "acked"
    assert bench.inspect(TOPIC, second).group_states[0].reason == "this one"
    assert bench.states("mails", hopeless) == ["garbage"]
    assert bench.states("mails", others[-1]) == ["retry"]
    (state,) = bench.inspect("mails", others[0]).group_states
    assert (state.reason, state.failed_attempts, state.deferrals) == ("busy", 0, 1)


# Leases, slots, prefetching


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_handler_loses_its_lease_and_the_message_is_retried(
    bench: Bench, kind: str
) -> None:
    bench.declare(TOPIC, ack_timeout="200ms", retry_delays="0")
    handler, cancelled, attempts = Blocking(), threading.Event(), list[int]()

    def hang(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            handler(message)

    async def hang_on_loop(message: Message) -> None:
        attempts.append(message.attempt)
        try:
            await asyncio.sleep(60 if message.attempt == 1 else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, hang if kind == "sync" else hang_on_loop, timeout="300ms")
    bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        bench.wait_acked(1)
        handler.go_on.set()
    assert attempts == [1, 2]
    assert cancelled.is_set() is (kind == "async")


def test_l8_a_message_behind_slow_handlers_is_not_handled_twice(bench: Bench) -> None:
    bench.declare(TOPIC, ack_timeout="2s", retry_delays="0")  # a busy machine may stall
    seen: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        time.sleep(2.6)
        seen.append((message.body, message.attempt))

    consumer = bench.consumer(handle, poll_batch_size=10)
    bench.send(TOPIC, range(2))
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2)
    assert sorted(seen) == [(0, 1), (1, 1)]
    assert bench.stat(TOPIC, "reclaimed") == 0


def test_deliveries_that_cannot_start_are_released(bench: Bench) -> None:
    """A fast handler becomes slow after messages were prefetched for it."""
    handler = Blocking(100)
    other, seen = bench.recorder()
    bench.send(TOPIC, range(200))
    with bench.consumer(handler):
        wait_until(lambda: 100 in handler.begun)
        # The number of prefetched messages depends on the machine's speed.
        wait_until(lambda: bench.pending(TOPIC) == 1)
        with other:
            wait_until(lambda: len(handler.begun) + len(seen) == 200)
        handler.go_on.set()
        bench.wait_acked(200)
    assert sorted(handler.begun + seen) == list(range(200))


@pytest.mark.parametrize("concurrency", [1, pytest.param(2, marks=pytest.mark.full)])
def test_prefetching_is_bounded_by_bytes(bench: Bench, concurrency: int) -> None:
    """Small bodies lead a consumer to prefetch hundreds; then each body is a megabyte."""
    waiting: list[int] = []
    attempts: list[int] = []
    consumer = Consumer(bench.url, concurrency=concurrency)

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        if isinstance(message.body, bytes):
            attempts.append(message.attempt)
            # All deliveries, also those whose acks are in transit, but those that were started.
            acked = bench.stat(TOPIC, "acked") - 2_000
            waiting.append(acked + bench.pending(TOPIC) - len(attempts))

    bench.send(TOPIC, range(2_000))
    with bench.manager(TOPIC), consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2_000)
        bench.configure(TOPIC, paused=True)
        for _ in range(60):
            bench.send(TOPIC, [b"x" * 1_000_000])
        bench.configure(TOPIC, paused=False)
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2_060)
    assert len(waiting) == 60
    assert max(waiting[1:]) <= AHEAD_BYTES // 1_000_000 + 8, waiting
    assert set(attempts) == {1}


@pytest.mark.parametrize("topics", [["orders"], ["orders", "mails", "hooks"]])
def test_acks_do_not_wait_for_the_next_handler_on_their_thread(
    bench: Bench, topics: list[str]
) -> None:
    bench.declare_all(*topics)
    is_slow, go_on = threading.Semaphore(0), threading.Semaphore(0)
    handled, consumer = Counter[str](), Consumer(bench.url)

    def handle(message: Message) -> None:
        if message.body == "slow":
            is_slow.release()
            go_on.acquire(timeout=100)
        else:
            handled[message.topic] += 1

    for topic in topics:
        consumer.on(topic, handle)
    with consumer:
        bench.send(topics[-1], ["slow"])
        for slow in range(1, 6):
            assert is_slow.acquire(timeout=60)
            for topic in topics:
                expected = handled[topic] + (slow - 1) * (topic == topics[-1])
                wait_until(lambda: bench.stat(topic, "acked") == expected)  # noqa: B023  at once
            for topic in topics[:-1]:
                bench.send(topic, ["fast"])
            bench.send(topics[-1], ["slow"])
            go_on.release()
        assert is_slow.acquire(timeout=60)
        go_on.release()


def test_acks_do_not_wait_for_a_handler_that_blocks_the_event_loop(bench: Bench) -> None:
    is_slow, go_on = threading.Event(), threading.Event()

    async def handle(message: Message) -> None:
        if message.body == "slow":
            is_slow.set()
            go_on.wait(timeout=100)

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, ["fast", "slow"])
    with consumer:
        assert is_slow.wait(timeout=60)
        try:
            wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
        finally:
            go_on.set()


# A topic's own limit


@pytest.mark.parametrize(
    ("limit", "batch", "is_async"), [(1, None, False), (2, 1, True), (2, None, True)]
)
def test_the_handlers_of_a_topic_keep_to_its_limit_and_others_use_the_rest(
    bench: Bench, limit: int, batch: int | None, *, is_async: bool
) -> None:
    bench.declare("others")
    running, most, lock = Counter[str](), Counter[str](), threading.Lock()

    @contextmanager
    def counted(topic: str) -> Iterator[None]:
        with lock:
            running[topic] += 1
            most[topic] = max(most[topic], running[topic])
        yield
        with lock:
            running[topic] -= 1

    def handler_of(topic: str) -> Callable[[Any], Any]:
        def handle(_: Any) -> None:
            with counted(topic):
                time.sleep(0.02)

        async def handle_async(_: Any) -> None:
            with counted(topic):
                await asyncio.sleep(0.02)

        return handle_async if is_async else handle

    consumer = Consumer(bench.url, concurrency=6)
    consumer.on(TOPIC, handler_of(TOPIC), concurrency=limit, batch=batch)
    consumer.on("others", handler_of("others"), batch=batch)
    bench.send(TOPIC, range(20))
    bench.send("others", range(60))
    with consumer:
        bench.wait_acked(20)
        bench.wait_acked(60, "others")
    assert most[TOPIC] == limit
    assert limit < most["others"] <= 6
