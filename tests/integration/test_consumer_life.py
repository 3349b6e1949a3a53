"""Groups, live changes, start and stop, on a real server."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.consumer import Consumer
from lisa.consumer.stream_reader import StreamReader
from lisa.core.delivery.degradation import FIRST_S
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic
from lisa.core.store import group_removal
from lisa.core.transitions.undeclare import Undeclare
from tests.consumers import Bench, ignore, presences, presences_running, settled, state_of
from tests.servers import flush, wait_until
from tests.shards import Split

if TYPE_CHECKING:
    from collections.abc import Callable

TOPIC = Topic("orders")


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


def test_a_removed_group_is_waited_for_and_the_other_topics_are_read(bench: Bench) -> None:
    bench.declare(TOPIC)
    bench.declare("invoices")
    consumer = Consumer(bench.url, poll_timeout=timedelta(seconds=0.2))
    seen: list[str] = []
    consumer.on(TOPIC, ignore)
    consumer.on("invoices", lambda message: seen.append(message.id))
    with consumer:
        wait_until(lambda: presences(bench) and presences(bench)[0].state == "running")
        bench.store.call(Undeclare(TOPIC, "lisa", drop=True))
        wait_until(lambda: state_of(consumer) == "removed")
        assert consumer.health()["status"] == "waiting"
        bench.send("invoices", [1])
        wait_until(lambda: seen)
    assert bench.store.drive(bench.store.groups(TOPIC)) == ()


@pytest.mark.parametrize("group", [None, "lisa"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_group_that_is_declared_again_is_read_again(
    bench: Bench, group: str | None, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    split = Split(bench.url)
    if count > 1:
        split.into(count)
    shards = split.layout.active(TOPIC)
    for shard in shards:
        bench.declare(shard)
    consumer = Consumer(bench.url, group=group, poll_timeout=timedelta(seconds=0.2))
    seen: list[object] = []
    goes_on = threading.Event()

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        seen.append(message.body)
        if message.body == "held":
            goes_on.wait(30)

    last = shards[-1]
    with caplog.at_level("ERROR", "lisa.consumer"), consumer:
        wait_until(lambda: consumer.health()["status"] == "ok")
        [held] = bench.send(last, ["held"])
        wait_until(lambda: seen == ["held"])
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        goes_on.set()
        wait_until(lambda: state_of(consumer) == "removed")
        assert consumer._runtime is not None
        readers = consumer._runtime.readers.subscriptions()
        wait_until(lambda: all(one.membership.is_removed for one in readers))
        for shard in shards:
            bench.declare(shard)
        wait_until(lambda: consumer.health()["status"] == "ok")
        sent = [one for shard in shards for one in bench.send(shard, ["new"])]
        for shard, one in zip(shards, sent, strict=True):
            wait_until(settled(bench, one, shard))
    assert seen == ["held", *["new"] * len(shards)]
    assert bench.settled_as(last, held) == "purged"
    assert sum("was removed; waiting" in one.message for one in caplog.records) == len(shards)
    split.store.close()


def test_a_group_that_is_being_removed_is_waited_for(bench: Bench) -> None:
    bench.declare(TOPIC)
    [old] = bench.send(TOPIC, ["old"])
    bench.store.call(Undeclare(TOPIC, "lisa"))
    consumer = Consumer(bench.url, group="lisa", poll_timeout=timedelta(seconds=0.2))
    seen: list[object] = []
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        time.sleep(0.3)
        assert bench.store.drive(bench.store.groups(TOPIC)) == ()
        bench.store.drive(group_removal.remove(bench.store, TOPIC, "lisa"))
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("lisa",))
        bench.send(TOPIC, ["new"])
        wait_until(lambda: seen)
    assert seen == ["new"]
    assert bench.settled_as(TOPIC, old) == "purged"


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


def test_a_stream_that_a_foreign_hand_deleted_is_made_again(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url, poll_timeout=timedelta(seconds=0.2))
    seen: list[int] = []
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(presences_running(bench))
        bench.ask("DEL", bench.ready(TOPIC))
        time.sleep(0.1)
        bench.send(TOPIC, [7])
        wait_until(lambda: seen == [7])


# Live changes


def test_topics_are_added_and_removed_at_run_time(bench: Bench) -> None:
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
        assert bench.states("second", left) == ["ready"]


def test_a_topic_that_cannot_be_read_ends_run_but_not_a_consumer_that_was_started(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for topic, group in [(TOPIC, "lisa"), ("second", "a"), ("second", "b")]:
        bench.declare(topic, group)
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
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
            run.result(20)
    assert "the consumer stops: topic 'second' has several groups (a, b)" in caplog.text


def test_pause_and_resume_here_only(bench: Bench) -> None:
    bench.declare(TOPIC)
    seen: list[int] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(presences_running(bench))
        consumer.pause(TOPIC)
        [sent] = bench.send(TOPIC, [1])
        time.sleep(0.3)
        assert bench.states(TOPIC, sent) == ["ready"]
        consumer.resume()
        wait_until(lambda: seen == [1])


def test_what_a_read_brings_after_a_pause_is_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request to end the read may arrive just before the read, and end nothing."""
    bench.declare(TOPIC)
    seen: list[int] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.attempt))
    with consumer:
        wait_until(lambda: b"blocked_clients:1\r" in bench.ask("INFO", "clients"))
        monkeypatch.setattr(StreamReader, "interrupt", lambda _: True)
        consumer.pause(TOPIC)
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.stat(TOPIC, "released") == 1)
        assert bench.states(TOPIC, sent) == ["ready"]
        assert bench.pending(TOPIC) == 0
        assert seen == []
        monkeypatch.undo()
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
        assert bench.ask("XLEN", bench.ready(TOPIC)) == 3
        assert bench.pending(TOPIC) == 0
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
    bench.send(TOPIC, ["x"])  # of several messages, some may be running when it becomes degraded
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: state_of(consumer) == "degraded")
        wait_until(lambda: len(times) >= 23)
        # Only a lower bound: on a busy machine each takes longer than its pause.
        assert times[21] - times[20] > 0.9 * FIRST_S
        assert times[22] - times[21] > 0.9 * 2 * FIRST_S
        works.set()
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
        assert state_of(consumer) == "running"


# Start and stop


def test_a_consumer_without_handlers_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="nothing to consume"):
        Consumer(bench.url).start()


def test_a_receiver_that_disappears_is_never_an_ack(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)

    def receiver(topic: str, *, message: Message) -> None:
        """A receiver; the signal holds it weakly."""

    consumer.message_received.connect(receiver, sender=TOPIC)
    with consumer:
        wait_until(presences_running(bench))  # the blocked read must not hold it either
        del receiver
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: bench.states(TOPIC, sent) == ["retry"])
    assert bench.stat(TOPIC, "acked") == 0


def test_a_receiver_added_during_a_blocking_read_gets_the_next_message(bench: Bench) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
    seen: list[int] = []
    with consumer:
        wait_until(presences_running(bench))
        consumer.on(TOPIC, lambda message: seen.append(message.body))
        bench.send(TOPIC, [1])
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
    assert seen == [1]


def test_stop_finishes_running_calls_and_releases_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.declare(TOPIC)
    running = threading.Event()
    done: list[int] = []
    close = StreamReader.close

    def close_slowly(stream: StreamReader) -> None:  # as on a busy machine
        time.sleep(0.5)
        close(stream)

    monkeypatch.setattr(StreamReader, "close", close_slowly)

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
    assert bench.pending(TOPIC) == 0
    assert bench.ask("XLEN", bench.ready(TOPIC)) == 39
    assert presences(bench) == []
    assert bench.ask("XINFO", "CONSUMERS", bench.ready(TOPIC), "lisa") == []
    assert not [one for one in threading.enumerate() if one.name.startswith("lisa-")]


def test_a_stop_between_short_handlers_leaves_nothing_in_hand(bench: Bench) -> None:
    topics = ("one", "two", "three")
    for topic in topics:
        bench.declare(topic)
    chance = random.Random(7)

    def handle(message: Message) -> None:
        time.sleep(chance.random() * 0.004)
        if chance.random() < 0.1:
            raise ValueError(message.id)

    left: list[int] = []
    for _ in range(30):
        for topic in topics:
            bench.send(topic, range(20))
        consumer = Consumer(bench.url, concurrency=4)
        for topic in topics:
            consumer.on(topic, handle)
        with consumer:
            time.sleep(0.03 + chance.random() * 0.05)  # somewhere among the handlers
        left += map(bench.pending, topics)
    assert not any(left)


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
    assert time.monotonic() - began < 60 / 2  # half of what the handler would take
    assert bench.states(TOPIC, sent) == ["ready"]
    assert bench.inspect(TOPIC, sent).group_states[0].failed_attempts == 0


@pytest.mark.parametrize("poll_timeout", [timedelta(seconds=60), timedelta.max], ids=str)
def test_a_blocked_read_ends_at_once(bench: Bench, poll_timeout: timedelta) -> None:
    bench.declare(TOPIC)
    consumer = Consumer(bench.url, poll_timeout=poll_timeout)
    consumer.on(TOPIC, ignore)
    consumer.start()
    wait_until(lambda: b"blocked_clients:1\r" in bench.ask("INFO", "clients"))
    consumer.stop()
    assert not [one for one in threading.enumerate() if one.name == f"lisa-{TOPIC}"]


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
    for _ in range(2):
        with consumer:
            [sent] = bench.send(TOPIC, [1])
            wait_until(settled(bench, sent))
    assert seen == [1, 1]


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


# Groups of handlers


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_handlers_of_several_groups_share_a_topic(
    bench: Bench, batch: int | None, concurrency: int
) -> None:
    for group in ("lisa", "mail", "stock"):
        bench.declare(TOPIC, group, retry_delays="1h")
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
    consumer.subscribe(TOPIC, handler("stock"), batch=batch, group="stock", retry="0s")
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: len(seen) == 4)
        wait_until(lambda: bench.stat(TOPIC, "garbage", "stock") == 1)
        wait_until(lambda: bench.stat(TOPIC, "acked", "mail") == 1)
        wait_until(lambda: bench.stat(TOPIC, "acked", "lisa") == 1)
    assert sorted(seen) == [("mail", "mail"), ("own", "lisa"), *[("stock", "stock")] * 2]
    assert sent


def test_a_group_of_a_handler_is_declared_and_subscribed_while_running(bench: Bench) -> None:
    seen: list[str] = []
    consumer = Consumer(bench.url)
    consumer.on("mails", lambda message: seen.append(message.group), group="first")
    with consumer:
        consumer.subscribe("mails", lambda message: seen.append(message.group), group="second")
        wait_until(lambda: {one.group for one in presences(bench, "mails")} == {"first", "second"})
        bench.send("mails", [1])
        wait_until(lambda: sorted(seen) == ["first", "second"])
        consumer.unsubscribe("mails")
        wait_until(lambda: presences(bench, "mails") == [])
    consumer.on("mails", lambda message: seen.append("any"))
    assert [wanted[1] for wanted in consumer._all_wanted()] == [None]


def test_a_group_with_and_without_a_name_is_refused(bench: Bench) -> None:
    consumer = Consumer(bench.url, group="mail")
    consumer.on(TOPIC, print, group="mail")
    assert consumer.topics() == [TOPIC]
    consumer.on(TOPIC, print)
    with pytest.raises(ConfigError, match="give group= to both or to neither"):
        consumer.start()
    with pytest.raises(InvalidMessage, match="group 'no spaces' is not allowed"):
        consumer.on(TOPIC, print, group="no spaces")


@pytest.mark.parametrize(
    ("known", "group", "levels"),
    [(["lisa"], "lsia", ["WARNING"]), (["lisa"], "lisa", []), ([], "lisa", ["INFO"])],
)
def test_a_group_declared_beside_others_may_be_a_typing_error(
    bench: Bench,
    known: list[str],
    group: str,
    levels: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for one in known:
        bench.declare(TOPIC, one)
    consumer = Consumer(bench.url, group=group)
    consumer.on(TOPIC, ignore)
    with caplog.at_level("INFO", "lisa"), consumer:
        wait_until(lambda: state_of(consumer, group=group) == "running")
    said = [one for one in caplog.records if "declared group" in one.message]
    assert [one.levelname for one in said] == levels
    assert all(("beside lisa" in one.message) is bool(known) for one in said)
