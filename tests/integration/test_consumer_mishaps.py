"""What a consumer must survive: failing receivers, blocked loops, lost leases."""

import asyncio
import ctypes
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from lisa.consumer import Batch, Consumer, event_loop
from lisa.consumer.inflight import Held
from lisa.consumer.leases import Leases
from lisa.consumer.subscription import Subscription
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.message import Message
from tests.consumers import Bench, Blocking, presences, settled
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


def states(bench: Bench) -> list[str]:
    return [one.state for one in presences(bench)]


def test_a_model_that_raises_fails_one_message_of_a_batch(bench: Bench) -> None:
    class Order(BaseModel):
        number: int

        @model_validator(mode="before")
        @classmethod
        def pick(cls, body: dict[str, int]) -> dict[str, int]:
            return {"number": body["number"]}  # raises KeyError, which pydantic does not convert

    seen = list[Batch]()
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, seen.append, batch=3, model=Order)
    bench.send(TOPIC, [{"number": 1}, {}, {"number": 2}])
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "retried") == 1)
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2)
    assert [message.body.number for batch in seen for message in batch] == [1, 2]


def test_receivers_that_raise_or_exit_end_neither_the_settling_nor_the_event_loop(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.configure(TOPIC, retry_delays="")
    first, *others = bench.send(TOPIC, list(range(20)))
    consumer = Consumer(bench.url, concurrency=4)
    left: list[object] = []

    def leave(_topic: str, *, message: Message) -> None:
        left.append(message.body)
        sys.exit(message.id)

    async def leave_the_loop(topic: str, *, message: Message) -> None:
        leave(topic, message=message)

    async def fail(_topic: str, *, message: Message) -> None:
        raise ValueError(f"no entry for {message.body}")

    async def wait(message: Message) -> None:
        await asyncio.sleep(0)

    def hand_on(message: Message) -> object:
        return leave_the_loop(TOPIC, message=message) if message.body == 0 else wait(message)

    for receiver in (leave, leave_the_loop, fail):
        consumer.message_acked.connect(receiver)
    consumer.on(TOPIC, hand_on)
    with consumer:
        wait_until(lambda: len(left) == 1 + 2 * len(others))
        wait_until(lambda: caplog.text.count("no entry for") >= len(others))
        wait_until(lambda: bench.states(TOPIC, first) == ["garbage"])
    assert not [one for one in caplog.records if "unexpected error" in one.message]


def test_a_batch_that_takes_too_long_is_cancelled_once_and_calls_no_further_receivers(
    bench: Bench,
) -> None:
    rolled_back, calls = list[int](), list[object]()

    async def handle(batch: Batch) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # a rollback, say
            rolled_back.append(len(batch))

    async def slow(message: Message) -> None:
        calls.append(message.body)
        if message.body == 1:
            await asyncio.sleep(60)

    async def handle_mails(_: Batch) -> None:
        calls.append("batch")

    bench.declare("mails", retry_delays="")
    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, handle, batch=100, timeout="300ms")
    consumer.on("mails", slow)
    consumer.on("mails", handle_mails, batch=3, within="1m", timeout="300ms")
    bench.send(TOPIC, range(100))
    bench.send("mails", range(3))
    with consumer:
        wait_until(lambda: rolled_back)
        wait_until(lambda: bench.pending("mails") == 0)
    assert rolled_back[0] == 100  # what is there as the consumer starts is one batch
    assert calls == [0, 1]


def test_a_handler_that_blocks_the_loop_does_not_spoil_the_stop(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def handle(_: Message) -> None:
        begun.set()
        go_on.wait(60)

    consumer = bench.consumer(handle, grace=timedelta(milliseconds=100))
    bench.send(TOPIC, [1])
    consumer.start()
    try:
        assert begun.wait(60)
        consumer.stop()
    finally:
        go_on.set()
    assert presences(bench) == []
    wait_until(lambda: not any(one.name == "lisa-loop" for one in threading.enumerate()))


def test_a_blocked_loop_keeps_no_reader_busy_and_its_handler_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    async def handle(message: Message) -> None:
        if message.body == "slow":
            await asyncio.sleep(0.5)  # from now on nothing is prefetched
        else:
            begun.set()
            go_on.wait(60)

    consumer = bench.consumer(handle, concurrency=4)
    [slow] = bench.send(TOPIC, ["slow"])
    with consumer:
        wait_until(settled(bench, slow))
        assert caplog.messages == []
        bench.send(TOPIC, ["blocks"])
        assert begun.wait(60)
        bench.send(TOPIC, ["behind"])
        wait_until(lambda: caplog.messages)
        began, before_s = time.monotonic(), time.process_time()
        time.sleep(0.5)
        used_s, took_s = time.process_time() - before_s, time.monotonic() - began
        go_on.set()
    assert used_s < took_s / 2
    [said] = caplog.messages
    assert said.startswith(f"{__name__}.")
    line = handle.__code__.co_firstlineno + 5
    assert "handle blocks the event loop for " in said
    assert f"at {__file__}:{line} (in {__name__}." in said


def hold_the_gil(message: Message) -> None:
    """A handler that lets no other thread run."""
    ctypes.PyDLL(None).usleep(message.body)


def test_a_handler_that_stops_all_threads_is_named(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.configure(TOPIC, ack_timeout="300ms")
    [sent] = bench.send(TOPIC, [700_000])
    with bench.consumer(hold_the_gil):
        wait_until(settled(bench, sent))
        wait_until(lambda: caplog.messages)
    assert [one for one in caplog.messages if f"{__name__}.hold_the_gil ran" in one]


def test_an_async_delivery_whose_lease_cannot_be_renewed_is_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends before its handler begins."""
    extended, seen = list[str](), list[int]()
    hold = Subscription._hold

    def extend(_: Leases, held: Held) -> bool:
        extended.append(held.message.id)
        raise ServerUnavailable("no answer")

    def hold_late(sub: Subscription, *arguments: Any) -> list[Held]:
        taken = hold(sub, *arguments)
        for held in taken:
            held.lease_ends = held.lease_ends if extended else 0.0
        return taken

    monkeypatch.setattr(Leases, "extend_now", extend)
    monkeypatch.setattr(Subscription, "_hold", hold_late)

    async def handle(message: Message) -> None:
        seen.append(message.body)

    consumer = bench.consumer(handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(settled(bench, sent))
    assert extended == [sent]
    assert seen == [1]


def test_a_topic_subscribed_again_leaves_what_the_former_still_handles(bench: Bench) -> None:
    handler = Blocking()
    consumer = bench.consumer(handler, concurrency=2)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: handler.begun == [1])
        consumer.unsubscribe(TOPIC)
        consumer.subscribe(TOPIC, handler)
        wait_until(lambda: sorted(states(bench)) == ["running", "stopping"])
        bench.ask("CLIENT", "KILL", "TYPE", "normal")  # its reader then looks for lost entries
        [later] = bench.send(TOPIC, [2])
        wait_until(lambda: 2 in handler.begun)
        assert handler.begun == [1, 2]
        handler.go_on.set()
        wait_until(settled(bench, sent))
        wait_until(settled(bench, later))
        wait_until(lambda: states(bench) == ["running"])
