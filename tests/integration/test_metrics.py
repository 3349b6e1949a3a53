"""The metrics of manager and consumer, compared with the data in Redis."""

import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from lisa import Batch, Consumer, Defer, Discard, Manager, Message, Producer
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


@pytest.fixture
def server(redis_url: str) -> str:
    """One kind: what a reading asks of the server is the same on each."""
    return redis_url


def read(cast: Cast) -> Exposed:
    cast.store.drive(cast.store.register([cast.topic]))
    numbers = cast.store.drive(topic_metrics.read(cast.store))
    return Exposed(metrics_page("manager", [numbers]).body.decode())


def states(page: Exposed, topic: str = "orders") -> dict[str, float]:
    found = [one for one in page.samples("lisa_topic_messages") if one[0]["topic"] == topic]
    return {known["state"]: value for known, value in found}


def value(page: Exposed, name: str, **labels: str) -> float:
    """One sample, which must be there."""
    found = page.value(f"lisa_{name}", **labels)
    assert found is not None, name
    return found


def test_every_state_and_counter_of_a_topic(cast: Cast) -> None:
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
    assert states(page) == {
        "waiting": 2,
        "ready": 3,
        "in_flight": 1,
        "parked": 0,
        "retry": 0,
        "garbage": 1,
    }
    assert value(page, "topic_messages", topic="orders", group="", state="waiting") == 2
    assert value(page, "topic_backlog_messages", **OWN) == 3
    age_s = value(page, "topic_oldest_ready_seconds", **OWN)
    assert 0 <= age_s <= (cast.now_ms() - started_ms) / 1000
    next_due_s = value(page, "topic_next_due_timestamp_seconds", topic="orders")
    assert due_ms <= next_due_s * 1000 <= cast.now_ms() + 30_000
    topic = {"capacity_messages": 50, "max_ready_messages": 7, "paused": 0, "sent_total": 8}
    for name, number in topic.items():
        assert value(page, f"topic_{name}", topic="orders") == number
    for name, number in {"acked_total": 1, "garbage_total": 1, "retried_total": 0}.items():
        assert value(page, f"topic_{name}", **OWN) == number
    assert value(page, "topics") == 1


def test_the_backlog_and_its_oldest_message(cast: Cast, kit: Services, raw: redis.Redis) -> None:
    """Due messages that are not promoted count, too; the oldest is the next that is unread."""
    for _ in range(3):
        cast.send_due()
    page = read(cast)
    assert states(page)["waiting"] == value(page, "topic_backlog_messages", **OWN) == 3
    kit.promoter.step(["orders"])
    page = read(cast)
    assert states(page)["ready"] == value(page, "topic_backlog_messages", **OWN) == 3
    assert page.value("lisa_topic_next_due_timestamp_seconds", topic="orders") is None
    assert kit.promoter.moved.numbers() == {("promoted",): 3}
    cast.take()
    ready, old_ms = cast.own.ready, cast.now_ms() - 100_000
    assert value(read(cast), "topic_oldest_ready_seconds", **OWN) == 0
    raw.xadd(ready, {"id": "next", "due": old_ms})
    raw.xadd(ready, {"id": "later", "due": old_ms + 90_000})
    assert 100 <= value(read(cast), "topic_oldest_ready_seconds", **OWN) < 130


def test_how_far_each_archive_is_behind(cast: Cast, raw: redis.Redis) -> None:
    """By events, and by the age of the first event that it lacks; not by its last report."""

    def behind(unit: str) -> dict[str, float]:
        samples = read(cast).samples(f"lisa_topic_archive_behind_{unit}")
        return {labels["archive"]: number for labels, number in samples}

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
    assert behind("events") == {"slow": 2, "current": 0}
    seconds = behind("seconds")
    assert seconds["current"] == 0
    assert 100 <= seconds["slow"] < 130
    raw.delete(cast.keys.events)  # lost: another metric counts these events
    assert behind("seconds")["slow"] == 0


def test_lateness_and_early_hand_overs(cast: Cast, raw: redis.Redis) -> None:
    raw.hset(cast.keys.stats, mapping={"late:a@g": 3, "late:s@g": 2, "late:A@g": 1, "late:-@g": 4})
    page, lateness = read(cast), "topic_lateness_seconds"
    for le, count in {"0.00025": 3, "0.5": 3, "1.0": 5, "3600.0": 5, "+Inf": 6}.items():
        assert value(page, f"{lateness}_bucket", **OWN, le=le) == count
    assert value(page, f"{lateness}_count", **OWN) == 6
    total = 3 * 0.000125 + 2 * 0.75 + 3600
    assert value(page, f"{lateness}_sum", **OWN) == pytest.approx(total)
    assert value(page, "topic_early_total", **OWN) == 4


def test_consumers_are_counted_by_process_and_server_clock(cast: Cast, raw: redis.Redis) -> None:
    """Two consumers of one process, another process on the host, the same pid on another host."""
    made = partial(presence.ConsumerPresence, group="g", host="one", pid=10, state="running")
    for record in (
        made(name="a", topic="orders", state="degraded"),
        made(name="b", topic="orders"),
        made(name="c", topic="orders", pid=11),
        made(name="a", topic="second"),
        made(name="d", topic="second", host="two"),
    ):
        cast.store.drive(presence.announce_consumer(cast.store, record))
    cast.store.drive(presence.announce_manager(cast.store, presence.ManagerPresence(name="m")))
    gone = b'{"name":"old","topic":"orders","group":"g","seen_ms":%d}' % (cast.now_ms() - 31_000)
    raw.hset(cast.keys.consumers, "old", gone)
    raw.hset(cast.store.keys.managers, "old", gone)
    second = cast.on("second").declare()
    second.store.drive(second.store.register(["second"]))
    page = read(cast)
    assert value(page, "topic_consumers_alive", **OWN) == 2
    assert value(page, "topic_consumers_degraded", **OWN) == 1
    assert value(page, "topic_consumers_alive", topic="second", group="g") == 2
    assert (value(page, "consumers_alive"), value(page, "managers_alive")) == (3, 1)


def test_further_topics_and_groups_are_summed(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("NAMED_TOPICS", "NAMED_GROUPS", "TOPICS_PER_STEP"):
        monkeypatch.setattr(topic_metrics, bound, 2)
    cast.send(1)
    for name in ("a", "p", "q", "z"):
        other = cast.on(name).declare()
        for group in ("h", "i"):
            cast.on(name, group).declare()
        other.send(1)
        other.send(1, delay_ms=60_000)
    page = read(cast)
    topics = {labels["topic"] for labels, _ in page.samples("lisa_topic_messages")}
    assert topics == {"a", "orders", "(others)"}
    groups = {one["group"] for one, _ in page.samples("lisa_topic_messages") if one["topic"] == "a"}
    assert groups == {"", "g", "h", "(others)"}
    assert value(page, "topic_messages", topic="a", group="(others)", state="ready") == 1
    others = states(page, "(others)")
    assert (others["waiting"], others["ready"]) == (3, 9)
    assert value(page, "topic_backlog_messages", topic="(others)", group="(others)") == 9
    assert page.total("lisa_topic_sent_total", topic="(others)") == 0
    assert value(page, "topics") == 5
    for name in ("lisa_topic_sent_total", "lisa_topic_lateness_seconds_count"):
        assert {labels["topic"] for labels, _ in page.samples(name)} == {"a", "orders"}


def test_damaged_data_does_not_hide_other_messages(cast: Cast, raw: redis.Redis) -> None:
    cast.send(1)
    broken = cast.on("broken").declare()
    raw.zadd(cast.store.keys.topics, {"broken": 1, "not a topic": 1})
    for key in (broken.own.ready, broken.keys.waiting):
        raw.set(key, "a text")
    raw.hset(broken.keys.consumers, "x", "no json")
    raw.hset(broken.keys.stats, "sent", "text")
    raw.hset(broken.keys.options, mapping={"capacity": "much", "max_ready": ""})
    page = read(cast)
    assert (states(page)["ready"], states(page, "broken")["ready"]) == (1, 0)
    assert value(page, "topics") == 2


def test_a_reading_is_made_of_few_round_trips(cast: Cast) -> None:
    cast.store.drive(cast.store.register([f"t{number}" for number in range(40)]))
    steps, flow = 0, topic_metrics.read(cast.store)
    try:
        step = next(flow)
        while True:
            steps += 1
            step = flow.send(step.run(cast.store.connection))
    except StopIteration as end:
        numbers: Numbers = end.value
    assert numbers["lisa_topics"] == {(): 40}
    assert steps <= 6


def page_of(port: int) -> Exposed:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return Exposed(answer.read().decode())


def test_a_manager_exports_its_metrics_and_outlives_the_server(own_server: EmbeddedServer) -> None:
    def readings() -> int:
        """The number of commands that readings send."""
        with connect(own_server.url) as client:
            stats = client.info("commandstats").get("cmdstat_zcount", {"calls": 0})
        return int(stats["calls"])

    def shows(name: str, number: float, **labels: str) -> None:
        wait_until(lambda: page_of(port).value(name, **labels) == number)

    with (
        Manager(own_server.url, topics={"orders": {"group": "g"}}, http="127.0.0.1:0") as manager,
        Producer(own_server.url) as producer,
    ):
        assert manager.status_port is not None
        port = manager.status_port
        shows("lisa_topic_messages", 0, **OWN, state="ready")
        producer.send("orders", 1, delay=timedelta(milliseconds=50))
        shows("lisa_manager_moved_total", 1, kind="promoted")
        began, before = time.monotonic(), readings()
        for _ in range(20):
            page = page_of(port)
        # A reading lasts a second; each counts due messages thrice at most.
        assert readings() - before <= 3 * (time.monotonic() - began + 1)
        for name in ("up", "manager_topics", "managers_alive", "processes"):
            assert value(page, name) == 1
        # One machine, one clock; a round trip may take long.
        assert abs(value(page, "server_clock_offset_seconds")) < 60
        assert page.total("lisa_manager_step_seconds_count", service="promoter") >= 1
        assert page.total("lisa_manager_failures_total") == 0
        own_server.kill()
        shows("lisa_up", 0)
        page = page_of(port)
        assert "lisa_topic_messages" not in page.families
        assert value(page, "manager_moved_total", kind="promoted") == 1
        own_server.restart()
        shows("lisa_up", 1)


@pytest.mark.parametrize("kind", ["inline", "threads", "async", "batch"])
def test_a_consumers_own_numbers(bench: Bench, kind: str) -> None:
    bench.declare("orders", "g")
    raised = {"fail": ValueError(), "discard": Discard("never"), "defer": Defer(delay="1h")}
    consumer = Consumer(bench.url, group="g", concurrency=4 if kind == "threads" else 1)

    def handle(message: Message) -> None:
        if message.body in raised:
            raise raised[message.body]

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
    discarded = 0 if kind == "batch" else 2
    bodies = ["ok"] * 30 + ["discard", "defer"] * discarded + ["fail"] * 25
    with consumer, Producer(bench.url) as producer:
        producer.send_many("orders", bodies, retry=[timedelta(hours=1)])

        def page() -> Exposed:
            return Exposed(metrics_page("consumer", [consumer.numbers()]).body.decode())

        name = "lisa_consumer_handled_total"
        is_degraded = float(kind != "batch")  # by 25 failures in a row
        wait_until(lambda: page().total(name) == len(bodies))
        wait_until(lambda: page().value("lisa_consumer_held", **OWN) == 0)
        seconds = "lisa_consumer_handler_seconds_count"
        wait_until(lambda: page().value(seconds, **OWN) == len(bodies))
        wait_until(lambda: page().value("lisa_consumer_degraded", **OWN) == is_degraded)
        now = page()
    outcomes = {one["outcome"]: n for one, n in now.samples(name)}
    assert outcomes == {"ok": 30, "failed": 25, "discarded": discarded, "deferred": discarded}
    assert value(now, "consumer_concurrency") == (4 if kind == "threads" else 1)
    assert value(now, "up") == 1
    assert consumer.numbers() == {}


def test_a_family_answers_as_one(bench: Bench, processes: Processes, tmp_path: Path) -> None:
    bench.declare("orders", "g")
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
    options = ("--redis", bench.url, "--processes", "2", "--http", f"127.0.0.1:{port}")
    family = processes.start("-m", "lisa.cli.consumer", *options, "shop")

    def total(name: str) -> float:
        with suppress(OSError):
            return page_of(port).total(name)
        return 0.0

    wait_until(lambda: total("lisa_processes") == 2)
    wait_until(lambda: total("lisa_consumer_concurrency") == 2)
    with Producer(bench.url) as producer:
        producer.send_many("orders", range(200))
        wait_until(lambda: total("lisa_consumer_handled_total") == 200)
        used_s = total("lisa_process_cpu_seconds_total")
        producer.send("orders", "die", retry=[])
        family.wait_for("ended with code 3")
    seen: list[float] = []

    def is_whole_again() -> bool:
        """The counts of the dead one are kept."""
        seen.append(total("lisa_consumer_handled_total"))
        return total("lisa_processes") == 2 and "another one starts" in family.output

    wait_until(is_whole_again)
    assert min(seen) == 200
    assert total("lisa_process_cpu_seconds_total") >= used_s > 0
    assert total("lisa_up") == 1
    assert family.stop() == 0
