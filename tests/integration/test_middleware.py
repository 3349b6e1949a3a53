"""Middleware of running consumers and producers, from code and from settings."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lisa import (
    AsyncConsumer,
    Batch,
    Consumer,
    Discard,
    Message,
    Middleware,
    Producer,
    SendCall,
    Settled,
)
from lisa.core.model.errors import ConfigError
from tests.consumers import Bench, ignore, settled
from tests.servers import Processes, wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


Next = Callable[[Any], Any]


class Watches(Middleware):
    """Records what it sees of messages, and fails the first attempt."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.threads: set[str] = set()
        self.settled_calls: list[Settled] = []

    def see(self, message: Message) -> None:
        self.seen.append((message.attempt, message.headers["tenant"]))
        self.threads.add(threading.current_thread().name)
        if message.attempt == 1:
            raise ValueError("the first attempt")

    def handle(self, message: Message, call_next: Next) -> Any:
        self.see(message)
        return call_next(message)

    async def handle_async(self, message: Message, call_next: Next) -> Any:
        self.see(message)
        return await call_next(message)

    def settled(self, settled: Settled) -> None:
        self.settled_calls.append(settled)
        raise ValueError("is logged")


class Tenant(Middleware):
    def send(self, call: SendCall, call_next: Next) -> Any:
        call.set_header("tenant", "a")
        return call_next(call)


async def ignore_async(message: Message) -> None: ...


@pytest.mark.parametrize("kind", ["threads", "loop", "application's loop"])
async def test_an_error_of_middleware_retries_the_message_and_settlements_are_told(
    bench: Bench, kind: str
) -> None:
    bench.configure(TOPIC, retry_delays="0,0")
    watch = Watches()
    made = AsyncConsumer if kind == "application's loop" else Consumer
    consumer = made(bench.url, middleware=[watch])
    consumer.on(TOPIC, ignore if kind == "threads" else ignore_async)
    with Producer(bench.url, middleware=[Tenant()]) as producer:
        sent = producer.send(TOPIC, 1)
    async with AsyncExitStack() as stack:
        stack.enter_context(bench.manager(TOPIC))
        if isinstance(consumer, AsyncConsumer):
            await stack.enter_async_context(consumer)
        else:
            stack.enter_context(consumer)
        await asyncio.to_thread(wait_until, settled(bench, sent))
    assert watch.seen == [(1, "a"), (2, "a")]
    in_main_thread = watch.threads == {threading.current_thread().name}
    assert in_main_thread == (kind == "application's loop")
    told = [
        (one.operation, [message.id for message in one.messages]) for one in watch.settled_calls
    ]
    assert told == [("retry", [sent]), ("ack", [sent])]
    retried = watch.settled_calls[0]
    assert (retried.topic, retried.group, retried.error) == (TOPIC, "lisa", None)
    assert retried.seconds is not None


class Traced(Middleware):
    """Records the order of calls, in every form."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    @contextmanager
    def _seen(self, given: Any) -> Iterator[None]:
        bodies = [one.body for one in given] if isinstance(given, Batch) else given.body
        self.events.append(f"{self.name} {bodies}")
        try:
            yield
        except ValueError as error:
            self.events.append(f"{self.name} sees {error}")
            raise

    def handle(self, message: Any, call_next: Next) -> Any:
        with self._seen(message):
            return call_next(message)

    async def handle_async(self, message: Any, call_next: Next) -> Any:
        with self._seen(message):
            return await call_next(message)

    handle_batch = handle  # type: ignore[assignment]
    handle_batch_async = handle_async  # type: ignore[assignment]


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_handlers_run_inside_their_middleware(
    bench: Bench, batch: int | None, *, is_async: bool
) -> None:
    bench.configure(TOPIC, retry_delays="1h")
    events: list[str] = []
    consumer = Consumer(bench.url, middleware=[Traced("outer", events), Traced("inner", events)])

    def handle(given: Any) -> None:
        body = given[0].body if batch else given.body
        events.append("handler")
        if body == 2:
            raise ValueError("broken")

    async def handle_async(given: Any) -> None:
        await asyncio.sleep(0)
        handle(given)

    def receive(topic: str, *, message: Message) -> None:
        events.append(f"receiver of {message.body}")

    consumer.on(TOPIC, handle_async if is_async else handle, batch=batch)
    if not batch:
        consumer.message_received.connect(receive, sender=TOPIC)
    good, bad = bench.send(TOPIC, [1, 2])
    with consumer:
        wait_until(lambda: bench.states(TOPIC, bad) == ["retry"])
        wait_until(settled(bench, good))
    one, two = ("[1]", "[2]") if batch else ("1", "2")
    failed = [f"outer {two}", f"inner {two}", "handler", "inner sees broken", "outer sees broken"]
    handled = [f"outer {one}", f"inner {one}", "handler", *failed]
    received = [x for n in (1, 2) for x in (f"outer {n}", f"inner {n}", f"receiver of {n}")]
    assert Counter(events) == Counter(handled if batch else [*handled, *received])
    assert events.index("inner sees broken") < events.index("outer sees broken")
    assert events[:2] == [f"outer {one}", f"inner {one}"]


class Order(msgspec.Struct):
    number: int


class Decides(Middleware):
    def handle(self, message: Message[Order], call_next: Next) -> Any:
        if message.body.number == 0:
            raise Discard("not wanted")
        if message.body.number < 3:
            return {1: None, 2: False}[message.body.number]
        return call_next(msgspec.structs.replace(message, body=Order(message.body.number * 2)))


def test_middleware_may_discard_skip_refuse_and_replace_the_decoded_body(bench: Bench) -> None:
    seen: list[Message] = []
    consumer = Consumer(bench.url, middleware=[Decides()])
    consumer.on(TOPIC, seen.append, model=Order)
    discarded, skipped, refused, doubled = bench.send(TOPIC, [{"number": n} for n in range(4)])
    with consumer:
        wait_until(lambda: bench.states(TOPIC, discarded) == ["garbage"])
        wait_until(lambda: bench.states(TOPIC, refused) == ["retry"])
        wait_until(settled(bench, skipped))
        wait_until(settled(bench, doubled))
    assert [message.body for message in seen] == [Order(6)]
    reasons = [bench.inspect(TOPIC, one).group_states[0].reason for one in (discarded, refused)]
    assert reasons == ["not wanted", "the handler returned False"]


MODULE = """
import lisa
from lisa import Consumer

class Tenant(lisa.Middleware):
    def send(self, call, call_next):
        call.set_header("tenant", "of the settings")
        return call_next(call)

    def handle(self, message, call_next):
        print("tenant", message.headers["tenant"], flush=True)
        return call_next(message)

shout = Tenant()
consumer = Consumer()
consumer.on("orders", lambda message: print("handled", message.body, flush=True))
"""


def test_settings_name_middleware_for_both_roles(
    bench: Bench, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shopware.py").write_text(MODULE)
    (tmp_path / "lisa.yml").write_text(
        "lisa-delay-queue:\n"
        f"  redis: {{url: {bench.url}}}\n"
        "  target: shopware:consumer\n"
        "  middleware: [shopware:shout]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Producer.from_config(tmp_path / "lisa.yml") as producer:
        assert producer.send(TOPIC, 1)
        process = processes.start("-m", "lisa.cli.consumer", "--config", "lisa.yml", cwd=tmp_path)
        process.wait_for("tenant of the settings")
        process.wait_for("handled 1")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("shop", "must be pkg.module:name"),
        ("nosuchmodule:Tenant", "cannot be imported: No module named"),
        ("lisa.middleware:Tenant", "cannot be imported: module 'lisa.middleware' has no attribute"),
        ("json:dumps", "is not middleware; subclass lisa.Middleware"),
    ],
)
def test_settings_that_lead_to_no_middleware_are_refused(
    path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISA_MIDDLEWARE", path)
    for role in (Producer, Consumer):
        with pytest.raises(ConfigError, match=said):
            role.from_config()
