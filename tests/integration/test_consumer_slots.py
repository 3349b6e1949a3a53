"""Batches, leases, slots and prefetching, on a real server."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lisa.consumer import Batch, Consumer
from lisa.core.delivery.body_size import AHEAD_BYTES
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Discard
from lisa.core.redis.connection import Connection
from tests.consumers import Bench, ignore, presences, settled
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.redis.flow import Command

TOPIC = "orders"


class Order(msgspec.Struct):
    order: int


# Batches


@pytest.mark.parametrize("concurrency", [1, 2])
def test_messages_due_together_are_handled_in_one_call(bench: Bench, concurrency: int) -> None:
    bench.declare(TOPIC)
    sizes: list[int] = []
    seen: list[int] = []
    consumer = Consumer(bench.url, concurrency=concurrency)

    @consumer.on(TOPIC, batch=100, within="200ms")
    def handle(batch: Batch) -> None:
        sizes.append(len(batch))
        seen.extend(message.body for message in batch)

    bench.send(TOPIC, range(250))
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 250)
    assert sorted(seen) == list(range(250))
    assert sizes == [100, 100, 50]


def test_within_bounds_the_wait_of_the_first(bench: Bench) -> None:
    bench.declare(TOPIC)
    came: list[float] = []
    consumer = Consumer(bench.url)
    consumer.on(
        TOPIC, lambda batch: came.append(time.monotonic()), batch=100, within=timedelta(seconds=0.3)
    )
    with consumer:
        wait_until(lambda: any(one.state == "running" for one in presences(bench)))
        sent = time.monotonic()
        bench.send(TOPIC, [1])
        wait_until(lambda: came)
    assert 0.3 <= came[0] - sent < 0.3 + 1


def test_a_batch_may_wait_for_ever_until_it_is_full(bench: Bench) -> None:
    bench.declare(TOPIC)
    sizes: list[int] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda batch: sizes.append(len(batch)), batch=2, within=timedelta.max)
    with consumer:
        bench.send(TOPIC, [1])
        wait_until(lambda: bench.pending(TOPIC) == 1)
        bench.send(TOPIC, [2])
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2)
    assert sizes == [2]


async def test_an_async_batch_fails_message_by_message(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)

    @consumer.on(TOPIC, batch=3, within="2s", model=Order)
    async def handle(batch: Batch) -> None:
        await asyncio.sleep(0)
        batch.fail(batch[1], Discard("this one"))

    first, second, third, odd = bench.send(
        TOPIC, [{"order": 1}, {"order": 2}, {"order": 3}, {"order": "x"}]
    )
    with consumer:
        wait_until(lambda: bench.states(TOPIC, odd) == ["garbage"])
        wait_until(lambda: bench.states(TOPIC, second) == ["garbage"])
        wait_until(lambda: bench.settled_as(TOPIC, third) == "acked")
    assert bench.settled_as(TOPIC, first) == "acked"
    assert bench.inspect(TOPIC, second).group_states[0].reason == "this one"


# Leases, slots, prefetching


def test_leases_are_kept_where_a_server_is_slow_to_answer_all_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Connection.execute

    def slowly(self: Connection, command: Command) -> object:
        if threading.current_thread().name == "lisa-heartbeat":
            time.sleep(0.15)
        return execute(self, command)

    monkeypatch.setattr(Connection, "execute", slowly)
    monkeypatch.setattr("lisa.core.store.presence.BEAT", timedelta(seconds=3))
    topics = [TOPIC, *[f"other-{n}" for n in range(9)]]
    for topic in topics:
        bench.declare(topic, ack_timeout=timedelta(seconds=2.7))  # a busy machine may stall
    consumer = Consumer(bench.url, concurrency=2)
    for topic in topics:
        consumer.on(topic, lambda _: time.sleep(8))
    [sent] = bench.send(TOPIC, [1])
    with bench.manager(TOPIC), consumer:
        wait_until(settled(bench, sent))
    assert bench.stat(TOPIC, "retried") == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_handler_loses_its_lease_and_the_message_is_retried(
    bench: Bench, kind: str
) -> None:
    bench.declare(TOPIC, ack_timeout="200ms", retry_delays="0")
    release = threading.Event()
    cancelled = threading.Event()
    attempts: list[int] = []

    def sync(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            release.wait(20)

    async def asynchronous(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, sync if kind == "sync" else asynchronous, timeout="300ms")
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.settled_as(TOPIC, sent) == "acked")
        release.set()
    assert attempts == [1, 2]
    assert cancelled.is_set() is (kind == "async")


def test_a_slow_handler_has_nothing_waiting_behind_it(bench: Bench) -> None:
    bench.declare(TOPIC)
    go_on = threading.Event()
    started: list[int] = []

    def handle(message: Message) -> None:
        started.append(message.body)
        go_on.wait(20)

    bench.send(TOPIC, range(5))
    slow, other = Consumer(bench.url), Consumer(bench.url)
    slow.on(TOPIC, handle)
    seen: list[int] = []
    other.on(TOPIC, lambda message: seen.append(message.body))
    with slow:
        wait_until(lambda: started)
        with other:
            wait_until(lambda: len(seen) == 4)
        go_on.set()
    assert (started, seen) == ([0], [1, 2, 3, 4])


def test_deliveries_that_cannot_start_are_released(bench: Bench) -> None:
    """A fast handler becomes slow after messages were prefetched for it."""
    bench.declare(TOPIC)
    go_on = threading.Event()
    started: list[int] = []

    def handle(message: Message) -> None:
        started.append(message.body)
        if message.body == 100:
            go_on.wait(20)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, range(200))
    with consumer:
        wait_until(lambda: 100 in started)
        # The number of prefetched messages depends on the machine's speed.
        wait_until(lambda: bench.pending(TOPIC) == 1)
        other = Consumer(bench.url)
        seen: list[int] = []
        other.on(TOPIC, lambda message: seen.append(message.body))
        with other:
            wait_until(lambda: len(started) + len(seen) == 200)
        go_on.set()
        wait_until(lambda: bench.stat(TOPIC, "acked") == 200)
    assert sorted(started + seen) == list(range(200))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_several_topics_take_fair_turns(bench: Bench, concurrency: int) -> None:
    """A flood on one topic delays the other's few messages by a few turns at most."""
    for topic in ("flood", "trickle"):
        bench.declare(topic)
    order: list[str] = []

    def handle(message: Message) -> None:
        order.append(message.topic)
        time.sleep(0.02)

    consumer = Consumer(bench.url, concurrency=concurrency)
    consumer.on("flood", handle)
    consumer.on("trickle", handle)
    bench.send("flood", range(60))
    bench.send("trickle", range(5))
    with consumer:
        wait_until(lambda: len(order) == 65)
        wait_until(lambda: bench.stat("flood", "acked") == 60)
    last = max(index for index, topic in enumerate(order) if topic == "trickle")
    assert last < 30


def test_one_topics_blocked_handler_does_not_block_other_topics(bench: Bench) -> None:
    for topic in ("hangs", "works"):
        bench.declare(topic)
    go_on = threading.Event()
    consumer = Consumer(bench.url)
    consumer.on("hangs", lambda message: go_on.wait(20))
    mine: list[int] = []
    consumer.on("works", lambda message: mine.append(message.body))
    seen: list[int] = []
    other = Consumer(bench.url)
    other.on("works", lambda message: seen.append(message.body))
    bench.send("hangs", [1])
    with consumer:
        wait_until(lambda: presences(bench, "works"))
        wait_until(lambda: bench.states("hangs", "x") == [] and go_on is not None)
        bench.send("works", range(20))
        with other:
            wait_until(lambda: len(seen) == 20)
        go_on.set()
    assert mine == []


def test_poll_batch_size_limits_unstarted_deliveries(bench: Bench) -> None:
    bench.declare(TOPIC)
    most = 0
    consumer = Consumer(bench.url, poll_batch_size=5)

    def handle(message: Message) -> None:
        nonlocal most
        if message.body % 50 == 0:
            most = max(most, bench.pending(TOPIC))

    bench.send(TOPIC, range(500))
    consumer.on(TOPIC, handle)
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 500)
    # Five running, and as many whose ack may be in transit for 5 ms.
    assert 1 <= most < 250


@pytest.mark.parametrize("concurrency", [1, 2])
def test_prefetching_is_bounded_by_bytes(bench: Bench, concurrency: int) -> None:
    """Small bodies lead a consumer to prefetch hundreds; then each body is a megabyte."""
    bench.declare(TOPIC)
    held: list[int] = []
    attempts: list[int] = []
    consumer = Consumer(bench.url, concurrency=concurrency)

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        if isinstance(message.body, bytes):
            held.append(bench.pending(TOPIC))
            attempts.append(message.attempt)

    bench.send(TOPIC, range(2_000))
    with bench.manager(TOPIC), consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2_000)
        bench.configure(TOPIC, paused=True)
        for _ in range(60):
            bench.send(TOPIC, [b"x" * 1_000_000])
        bench.configure(TOPIC, paused=False)
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2_060)
    assert len(held) == 60
    # Besides prefetched messages, acks may be in transit.
    assert max(held[1:]) <= AHEAD_BYTES // 1_000_000 + 8, held
    assert set(attempts) == {1}


def test_a_batch_is_gathered_however_large_its_bodies_are(bench: Bench) -> None:
    bench.declare(TOPIC)
    sizes: list[int] = []
    consumer = Consumer(bench.url)

    @consumer.on(TOPIC, batch=25, within="5s")
    def handle(batch: Batch) -> None:
        sizes.append(len(batch))

    for _ in range(25):
        bench.send(TOPIC, [b"x" * 1_000_000])
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 25)
    assert sizes == [25]


# A topic's own limit


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_handlers_of_a_topic_keep_to_its_limit_and_others_use_the_rest(
    bench: Bench, limit: int, batch: int | None, *, is_async: bool
) -> None:
    bench.declare("others")
    running = {TOPIC: 0, "others": 0}
    most = dict(running)
    lock = threading.Lock()

    def change(topic: str, by: int) -> None:
        with lock:
            running[topic] += by
            most[topic] = max(most[topic], running[topic])

    def handler_of(topic: str) -> Callable[[Any], Any]:
        def handle(_: Any) -> None:
            change(topic, 1)
            time.sleep(0.02)
            change(topic, -1)

        async def handle_async(_: Any) -> None:
            change(topic, 1)
            await asyncio.sleep(0.02)
            change(topic, -1)

        return handle_async if is_async else handle

    bench.declare(TOPIC)
    consumer = Consumer(bench.url, concurrency=6)
    consumer.on(TOPIC, handler_of(TOPIC), concurrency=limit, batch=batch)
    consumer.on("others", handler_of("others"), batch=batch)
    bench.send(TOPIC, range(20))
    bench.send("others", range(60))
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 20)
        wait_until(lambda: bench.stat("others", "acked") == 60)
    assert most[TOPIC] == limit
    assert limit < most["others"] <= 6


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_left_of_an_unsubscribed_topic_with_a_limit(
    bench: Bench, *, is_async: bool
) -> None:
    for topic in (TOPIC, "others"):
        bench.declare(topic)
    consumer = Consumer(bench.url, concurrency=2)

    async def handle(message: Message) -> None: ...

    consumer.on(TOPIC, handle if is_async else ignore, concurrency=1)
    consumer.on("others", ignore)
    with consumer:
        bench.send(TOPIC, range(10))
        wait_until(lambda: bench.stat(TOPIC, "acked") == 10)
        runtime = consumer._runtime
        assert runtime is not None
        subs = [one for one in runtime.readers.subscriptions() if one.topic == TOPIC]
        left = [weakref.ref[object](one) for sub in subs for one in (sub, sub.slots)]
        del subs
        consumer.unsubscribe(TOPIC)

        def is_gone() -> bool:
            gc.collect()
            return all(one() is None for one in left)

        wait_until(is_gone)


def test_an_invalid_limit_is_refused(bench: Bench) -> None:
    consumer = Consumer(bench.url)
    for wrong in (0, True, "2"):
        with pytest.raises(ConfigError, match="concurrency="):
            consumer.on(TOPIC, print, concurrency=wrong)  # type: ignore[arg-type]
    consumer.on(TOPIC, print, concurrency=2)
    with pytest.raises(ConfigError, match="another handler has a different concurrency="):
        consumer.on(TOPIC, print, concurrency=3)
