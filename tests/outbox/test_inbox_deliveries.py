"""The inbox with real deliveries: consumers of each kind, killed and frozen at bad moments."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from lisa import AsyncConsumer, Consumer, Message, Middleware, Producer
from lisa.testing import ClockedServer, LisaTestKit
from tests.consumers import Bench, settled
from tests.outbox.conftest import Database
from tests.outbox.effects import create_tables, effect, effect_async, effects
from tests.servers import Process, Processes, no_clock, wait_until

TOPIC = "orders"
ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """An engine on a database with an inbox and the table of effects."""
    create_tables(engine)
    return engine


@pytest.fixture
def bench(redis_url: str) -> Bench:
    """A topic whose leases end soon, and whose retries begin at once."""
    bench = Bench(redis_url)
    bench.declare(TOPIC, ack_timeout=timedelta(seconds=0.5), retry_delays=",".join("0" * 50))
    return bench


HANDLERS = """
import os, signal, time
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session
from lisa import Consumer
from tests.outbox.effects import effect

engine = create_engine(os.environ["DATABASE"])
consumer = Consumer()

@event.listens_for(Session, "after_commit")
def committed(session):
    if "handled" in session.info and at("after the commit"):
        os.kill(os.getpid(), signal.SIGKILL)

def at(place):
    if os.environ.get("STOP") != place or os.path.exists("stopped"):
        return False
    open("stopped", "w").close()
    return True

@consumer.on("orders", once_in=engine)
def handle(message, session):
    effect(message, session)
    session.info["handled"] = True
    print(f"handled in {os.getpid()}", flush=True)
    if at("before the commit"):
        os.kill(os.getpid(), signal.SIGKILL)
    if at("frozen"):
        while not os.path.exists("go"):
            time.sleep(0.01)
"""


class Daemons:
    """Starts `lisa-consumer` with the handler above on a database."""

    def __init__(self, processes: Processes, database: Database, url: str, folder: Path) -> None:
        self._processes, self._database, self._url = processes, database, url
        (folder / "shop.py").write_text(HANDLERS)

    def start(self, stop: str = "") -> Process:
        """Start one; the first handler dies or freezes at `stop`."""
        env = {"DATABASE": self._database.url, "STOP": stop}
        command = ("-m", "lisa.cli.consumer", "--redis", self._url, "shop")
        return self._processes.start(*command, env=env)


@pytest.fixture
def daemons(processes: Processes, database: Database, redis_url: str, tmp_path: Path) -> Daemons:
    return Daemons(processes, database, redis_url, tmp_path)


@pytest.mark.parametrize("place", ["before the commit", "after the commit"])
def test_a_message_of_a_killed_consumer_has_one_effect(
    engine: Engine, bench: Bench, daemons: Daemons, place: str
) -> None:
    is_committed = place == "after the commit"
    [sent] = bench.send(TOPIC, [1])
    killed = daemons.start(place)
    with bench.manager(TOPIC):
        assert killed.wait() == -signal.SIGKILL
        wait_until(lambda: effects(engine) == [sent] * is_committed)
        again = daemons.start(place)
        wait_until(settled(bench, sent))
    assert effects(engine) == [sent]
    assert again.output.count("handled in") == (not is_committed)
    assert again.stop() == 0


def test_a_message_whose_lease_ended_during_the_handler_has_one_effect(
    engine: Engine, bench: Bench, daemons: Daemons, tmp_path: Path
) -> None:
    """Another consumer waits for the first one's transaction."""
    [sent] = bench.send(TOPIC, [1])
    frozen = daemons.start("frozen")
    frozen.wait_for("handled in")
    frozen.signal(signal.SIGSTOP)
    with bench.manager(TOPIC):
        wait_until(lambda: bench.states(TOPIC, sent) == ["ready"])
        other = daemons.start()
        wait_until(lambda: bench.states(TOPIC, sent) == ["in_flight"])
        (tmp_path / "go").touch()
        frozen.signal(signal.SIGCONT)
        wait_until(settled(bench, sent))
        wait_until(lambda: bench.pending(TOPIC) == 0)
    assert effects(engine) == [sent]
    assert other.output.count("handled in") == 0
    assert [frozen.stop(), other.stop()] == [0, 0]


class Failing(Middleware):
    """Fails the first delivery of each message, after its handler."""

    def __init__(self) -> None:
        self.delivered = Counter[str]()

    def _fail(self, message: Message) -> None:
        self.delivered[message.id] += 1
        if self.delivered[message.id] == 1:
            raise ValueError("after the commit")

    def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
        call_next(message)
        self._fail(message)

    async def handle_async(
        self, message: Message, call_next: Callable[[Message], Awaitable[Any]]
    ) -> Any:
        await call_next(message)
        self._fail(message)


class Order(msgspec.Struct):
    number: int


@ON_SQLITE
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
@pytest.mark.parametrize("form", ["handle", "handle_async"])
async def test_each_kind_of_consumer_calls_the_handler_inside_of_its_middleware(
    *,
    engine: Engine,
    async_engine: AsyncEngine,
    bench: Bench,
    kind: type[Consumer | AsyncConsumer],
    form: str,
    concurrency: int,
) -> None:
    numbers: list[int] = []
    failing = Failing()
    consumer = kind(bench.url, concurrency=concurrency, middleware=[failing])

    def handle(message: Message[Order], session: Session) -> None:
        numbers.append(message.body.number)
        effect(message, session)

    async def handle_async(message: Message[Order], session: AsyncSession) -> None:
        numbers.append(message.body.number)
        await effect_async(message, session)

    if form == "handle":
        consumer.on(TOPIC, handle, model=Order, once_in=engine)
    else:
        consumer.on(TOPIC, handle_async, model=Order, once_in=async_engine)
    ids = bench.send(TOPIC, [Order(number) for number in range(8)])
    with bench.manager(TOPIC):
        if isinstance(consumer, AsyncConsumer):
            async with consumer:
                await asyncio.to_thread(bench.wait_acked, 8)
        else:
            with consumer:
                await asyncio.to_thread(bench.wait_acked, 8)
    assert sorted(effects(engine)) == sorted(ids)
    assert sorted(numbers) == list(range(8))
    assert failing.delivered == dict.fromkeys(ids, 2)


@ON_SQLITE
def test_a_message_that_is_sent_again_has_an_effect_again_in_each_group(
    engine: Engine, bench: Bench
) -> None:
    consumer = Consumer(bench.url)
    for group in ("lisa", "mail"):
        bench.declare(TOPIC, group)
        consumer.on(TOPIC, effect, once_in=engine, group=group)
    with bench.manager(TOPIC), consumer, Producer(bench.url) as producer:
        for count in (1, 2):
            producer.send(TOPIC, count, id="a", on_duplicate="replace")
            bench.wait_acked(count)
            bench.wait_acked(count, group="mail")
    assert effects(engine) == ["a"] * 4


@ON_SQLITE
@pytest.mark.skipif(no_clock() is not None, reason=str(no_clock()))
def test_the_test_kit_calls_handlers_with_their_session(
    engine: Engine, async_engine: AsyncEngine
) -> None:
    def handle(message: Message, session: Session) -> None:
        effect(message, session)
        if message.attempt == 1:
            raise ValueError("first")

    consumer = Consumer(middleware=[Failing()])
    consumer.on(TOPIC, handle, once_in=engine)
    consumer.on("mails", effect_async, once_in=async_engine)
    with ClockedServer() as server, LisaTestKit(server) as kit:
        kit.attach(consumer)
        first = kit.producer.send(TOPIC, 1, delay="1d", retry="1m,1m")
        second = kit.producer.send("mails", 1, delay="2d", retry="1m,1m")
        kit.advance(days=3)
        outcomes = [(one.message.topic, one.outcome) for one in kit.attempts()]
    assert outcomes == [
        *[(TOPIC, "retrying"), (TOPIC, "retrying"), (TOPIC, "handled")],
        *[("mails", "retrying"), ("mails", "handled")],
    ]
    assert effects(engine) == [first, second]
