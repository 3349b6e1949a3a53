"""Middleware around sends and handlers, without a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lisa import (
    Batch,
    ConfigError,
    Discard,
    DuplicateMessage,
    InvalidMessage,
    Message,
    Middleware,
    Outgoing,
    SendCall,
    SendOutcome,
)
from lisa.consumer.handlers import Handlers
from lisa.consumer.inflight import Held, Outcome
from lisa.consumer.invoke import on_batch, on_message_async, on_message_sync
from lisa.core.redis.flow import adrive, drive
from lisa.testing import AsyncRecordingProducer, RecordingProducer
from tests.unit.deliveries import held, no_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

TOPIC = "orders"


class Traced(Middleware):
    """Records the order of all calls, in every form."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    def send(
        self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
    ) -> Sequence[SendOutcome]:
        self.events.append(f"{self.name} sends {len(call)}")
        try:
            return call_next(call)
        finally:
            self.events.append(f"{self.name} sent")

    async def send_async(
        self, call: SendCall, call_next: Callable[[SendCall], Awaitable[Sequence[SendOutcome]]]
    ) -> Sequence[SendOutcome]:
        self.events.append(f"{self.name} sends {len(call)}")
        try:
            return await call_next(call)
        finally:
            self.events.append(f"{self.name} sent")

    def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
        self.events.append(f"{self.name} handles {message.body}")
        try:
            return call_next(message)
        except ValueError as error:
            self.events.append(f"{self.name} sees {error}")
            raise

    async def handle_async(
        self, message: Message, call_next: Callable[[Message], Awaitable[Any]]
    ) -> Any:
        self.events.append(f"{self.name} handles {message.body}")
        try:
            return await call_next(message)
        except ValueError as error:
            self.events.append(f"{self.name} sees {error}")
            raise

    def handle_batch(self, batch: Batch, call_next: Callable[[Batch], Any]) -> Any:
        self.events.append(f"{self.name} handles {len(batch)}")
        return call_next(batch)

    async def handle_batch_async(
        self, batch: Batch, call_next: Callable[[Batch], Awaitable[Any]]
    ) -> Any:
        self.events.append(f"{self.name} handles {len(batch)}")
        return await call_next(batch)


class Tenant(Middleware):
    def send(
        self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
    ) -> Sequence[SendOutcome]:
        call.set_header("tenant", "a")
        return call_next(call)


class OnlyHandle(Middleware):
    def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
        return call_next(message)


def handlers_with(*middleware: Middleware) -> Handlers:
    handlers = Handlers()
    handlers.use(middleware)
    return handlers


def outcome_of(handlers: Handlers, one: Held) -> Outcome:
    return on_message_sync(handlers.plan(TOPIC), one, no_wait)


# Sends


def test_the_first_is_the_outermost_around_each_kind_of_send() -> None:
    events: list[str] = []
    producer = RecordingProducer(middleware=[Traced("outer", events), Traced("inner", events)])
    assert producer.send(TOPIC, 1) == producer.sent[0].id
    assert events == ["outer sends 1", "inner sends 1", "inner sent", "outer sent"]
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
    assert events == ["a sends 1", "b sends 1", "b sent", "a sent"]
    events.clear()
    await asyncio.gather(*(producer.send(TOPIC, n) for n in range(3)))
    assert events.count("a sends 1") == 3
    assert (await producer.send_many(TOPIC, range(300))).accepted == 300
    assert len([one async for one in producer.send_stream(TOPIC, range(2))]) == 2
    assert [one for one in events if one.startswith("a sends")][3:] == [
        "a sends 250",
        "a sends 50",
        "a sends 2",
    ]


def test_middleware_changes_headers_bodies_options_and_topic() -> None:
    class Changes(Tenant):
        def send(
            self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
        ) -> Sequence[SendOutcome]:
            call.bodies = [body * 10 for body in call.bodies]
            call.set_header("kept", "new", replace=False)
            assert "delay" not in call.options, "left by the call before"
            call.options["delay"] = "1h"
            call.topic = f"{call.topic}.eu"
            return super().send(call, call_next)

    producer = RecordingProducer(middleware=[Changes()])
    options = {"a": "b", "kept": "old"}
    producer.send_many(
        TOPIC, [1, Outgoing(2, id="x"), Outgoing(3, headers={"tenant": "z"})], headers=options
    )
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
        def send(
            self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
        ) -> Sequence[SendOutcome]:
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


def test_middleware_sees_the_errors_of_a_send() -> None:
    events: list[str] = []
    producer = RecordingProducer(middleware=[Traced("a", events)])
    with pytest.raises(InvalidMessage):
        producer.send(TOPIC, object())
    assert events == ["a sends 1", "a sent"]


def test_invalid_options_are_refused_before_the_middleware() -> None:
    untyped: Any = RecordingProducer(middleware=[Tenant()])
    for headers in (["a"], {"a": 1}):
        with pytest.raises(InvalidMessage, match="headers are"):
            untyped.send(TOPIC, 1, headers=headers)
        with pytest.raises(InvalidMessage, match="headers are"):
            untyped.send_many(TOPIC, [1], headers=headers)
        with pytest.raises(InvalidMessage, match="headers are"):
            untyped.send_many(TOPIC, [Outgoing(1, headers=headers)])  # type: ignore[arg-type]


def test_middleware_that_forgets_to_return_is_told() -> None:
    class Forgets(Middleware):
        def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
            call_next(call)

    with pytest.raises(TypeError, match="must return the 1 outcomes that call_next returned"):
        RecordingProducer(middleware=[Forgets()]).send(TOPIC, 1)


def test_as_many_bodies_are_needed() -> None:
    call = SendCall(TOPIC, [1, 2], {})
    with pytest.raises(InvalidMessage, match="1 bodies cannot replace 2"):
        call.bodies = [1]
    assert repr(call) == "<SendCall of 2 on 'orders'>"


# Handlers


def test_a_handler_runs_inside_its_middleware() -> None:
    events: list[str] = []
    handlers = handlers_with(Traced("outer", events), Traced("inner", events))
    handlers.add(TOPIC, lambda message: events.append(f"handler {message.body}"))
    assert outcome_of(handlers, held(body=1)) is None
    assert events == ["outer handles 1", "inner handles 1", "handler 1"]


def test_middleware_sees_failures_and_they_keep_their_meaning() -> None:
    def fails(_message: Message) -> None:
        raise ValueError("broken")

    events: list[str] = []
    handlers = handlers_with(Traced("a", events))
    handlers.add(TOPIC, fails)
    outcome = outcome_of(handlers, held(body=1))
    assert outcome is not None
    assert "broken" in outcome.reason
    assert events == ["a handles 1", "a sees broken"]


def test_middleware_can_discard_skip_and_refuse_by_its_result() -> None:
    class Decides(Middleware):
        def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
            if message.body == "discard":
                raise Discard("not wanted")
            return {"skip": None, "refuse": False}[message.body]

    handlers = handlers_with(Decides())
    handlers.add(TOPIC, lambda _: pytest.fail("the handler was called"))
    assert outcome_of(handlers, held(body="skip")) is None
    discarded, refused = (
        outcome_of(handlers, held(body="discard")),
        outcome_of(handlers, held(body="refuse")),
    )
    assert discarded is not None
    assert discarded.is_discard
    assert discarded.reason == "not wanted"
    assert refused is not None
    assert "returned False" in refused.reason


def test_the_body_is_decoded_before_and_may_be_replaced() -> None:
    class Order(msgspec.Struct):
        order: int

    class Doubles(Middleware):
        def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
            body = Order(message.body.order * 2)
            return call_next(msgspec.structs.replace(message, body=body))

    seen: list[object] = []
    handlers = handlers_with(Doubles())
    handlers.add(TOPIC, lambda message: seen.append(message.body), model=Order)
    assert outcome_of(handlers, held(body={"order": 21})) is None
    assert seen == [Order(42)]


async def test_async_handlers_run_inside_the_async_form() -> None:
    async def handler(message: Message) -> None:
        await asyncio.sleep(0)
        if message.body == 2:
            raise ValueError("broken")
        events.append("handler")

    events: list[str] = []
    handlers = handlers_with(Traced("a", events), Traced("b", events))
    handlers.add(TOPIC, handler)
    plan = handlers.plan(TOPIC)
    assert plan.is_async
    assert await on_message_async(plan, held(body=1)) is None
    assert await on_message_async(plan, held(body=2)) is not None
    assert events == [
        *("a handles 1", "b handles 1", "handler"),
        *("a handles 2", "b handles 2", "b sees broken", "a sees broken"),
    ]


def test_batch_handlers_run_inside_the_batch_form_and_fail_messages() -> None:
    def handler(batch: Batch) -> None:
        batch.fail(batch[1], "broken")

    events: list[str] = []
    handlers = handlers_with(Traced("a", events))
    handlers.add(TOPIC, handler, batch=10)
    outcomes = drive(on_batch(handlers.plan(TOPIC), [held("a", 1), held("b", 2)]), no_wait)
    assert [one is None for one in outcomes] == [True, False]
    assert events == ["a handles 2"]


async def test_async_batch_handlers_run_inside_the_async_batch_form() -> None:
    async def handler(_batch: Batch) -> bool:
        await asyncio.sleep(0)
        return False

    events: list[str] = []
    handlers = handlers_with(Traced("a", events))
    handlers.add(TOPIC, handler, batch=10)
    outcomes = await adrive(on_batch(handlers.plan(TOPIC), [held(body=1)]), None)
    assert [one is None for one in outcomes] == [False]
    assert events == ["a handles 1"]


def test_receivers_of_the_signal_run_inside_middleware_and_each_handler_has_its_own_call() -> None:
    events: list[str] = []
    handlers = handlers_with(Traced("a", events))

    def receiver(topic: str, *, message: Message) -> None:
        events.append(f"receiver {topic} {message.body}")

    handlers.signals.received.connect(receiver, sender=TOPIC)
    handlers.add(TOPIC, lambda _: events.append("handler"))
    assert outcome_of(handlers, held(body=1)) is None
    assert sorted(events) == ["a handles 1", "a handles 1", "handler", "receiver orders 1"]


def test_middleware_that_is_added_later_applies_to_earlier_handlers() -> None:
    events: list[str] = []
    handlers = Handlers()
    handlers.add(TOPIC, lambda _: None)
    handlers.use([Traced("a", events)])
    outcome_of(handlers, held(body=1))
    assert events == ["a handles 1"]


def test_without_middleware_the_handler_is_called_directly() -> None:
    def handler(_message: Message) -> None: ...

    handlers = Handlers()
    handlers.add(TOPIC, handler)
    (receiver,) = handlers.plan(TOPIC).receivers
    assert receiver.run is handler


# Mistakes


async def an_async_handler(_message: Message) -> None: ...


async def an_async_receiver(topic: str, *, message: Message) -> None: ...


def test_a_missing_form_is_refused_when_the_handler_is_registered() -> None:
    handlers = handlers_with(Tenant(), OnlyHandle())
    said = "an_async_handler needs the method handle_async of the middleware .*OnlyHandle, which"
    with pytest.raises(ConfigError, match=said):
        handlers.add(TOPIC, an_async_handler)
    with pytest.raises(ConfigError, match=r"needs the method handle_batch .* has only handle$"):
        handlers.add(TOPIC, print, batch=2)
    assert handlers.topics() == []
    handlers.signals.received.connect(an_async_receiver, sender=TOPIC)
    plan = handlers.plan(TOPIC)
    with pytest.raises(ConfigError, match="an_async_receiver needs the method handle_async of"):
        plan.check()
    outcome = on_message_sync(
        plan, held(body=1), lambda _: None
    )  # it was connected after the start
    assert outcome is not None
    assert "needs the method handle_async" in outcome.reason
    early = Handlers()
    early.add(TOPIC, an_async_handler)
    with pytest.raises(ConfigError, match="needs the method handle_async"):
        early.use([OnlyHandle()])


def test_a_missing_form_is_refused_when_the_producer_is_created() -> None:
    with pytest.raises(ConfigError, match="AsyncRecordingProducer needs the method send_async of"):
        AsyncRecordingProducer(middleware=[Tenant()])
    RecordingProducer(middleware=[OnlyHandle()]).send(TOPIC, 1)


def test_what_is_no_middleware_is_refused() -> None:
    class Wrong(Middleware):
        async def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any: ...

    class NotAsync(Middleware):
        def send_async(self, call: SendCall, call_next: Any) -> Any: ...

    untyped: Any = RecordingProducer
    for middleware, said in (
        (Tenant, r"Tenant is a class; give an object"),
        (
            "shop:Tenant",
            "'shop:Tenant' is not middleware; subclass lisa.Middleware",
        ),
        (Wrong(), r"handle of the middleware .*Wrong must not be `async def`"),
        (NotAsync(), r"send_async of the middleware .*NotAsync must be `async def`"),
    ):
        with pytest.raises(ConfigError, match=said):
            untyped(middleware=[middleware])


class Silent(Middleware):
    """Middleware that is idle while `is_off`, and counts its sends."""

    def __init__(self) -> None:
        self.is_off, self.sends = True, 0

    def is_idle(self) -> bool:
        return self.is_off

    def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
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
