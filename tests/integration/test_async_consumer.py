"""`AsyncConsumer`: handlers, pulls and the end of a run on the application's event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

from lisa import AsyncConsumer, AsyncDelivery, Discard, Message
from lisa.consumer import event_loop
from lisa.consumer.pull import Puller
from lisa.core.delivery.source import GroupSource
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.redis.flow import Flow, Pause
from tests.consumers import Bench, heard, presences
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
place: ContextVar[str] = ContextVar("place", default="nowhere")


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


async def pulled(consumer: AsyncConsumer, batch: int = 1, wait: str = "0s") -> list[AsyncDelivery]:
    return [delivery async for delivery in consumer.pull(TOPIC, batch=batch, wait=wait)]


# Handlers


async def test_handlers_share_the_loop_or_run_on_threads_in_copies_of_the_context(
    bench: Bench,
) -> None:
    """Async ones on the loop, within the bound of the consumer; so do receivers of signals."""
    place.set("application")
    on_loop, on_threads = set(), set()
    running = most = 0
    consumer = AsyncConsumer(bench.url, concurrency=3)

    def where() -> tuple[int, str]:
        return threading.get_ident(), place.get()

    @consumer.on(TOPIC)
    async def handle(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        on_loop.add((asyncio.get_running_loop(), *where()))
        place.set("handler")  # must not reach the next message
        await asyncio.sleep(0.01)
        running -= 1
        if message.body == 7:
            raise Discard("seven")

    async def acked(topic: str, *, message: Message) -> None:
        on_loop.add((asyncio.get_running_loop(), *where()))

    def handle_on_thread(_: object) -> None:
        on_threads.add(where())
        place.set("thread")

    consumer.message_acked.connect(acked)
    consumer.on("mails", handle_on_thread)
    consumer.on("batches", handle_on_thread, batch=5)
    bench.declare_all("mails", "batches")
    sent = bench.send(TOPIC, range(20))
    for topic in ("mails", "batches"):
        bench.send(topic, range(20))
    async with consumer:
        await until(lambda: bench.stat(TOPIC, "acked") == 19)
        await until(lambda: bench.states(TOPIC, sent[7]) == ["garbage"])
        await asyncio.to_thread(bench.wait_acked, 20, "mails", "batches")
    main = threading.get_ident()
    assert on_loop == {(asyncio.get_running_loop(), main, "application")}
    assert main not in {thread for thread, _ in on_threads}
    assert {context for _, context in on_threads} == {"application"}
    assert place.get() == "application"
    assert most == 3


# The end


async def test_a_handler_that_blocks_the_applications_loop_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.05)
    consumer = AsyncConsumer(bench.url)
    done = asyncio.Event()

    @consumer.on(TOPIC)
    async def handle(message: Message) -> None:
        wait_until(lambda: "blocks the event loop" in caplog.text)
        done.set()

    bench.send(TOPIC, [1])
    async with consumer:
        await done.wait()


async def test_a_stop_does_not_wait_for_jobs_of_the_loops_executor(bench: Bench) -> None:
    started, go_on = asyncio.Event(), threading.Event()
    consumer = AsyncConsumer(bench.url, grace="200ms")

    @consumer.on(TOPIC)
    async def handle(message: Message) -> None:
        started.set()
        await asyncio.to_thread(go_on.wait, 60)

    bench.send(TOPIC, [1])
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    try:
        async with asyncio.timeout(60):
            await consumer.start()
            await started.wait()
            await consumer.pause()
            await consumer.resume()
            await consumer.unsubscribe(TOPIC)
            await consumer.stop()
    finally:
        go_on.set()
    assert consumer.health()["status"] == "stopped"


async def test_a_cancelled_stop_goes_on(bench: Bench) -> None:
    started = asyncio.Event()
    consumer = AsyncConsumer(bench.url)

    @consumer.on(TOPIC)
    async def handle(message: Message) -> None:
        started.set()
        await asyncio.sleep(0.5)

    [sent] = bench.send(TOPIC, [1])
    await consumer.start()
    async with asyncio.timeout(60):
        await started.wait()
    stop = asyncio.create_task(consumer.stop())
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    await until(lambda: bench.settled_as(TOPIC, sent) == "acked" and presences(bench) == [])


@pytest.mark.parametrize("factory", [None, getattr(asyncio, "eager_task_factory", None)])
def test_a_stop_that_a_handler_began_is_finished_before_the_loop_is_closed(
    bench: Bench, factory: Any
) -> None:
    consumer, stopping = AsyncConsumer(bench.url), list[bool]()

    async def program() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        began = asyncio.Event()

        @consumer.on(TOPIC)
        async def handle(message: Message) -> None:
            await consumer.stop()
            stopping.append(consumer.health()["status"] != "stopped")
            began.set()

        await consumer.start()
        await began.wait()

    bench.send(TOPIC, [1])
    asyncio.run(program())
    assert stopping == [True]
    assert consumer.health()["status"] == "stopped"
    assert presences(bench) == []


async def test_topics_come_go_and_pause_until_the_run_is_cancelled(bench: Bench) -> None:
    bench.declare("mails")
    consumer, seen = AsyncConsumer(bench.url), list[int]()

    async def handle(message: Message) -> None:
        seen.append(message.body)

    consumer.on(TOPIC, handle)
    async with consumer, asyncio.timeout(60):
        consumer.on("mails", handle)  # read by `run`
        run = asyncio.create_task(consumer.run())
        await until(lambda: [one.state for one in presences(bench, "mails")] == ["running"])
        await until(bench.is_reading)
        await consumer.pause()
        bench.send(TOPIC, [1])
        await until(lambda: not bench.is_reading())
        assert seen == []
        await consumer.resume()
        await until(lambda: seen == [1])
        bench.send("mails", [2])
        await until(lambda: seen == [1, 2])
        await consumer.unsubscribe(TOPIC)
        await until(lambda: presences(bench) == [])
        bench.send(TOPIC, [3])
        consumer.subscribe(TOPIC, handle)
        await until(lambda: seen == [1, 2, 3])
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        assert run.cancelled()
    assert consumer.health()["status"] == "stopped"


# Pulls


async def test_a_pull_yields_deliveries_to_settle_and_releases_those_not_reached(
    bench: Bench,
) -> None:
    bench.configure(TOPIC, ack_timeout="1h", retry_delays="0s")
    ids = bench.send(TOPIC, range(6))
    async with AsyncConsumer(bench.url) as consumer:
        acked = heard(consumer.message_acked)
        found = await pulled(consumer, batch=5)
        assert [one.body for one in found] == [0, 1, 2, 3, 4]
        assert repr(found[0]) == f"<AsyncDelivery of {ids[0]!r} on 'orders', attempt 1>"
        assert await found[0].ack() == "acked"
        assert await found[0].ack() == "repeated"
        assert await found[1].retry(delay="1h") == "retrying"
        assert await found[2].discard("no") == "dead"
        assert await found[3].extend()
        assert await found[4].release()
        async for delivery in consumer.pull(TOPIC, batch=5):
            reached = delivery.body
            break
    assert [message.id for message in acked] == [ids[0], ids[0]]
    assert presences(bench) == []
    async with AsyncConsumer(bench.url) as consumer:
        [rest] = await pulled(consumer, batch=5)
        assert ({rest.body, reached}, rest.attempt) == ({4, 5}, 1)
        assert await pulled(consumer) == []


async def test_a_cancelled_pull_loses_no_messages(bench: Bench) -> None:
    bench.configure(TOPIC, ack_timeout="1h")
    bench.send(TOPIC, range(40))
    seen: list[int] = []
    async with AsyncConsumer(bench.url) as consumer, asyncio.timeout(60):
        for step in range(200):
            pull = asyncio.create_task(pulled(consumer, batch=2))
            await asyncio.sleep(step % 40 * 0.0002)  # cancels at another await each time
            pull.cancel()
            with suppress(asyncio.CancelledError):
                seen += [delivery.body for delivery in await pull]
        while len(seen) < 40:
            found = await pulled(consumer, batch=10, wait="5s")
            assert found, f"{40 - len(seen)} messages were never delivered"
            seen += [delivery.body for delivery in found]
    assert sorted(seen) == list(range(40))


Step = tuple[type, str, list[int]]
CANCELLED: dict[str, list[Step]] = {
    "before opening": [(GroupSource, "open", [4])],
    "before settling": [(GroupSource, "settle_unfit", [4])],
    # The second pull repeats the first, opens one of the four entries, and releases three.
    "during a release": [(GroupSource, "open", [4]), (Puller, "_release", [1])],
    "two pulls": [(GroupSource, "open", [2, 2])],
    "two pulls, then a stop": [(GroupSource, "open", [2, 2])],
}
"""The steps in which pulls are cancelled, one after the other, and the batches of these pulls."""


@pytest.mark.parametrize("case", CANCELLED)
async def test_the_next_pulls_return_messages_of_cancelled_ones_and_a_stop_releases_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    bench.configure(TOPIC, ack_timeout="1h")
    sent = bench.send(TOPIC, range(4))
    reached = asyncio.Queue[str]()

    def stuck(*_: Any) -> Flow[Any]:
        reached.put_nowait("step")
        yield Pause(60)

    async with AsyncConsumer(bench.url) as consumer, asyncio.timeout(60):
        for owner, step, batches in CANCELLED[case]:
            with monkeypatch.context() as patch:
                patch.setattr(owner, step, stuck)
                pulls = [asyncio.create_task(pulled(consumer, batch)) for batch in batches]
                for _ in batches:
                    await reached.get()
                for pull in pulls:
                    pull.cancel()
                await asyncio.wait(pulls)
        if case != "two pulls, then a stop":
            found = [*await pulled(consumer, batches[0]), *await pulled(consumer, batch=4)]
            assert {(one.id, one.attempt) for one in found} == {(one, 1) for one in sent}
    state = "ready" if case == "two pulls, then a stop" else "in_flight"
    assert {one: bench.states(TOPIC, one) for one in sent} == {one: [state] for one in sent}


def test_pulls_in_a_second_event_loop_say_so(bench: Bench) -> None:
    consumer = AsyncConsumer(bench.url)

    async def pull(last: str) -> list[Any]:
        found = [delivery.body for delivery in await pulled(consumer)]
        if last == "stop":
            await consumer.stop()
        elif last == "leave open" and consumer._puller is not None:
            await consumer._puller._store.connection.close()  # only against Python's warnings
        return found

    bench.send(TOPIC, [1, 2])
    assert asyncio.run(pull("leave open")) == [1]
    with pytest.raises(RuntimeError, match=r"belongs to the event loop of its first pull"):
        asyncio.run(pull("leave open"))
    consumer = AsyncConsumer(bench.url)
    assert asyncio.run(pull("stop")) == [2]
    assert asyncio.run(pull("stop")) == []


async def test_mistakes_are_refused_by_the_call(bench: Bench) -> None:
    consumer = AsyncConsumer(bench.url, group="billing")
    with pytest.raises(InvalidMessage):
        consumer.pull("no spaces")
    with pytest.raises(InvalidMessage):
        await pulled(consumer, batch=0)
    with pytest.raises(ConfigError, match="not running"):
        await consumer.pause()
    with pytest.raises(ConfigError, match="nothing to consume"):
        await consumer.run()
    assert await pulled(consumer) == []
    with pytest.raises(ConfigError, match="stop it before its group is changed"):
        consumer.group = "lisa"
    await consumer.stop()
    consumer.group = None
    consumer.subscribe(TOPIC, print)
    with pytest.raises(ConfigError, match="several groups"):
        await consumer.run()
