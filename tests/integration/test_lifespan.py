"""A consumer's lifespan: what it yields reaches the handlers, and its end comes after them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest

from lisa import AsyncConsumer, Consumer, Message, StartupFailed
from lisa.consumer.lifespan import Lifespan
from lisa.core.model.errors import ConfigError
from tests.consumers import Bench, ignore, presences
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


class Story:
    """What happened, in order, in a lifespan of each kind."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.started = threading.Event()

    @contextmanager
    def sync(self) -> Iterator[Story]:
        self.events.append("open")
        yield self
        self.events.append("close")

    @asynccontextmanager
    async def on_loop(self) -> AsyncIterator[Story]:
        with self.sync():
            task = asyncio.current_task()
            self.loops.append(asyncio.get_running_loop())
            yield self
            assert asyncio.current_task() is task, "cancel scopes need the same task"


KINDS: list[Callable[[Story], Lifespan]] = [lambda story: story.sync, lambda story: story.on_loop]


def lisas_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("lisa-")}


async def slow(message: Message) -> None:
    message.state.started.set()
    await asyncio.sleep(0.2)
    message.state.events.append(f"handled {message.body}")
    message.state.loops.append(asyncio.get_running_loop())


def slow_thread(message: Message) -> None:
    message.state.started.set()
    time.sleep(0.2)
    message.state.events.append(f"handled {message.body}")


@pytest.mark.parametrize(
    ("kind", "handler", "concurrency"),
    [(KINDS[0], slow, 4), (KINDS[1], slow, 1), (KINDS[1], slow_thread, 4)],
)
def test_handlers_get_the_state_and_end_before_it_is_closed(
    bench: Bench, kind: Callable[[Story], Lifespan], handler: Callable[..., Any], concurrency: int
) -> None:
    story = Story()
    consumer = Consumer(bench.url, concurrency=concurrency, lifespan=kind(story))
    consumer.on(TOPIC, handler)
    for round_ in range(2):  # the next start opens it again
        bench.send(TOPIC, [round_])
        with consumer:
            assert story.started.wait(60)
        assert story.events == ["open", f"handled {round_}", "close"]
        story.events.clear()
        story.started.clear()
        if handler is slow and kind is KINDS[1]:
            assert story.loops[0] is story.loops[1], "the handlers' loop"
        story.loops.clear()
    assert bench.stat(TOPIC, "acked") == 2


async def test_a_start_whose_lifespan_hangs_can_be_cancelled(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    story, hangs = Story(), True

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Story]:
        async with story.on_loop():
            try:
                await asyncio.sleep(60 if hangs else 0)
            except asyncio.CancelledError:
                story.events.append("cancelled")
                raise
            yield story

    before = lisas_threads()
    consumer = AsyncConsumer(bench.url, lifespan=lifespan)
    consumer.on(TOPIC, slow)
    for pause in (0, 0.2):  # before the lifespan begins, and while it hangs
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(pause):
                await consumer.start()
    assert consumer.health()["status"] == "stopped"
    await asyncio.to_thread(wait_until, lambda: not lisas_threads() - before)
    assert story.events[-2:] == ["open", "cancelled"]
    assert "lifespan failed" not in caplog.text
    hangs = False
    async with consumer:
        bench.send(TOPIC, [1])
        await asyncio.to_thread(story.started.wait, 60)
    assert story.events[-3:] == ["open", "handled 1", "close"]


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_handlers_use_the_state_until_they_end(
    bench: Bench, kind: Callable[[Story], Lifespan]
) -> None:
    """Their messages are released."""
    bench.configure(TOPIC, ack_timeout="1h")
    story, started = Story(), asyncio.Event()
    consumer = AsyncConsumer(bench.url, lifespan=kind(story), grace="100ms")

    @consumer.on(TOPIC)
    async def handle(message: Message) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            message.state.events.append("cancelled")

    async with consumer, asyncio.timeout(60):
        [sent] = bench.send(TOPIC, [1])
        await started.wait()
    assert story.events == ["open", "cancelled", "close"]
    assert set(story.loops) <= {asyncio.get_running_loop()}
    assert bench.states(TOPIC, sent) == ["ready"]
    assert bench.inspect(TOPIC, sent).group_states[0].failed_attempts == 0


def connect() -> None:
    raise ConnectionError("no database")


@contextmanager
def broken() -> Iterator[None]:
    connect()
    yield


@asynccontextmanager
async def broken_on_loop() -> AsyncIterator[None]:
    with broken():
        yield


def run(consumer: Consumer | AsyncConsumer) -> None:
    running = consumer.run()
    if running is not None:
        asyncio.run(running)


def undecorated() -> Iterator[None]:
    yield


async def undecorated_on_loop() -> AsyncIterator[None]:
    yield


DATABASE = "startup: ConnectionError: no database"
GENERATOR = r"generator; decorate .* with @contextmanager or @asy"


@pytest.mark.parametrize(
    ("kind", "lifespan", "said"),
    [
        (Consumer, broken, DATABASE),
        (Consumer, broken_on_loop, DATABASE),
        (AsyncConsumer, broken, DATABASE),
        (Consumer, undecorated, GENERATOR),
        (Consumer, undecorated_on_loop, GENERATOR),
    ],
)
def test_an_error_at_startup_is_raised_and_leaves_nothing_running(
    bench: Bench, kind: type[Consumer | AsyncConsumer], lifespan: Any, said: str
) -> None:
    before = lisas_threads()
    consumer = kind(bench.url, lifespan=lifespan)
    consumer.on(TOPIC, ignore)
    with pytest.raises(StartupFailed, match=said) as caught:
        run(consumer)
    assert said is GENERATOR or isinstance(caught.value.__cause__, ConnectionError)
    assert consumer.health()["status"] == "stopped"
    wait_until(lambda: not lisas_threads() - before)
    assert presences(bench) == []


def test_an_error_at_shutdown_is_logged_and_without_a_lifespan_the_state_is_none(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def breaking() -> Iterator[None]:
        yield
        raise ConnectionError("gone")

    @asynccontextmanager
    async def breaking_on_loop() -> AsyncIterator[None]:
        with breaking():
            yield

    for count, lifespan in enumerate((breaking, breaking_on_loop, None), 1):
        caplog.clear()
        seen: list[Message] = []
        bench.send(TOPIC, [1])
        with bench.consumer(seen.append, lifespan=lifespan):
            bench.wait_acked(count)
        assert [message.state for message in seen] == [None]
        assert ("the consumer's lifespan failed at shutdown" in caplog.text) is bool(lifespan)
        assert ("gone" in caplog.text) is bool(lifespan)


async def test_a_lifespan_is_a_function_and_cannot_subscribe(redis_url: str) -> None:
    @asynccontextmanager
    async def subscribing() -> AsyncIterator[None]:
        consumer.subscribe("others", ignore)
        yield

    with pytest.raises(ConfigError, match="is not a function that returns a context manager"):
        Consumer(redis_url, lifespan=nullcontext())  # type: ignore[arg-type]
    consumer = AsyncConsumer(redis_url, lifespan=subscribing)
    consumer.subscribe(TOPIC, ignore)
    with pytest.raises(StartupFailed, match="a lifespan cannot subscribe"):
        await consumer.start()
    consumer.subscribe("others", ignore)
    await consumer.stop()
