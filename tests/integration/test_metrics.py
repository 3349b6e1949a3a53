"""The metrics of manager and consumer, compared with the data in Redis."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from lisa import Batch, Consumer, Discard, Manager, Message, Producer
from lisa.core.metrics import topics as topic_metrics
from lisa.core.metrics.numbers import Numbers
from lisa.core.metrics.page import metrics_page
from lisa.core.store import presence
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.consumers import Bench
from tests.exposition import Exposed
from tests.roles import Cast, Services
from tests.servers import Processes, connect, wait_until

OWN = {"topic": "orders", "group": "g"}
EMPTY = dict.fromkeys(("waiting", "ready", "in_flight", "retry", "garbage"), 0)


@pytest.fixture
def server(redis_url: str) -> str:
    """One kind: what a reading asks of the server is the same on each."""
    return redis_url


def read(cast: Cast) -> Exposed:
    cast.store.drive(cast.store.register([cast.topic]))
    numbers = cast.store.drive(topic_metrics.read(cast.store))
    return Exposed(metrics_page("manager", [numbers]).body.decode())


def states(page: Exposed, **labels: str) -> dict[str, float]:
    wanted = labels.items()
    return {
        known["state"]: value
        for known, value in page.samples("lisa_topic_messages")
        if wanted <= known.items()
    }


def test_every_state_and_counter_of_a_topic(cast: Cast, kit: Services) -> None:
    cast.configure(capacity="50", max_ready="7", ack_timeout="60000")
    started_ms = cast.now_ms()
    for number in range(6):
        cast.send(number)
    cast.send("later", delay_ms=60_000)
    due_ms = cast.now_ms() + 30_000
    cast.send("sooner", delay_ms=30_000)
    first, second, _ = cast.take(3)
    cast.ack(first)
    cast.discard(second)
    page = read(cast)
    held = {"waiting": 2, "ready": 3, "in_flight": 1, "garbage": 1}
    assert states(page, topic="orders") == EMPTY | held
    assert page.value("lisa_topic_messages", topic="orders", group="", state="waiting") == 2
    assert page.value("lisa_topic_backlog_messages", **OWN) == 3
    age_s = page.value("lisa_topic_oldest_ready_seconds", **OWN)
    assert age_s is not None
    assert 0 <= age_s <= (cast.now_ms() - started_ms) / 1000
    next_due_s = page.value("lisa_topic_next_due_timestamp_seconds", topic="orders")
    assert next_due_s is not None
    assert due_ms <= next_due_s * 1000 <= cast.now_ms() + 30_000
    for name, value in (
        *(("capacity_messages", 50), ("max_ready_messages", 7), ("paused", 0), ("sent_total", 8)),
    ):
        assert page.value(f"lisa_topic_{name}", topic="orders") == value
    for name, value in (("acked_total", 1), ("garbage_total", 1), ("retried_total", 0)):
        assert page.value(f"lisa_topic_{name}", **OWN) == value
    assert page.value("lisa_topics") == 1


def test_due_messages_before_promotion_count_as_backlog(cast: Cast, kit: Services) -> None:
    for _ in range(3):
        cast.send_due()
    page = read(cast)
    assert states(page, topic="orders")["waiting"] == 3
    assert page.value("lisa_topic_backlog_messages", **OWN) == 3
    kit.promoter.step(["orders"])
    page = read(cast)
    assert states(page, topic="orders") == EMPTY | {"ready": 3}
    assert page.value("lisa_topic_backlog_messages", **OWN) == 3
    assert page.value("lisa_topic_next_due_timestamp_seconds", topic="orders") is None
    assert kit.promoter.moved.numbers() == {("promoted",): 3}


def test_the_oldest_ready_message_is_the_next_unread(cast: Cast, raw: redis.Redis) -> None:
    ready = cast.keys.group("g").ready
    old_ms = cast.now_ms() - 100_000
    raw.xadd(ready, {"id": "in flight", "due": old_ms - 900_000})
    raw.xreadgroup("g", "c1", {ready: ">"})
    assert read(cast).value("lisa_topic_oldest_ready_seconds", **OWN) == 0
    raw.xadd(ready, {"id": "next", "due": old_ms})
    raw.xadd(ready, {"id": "later", "due": old_ms + 90_000})
    seconds = read(cast).value("lisa_topic_oldest_ready_seconds", **OWN)
    assert seconds is not None
    assert 100 <= seconds < 130


def test_how_far_each_archive_is_behind(cast: Cast, raw: redis.Redis) -> None:
    """By events, and by the age of the first event that it lacks; not by its last report."""
    now_ms = cast.now_ms()
    for number, age_ms in enumerate((900_000, 100_000, 5_000), 1):
        raw.xadd(cast.keys.events, {"n": number, "id": "a"}, id=f"{now_ms - age_ms}-0")
    raw.hset(cast.keys.stats, "journaled", 3)
    records: Mapping[Any, Any] = {
        "slow": f"{now_ms - 900_000}-0 1 {now_ms}",
        "current": f"{now_ms - 5_000}-0 3 {now_ms}",
        "~trimmed": f"1 {now_ms}",
        "odd": "?",
    }
    raw.hset(cast.keys.archived, mapping=records)
    page = read(cast)
    events = {one["archive"]: n for one, n in page.samples("lisa_topic_archive_behind_events")}
    assert events == {"slow": 2, "current": 0}
    seconds = {
        one["archive"]: value for one, value in page.samples("lisa_topic_archive_behind_seconds")
    }
    assert seconds["current"] == 0
    assert 100 <= seconds["slow"] < 130
    raw.delete(cast.keys.events)  # lost: another metric counts these events
    assert page.value("lisa_topic_archive_behind_seconds", topic="orders", archive="current") == 0
    lost = read(cast).value("lisa_topic_archive_behind_seconds", topic="orders", archive="slow")
    assert lost == 0


def test_lateness_and_early_hand_overs(cast: Cast, raw: redis.Redis) -> None:
    raw.hset(cast.keys.stats, mapping={"late:a@g": 3, "late:s@g": 2, "late:A@g": 1, "late:-@g": 4})
    page = read(cast)
    bucket = "lisa_topic_lateness_seconds_bucket"
    assert page.value(bucket, **OWN, le="0.00025") == 3
    assert page.value(bucket, **OWN, le="0.5") == 3
    assert page.value(bucket, **OWN, le="1.0") == 5
    assert page.value(bucket, **OWN, le="3600.0") == 5
    assert page.value(bucket, **OWN, le="+Inf") == 6
    assert page.value("lisa_topic_lateness_seconds_count", **OWN) == 6
    total = 3 * 0.000125 + 2 * 0.75 + 3600
    assert page.value("lisa_topic_lateness_seconds_sum", **OWN) == pytest.approx(total)
    assert page.value("lisa_topic_early_total", **OWN) == 4


def test_consumers_are_counted_by_process_and_by_the_server_s_clock(
    cast: Cast, raw: redis.Redis
) -> None:
    """Two consumers of one process, another process on the host, the same pid on another host."""
    second = cast.on("second").declare()
    for name, topic, host, pid, state in (
        ("a", "orders", "one", 10, "degraded"),
        ("b", "orders", "one", 10, "running"),
        ("c", "orders", "one", 11, "running"),
        ("a", "second", "one", 10, "running"),
        ("d", "second", "two", 10, "running"),
    ):
        record = presence.ConsumerPresence(
            name=name, topic=topic, group="g", host=host, pid=pid, state=state
        )
        cast.store.drive(presence.announce_consumer(cast.store, record))
    cast.store.drive(presence.announce_manager(cast.store, presence.ManagerPresence(name="m")))
    gone = b'{"name":"old","topic":"orders","group":"g","seen_ms":%d}' % (cast.now_ms() - 31_000)
    raw.hset(cast.keys.consumers, "old", gone)
    raw.hset(cast.store.keys.managers, "old", gone)
    second.store.drive(second.store.register(["second"]))
    page = read(cast)
    assert page.value("lisa_topic_consumers_alive", **OWN) == 2
    assert page.value("lisa_topic_consumers_degraded", **OWN) == 1
    assert page.value("lisa_topic_consumers_alive", topic="second", group="g") == 2
    assert page.value("lisa_consumers_alive") == 3
    assert page.value("lisa_managers_alive") == 1
    second.store.close()


def test_topics_and_groups_beyond_the_bounds_are_summed(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metrics, "NAMED_TOPICS", 2)
    monkeypatch.setattr(topic_metrics, "NAMED_GROUPS", 2)
    monkeypatch.setattr(topic_metrics, "TOPICS_PER_STEP", 2)
    cast.send(1)
    for name in ("a", "p", "q", "z"):
        other = cast.on(name).declare()
        for group in ("h", "i"):
            cast.on(name, group).declare()
        other.send(1)
        other.send(1, delay_ms=60_000)
        other.store.close()
    page = read(cast)
    topics = {labels["topic"] for labels, _ in page.samples("lisa_topic_messages")}
    assert topics == {"a", "orders", "(others)"}
    groups = {one["group"] for one, _ in page.samples("lisa_topic_messages") if one["topic"] == "a"}
    assert groups == {"", "g", "h", "(others)"}
    assert page.value("lisa_topic_messages", topic="a", group="(others)", state="ready") == 1
    assert states(page, topic="(others)") == EMPTY | {"waiting": 3, "ready": 9}
    assert page.value("lisa_topic_backlog_messages", topic="(others)", group="(others)") == 9
    assert page.total("lisa_topic_sent_total", topic="(others)") == 0
    assert page.value("lisa_topics") == 5
    for name in ("lisa_topic_sent_total", "lisa_topic_lateness_seconds_count"):
        assert {labels["topic"] for labels, _ in page.samples(name)} == {"a", "orders"}


def test_damaged_data_does_not_hide_other_messages(cast: Cast, raw: redis.Redis) -> None:
    cast.send(1)
    broken = cast.on("broken").declare()
    raw.zadd(cast.store.keys.topics, {"broken": 1, "not a topic": 1})
    own = broken.keys.group("g")
    raw.delete(own.ready)
    raw.set(own.ready, "a text")
    raw.set(broken.keys.waiting, "a text")
    raw.hset(broken.keys.consumers, "x", "no json")
    raw.hset(broken.keys.stats, "sent", "text")
    raw.hset(broken.keys.options, mapping={"capacity": "much", "max_ready": ""})
    page = read(cast)
    assert states(page, topic="orders")["ready"] == 1
    assert states(page, topic="broken")["ready"] == 0
    assert page.value("lisa_topics") == 2
    broken.store.close()


def test_a_reading_is_made_of_few_round_trips(cast: Cast) -> None:
    for number in range(40):
        cast.store.drive(cast.store.register([f"t{number}"]))
    steps, flow = 0, topic_metrics.read(cast.store)
    link = cast.store.connection
    try:
        step = next(flow)
        while True:
            steps += 1
            step = flow.send(step.run(link))
    except StopIteration as end:
        numbers: Numbers = end.value
    assert numbers["lisa_topics"] == {(): 40}
    assert steps <= 6


def page_of(port: int) -> Exposed:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return Exposed(answer.read().decode())


@pytest.fixture
def declared(redis_url: str) -> str:
    """URL of a server with the group of `orders`: sent messages are ready without a manager."""
    bench = Bench(redis_url)
    bench.declare("orders", "g")
    bench.store.close()
    return redis_url


def test_a_manager_exports_its_metrics_and_outlives_the_server(own_server: EmbeddedServer) -> None:
    with (
        Manager(own_server.url, topics={"orders": {"group": "g"}}, http="127.0.0.1:0") as manager,
        Producer(own_server.url) as producer,
    ):
        port = manager.status_port
        assert port is not None
        ready = {**OWN, "state": "ready"}
        wait_until(lambda: page_of(port).value("lisa_topic_messages", **ready) == 0)
        producer.send("orders", 1, delay=timedelta(milliseconds=50))
        wait_until(lambda: page_of(port).value("lisa_manager_moved_total", kind="promoted") == 1)
        began, before = time.monotonic(), readings(own_server)
        for _ in range(20):
            page = page_of(port)
        # A reading lasts a second; each counts due messages thrice at most.
        assert readings(own_server) - before <= 3 * (time.monotonic() - began + 1)
        for name in ("lisa_up", "lisa_manager_topics", "lisa_managers_alive", "lisa_processes"):
            assert page.value(name) == 1
        offset_s = page.value("lisa_server_clock_offset_seconds")
        assert offset_s is not None
        assert abs(offset_s) < 60  # one machine, one clock; a round trip may take long
        assert page.total("lisa_manager_step_seconds_count", service="promoter") >= 1
        assert page.total("lisa_manager_failures_total") == 0
        own_server.kill()
        wait_until(lambda: page_of(port).value("lisa_up") == 0)
        page = page_of(port)
        assert "lisa_topic_messages" not in page.families
        assert page.value("lisa_manager_moved_total", kind="promoted") == 1
        own_server.restart()
        wait_until(lambda: page_of(port).value("lisa_up") == 1)


def readings(server: EmbeddedServer) -> int:
    """The number of commands that readings send."""
    with connect(server.url) as client:
        stats = client.info("commandstats").get("cmdstat_zcount", {"calls": 0})
    return int(stats["calls"])


@pytest.mark.parametrize("kind", ["inline", "threads", "async", "batch"])
def test_a_consumers_own_numbers(declared: str, kind: str) -> None:
    consumer = Consumer(declared, group="g", concurrency=4 if kind == "threads" else 1)

    def handle(message: Message) -> None:
        if message.body == "fail":
            raise ValueError("no")
        if message.body == "discard":
            raise Discard("never")

    async def handle_soon(message: Message) -> None:
        handle(message)

    def handle_some(batch: Batch) -> None:
        for message in batch:
            if message.body == "fail":
                batch.fail(message, "no")

    if kind == "batch":
        consumer.on("orders", handle_some, batch=10)
    else:
        consumer.on("orders", handle_soon if kind == "async" else handle)
    bodies = ["ok"] * 30 + (["discard"] * 2 if kind != "batch" else []) + ["fail"] * 25
    with consumer, Producer(declared) as producer:
        producer.send_many("orders", bodies, retry=[timedelta(hours=1)])

        def page() -> Exposed:
            return Exposed(metrics_page("consumer", [consumer.numbers()]).body.decode())

        seconds = "lisa_consumer_handler_seconds"
        wait_until(lambda: page().total("lisa_consumer_handled_total") == len(bodies))
        wait_until(lambda: page().value("lisa_consumer_held", **OWN) == 0)
        wait_until(lambda: page().value(f"{seconds}_count", **OWN) == len(bodies))
        is_degraded = float(kind != "batch")  # by 25 failures in a row
        wait_until(lambda: page().value("lisa_consumer_degraded", **OWN) == is_degraded)
        now = page()
    outcomes = {one["outcome"]: n for one, n in now.samples("lisa_consumer_handled_total")}
    assert outcomes == {"ok": 30, "failed": 25, "discarded": 0 if kind == "batch" else 2}
    assert now.value("lisa_consumer_concurrency") == (4 if kind == "threads" else 1)
    assert now.value("lisa_up") == 1
    assert consumer.numbers() == {}


def test_a_family_of_consumers_answers_as_one(
    declared: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        "import os\n"
        "from lisa import Consumer\n"
        "consumer = Consumer(group='g')\n"
        "@consumer.on('orders')\n"
        "def handle(message):\n"
        "    if message.body == 'die':\n"
        "        os._exit(3)\n"
    )
    port = free_port()
    options = ("--redis", declared, "--processes", "2", "--http", f"127.0.0.1:{port}")
    family = processes.start("-m", "lisa.cli.consumer", *options, "shop")

    def value(name: str) -> float | None:
        try:
            return page_of(port).total(name)
        except OSError:
            return None

    wait_until(lambda: value("lisa_processes") == 2)
    wait_until(lambda: value("lisa_consumer_concurrency") == 2)
    with Producer(declared) as producer:
        producer.send_many("orders", range(200))
        wait_until(lambda: value("lisa_consumer_handled_total") == 200)
        used_s = value("lisa_process_cpu_seconds_total")
        producer.send("orders", "die", retry=[])
        family.wait_for("ended with code 3")
    # Another one starts, and the counts of the dead one are kept.
    seen: list[float] = []

    def is_whole_again() -> bool:
        seen.append(value("lisa_consumer_handled_total") or 0.0)
        return value("lisa_processes") == 2 and "another one starts" in family.output

    wait_until(is_whole_again)
    assert min(seen) == 200
    assert used_s is not None
    assert (value("lisa_process_cpu_seconds_total") or 0) >= used_s
    assert value("lisa_up") == 1
    assert family.stop() == 0
