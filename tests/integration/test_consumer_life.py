"""Groups, live changes, start and stop, on a real server."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from blinker import Signal

import lisa
from lisa.consumer import AsyncConsumer, Batch, Consumer
from lisa.consumer.consumer import BaseConsumer
from lisa.consumer.read_topic import ReadTopic
from lisa.consumer.reader import Reader
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic
from lisa.core.store import group_removal
from lisa.core.transitions.groups import Undeclare
from tests.consumers import Bench, Blocking, ignore, presences, presences_running, settled, state_of
from tests.servers import flush, wait_until
from tests.shards import Split

TOPIC = Topic("orders")


# Groups


def test_a_consumer_waits_for_a_group_and_asks_for_one(bench: Bench) -> None:
    [sent] = bench.send(TOPIC, [1])
    consumer = bench.consumer(ignore)
    pubsub = bench.store.connection.subscribe(bench.store.keys.wake)
    with consumer:
        wait_until(lambda: [(p.group, p.state) for p in presences(bench)] == [("", "waiting")])
        assert pubsub.get(5) == TOPIC.encode()
        bench.declare(TOPIC, "billing")
        with bench.manager(TOPIC):
            wait_until(lambda: bench.settled_as(TOPIC, sent) == "acked")
    pubsub.close()
    assert bench.stat(TOPIC, "acked", "billing") == 1


def test_l11_a_consumer_before_the_manager_gets_every_message(bench: Bench) -> None:
    """It does not spin meanwhile, and does not need an existing stream."""
    bench.send(TOPIC, [1, 2, 3])
    consumer, seen = bench.recorder(group="lisa")

    def commands() -> int:
        stats = bench.ask("INFO", "stats").decode()
        return int(stats.partition("total_commands_processed:")[2].split()[0])

    with consumer:
        wait_until(presences_running(bench))
        before = commands()
        time.sleep(1)
        assert commands() - before < 30
        with bench.manager(TOPIC):
            wait_until(lambda: len(seen) == 3)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(("group", "count"), [(None, 1), ("lisa", 2)])
def test_a_group_that_is_declared_again_is_read_again(
    bench: Bench, group: str | None, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    split = Split(bench.url)
    if count > 1:
        split.into(count)
    shards = split.layout.active(TOPIC)
    bench.declare_all(*shards)
    handler, last = Blocking("held"), shards[-1]
    consumer = bench.consumer(handler, group=group, poll_timeout=timedelta(seconds=0.2))
    with caplog.at_level("ERROR", "lisa.consumer"), consumer:
        wait_until(lambda: consumer.health()["status"] == "ok")
        [held] = bench.send(last, ["held"])
        wait_until(lambda: handler.begun == ["held"])
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        handler.go_on.set()
        wait_until(lambda: state_of(consumer) == "removed")
        wait_until(lambda: caplog.text.count("was removed; waiting") == len(shards))
        assert consumer.health()["status"] == "waiting"
        bench.declare_all(*shards)
        wait_until(lambda: consumer.health()["status"] == "ok")
        sent = [one for shard in shards for one in bench.send(shard, ["new"])]
        for shard, one in zip(shards, sent, strict=True):
            wait_until(settled(bench, one, shard))
    assert handler.begun == ["held", *["new"] * len(shards)]
    assert bench.settled_as(last, held) == "purged"
    assert caplog.text.count("was removed; waiting") == len(shards)


def test_a_group_that_is_being_removed_is_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.declare(TOPIC)
    [old] = bench.send(TOPIC, ["old"])
    bench.store.call(Undeclare(TOPIC, "lisa"))
    consumer, seen = bench.recorder(group="lisa", poll_timeout=timedelta(seconds=0.2))
    with consumer:
        wait_until(lambda: "the removal is still settling its messages" in caplog.text)
        assert bench.store.drive(bench.store.groups(TOPIC)) == ()
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("lisa",))
        bench.send(TOPIC, ["new"])
        wait_until(lambda: seen)
    assert seen == ["new"]
    assert bench.settled_as(TOPIC, old) == "purged"


@pytest.mark.parametrize("group", [None, "lisa"])
def test_a_deleted_stream_is_made_and_an_emptied_server_joined_again(
    bench: Bench, group: str | None
) -> None:
    bench.declare(TOPIC)
    consumer, seen = bench.recorder(group=group, poll_timeout=timedelta(seconds=0.2))
    with consumer:
        wait_until(presences_running(bench))
        bench.ask("DEL", bench.ready(TOPIC))
        time.sleep(0.1)
        bench.send(TOPIC, [6])
        wait_until(lambda: seen == [6])
        flush(bench.url)
        if group is None:
            wait_until(lambda: presences(bench) and presences(bench)[0].state == "waiting")
            bench.declare(TOPIC)
        else:
            wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("lisa",))
        bench.send(TOPIC, [7])
        wait_until(lambda: seen == [6, 7])


# Live changes


def test_a_topic_that_cannot_be_read_ends_run_but_not_a_consumer_that_was_started(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for topic, group in [(TOPIC, "lisa"), ("second", "a"), ("second", "b")]:
        bench.declare(topic, group)
    consumer = bench.consumer(ignore)
    with consumer:
        consumer.subscribe("second", ignore)
        wait_until(lambda: "cannot read: topic 'second' has several groups (a, b)" in caplog.text)
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.settled_as(TOPIC, sent) == "acked")
    consumer.unsubscribe("second")
    assert "the consumer stops" not in caplog.text
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(consumer.run)
        wait_until(presences_running(bench))
        consumer.subscribe("second", ignore)
        with pytest.raises(ConfigError, match="several groups"):
            run.result(60)
    assert "the consumer stops: topic 'second' has several groups (a, b)" in caplog.text


def test_what_a_read_brings_after_a_pause_is_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request to end the read may arrive just before the read, and end nothing."""
    bench.declare(TOPIC)
    seen: list[int] = []
    consumer = bench.consumer(lambda message: seen.append(message.attempt))
    with consumer:
        wait_until(lambda: b"blocked_clients:1\r" in bench.ask("INFO", "clients"))
        monkeypatch.setattr(Reader, "interrupt", lambda _: True)
        consumer.pause(TOPIC)
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.stat(TOPIC, "released") == 1)
        assert bench.states(TOPIC, sent) == ["ready"]
        assert bench.pending(TOPIC) == 0
        assert seen == []
        monkeypatch.undo()
        consumer.resume()
        wait_until(lambda: seen == [1])


# Start and stop


def test_receivers_may_come_and_go_during_a_blocking_read(bench: Bench) -> None:
    """A receiver that disappears is never an ack."""
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)
    seen: list[int] = []

    def receiver(topic: str, *, message: Message) -> None:
        """A receiver; the signal holds it weakly."""

    consumer.message_received.connect(receiver, sender=TOPIC)
    with consumer:
        wait_until(bench.is_reading)  # the blocked read must not hold it either
        del receiver
        [unheard] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.states(TOPIC, unheard) == ["retry"])
        wait_until(bench.is_reading)
        consumer.on(TOPIC, lambda message: seen.append(message.body))
        [sent] = bench.send(TOPIC, [2])
        wait_until(settled(bench, sent))
    assert seen == [2]


def test_stop_finishes_running_calls_and_releases_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.declare(TOPIC)
    running = threading.Event()
    done: list[int] = []
    leave = Reader._leave

    def leave_slowly(reader: Reader, reading: ReadTopic) -> None:  # as on a busy machine
        time.sleep(0.5)
        leave(reader, reading)

    monkeypatch.setattr(Reader, "_leave", leave_slowly)

    def handle(message: Message) -> None:
        if message.body == 60:
            running.set()
            time.sleep(0.5)
        done.append(message.body)

    consumer = bench.consumer(handle, grace=timedelta.max)
    bench.send(TOPIC, range(100))
    consumer.start()
    assert running.wait(60)
    consumer.stop()
    assert done == list(range(61))
    assert bench.stat(TOPIC, "acked") == 61
    assert bench.pending(TOPIC) == 0
    assert bench.ask("XLEN", bench.ready(TOPIC)) == 39
    assert presences(bench) == []
    assert bench.ask("XINFO", "CONSUMERS", bench.ready(TOPIC), "lisa") == []
    assert not [one for one in threading.enumerate() if one.name.startswith("lisa-")]


def test_a_stop_between_short_handlers_leaves_nothing_in_hand(bench: Bench) -> None:
    topics = ("one", "two", "three")
    bench.declare_all(*topics)
    chance = random.Random(7)

    def handle(message: Message) -> None:
        time.sleep(chance.random() * 0.004)
        if chance.random() < 0.1:
            raise ValueError(message.id)

    left: list[int] = []
    for _ in range(12):
        for topic in topics:
            bench.send(topic, range(20))
        consumer = Consumer(bench.url, concurrency=4)
        for topic in topics:
            consumer.on(topic, handle)
        with consumer:
            time.sleep(0.03 + chance.random() * 0.05)  # somewhere among the handlers
        left += map(bench.pending, topics)
    assert not any(left)


def test_a_handler_and_a_receiver_may_stop_the_consumer_which_can_be_started_again(
    bench: Bench,
) -> None:
    """A stop also ends a blocking read at once."""
    bench.declare(TOPIC)

    def stop(_: str, *, message: Message) -> None:
        consumer.stop()

    consumer = bench.consumer(lambda message: consumer.stop(), poll_timeout=timedelta.max)
    for count in (1, 2):
        bench.send(TOPIC, [1])
        consumer.run()
        assert bench.stat(TOPIC, "acked") == count
    consumer.unsubscribe(TOPIC)
    consumer.subscribe(TOPIC, ignore)
    consumer.message_acked.connect(stop)
    bench.send(TOPIC, [1])
    consumer.run()
    consumer.start()
    wait_until(bench.is_reading)
    consumer.stop()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lisa-")])
    assert presences(bench) == []


# Handlers that are added late

Add = Callable[[BaseConsumer, str, list[Any]], object]


def connect(signal: Signal, topic: str, seen: list[Any]) -> None:
    def receive(topic: str, *, message: Message) -> None:
        seen.append((topic, message.body))

    signal.connect(receiver := receive, sender=topic)
    RECEIVERS.append(receiver)


RECEIVERS: list[Any] = []
"""Weakly connected, so that they disappear after each test."""


@pytest.fixture
def receivers() -> Iterator[None]:
    yield
    RECEIVERS.clear()


def record(topic: str, seen: list[Any]) -> Callable[[Any], None]:
    def handle(found: Any) -> None:
        every = found if isinstance(found, Batch) else [found]
        seen.extend((topic, message.body) for message in every)

    return handle


ADDED: dict[str, Add] = {
    "on": lambda consumer, topic, seen: consumer.on(topic, record(topic, seen)),
    "batch": lambda consumer, topic, seen: consumer.on(topic, record(topic, seen), batch=2),
    "group": lambda consumer, topic, seen: consumer.on(topic, record(topic, seen), group="lisa"),
    "own signal": lambda consumer, topic, seen: connect(consumer.message_received, topic, seen),
    "module's signal": lambda _, topic, seen: connect(lisa.message_received, topic, seen),
}


@pytest.mark.usefixtures("receivers")
@pytest.mark.parametrize("kind", ADDED)
def test_a_handler_that_is_added_in_a_block_or_to_a_running_consumer_gets_messages(
    bench: Bench, kind: str
) -> None:
    bench.declare_all("orders", "mails")
    seen: list[Any] = []
    for topic in ("orders", "mails"):
        bench.send(topic, [1])
    with Consumer(bench.url) as consumer:
        ADDED[kind](consumer, "orders", seen)
        bench.wait_acked(1, "orders")
        ADDED[kind](consumer, "mails", seen)
        bench.wait_acked(1, "mails")
    assert sorted(seen) == [("mails", 1), ("orders", 1)]
    seen.clear()

    async def run() -> None:
        async with AsyncConsumer(bench.url) as consumer:
            for topic in ("orders", "mails"):
                ADDED[kind](consumer, topic, seen)
                bench.send(topic, [2])
                await asyncio.to_thread(bench.wait_acked, 2, topic)

    RECEIVERS.clear()
    asyncio.run(run())
    assert sorted(seen) == [("mails", 2), ("orders", 2)]


def test_a_block_starts_once_and_a_stopped_consumer_stays_so(bench: Bench) -> None:
    """`start` and `run` may follow the start by the first handler."""
    bench.declare_all("orders", "mails")
    with Consumer(bench.url) as consumer:
        consumer.on("orders", lambda _: consumer.stop())
        consumer.start()
        with pytest.raises(ConfigError, match="already running"):
            consumer.start()
        bench.send("orders", [1])
        wait_until(lambda: consumer.health()["status"] == "stopped")
        consumer.on("mails", ignore)
        assert consumer.health()["status"] == "stopped"


# Groups of handlers


def test_l21_a_topic_listed_twice_is_refused_in_one_line_or_joins_both_groups(
    bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "consumer.yml"
    path.write_text(
        f"lisa-delay-queue:\n  redis: {{url: '{bench.url}'}}\n  groups:\n"
        "    - {topic: orders, group: g, consumer: worker}\n"
        "    - {topic: orders, group: g, consumer: worker}\n"
    )
    with pytest.raises(ConfigError, match="orders") as refused:
        Consumer.from_config(path)
    assert "\n" not in str(refused.value)
    path.write_text(path.read_text().replace("group: g,", "group: h,", 1))
    seen: list[tuple[str, int]] = []
    consumer = Consumer.from_config(path)
    consumer.on(TOPIC, lambda message: seen.append((message.group, message.body)))
    with consumer:
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("g", "h"))
        wait_until(lambda: len(presences(bench)) == 2)
        assert all(one.name.startswith("worker-") for one in presences(bench))
        [sent] = bench.send(TOPIC, [5])
        wait_until(settled(bench, sent))
    assert sorted(seen) == [("g", 5), ("h", 5)]


@pytest.mark.parametrize(("concurrency", "batch"), [(1, None), (4, 1)])
def test_handlers_of_several_groups_share_a_topic(
    bench: Bench, concurrency: int, batch: int | None
) -> None:
    """Groups of handlers are declared, and subscribed while the consumer runs."""
    bench.declare(TOPIC, retry_delays="1h")
    seen: list[tuple[str, str]] = []

    def handler(name: str) -> Callable[[Any], None]:
        def handle(given: Any) -> None:
            message = given[0] if batch else given
            seen.append((name, message.group))
            if name == "stock":
                raise ValueError("out of stock")

        return handle

    consumer = Consumer(bench.url, group="lisa", concurrency=concurrency)
    consumer.on(TOPIC, handler("own"), batch=batch)
    consumer.on(TOPIC, handler("mail"), batch=batch, group="mail", concurrency=2, retry="2h")
    with consumer, bench.manager(TOPIC):
        consumer.subscribe(TOPIC, handler("stock"), batch=batch, group="stock", retry="0s")
        groups = {"lisa", "mail", "stock"}
        wait_until(lambda: {one.group for one in presences(bench)} == groups)
        bench.send(TOPIC, [1])
        wait_until(lambda: len(seen) == 4)
        wait_until(lambda: bench.stat(TOPIC, "garbage", "stock") == 1)
        bench.wait_acked(1, group="mail")
        bench.wait_acked(1, group="lisa")
        consumer.unsubscribe(TOPIC)
        wait_until(lambda: presences(bench) == [])
    assert sorted(seen) == [("mail", "mail"), ("own", "lisa"), *[("stock", "stock")] * 2]


def test_a_group_with_and_without_a_name_is_refused(bench: Bench) -> None:
    consumer = Consumer(bench.url, group="mail")
    consumer.on(TOPIC, print, group="mail")
    assert consumer.topics() == [TOPIC]
    consumer.on(TOPIC, print)
    with pytest.raises(ConfigError, match="give group= to both or to neither"):
        consumer.start()
    with pytest.raises(InvalidMessage, match="group 'no spaces' is not allowed"):
        consumer.on(TOPIC, print, group="no spaces")


def test_a_group_declared_beside_others_may_be_a_typing_error(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("mistyped", "known"):
        bench.declare(topic, "lisa")
    consumer = Consumer(bench.url, group="lisa")
    consumer.on("mistyped", ignore, group="lsia")
    for topic in ("known", "new"):
        consumer.on(topic, ignore)
    with caplog.at_level("INFO", "lisa"), consumer:
        wait_until(lambda: consumer.health()["status"] == "ok")
    said = [one for one in caplog.records if "declared group" in one.message]
    levels = {one.levelname: one.message for one in said}
    assert len(said) == 2
    assert "beside lisa" in levels["WARNING"]
    assert "lsia" in levels["WARNING"]
    assert "beside" not in levels["INFO"]
