"""Middleware of producers and consumers, from code and from settings."""

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
    ConfigError,
    Consumer,
    Discard,
    DuplicateMessage,
    InvalidMessage,
    Message,
    Middleware,
    Outgoing,
    Producer,
    SendCall,
    Settled,
)
from lisa.testing import AsyncRecordingProducer, RecordingProducer
from tests.consumers import Bench, ignore, settled
from tests.servers import Processes, wait_until

declared = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
Next = Callable[[Any], Any]


class Traced(Middleware):
    """Records the begin and end of sends and of handlers' calls, in every form."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    @contextmanager
    def _traced(self, given: Any) -> Iterator[None]:
        if isinstance(given, SendCall):
            self.events.append(f"{self.name} sends {len(given)}")
        else:
            bodies = [one.body for one in given] if isinstance(given, Batch) else given.body
            self.events.append(f"{self.name} {bodies}")
        try:
            yield
        except Exception as error:
            self.events.append(f"{self.name} sees {type(error).__name__}")
            raise
        self.events.append(f"{self.name} ends")

    def send(self, call: Any, call_next: Next) -> Any:
        with self._traced(call):
            return call_next(call)

    async def send_async(self, call: Any, call_next: Next) -> Any:
        with self._traced(call):
            return await call_next(call)

    handle = handle_batch = send  # type: ignore[assignment]
    handle_async = handle_batch_async = send_async  # type: ignore[assignment]


class Tenant(Middleware):
    def send(self, call: SendCall, call_next: Next) -> Any:
        call.set_header("tenant", "a")
        return call_next(call)


class OnlyHandle(Middleware):
    def handle(self, message: Message, call_next: Next) -> Any:
        return call_next(message)


# Sends


def test_the_first_is_the_outermost_around_each_kind_of_send() -> None:
    events: list[str] = []
    producer = RecordingProducer(middleware=[Traced("outer", events), Traced("inner", events)])
    assert producer.send(TOPIC, 1) == producer.sent[0].id
    assert events == ["outer sends 1", "inner sends 1", "inner ends", "outer ends"]
    with pytest.raises(InvalidMessage):
        producer.send(TOPIC, object())
    assert events[-2:] == ["inner sees InvalidMessage", "outer sees InvalidMessage"]
    events.clear()
    assert producer.send_one(TOPIC, 1, id="x").id == "x"
    assert producer.send_many(TOPIC, [1, Outgoing(2, id="y")]).accepted == 2
    assert [one.id for one in producer.send_stream(TOPIC, [1, Outgoing(2, id="z")])][1] == "z"
    assert events.count("outer sends 2") == events.count("inner sends 2") == 2
    with pytest.raises(DuplicateMessage):
        producer.send(TOPIC, 1, id="x", on_duplicate="reject")


async def test_an_async_producer_awaits_the_async_form() -> None:
    events: list[str] = []
    producer = AsyncRecordingProducer(middleware=[Traced("a", events), Traced("b", events)])
    assert await producer.send(TOPIC, 1) == producer.sent[0].id
    assert events == ["a sends 1", "b sends 1", "b ends", "a ends"]
    events.clear()
    await asyncio.gather(*(producer.send(TOPIC, n) for n in range(3)))
    assert events.count("a sends 1") == 3
    assert (await producer.send_many(TOPIC, range(300))).accepted == 300
    assert len([one async for one in producer.send_stream(TOPIC, range(2))]) == 2
    sends = [event for event in events if event.startswith("a sends")]
    assert sends[3:] == ["a sends 250", "a sends 50", "a sends 2"]


def test_middleware_changes_headers_bodies_options_and_topic() -> None:
    class Changes(Tenant):
        def send(self, call: SendCall, call_next: Next) -> Any:
            call.bodies = [body * 10 for body in call.bodies]
            call.set_header("kept", "new", replace=False)
            assert "delay" not in call.options, "left by the call before"
            call.options["delay"] = "1h"
            call.topic = f"{call.topic}.eu"
            return super().send(call, call_next)

    producer = RecordingProducer(middleware=[Changes()])
    options = {"a": "b", "kept": "old"}
    bodies = [1, Outgoing(2, id="x"), Outgoing(3, headers={"tenant": "z"})]
    producer.send_many(TOPIC, bodies, headers=options)
    assert [(one.body, one.headers) for one in producer.sent] == [
        (10, {"a": "b", "kept": "old", "tenant": "a"}),
        (20, {"a": "b", "kept": "old", "tenant": "a"}),
        (30, {"tenant": "a", "kept": "new"}),
    ]
    assert producer.sent[1].id == "x"
    assert {(one.topic, str(one.delay)) for one in producer.sent} == {("orders.eu", "1:00:00")}
    assert producer.send_many(TOPIC, ["a"] * 251).accepted == 251
    assert options == {"a": "b", "kept": "old"}, "the caller's headers were changed"


def test_an_error_of_middleware_is_the_error_of_the_send() -> None:
    class Refuses(Middleware):
        def send(self, call: SendCall, call_next: Next) -> Any:
            if "secret" in call.bodies:
                raise InvalidMessage("no secrets")
            return call_next(call)

    producer = RecordingProducer(middleware=[Refuses()])
    with pytest.raises(InvalidMessage, match="no secrets"):
        producer.send(TOPIC, "secret")
    with pytest.raises(InvalidMessage, match="no secrets") as caught:
        producer.send_many(TOPIC, [*range(250), "secret"])
    assert caught.value.sent == len(producer.sent) == 250
    # An error below the middleware counts the messages of earlier calls, too.
    with pytest.raises(InvalidMessage, match="JSON") as caught:
        producer.send_many(TOPIC, [*range(250), 1, object()])
    assert caught.value.sent == 250


def test_invalid_options_are_refused_before_the_middleware() -> None:
    untyped: Any = RecordingProducer(middleware=[Tenant()])
    headers: Any
    for headers in (["a"], {"a": 1}):
        with pytest.raises(InvalidMessage, match="headers are"):
            untyped.send(TOPIC, 1, headers=headers)
        with pytest.raises(InvalidMessage, match="headers are"):
            untyped.send_many(TOPIC, [Outgoing(1, headers=headers)])


def test_middleware_that_forgets_to_return_or_drops_a_body_is_told() -> None:
    class Forgets(Middleware):
        def send(self, call: SendCall, call_next: Next) -> Any:
            call_next(call)

    with pytest.raises(TypeError, match="must return the 1 outcomes that call_next returned"):
        RecordingProducer(middleware=[Forgets()]).send(TOPIC, 1)
    call = SendCall(TOPIC, [1, 2], {})
    with pytest.raises(InvalidMessage, match="1 bodies cannot replace 2"):
        call.bodies = [1]
    assert repr(call) == "<SendCall of 2 on 'orders'>"


class Silent(Middleware):
    """Middleware that is idle while `is_off`, and counts its sends."""

    def __init__(self) -> None:
        self.is_off, self.sends = True, 0

    def is_idle(self) -> bool:
        return self.is_off

    def send(self, call: SendCall, call_next: Next) -> Any:
        self.sends += 1
        return call_next(call)


def test_sends_skip_middleware_while_all_of_it_is_idle() -> None:
    one, other = Silent(), Silent()
    producer = RecordingProducer(middleware=[one, other])
    producer.send("orders", 1)
    producer.send_many("orders", [1, 2])
    assert (one.sends, other.sends, len(producer.sent)) == (0, 0, 3)
    other.is_off = False
    producer.send("orders", 1)
    producer.send_many("orders", [1, 2])
    assert (one.sends, other.sends, len(producer.sent)) == (2, 2, 6)


# Handlers


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


async def ignore_async(message: Message) -> None: ...


@declared
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


@declared
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
    ends, sees = ["inner ends", "outer ends"], ["inner sees ValueError", "outer sees ValueError"]
    handled = [f"outer {one}", f"inner {one}", "handler", *ends]
    handled += [f"outer {two}", f"inner {two}", "handler", *sees]
    if batch:
        assert events == handled
    else:
        received = [[f"outer {n}", f"inner {n}", f"receiver of {n}", *ends] for n in (1, 2)]
        assert Counter(events) == Counter([*handled, *received[0], *received[1]])


class Order(msgspec.Struct):
    number: int


class Decides(Middleware):
    def handle(self, message: Message[Order], call_next: Next) -> Any:
        if message.body.number == 0:
            raise Discard("not wanted")
        if message.body.number < 3:
            return {1: None, 2: False}[message.body.number]
        return call_next(msgspec.structs.replace(message, body=Order(message.body.number * 2)))


@declared
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


# Settings and mistakes


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


@declared
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


NO_MIDDLEWARE = {
    "shop": "must be pkg.module:name",
    "nosuchmodule:Tenant": "cannot be imported: No module named",
    "lisa.middleware:Tenant": "cannot be imported: module 'lisa.middleware' has no attribute",
    "json:dumps": "is not middleware; subclass lisa.Middleware",
}


def test_settings_that_lead_to_no_middleware_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, said in NO_MIDDLEWARE.items():
        monkeypatch.setenv("LISA_MIDDLEWARE", path)
        for role in (Producer, Consumer):
            with pytest.raises(ConfigError, match=said):
                role.from_config()


def test_a_missing_form_is_refused_when_the_role_or_handler_is_registered() -> None:
    consumer = Consumer(middleware=[Tenant(), OnlyHandle()])
    said = "ignore_async needs the method handle_async of the middleware .*OnlyHandle, which"
    with pytest.raises(ConfigError, match=said):
        consumer.on(TOPIC, ignore_async)
    with pytest.raises(ConfigError, match=r"needs the method handle_batch .* has only handle$"):
        consumer.on(TOPIC, print, batch=2)
    assert consumer.topics() == []
    with pytest.raises(ConfigError, match="AsyncRecordingProducer needs the method send_async of"):
        AsyncRecordingProducer(middleware=[Tenant()])
    RecordingProducer(middleware=[OnlyHandle()]).send(TOPIC, 1)


def test_what_is_no_middleware_is_refused() -> None:
    class Wrong(Middleware):
        async def handle(self, message: Message, call_next: Next) -> Any: ...

    class NotAsync(Middleware):
        def send_async(self, call: SendCall, call_next: Any) -> Any: ...

    untyped: Any = RecordingProducer
    for middleware, said in (
        (Tenant, r"Tenant is a class; give an object"),
        ("shop:Tenant", "'shop:Tenant' is not middleware; subclass lisa.Middleware"),
        (Wrong(), r"handle of the middleware .*Wrong must not be `async def`"),
        (NotAsync(), r"send_async of the middleware .*NotAsync must be `async def`"),
    ):
        with pytest.raises(ConfigError, match=said):
            untyped(middleware=[middleware])
