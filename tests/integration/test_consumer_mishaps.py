"""What a consumer must survive: failing receivers, blocked loops, lost leases."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel, model_validator

from lisa import Discard, Retry
from lisa.consumer import Batch, Consumer
from lisa.consumer.leases import Leases
from lisa.consumer.subscription import Subscription
from lisa.core.delivery.opening import StreamRead
from lisa.core.model.errors import ServerUnavailable
from lisa.core.transitions.release import Release
from tests.consumers import Bench, ignore, presences, presences_running, settled
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from typing import Any

    from lisa.consumer.inflight import Held
    from lisa.core.model.message import Message
    from lisa.core.model.stream import Entry

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


def states(bench: Bench) -> list[str]:
    return [one.state for one in presences(bench)]


def test_an_id_that_is_not_text_does_not_block_the_others(bench: Bench) -> None:
    bench.ask("XADD", bench.ready(TOPIC), "*", "id", b"\xff\xfe", "due", "1")
    [sent] = bench.send(TOPIC, [1])
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
    with consumer:
        wait_until(settled(bench, sent))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_exceptions_whose_own_code_fails_are_failures(bench: Bench, concurrency: int) -> None:
    class Attributes(Exception):
        def __getattr__(self, name: str) -> str:  # also asked for `__notes__`
            return {"known": "word"}[name]

    class Later(Retry):
        def __init__(self) -> None:  # without `super().__init__`
            pass

    class Speechless(Exception):
        def __str__(self) -> str:
            raise AttributeError("words")

    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    errors = [Attributes, Later, Speechless, Silent, ValueError]

    def handle(message: Message) -> None:
        raise errors[message.body]

    consumer = Consumer(bench.url, concurrency=concurrency)
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, range(len(errors)))
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "retried") == len(errors))
        wait_until(lambda: consumer.health()["topics"][f"{TOPIC}/lisa"]["held"] == 0)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_that_returns_a_generator_has_not_handled_its_message(
    bench: Bench, batch: int | None, *, is_async: bool
) -> None:
    """As with a decorator that hides the generator function."""

    async def handle_async(_: object) -> object:
        return handle(_)

    def handle(_: object) -> object:
        return (number for number in range(3))

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle_async if is_async else handle, batch=batch)
    bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "retried") == 1)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_coroutine_that_is_not_awaited_has_not_handled_its_message(
    bench: Bench, batch: int | None, *, is_async: bool
) -> None:
    """As with `return call_next(message)` without `await` in a middleware."""
    made: list[Coroutine[Any, Any, None]] = []

    async def work() -> None: ...

    async def handle_async(_: object) -> object:
        made.append(work())
        return made[-1]

    def handle(_: object) -> object:
        return handle_async(_)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle_async if is_async else handle, batch=batch)
    bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "retried") == 1)
    for one in made:
        one.close()


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_retry_and_a_discard_may_be_returned(
    bench: Bench, batch: int | None, *, is_async: bool
) -> None:
    outcomes: Iterator[object] = iter([Retry("later", delay="1ms"), Retry, Discard])

    async def handle_async(_: object) -> object:
        return next(outcomes)

    def handle(_: object) -> object:
        return next(outcomes)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle_async if is_async else handle, batch=batch)
    bench.configure(TOPIC, retry_delays="0,0")
    bench.send(TOPIC, [1])
    with bench.manager(TOPIC), consumer:
        wait_until(lambda: bench.stat(TOPIC, "garbage") == 1)
    assert bench.stat(TOPIC, "retried") == 2


def test_a_model_that_raises_fails_one_message_of_a_batch(bench: Bench) -> None:
    class Order(BaseModel):
        number: int

        @model_validator(mode="before")
        @classmethod
        def pick(cls, body: dict[str, int]) -> dict[str, int]:
            return {"number": body["number"]}  # raises KeyError, which pydantic does not convert

    seen = list[int]()

    def handle(batch: Batch) -> None:
        seen.extend(message.body.number for message in batch)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle, batch=3, model=Order)
    bench.send(TOPIC, [{"number": 1}, {}, {"number": 2}])
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "retried") == 1)
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2)
    assert seen == [1, 2]


def test_a_receiver_that_exits_does_not_end_the_settling(bench: Bench) -> None:
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)

    def leave(_: str, *, message: Message) -> None:
        sys.exit(message.id)

    consumer.message_acked.connect(leave)
    with consumer:
        for body in (1, 2):
            [sent] = bench.send(TOPIC, [body])
            wait_until(settled(bench, sent))


def test_the_error_of_an_async_receiver_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: str, *, message: Message) -> None:
        raise ValueError(f"no entry for {message.body}")

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)
    consumer.message_acked.connect(fail)
    bench.send(TOPIC, [7])
    with consumer:
        wait_until(lambda: "no entry for 7" in caplog.text)


def test_an_async_receiver_that_exits_does_not_stop_the_event_loop(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.configure(TOPIC, retry_delays="")
    first, *others = bench.send(TOPIC, list(range(20)))
    consumer = Consumer(bench.url, concurrency=4)
    left: list[object] = []

    async def leave(_topic: str, *, message: Message) -> None:
        left.append(message.body)
        sys.exit(message.id)

    async def wait(message: Message) -> None:
        await asyncio.sleep(0)

    def hand_on(message: Message) -> object:
        return leave(TOPIC, message=message) if message.body == 0 else wait(message)

    consumer.message_acked.connect(leave)
    consumer.on(TOPIC, hand_on)
    with consumer:
        wait_until(lambda: len(left) == 1 + len(others))
        wait_until(lambda: bench.states(TOPIC, first) == ["garbage"])
    assert not [one for one in caplog.records if "unexpected error" in one.message]


def test_a_batch_that_takes_too_long_is_cancelled_once(bench: Bench) -> None:
    ended = list[str]()

    async def handle(_: Batch) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # a rollback, say
            ended.append("cleanly")

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle, batch=100, timeout="300ms")
    bench.send(TOPIC, range(100))
    with consumer:
        wait_until(lambda: ended == ["cleanly"])


def test_a_receiver_of_acks_may_stop_the_consumer(bench: Bench) -> None:
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, ignore)

    def stop(_: str, *, message: Message) -> None:
        assert message.topic == TOPIC
        consumer.stop()

    consumer.message_acked.connect(stop)
    bench.send(TOPIC, [1])
    running = threading.Thread(target=consumer.run, daemon=True)
    running.start()
    running.join(10)
    assert not running.is_alive()
    assert presences(bench) == []


def test_a_handler_that_blocks_the_loop_does_not_spoil_the_stop(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def handle(_: Message) -> None:
        begun.set()
        go_on.wait(20)

    consumer = Consumer(bench.url, grace=timedelta(milliseconds=100))
    consumer.on(TOPIC, handle)
    bench.send(TOPIC, [1])
    consumer.start()
    try:
        assert begun.wait(10)
        consumer.stop()
    finally:
        go_on.set()
    assert presences(bench) == []
    wait_until(lambda: not any(one.name == "lisa-loop" for one in threading.enumerate()))


def test_a_blocked_loop_keeps_no_reader_busy(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def handle(message: Message) -> None:
        if message.body == "slow":
            await asyncio.sleep(0.5)  # from now on nothing is prefetched
        else:
            begun.set()
            go_on.wait(20)

    consumer = Consumer(bench.url, concurrency=4)
    consumer.on(TOPIC, handle)
    [slow] = bench.send(TOPIC, ["slow"])
    with consumer:
        wait_until(settled(bench, slow))
        bench.send(TOPIC, ["blocks"])
        assert begun.wait(10)
        bench.send(TOPIC, ["behind"])
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        used_s = time.process_time() - before
        go_on.set()
    assert used_s < 0.25


def test_an_async_delivery_lost_before_it_began_is_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    take = Subscription._take

    def take_and_lose(sub: Subscription, *arguments: object) -> list[Held]:
        taken = take(sub, *arguments)  # type: ignore[arg-type]
        for held in taken:
            held.lease_ends = 0.0
            sub.store.call(Release(TOPIC, "lisa", [held.receipt]))
            bench.ask("XREADGROUP", "GROUP", "lisa", "other", "STREAMS", bench.ready(TOPIC), ">")
        return taken

    monkeypatch.setattr(Subscription, "_take", take_and_lose)

    async def handle(message: Message) -> None:
        seen.append(message.id)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    with consumer:
        bench.send(TOPIC, [1])
        wait_until(lambda: bench.stat(TOPIC, "released") == 1)
        wait_until(lambda: consumer.health()["topics"][f"{TOPIC}/lisa"]["held"] == 0)
    assert seen == []


def test_an_async_delivery_whose_lease_cannot_be_renewed_is_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals, seen = list[str](), list[int]()

    def renew(_: Leases, held: Held) -> bool:
        renewals.append(held.message.id)
        raise ServerUnavailable("no answer")

    take = Subscription._take

    def take_late(sub: Subscription, *arguments: object) -> list[Held]:
        taken = take(sub, *arguments)  # type: ignore[arg-type]
        for held in taken:
            if held.message.id not in renewals:
                held.lease_ends = 0.0
        return taken

    monkeypatch.setattr(Leases, "renew", renew)
    monkeypatch.setattr(Subscription, "_take", take_late)

    async def handle(message: Message) -> None:
        seen.append(message.body)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(settled(bench, sent))
    assert renewals == [sent]
    assert seen == [1]


def test_a_lease_runs_from_the_reading_not_from_a_late_opening(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.configure(TOPIC, ack_timeout="2s")
    attempts: list[int] = []
    cut_until: list[float] = []
    open_now = Subscription.open

    def open_late(
        sub: Subscription, entries: Sequence[Entry], read: StreamRead
    ) -> tuple[list[Held], int]:
        # It is retried 1.25 s after the first attempt, as pauses grow.
        cut_until[:] = cut_until or [time.monotonic() + 1.2]
        if time.monotonic() < cut_until[0]:
            raise ServerUnavailable("cut off")
        return open_now(sub, entries, read)

    monkeypatch.setattr(Subscription, "open", open_late)

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        time.sleep(1.5)  # past the lease's end at the handler's start

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with bench.manager(TOPIC), consumer:
        wait_until(settled(bench, sent))
    assert attempts == [1]
    assert bench.stat(TOPIC, "reclaimed") == 0


def test_deliveries_behind_a_running_batch_are_released_at_once(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def handle(batch: Batch) -> None:
        calls.append(len(batch))
        if len(calls) > 3:
            begun.set()
            go_on.wait(20)

    consumer = Consumer(bench.url, grace=timedelta(seconds=2))
    consumer.on(TOPIC, handle, batch=10, within="10s")
    bench.send(TOPIC, range(30))
    consumer.start()
    wait_until(lambda: len(calls) == 3)
    bench.send(TOPIC, range(15))
    assert begun.wait(10)
    stopping = threading.Thread(target=consumer.stop)
    stopping.start()
    try:
        wait_until(lambda: bench.stat(TOPIC, "released") == 5, timeout=timedelta(seconds=1.5))
    except AssertionError:
        # Not yet read at the stop: then there was nothing to release.
        assert bench.pending(TOPIC) == 10
    finally:
        go_on.set()
        stopping.join(10)


def test_a_topic_subscribed_again_leaves_what_the_former_still_handles(bench: Bench) -> None:
    begun, go_on = list[int](), threading.Event()

    def handle(message: Message) -> None:
        begun.append(message.body)
        go_on.wait(20)

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: begun == [1])
        consumer.unsubscribe(TOPIC)
        consumer.subscribe(TOPIC, handle)
        wait_until(lambda: sorted(states(bench)) == ["running", "stopping"])
        bench.ask("CLIENT", "KILL", "TYPE", "normal")  # its reader then looks for lost entries
        [later] = bench.send(TOPIC, [2])
        wait_until(lambda: 2 in begun)
        assert begun == [1, 2]
        go_on.set()
        wait_until(settled(bench, sent))
        wait_until(settled(bench, later))


def test_a_topic_subscribed_again_keeps_its_record_when_the_former_has_drained(
    bench: Bench,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handle(_: Message) -> None:
        begun.set()
        go_on.wait(20)

    consumer = Consumer(bench.url)
    consumer.on(TOPIC, handle)
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        assert begun.wait(10)
        consumer.unsubscribe(TOPIC)
        consumer.subscribe(TOPIC, ignore)
        wait_until(lambda: sorted(states(bench)) == ["running", "stopping"])
        go_on.set()
        wait_until(settled(bench, sent))
        wait_until(lambda: len(consumer._runtime.readers.subscriptions()) == 1)  # type: ignore[union-attr]
        assert presences_running(bench)()
