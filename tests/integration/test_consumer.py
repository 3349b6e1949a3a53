"""A consumer on a real server, the manager played by its transitions."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lisa.consumer import Batch, Consumer
from lisa.core import presence
from lisa.core.errors import ConfigError
from lisa.core.message import Message
from lisa.core.outcomes import Discard, Retry
from lisa.core.signals import everywhere
from lisa.core.transitions.undeclare import Undeclare
from tests.consumers import Bench
from tests.servers import flush, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC = "orders"


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    bench = Bench(redis_url)
    yield bench
    bench.store.close()


def ignore(message: Message) -> None:
    """A handler that is content with anything."""


def presences(bench: Bench, topic: str = TOPIC) -> list[presence.ConsumerPresence]:
    return bench.store.drive(presence.consumers(bench.store, topic))


# From due to handled


def test_messages_are_handled_acked_and_leave_only_tombstones(server: str) -> None:
    bench = Bench(flush(server))
    bench.declare(TOPIC)
    consumer = Consumer(server)
    seen: list[Message] = []
    consumer.on(TOPIC, seen.append)
    before = datetime.now(UTC) - timedelta(seconds=5)
    ids = bench.send(TOPIC, [{"order": n} for n in range(1000)])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1000)
    assert sorted(message.id for message in seen) == sorted(ids)
    assert sorted(message.body["order"] for message in seen) == list(range(1000))
    assert {(one.topic, one.group, one.attempt) for one in seen} == {(TOPIC, "lisa", 1)}
    assert all(before < message.due < datetime.now(UTC) for message in seen)
    late = {name: n for name, n in bench.stats(TOPIC).items() if name.startswith("late:")}
    assert sum(late.values()) == 1000
    assert not any(name.startswith("late:-") for name in late)
    left = {key for key in bench.ask("KEYS", "*") if b":done:" not in key}
    assert not any(b":body:" in key or b":entries" in key for key in left)
    assert bench.ask("XLEN", bench.store.keys.topic(TOPIC).group("lisa").ready) == 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_order_of_due_is_kept_by_one_inline_handler_and_all_run_with_several(
    bench: Bench, concurrency: int
) -> None:
    bench.declare(TOPIC)
    bench.send(TOPIC, range(200))
    seen: list[int] = []
    consumer = Consumer(bench.url, concurrency=concurrency)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: len(seen) == 200)
    assert sorted(seen) == list(range(200))
    if concurrency == 1:
        assert seen == list(range(200))


def test_async_handlers_run_on_one_loop_within_the_bound(bench: Bench) -> None:
    bench.declare(TOPIC)
    running, most, loops = 0, 0, set()
    done: list[int] = []

    async def handle(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.02)
        running -= 1
        done.append(message.body)

    bench.send(TOPIC, range(60))
    consumer = Consumer(bench.url, concurrency=10)
    consumer.on(TOPIC, handle)
    began = time.monotonic()
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 60)
    assert sorted(done) == list(range(60))
    assert most == 10
    assert len(loops) == 1
    assert time.monotonic() - began < 60 * 0.02  # one after the other it would take longer


def test_threads_run_as_many_at_a_time_as_asked_for(bench: Bench) -> None:
    bench.declare(TOPIC)
    together = threading.Barrier(4)

    def handle(message: Message) -> None:
        together.wait(10)

    bench.send(TOPIC, range(8))
    consumer = Consumer(bench.url, concurrency=4)
    consumer.on(TOPIC, handle)
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 8)
    assert bench.stat(TOPIC, "retried") == 0


def test_sync_and_async_receivers_of_one_message_both_run(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[str] = []

    async def asynchronous(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append("async")

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, asynchronous)
    consumer.on(TOPIC, lambda message: seen.append("sync"))
    bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
    assert sorted(seen) == ["async", "sync"]


# What handlers say


def test_a_failed_message_is_tried_again_and_signals_tell_each_step(bench: Bench) -> None:
    bench.declare(TOPIC, retry_delays="0,0")
    told: list[tuple[str, int, str | None]] = []
    consumer = Consumer(bench.url)

    def hear(name: str) -> Callable[..., None]:
        def receive(topic: str, *, message: Message) -> None:
            told.append((name, message.attempt, message.reason))

        return receive

    signals = {
        "received": consumer.message_received,
        "retrying": consumer.message_retrying,
        "acked": consumer.message_acked,
    }
    for name, signal in signals.items():
        signal.connect(hear(name), sender=TOPIC, weak=False)

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError(f"attempt {message.attempt}")

    bench.send(TOPIC, ["x"])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: ("acked", 3, None) in told)
    assert told == [
        ("received", 1, None),
        ("retrying", 1, "ValueError: attempt 1"),
        ("received", 2, None),
        ("retrying", 2, "ValueError: attempt 2"),
        ("received", 3, None),
        ("acked", 3, None),
    ]


@pytest.mark.parametrize(
    ("says", "place", "reason"),
    [
        (Discard("no such order"), "garbage", "no such order"),
        (Retry("later", delay=timedelta(hours=1)), "retry", "later"),
        (ValueError("boom"), "retry", "ValueError: boom"),
        (None, "retry", "the handler returned False"),
    ],
)
def test_what_a_handler_says_decides(
    bench: Bench, says: Exception | None, place: str, reason: str
) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)

    def handle(message: Message) -> bool:
        if says is not None:
            raise says
        return False

    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.places(TOPIC, sent) == [place])
    found = bench.inspect(TOPIC, sent).places[0]
    assert found.reason == reason
    if isinstance(says, Retry):
        now_ms = bench.store.drive(bench.store.server_time_us()) // 1000
        assert found.due_ms is not None
        assert 3_590_000 < found.due_ms - now_ms <= 3_600_000


def test_attempts_used_up_end_in_garbage_and_tell_so(bench: Bench) -> None:
    bench.declare(TOPIC, retry_delays="0")
    dead: list[Message] = []
    consumer = Consumer(bench.url)

    def hear(topic: str, *, message: Message) -> None:
        dead.append(message)

    consumer.message_dead.connect(hear)
    consumer.on(TOPIC, lambda message: 1 / 0)
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: dead)
    assert bench.places(TOPIC, sent) == ["garbage"]
    assert dead[0].reason == "ZeroDivisionError: division by zero"
    assert dead[0].attempt == 2


def test_all_receivers_run_and_one_failure_retries(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[str] = []
    consumer = Consumer(bench.url)

    def module_wide(topic: str, *, message: Message) -> None:
        seen.append("module-wide")

    def fails(message: Message) -> None:
        seen.append("fails")
        raise ValueError("boom")

    everywhere.received.connect(module_wide, sender=TOPIC)
    consumer.on(TOPIC, fails)
    consumer.on(TOPIC, lambda message: seen.append("own"))
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.places(TOPIC, sent) == ["retry"])
    assert sorted(seen) == ["fails", "module-wide", "own"]


def test_what_is_past_its_ttl_is_not_handed_out(bench: Bench) -> None:
    bench.declare(TOPIC)
    expired: list[str] = []
    seen: list[str] = []
    consumer = Consumer(bench.url)

    def hear(topic: str, *, message: Message) -> None:
        expired.append(message.id)

    consumer.message_expired.connect(hear)
    consumer.on(TOPIC, lambda message: seen.append(message.id))
    [sent] = bench.send(TOPIC, [1], ttl_ms=1)
    assert bench.places(TOPIC, sent) == ["ready"]
    time.sleep(0.02)
    with consumer:
        wait_until(lambda: expired)
    assert (expired, seen) == ([sent], [])
    assert bench.settled_as(TOPIC, sent) == "expired"


# Bodies


class Order(msgspec.Struct):
    order: int


def test_typed_bodies_and_those_that_do_not_fit(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[Order] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body), model=Order)
    good, bad = bench.send(TOPIC, [{"order": 1}, {"order": "one"}])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.places(TOPIC, bad) == ["garbage"] and seen)
        wait_until(lambda: bench.settled_as(TOPIC, good) == "acked")
    assert seen == [Order(1)]
    reason = bench.inspect(TOPIC, bad).places[0].reason
    assert reason is not None
    assert reason.startswith("the body is no Order: ")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b"9whatever", "unknown envelope version"),
        (b"1tokentok-j0000{nonsense", "the body cannot be decoded"),
        (b"1to", "cut short"),
    ],
)
def test_a_foreign_body_goes_to_garbage_with_the_reason(
    bench: Bench, written: bytes, reason: str
) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)
    seen: list[str] = []
    dead: list[Message] = []

    def hear(topic: str, *, message: Message) -> None:
        dead.append(message)

    consumer.message_dead.connect(hear)
    consumer.on(TOPIC, lambda message: seen.append(message.id))
    foreign, good = bench.send(TOPIC, [1, 2])
    bench.ask("SET", bench.store.keys.topic(TOPIC).body(foreign), written)
    with consumer:
        wait_until(lambda: dead and bench.settled_as(TOPIC, good) == "acked")
    assert seen == [good]
    assert bench.places(TOPIC, foreign) == ["garbage"]
    assert reason in (bench.inspect(TOPIC, foreign).places[0].reason or "")


def test_entries_without_a_body_are_cleared_and_counted(bench: Bench) -> None:
    bench.declare(TOPIC)
    keys = bench.store.keys.topic(TOPIC)
    gone, good = bench.send(TOPIC, [1, 2])
    bench.ask("DEL", keys.body(gone))
    bench.ask("XADD", keys.group("lisa").ready, "*", "foreign", "entry")
    consumer = Consumer(bench.url)
    seen: list[str] = []
    consumer.on(TOPIC, lambda message: seen.append(message.id))
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "cleared") == 2 and seen == [good])
    assert bench.ask("XLEN", keys.group("lisa").ready) == 0


# Batches


@pytest.mark.parametrize("concurrency", [1, 2])
def test_messages_due_together_come_in_one_call(bench: Bench, concurrency: int) -> None:
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
        wait_until(lambda: bench.places(TOPIC, odd) == ["garbage"])
        wait_until(lambda: bench.places(TOPIC, second) == ["garbage"])
        wait_until(lambda: bench.settled_as(TOPIC, third) == "acked")
    assert bench.settled_as(TOPIC, first) == "acked"
    assert bench.inspect(TOPIC, second).places[0].reason == "this one"


# Leases, slots, reading ahead


def test_a_handler_slower_than_the_ack_timeout_runs_once(bench: Bench) -> None:
    bench.declare(TOPIC, ack_timeout="200ms", retry_delays="0")
    runs: list[int] = []

    def handle(message: Message) -> None:
        runs.append(message.attempt)
        time.sleep(1)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.settled_as(TOPIC, sent) == "acked")
    assert runs == [1]
    assert bench.stat(TOPIC, "reclaimed") == 0
    assert bench.stat(TOPIC, "acked_late") == 0


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


def test_what_cannot_start_is_given_back(bench: Bench) -> None:
    """A handler that was fast had messages read ahead for it when it became slow."""
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
        wait_until(lambda: bench.stat(TOPIC, "released") > 0)
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
    """A flood on one topic holds up the other's few messages by a few turns at most."""
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
    last = max(place for place, topic in enumerate(order) if topic == "trickle")
    assert last < 30


def test_one_topics_hanging_handler_does_not_keep_the_others_messages(bench: Bench) -> None:
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
        wait_until(lambda: bench.places("hangs", "x") == [] and go_on is not None)
        bench.send("works", range(20))
        with other:
            wait_until(lambda: len(seen) == 20)
        go_on.set()
    assert mine == []


def test_poll_batch_size_caps_what_is_held_unstarted(bench: Bench) -> None:
    bench.declare(TOPIC)
    most = 0
    consumer = Consumer(bench.url, poll_batch_size=5)
    ready = bench.store.keys.topic(TOPIC).group("lisa").ready

    def handle(message: Message) -> None:
        nonlocal most
        if message.body % 50 == 0:
            most = max(most, bench.ask("XPENDING", ready, "lisa")[0])

    bench.send(TOPIC, range(500))
    consumer.on(TOPIC, handle)
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "acked") == 500)
    # Five being worked through, and as many whose ack may be on its way for 5 ms.
    assert 1 <= most < 250


# Groups


def test_a_consumer_waits_for_a_group_and_asks_for_one(bench: Bench) -> None:
    [sent] = bench.send(TOPIC, [1])
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
    pubsub = bench.store.connection.subscribe(bench.store.keys.wake)
    with consumer:
        wait_until(lambda: [(p.group, p.state) for p in presences(bench)] == [("", "waiting")])
        assert pubsub.get(5) == TOPIC.encode()
        bench.declare(TOPIC, "billing")
        with bench.manager(TOPIC):
            wait_until(lambda: bench.settled_as(TOPIC, sent) == "acked")
    pubsub.close()
    assert bench.stat(TOPIC, "acked", "billing") == 1


def test_a_named_group_is_declared(bench: Bench) -> None:
    consumer = Consumer(bench.url, group="billing")
    consumer.on(TOPIC, ignore)
    with consumer:
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("billing",))


def test_several_groups_without_a_choice_are_refused_by_name(bench: Bench) -> None:
    bench.declare(TOPIC, "a")
    bench.declare(TOPIC, "b")
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
    with pytest.raises(ConfigError, match=r"several groups \(a, b\)"):
        consumer.start()
    assert not [one for one in threading.enumerate() if one.name.startswith("lisa-")]


def test_a_removed_group_is_no_longer_read_and_the_other_topics_are(bench: Bench) -> None:
    bench.declare(TOPIC)
    bench.declare("invoices")
    consumer = Consumer(bench.url, poll_timeout=timedelta(seconds=0.2))
    seen: list[str] = []
    consumer.on(TOPIC, ignore)
    consumer.on("invoices", lambda message: seen.append(message.id))
    with consumer:
        wait_until(lambda: presences(bench) and presences(bench)[0].state == "running")
        bench.store.call(Undeclare(TOPIC, "lisa", [], last=True))
        wait_until(lambda: not any(t.name == f"lisa-{TOPIC}" for t in threading.enumerate()))
        bench.send("invoices", [1])
        wait_until(lambda: seen)
    assert bench.store.drive(bench.store.groups(TOPIC)) == ()


@pytest.mark.parametrize("group", [None, "lisa"])
def test_an_emptied_server_is_joined_again(bench: Bench, group: str | None) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url, group=group, poll_timeout=timedelta(seconds=0.2))
    seen: list[int] = []
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(presences_running(bench))
        flush(bench.url)
        if group is None:
            wait_until(lambda: presences(bench) and presences(bench)[0].state == "waiting")
            bench.declare(TOPIC)
        else:
            wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("lisa",))
        bench.send(TOPIC, [7])
        wait_until(lambda: seen == [7])


def presences_running(bench: Bench) -> Callable[[], bool]:
    return lambda: [one.state for one in presences(bench)] == ["running"]


def test_a_stream_that_a_foreign_hand_deleted_is_made_again(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url, poll_timeout=timedelta(seconds=0.2))
    seen: list[int] = []
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(presences_running(bench))
        bench.ask("DEL", bench.store.keys.topic(TOPIC).group("lisa").ready)
        time.sleep(0.1)
        bench.send(TOPIC, [7])
        wait_until(lambda: seen == [7])


def test_several_groups_each_get_every_message(bench: Bench) -> None:
    for group in ("a", "b"):
        bench.declare(TOPIC, group)
    seen: dict[str, list[int]] = {"a": [], "b": []}
    consumers = [Consumer(bench.url, group=group) for group in "ab"]
    for consumer in consumers:
        consumer.on(TOPIC, lambda message: seen[message.group].append(message.body))
    [first, *_] = bench.send(TOPIC, range(20))
    with consumers[0], consumers[1]:
        wait_until(lambda: bench.stat(TOPIC, "acked", "a") == bench.stat(TOPIC, "acked", "b") == 20)
    assert sorted(seen["a"]) == sorted(seen["b"]) == list(range(20))
    assert bench.settled_as(TOPIC, first) == "acked"


# Live changes


def test_topics_come_and_go_while_it_runs(bench: Bench) -> None:
    for topic in ("first", "second"):
        bench.declare(topic)
    seen: list[str] = []
    consumer = Consumer(bench.url)
    consumer.on("first", lambda message: seen.append(message.topic))
    with consumer:
        consumer.subscribe("second", lambda message: seen.append(message.topic))
        bench.send("second", [1])
        wait_until(lambda: seen == ["second"])
        consumer.unsubscribe("second")
        wait_until(lambda: presences(bench, "second") == [])
        [left] = bench.send("second", [2])
        bench.send("first", [3])
        wait_until(lambda: seen == ["second", "first"])
        assert consumer.topics() == ["first"]
        assert bench.places("second", left) == ["ready"]


def test_pause_and_resume_here_only(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[int] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(presences_running(bench))
        consumer.pause(TOPIC)
        time.sleep(0.1)
        [sent] = bench.send(TOPIC, [1])
        time.sleep(0.3)
        assert bench.places(TOPIC, sent) == ["ready"]
        consumer.resume()
        wait_until(lambda: seen == [1])


def test_a_paused_topic_is_left_alone_until_it_is_resumed(bench: Bench) -> None:
    bench.declare(TOPIC)
    bench.send(TOPIC, range(3))
    bench.configure(TOPIC, paused=True)
    seen: list[int] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        time.sleep(0.5)
        assert seen == []
        ready = bench.store.keys.topic(TOPIC).group("lisa").ready
        assert bench.ask("XLEN", ready) == 3
        assert bench.ask("XPENDING", ready, "lisa")[0] == 0
        bench.configure(TOPIC, paused=False)
        wait_until(lambda: sorted(seen) == [0, 1, 2])


def test_a_topic_that_only_fails_is_degraded_and_heals(bench: Bench) -> None:
    bench.declare(TOPIC, retry_delays=["0"] * 100)
    works = threading.Event()
    times: list[float] = []

    def handle(message: Message) -> None:
        times.append(time.monotonic())
        if not works.is_set():
            raise ValueError("the database is down")

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, range(4))
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: state_of(consumer) == "degraded")
        wait_until(lambda: len(times) >= 23)
        assert times[22] - times[21] > times[21] - times[20] > 0.2
        works.set()
        wait_until(lambda: bench.stat(TOPIC, "acked") == 4)
        assert state_of(consumer) == "running"


def state_of(consumer: Consumer) -> str:
    return str(consumer.health()["topics"].get(f"{TOPIC}/lisa", {}).get("state"))


# Start and stop


def test_nobody_to_hear_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="nothing to consume"):
        Consumer(bench.url).start()
    configured = Consumer.from_config(None, redis=bench.url, groups=[{"topic": TOPIC}])
    with pytest.raises(ConfigError, match="nobody would receive the messages of topic 'orders'"):
        configured.start()


def test_a_receiver_that_disappears_is_never_an_ack(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)

    def receiver(topic: str, *, message: Message) -> None:
        """Held weakly by the signal."""

    consumer.message_received.connect(receiver, sender=TOPIC)
    with consumer:
        del receiver
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.places(TOPIC, sent) == ["retry"])
    assert bench.stat(TOPIC, "acked") == 0


def test_stop_finishes_what_runs_and_gives_back_the_rest(bench: Bench) -> None:
    bench.declare(TOPIC)
    running = threading.Event()
    done: list[int] = []

    def handle(message: Message) -> None:
        if message.body == 60:
            running.set()
            time.sleep(0.5)
        done.append(message.body)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, range(100))
    consumer.start()
    assert running.wait(10)
    consumer.stop()
    assert done == list(range(61))
    assert bench.stat(TOPIC, "acked") == 61
    keys = bench.store.keys.topic(TOPIC).group("lisa")
    assert bench.ask("XPENDING", keys.ready, "lisa")[0] == 0
    assert bench.ask("XLEN", keys.ready) == 39
    assert presences(bench) == []
    assert bench.ask("XINFO", "CONSUMERS", keys.ready, "lisa") == []
    assert not [one for one in threading.enumerate() if one.name.startswith("lisa-")]


def test_after_the_grace_time_async_handlers_are_cancelled_and_given_back(bench: Bench) -> None:
    bench.declare(TOPIC)
    started = threading.Event()

    async def handle(message: Message) -> None:
        started.set()
        await asyncio.sleep(60)

    consumer = Consumer(bench.url, grace=timedelta(seconds=0.2))
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    consumer.start()
    assert started.wait(10)
    began = time.monotonic()
    consumer.stop()
    assert time.monotonic() - began < 0.2 + 3
    assert bench.places(TOPIC, sent) == ["ready"]
    assert bench.inspect(TOPIC, sent).places[0].failed_attempts == 0


def test_a_blocked_read_ends_at_once(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url, poll_timeout=timedelta(seconds=60))
    consumer.on(TOPIC, ignore)
    consumer.start()
    wait_until(presences_running(bench))
    began = time.monotonic()
    consumer.stop()
    assert time.monotonic() - began < 2


def test_a_handler_may_stop_its_consumer(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: consumer.stop())
    bench.send(TOPIC, [1])
    consumer.run()
    assert bench.stat(TOPIC, "acked") == 1
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lisa-")])


def test_it_can_be_started_again(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[Any] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    for times in (1, 2):
        with consumer:
            bench.send(TOPIC, [times])
            wait_until(lambda: bench.stat(TOPIC, "acked") == len(seen) > 0)
        assert len(seen) == times
    assert seen == [1, 2]


def test_from_config_takes_topics_groups_and_names(bench: Bench, tmp_path: Any) -> None:
    path = tmp_path / "consumer.yml"
    path.write_text(
        f"lisa-delay-queue:\n  redis: {{url: '{bench.url}'}}\n  groups:\n"
        "    - {topic: orders, group: g1, consumer: worker}\n"
        "    - {topic: orders, group: g2, consumer: worker}\n"
    )
    consumer = Consumer.from_config(path)
    seen: list[tuple[str, int]] = []
    consumer.on(TOPIC, lambda message: seen.append((message.group, message.body)))
    with consumer:
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("g1", "g2"))
        wait_until(lambda: len(presences(bench)) == 2)
        assert all(one.name.startswith("worker-") for one in presences(bench))
        bench.send(TOPIC, [5])
        wait_until(lambda: sorted(seen) == [("g1", 5), ("g2", 5)])
