"""No exception ends a service thread of a consumer or manager; health reports it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import redis

from lisa import Manager
from lisa.consumer import Consumer
from lisa.consumer.heartbeat import Heartbeat
from lisa.consumer.reader import Reader
from lisa.consumer.runner import Runner
from lisa.consumer.settler import Settler
from lisa.core.daemon import threads
from lisa.core.daemon.process_signals import Mailbox
from lisa.core.daemon.threads import unforeseen_errors
from lisa.core.model.keys import Keys
from lisa.core.model.message import Message
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Execute
from lisa.core.store import presence
from lisa.core.store.store import SyncStore
from lisa.core.transitions.lease import Reclaim
from lisa.manager.loop import Loop
from lisa.manager.nodes import Node
from lisa.manager.promoter import Promoter
from lisa.manager.waker import Waker
from tests.consumers import Bench, Blocking, ignore, refused_threads, settled
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
ERROR = AttributeError("'NoneType' object has no attribute 'x'")
FULL = pytest.mark.full


@contextmanager
def failing(owner: type, name: str, error: BaseException) -> Iterator[None]:
    """The method raises, until two of its errors have been counted."""
    before = unforeseen_errors()
    with patch.object(owner, name, side_effect=error):
        yield
        wait_until(lambda: unforeseen_errors() - before >= 2)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RESTART_AFTER_S", 0.05)
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=300))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Reader, "_round", ERROR),
        pytest.param(Settler, "flush", ERROR, marks=FULL),
        pytest.param(Settler, "_settle_all", ERROR, marks=FULL),
        (Heartbeat, "step", SystemExit(1)),
        pytest.param(Heartbeat, "_try", ERROR, marks=FULL),
        pytest.param(Heartbeat, "_announce", ERROR, marks=FULL),
        (Runner, "_run_one", SystemExit(1)),
    ],
    ids=str,
)
def test_a_consumer_lives_through_any_exception(
    bench: Bench, owner: type, name: str, error: BaseException
) -> None:
    bench.declare(TOPIC, ack_timeout=timedelta(seconds=1), retry_delays=["0"] * 100)
    consumer, seen = bench.recorder(concurrency=2)
    with bench.manager(TOPIC), consumer:
        bench.send(TOPIC, [1])
        bench.wait_acked(1)
        with failing(owner, name, error):
            bench.send(TOPIC, [2])
        bench.wait_acked(2)
        wait_until(lambda: consumer.health()["status"] == "ok")
        assert consumer.health()["faults"] == []
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("name", ["lisa-loop", "lisa-handler-1"])
def test_a_thread_for_handlers_that_cannot_be_started_is_tried_again(
    bench: Bench, name: str
) -> None:
    """As at the thread limit; of each topic, a message arrives before a thread can start."""
    topics, handled = [TOPIC, "mails", "hooks"], list[str]()

    def handle(message: Message) -> None:
        handled.append(message.id)

    async def handle_async(message: Message) -> None:
        handle(message)

    bench.declare_all(*topics)
    consumer = Consumer(bench.url, concurrency=2)
    for topic in topics:
        consumer.on(topic, handle_async if name == "lisa-loop" else handle)
    ids = [bench.send(topic, [1])[0] for topic in topics for _ in range(3)]
    with refused_threads(name, 3) as refused, consumer, bench.manager(*topics):
        bench.wait_acked(3, *topics)
        assert len(refused) == 3
        assert sorted(handled) == sorted(ids)
        assert consumer._runtime is not None
        runner = consumer._runtime._runner
        assert runner.wait_all_free(1)
        assert runner.limit.free == 2


def test_a_start_that_fails_at_the_thread_limit_leaves_no_thread(bench: Bench) -> None:
    consumer = bench.consumer(ignore)
    before = set(threading.enumerate())
    with refused_threads("lisa-heartbeat"), pytest.raises(RuntimeError, match="can't start"):
        consumer.start()
    wait_until(lambda: set(threading.enumerate()) <= before)
    with consumer:
        wait_until(lambda: consumer.health()["status"] == "ok")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Promoter, "_record", ERROR),
        (Loop, "_step", SystemExit(1)),
        pytest.param(Waker, "step", ERROR, marks=FULL),
        (Node, "probe", SystemExit(1)),
    ],
    ids=str,
)
def test_a_manager_lives_through_any_exception(
    bench: Bench, owner: type, name: str, error: BaseException
) -> None:
    bench.store.drive(bench.store.register([TOPIC]))
    with Manager(bench.url) as manager:
        wait_until(lambda: manager.health()["status"] == "ok")
        with failing(owner, name, error):
            [sent] = bench.send(TOPIC, [1], delay_ms=50)
        wait_until(lambda: "ready" in bench.states(TOPIC, sent))
        wait_until(lambda: manager.health()["status"] == "ok")
        assert manager.health()["faults"] == []


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLACK_S", 0.3)
    monkeypatch.setattr(threads, "CALLS", 0)


@pytest.mark.usefixtures("short_rounds")
def test_health_names_the_thread_that_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = Settler._settle_all

    def hang(self: Settler, *args: Any) -> None:
        go_on.wait(60)
        real(self, *args)

    monkeypatch.setattr(Settler, "_settle_all", hang)
    # Two at a time, and handled once the next read has begun: no read includes the ack.
    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, lambda _: wait_until(bench.is_reading))
    with consumer:
        [sent] = bench.send(TOPIC, [1])
        wait_until(lambda: consumer.health()["status"] == "failing")
        [fault] = consumer.health()["faults"]
        assert fault.startswith("thread lisa-settler has not completed a round for ")
        go_on.set()
        wait_until(settled(bench, sent))
        wait_until(lambda: consumer.health()["status"] == "ok")


@pytest.mark.usefixtures("short_rounds")
def test_a_long_handler_a_long_poll_and_a_pause_are_healthy(bench: Bench) -> None:
    handler = Blocking()
    bench.declare("idle")
    bench.declare("paused", paused=True)
    consumer = bench.consumer(handler, poll_timeout=timedelta(seconds=1))
    for topic in ("idle", "paused", "groupless"):
        consumer.on(topic, ignore)
    with consumer:
        [sent, _] = bench.send(TOPIC, [1, 2])
        wait_until(lambda: handler.begun)
        faults = list[str]()
        ends = time.monotonic() + 1.2
        while time.monotonic() < ends:
            faults += consumer.health()["faults"]
            time.sleep(0.02)
        handler.go_on.set()
        wait_until(settled(bench, sent))
    assert faults == []


# What these threads rely on


def test_a_mailbox_keeps_order_and_is_woken_by_a_signal_that_another_thread_caught() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.post(1)
    mailbox.post(2)
    assert [mailbox.get(), mailbox.get()] == [1, 2]

    def catch() -> None:
        # Sent to this thread: a main thread waiting for a lock would not wake up.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    too_late = threading.Timer(60, mailbox.post, [0])
    too_late.start()
    caught = threading.Timer(0.1, catch)
    try:
        with mailbox.handling_signals(mailbox.post, [signal.SIGUSR1]):
            caught.start()
            assert mailbox.get() == signal.SIGUSR1
    finally:
        too_late.cancel()
        caught.join()


def test_a_long_outage_does_not_grow_the_stack() -> None:
    """A long patience can take thousands of attempts."""
    address = Address("redis://localhost:1/0")
    flow = SyncStore(Connection(address), Keys(), timedelta(hours=1)).run(Reclaim("orders", "lisa"))
    step = next(flow)
    for _ in range(5000):
        away = redis.ConnectionError("away")
        step = flow.throw(away) if isinstance(step, Execute) else flow.send(None)
