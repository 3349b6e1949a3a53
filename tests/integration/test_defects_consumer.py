"""Known defects of the Java original's consumer, by number; Lisa has none of them."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from lisa.consumer import Consumer
from lisa.core.model.errors import ConfigError
from lisa.core.settings import ConsumerSettings
from lisa.producer import Producer
from tests.consumers import Bench, presences, settled
from tests.servers import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from lisa.core.model.message import Message
    from tests.servers import Processes

TOPIC = "orders"


def test_l7_a_late_success_leaves_no_zombie(bench: Bench) -> None:
    """A handler outlives its lease; its ack settles the message, which is not redelivered."""
    bench.declare(TOPIC, ack_timeout="200ms", retry_delays="1s")
    go_on = threading.Event()
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        go_on.wait(20)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle, timeout="100ms")  # so that the lease is not extended
    [sent] = bench.send(TOPIC, [1])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.states(TOPIC, sent) == ["retry"])
        go_on.set()
        wait_until(settled(bench, sent))
        time.sleep(1.2)  # the retry would be due by now
    assert attempts == [1]
    assert bench.stat(TOPIC, "acked_late") == 1
    assert bench.states(TOPIC, sent) == []


def test_l8_a_message_behind_slow_handlers_is_not_handled_twice(bench: Bench) -> None:
    bench.declare(TOPIC, ack_timeout="2s", retry_delays="0")  # a busy machine may stall
    seen: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        time.sleep(2.6)
        seen.append((message.body, message.attempt))

    consumer = Consumer(bench.url, poll_batch_size=10)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, range(3))
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") == 3)
    assert sorted(seen) == [(n, 1) for n in range(3)]
    assert bench.stat(TOPIC, "reclaimed") == 0


def test_l11_a_consumer_before_the_manager_gets_every_message(bench: Bench) -> None:
    """It does not spin meanwhile, and does not need an existing stream."""
    sent = bench.send(TOPIC, [1, 2, 3])
    seen: list[int] = []
    consumer = Consumer(bench.url, group="lisa")
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    with consumer:
        wait_until(lambda: presences(bench))
        commands = int(info(bench, "total_commands_processed"))
        time.sleep(1)
        assert int(info(bench, "total_commands_processed")) - commands < 30
        with bench.manager(TOPIC):
            wait_until(lambda: len(seen) == len(sent))
    assert seen == [1, 2, 3]


def info(bench: Bench, name: str) -> str:
    text = bench.ask("INFO", "stats").decode()
    return str(dict(line.split(":", 1) for line in text.split() if ":" in line)[name])


def test_l12_every_group_gets_every_message_and_the_body_is_deleted_last(bench: Bench) -> None:
    for group in ("fast", "slow"):
        bench.declare(TOPIC, group)
    go_on = threading.Event()
    seen: dict[str, list[object]] = {"fast": [], "slow": []}
    fast, slow = Consumer(bench.url, group="fast"), Consumer(bench.url, group="slow")
    fast.on(TOPIC, lambda message: seen["fast"].append(message.body))

    def handle_slowly(message: Message) -> None:
        go_on.wait(20)
        seen["slow"].append(message.body)

    slow.on(TOPIC, handle_slowly)
    body = bench.store.keys.topic(TOPIC)
    [sent] = bench.send(TOPIC, ["for both"])
    with fast, slow:
        wait_until(lambda: bench.stat(TOPIC, "acked", "fast") == 1)
        assert bench.ask("EXISTS", body.body(sent)) == 1
        go_on.set()
        wait_until(settled(bench, sent))
    assert seen == {"fast": ["for both"], "slow": ["for both"]}
    assert bench.ask("EXISTS", body.body(sent)) == 0


def test_l13_what_a_killed_consumer_held_is_handled_by_another(
    bench: Bench, processes: Processes, tmp_path: Path
) -> None:
    bench.declare(TOPIC, ack_timeout="300ms", retry_delays="0")
    (tmp_path / "hangs.py").write_text(
        "import time\nfrom lisa.consumer import Consumer\nconsumer = Consumer()\n"
        "@consumer.on('orders')\ndef handle(message):\n"
        "    print('got it', flush=True)\n    time.sleep(60)\n"
    )
    [sent] = bench.send(TOPIC, [1])
    first = processes.start("-m", "lisa.cli.consumer", "--redis", bench.url, "hangs")
    first.wait_for("got it")
    first.kill()
    seen: list[int] = []
    second = Consumer(bench.url)
    second.on(TOPIC, lambda message: seen.append(message.attempt))
    with second, bench.manager(TOPIC):
        wait_until(settled(bench, sent))
    assert seen == [2]


def test_l14_nothing_is_acked_unheard_and_each_receiver_gets_its_own_topic(bench: Bench) -> None:
    for topic in ("orders", "invoices"):
        bench.declare(topic)
    [unheard] = bench.send("orders", [1])
    configured = Consumer.from_config(None, redis=bench.url, groups=[{"topic": "orders"}])
    with pytest.raises(ConfigError, match="topic 'orders' has no handler"):
        configured.start()
    assert bench.states("orders", unheard) == ["ready"]
    seen: list[tuple[str, int]] = []
    consumer = Consumer(bench.url)
    consumer.on("orders", lambda message: seen.append(("orders", message.body)))
    consumer.on("invoices", lambda message: seen.append(("invoices", message.body)))
    [other] = bench.send("invoices", [2])
    with consumer:
        wait_until(settled(bench, unheard, "orders"))
        wait_until(settled(bench, other, "invoices"))
    assert sorted(seen) == [("invoices", 2), ("orders", 1)]


def test_l14_an_async_handler_is_acked_after_its_work(bench: Bench) -> None:
    bench.declare(TOPIC)
    go_on = threading.Event()

    async def handle(message: Message) -> None:
        await asyncio.to_thread(go_on.wait, 20)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: bench.states(TOPIC, sent) == ["in_flight"])
        time.sleep(0.2)
        assert bench.states(TOPIC, sent) == ["in_flight"]
        go_on.set()
        wait_until(settled(bench, sent))


def test_l21_a_topic_listed_twice_is_refused_in_one_line_or_joins_both_groups(
    bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "consumer.yml"
    path.write_text(
        "lisa-delay-queue:\n  groups:\n    - {topic: orders, group: g}\n"
        "    - {topic: orders, group: g}\n"
    )
    with pytest.raises(ConfigError, match="orders") as refused:
        ConsumerSettings.load(path)
    assert "\n" not in str(refused.value)
    path.write_text(path.read_text().replace("group: g}", "group: h}", 1))
    seen: list[str] = []
    consumer = Consumer.from_config(path, redis=bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.group))
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.store.drive(bench.store.groups(TOPIC)) == ("g", "h"))
        [sent] = bench.send(TOPIC, [1])
        wait_until(settled(bench, sent))
    assert sorted(seen) == ["g", "h"]


@pytest.mark.parametrize(
    "body",
    [
        {"clazz": "os.system", "body": "echo"},
        {"@type": "java.lang.Runtime"},
        {"py/object": "subprocess.Popen", "args": ["true"]},
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    ],
)
def test_l24_no_class_named_by_a_message_is_loaded(bench: Bench, body: object) -> None:
    bench.declare(TOPIC)
    seen: list[object] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append(message.body))
    bench.send(TOPIC, [body])
    with consumer:
        wait_until(lambda: seen)
    assert seen == [body]  # plain data, as it was sent
    assert type(seen[0]) in (dict, bytes)


@pytest.mark.parametrize("model", [None, dict[str, str]])
def test_l24_no_module_named_by_a_message_is_imported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: object
) -> None:
    """Under any key that other formats use for a class, in the body and in headers."""
    (tmp_path / "sprung.py").write_text("class Order: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("clazz", "@class", "@type", "__class__", "__type__", "py/object", "py/type")
    named = dict.fromkeys(names, "sprung.Order")
    bench.declare(TOPIC)
    seen: list[object] = []
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, lambda message: seen.append((message.body, message.headers)), model=model)
    with consumer, Producer(bench.url) as producer:
        producer.send(TOPIC, named, headers=named)
        wait_until(lambda: seen)
    assert seen == [(named, named)]
    assert "sprung" not in sys.modules
