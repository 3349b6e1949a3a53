"""Middleware around sends, and mistakes in middleware, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lisa import (
    ConfigError,
    Consumer,
    DuplicateMessage,
    InvalidMessage,
    Message,
    Middleware,
    Outgoing,
    SendCall,
)
from lisa.testing import AsyncRecordingProducer, RecordingProducer

TOPIC = "orders"
Next = Callable[[Any], Any]


class Traced(Middleware):
    """Records the order of all sends."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    @contextmanager
    def _traced(self, call: SendCall) -> Iterator[None]:
        self.events.append(f"{self.name} sends {len(call)}")
        try:
            yield
        finally:
            self.events.append(f"{self.name} sent")

    def send(self, call: SendCall, call_next: Next) -> Any:
        with self._traced(call):
            return call_next(call)

    async def send_async(self, call: SendCall, call_next: Next) -> Any:
        with self._traced(call):
            return await call_next(call)


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
    with pytest.raises(InvalidMessage):
        producer.send(TOPIC, object())
    assert events == ["outer sends 1", "inner sends 1", "inner sent", "outer sent"] * 2
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


# Mistakes


async def an_async_handler(_message: Message) -> None: ...


def test_a_missing_form_is_refused_when_the_role_or_handler_is_registered() -> None:
    consumer = Consumer(middleware=[Tenant(), OnlyHandle()])
    said = "an_async_handler needs the method handle_async of the middleware .*OnlyHandle, which"
    with pytest.raises(ConfigError, match=said):
        consumer.on(TOPIC, an_async_handler)
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
