"""Handlers without a server: their signatures, blocked event loops, and tracebacks."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

import lisa
from lisa import ConfigError, Consumer
from lisa.consumer import loop_watch
from lisa.consumer.handlers import Handlers
from lisa.consumer.invoke import on_message_sync
from lisa.consumer.receivers import HandlerPlan, Receiver
from lisa.consumer.tasks import AppLoop, HandlerTasks
from lisa.core.model.outcomes import traceback_of

if TYPE_CHECKING:
    from lisa import Message

# Signatures


def takes_two(message: object, user: object) -> None: ...


def wrapped_by_a_decorator(function: Callable[..., Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def call(message: object) -> Any:
        return function(message, "bound")

    return call


class Shop:
    def method(self, message: Message) -> None: ...
    def __call__(self, message: Message) -> None: ...
    @classmethod
    def of_class(cls, message: Message) -> None: ...
    @staticmethod
    def static(message: Message) -> None: ...


async def asynchronous(message: Message) -> None: ...
def without_arguments() -> None: ...
def keyword_only(*, message: Message) -> None: ...
def needs_a_keyword(message: Message, *, user: object) -> None: ...
def of_a_signal(topic: str, *, message: object) -> None: ...


def generator(*_: object, **__: object) -> Iterator[None]:
    yield


async def asynchronous_generator(*_: object, **__: object) -> AsyncIterator[None]:
    yield


class CalledAsGenerator:
    def __call__(self, *_: object, **__: object) -> Iterator[None]:
        yield


ACCEPTED = [
    print,
    [].append,
    int,
    dict.fromkeys,
    {}.update,
    Mock(),
    asynchronous,
    Shop().method,
    Shop(),
    Shop.of_class,
    Shop.static,
    lambda message, user=None: None,
    lambda *messages: None,
    lambda message, **options: None,
    functools.partial(takes_two, user="a"),
    functools.partial(of_a_signal, message="a"),
    wrapped_by_a_decorator(takes_two),
]


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("handler", ACCEPTED)
def test_handlers_of_one_argument_are_accepted(
    handler: Callable[..., Any], batch: int | None
) -> None:
    assert Consumer().on("orders", handler, batch=batch) is handler


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (takes_two, "missing a required argument: 'user'"),
        (Shop.method, "missing a required argument: 'message'"),
        (Shop, "too many positional arguments"),
        (without_arguments, "too many positional arguments"),
        (keyword_only, "too many positional arguments"),
        (needs_a_keyword, "missing a required"),
        (of_a_signal, "missing a required"),
        (functools.partial(takes_two, 1, 2), "too many positional arguments"),
        (generator, "generator contains yield"),
        (asynchronous_generator, "contains yield"),
        (functools.partial(generator), "contains yield"),
        (CalledAsGenerator(), "CalledAsGenerator contains yield"),
    ],
)
def test_other_handlers_are_refused_when_they_are_registered(
    handler: Callable[..., Any], why: str
) -> None:
    consumer = Consumer()
    with pytest.raises(ConfigError, match=why):
        consumer.on("orders", handler)
    with pytest.raises(ConfigError, match=why):
        consumer.subscribe("orders", handler)
    assert consumer.topics() == []


def test_the_refusal_names_the_handler_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        Consumer().on("orders", takes_two, batch=10)
    assert str(caught.value) == (
        f"topic 'orders': the handler {__name__}.takes_two must take one positional argument, the "
        "batch: missing a required argument: 'user'; define it as takes_two(batch), and give other "
        "arguments defaults or bind them with functools.partial"
    )


def test_a_decorator_without_a_topic_is_refused() -> None:
    consumer: Any = Consumer()
    with pytest.raises(ConfigError, match=r"write @consumer.on\('TOPIC'\)"):

        @consumer.on  # type: ignore[untyped-decorator]
        def handle(message: Message) -> None: ...


def keywords(topic: str, **named: object) -> None: ...


@pytest.mark.parametrize("receiver", [of_a_signal, keywords, functools.partial(of_a_signal)])
def test_receivers_of_signals_take_the_topic_and_the_message(receiver: Callable[..., Any]) -> None:
    signal = Consumer().message_received
    assert signal.connect(receiver, sender="orders", weak=False) is receiver
    assert list(signal.receivers_for("orders")) == [receiver]


@pytest.mark.parametrize(
    ("receiver", "why"),
    [
        (without_arguments, "too many positional arguments"),
        (Shop().method, "multiple values for argument 'message'"),
        (keyword_only, "too many positional arguments"),
        (takes_two, "multiple values for argument 'message'"),
        (5, "not callable: 5"),
        (generator, "contains yield"),
        (asynchronous_generator, "contains yield"),
    ],
)
@pytest.mark.parametrize("name", ["received", "acked", "retrying", "dead", "expired"])
def test_other_receivers_are_refused_when_they_are_connected(
    receiver: Any, why: str, name: str
) -> None:
    for signals in (Consumer(), lisa):
        signal = getattr(signals, f"message_{name}")
        for connect in (signal.connect, signal.connect_via("orders")):
            with pytest.raises(ConfigError, match=why):
                connect(receiver)
        assert not list(signal.receivers_for("orders"))


def test_the_refusal_of_a_receiver_names_it_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        Consumer().message_dead.connect(without_arguments)
    assert str(caught.value) == (
        f"the receiver {__name__}.without_arguments of a signal must take the topic and the "
        "message: too many positional arguments; define it as without_arguments(topic, *, message)"
    )


# Handlers that block the event loop


def blocks(gate: threading.Event) -> None:
    gate.wait(10)


async def blocking_handler(gate: threading.Event) -> None:
    blocks(gate)


async def patient_handler(gate: threading.Event) -> None:
    await asyncio.to_thread(gate.wait, 10)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandlerTasks]:
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.05)
    found = HandlerTasks(Handlers(), Mock())
    yield found
    found.close()


def checked_while(
    tasks: HandlerTasks, handler: Callable[[threading.Event], Awaitable[None]], times: int
) -> None:
    """Check the loop while a handler runs, and wait for the handler's end."""
    gate, ended = threading.Event(), threading.Event()
    tasks.spawn(handler(gate)).add_done_callback(lambda _: ended.set())
    for _ in range(times):
        tasks.check_loop()
        time.sleep(0.06)
    gate.set()
    assert ended.wait(10)
    tasks.check_loop()
    tasks.check_loop()


def test_a_handler_that_blocks_the_loop_is_named_once(
    tasks: HandlerTasks, caplog: pytest.LogCaptureFixture
) -> None:
    checked_while(tasks, blocking_handler, 10)
    [said] = caplog.messages
    assert said.startswith(f"{__name__}.blocking_handler blocks the event loop for 0.")
    line = blocking_handler.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line} (in {__name__}.blocks)" in said
    checked_while(tasks, blocking_handler, 3)
    assert len(caplog.messages) == 1


async def test_a_blocked_loop_of_the_application_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.05)
    app = AppLoop(asyncio.get_running_loop(), threading.current_thread(), copy_context())
    tasks, gate = HandlerTasks(Handlers(), Mock(), app), threading.Event()

    def check() -> None:
        while not caplog.messages:
            tasks.check_loop()
            time.sleep(0.01)
        gate.set()

    checking = threading.Thread(target=check)
    checking.start()
    await blocking_handler(gate)
    await asyncio.to_thread(checking.join)
    [said] = caplog.messages
    assert f"(in {__name__}.blocks)" in said


def test_a_handler_that_awaits_blocks_nothing(
    tasks: HandlerTasks, caplog: pytest.LogCaptureFixture
) -> None:
    checked_while(tasks, patient_handler, 3)
    assert caplog.messages == []


def test_a_loop_that_is_absent_or_closed_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    tasks = HandlerTasks(Handlers(), Mock())
    tasks.check_loop()
    tasks.wait(asyncio.sleep(0))
    tasks.close()
    tasks.check_loop()
    assert caplog.messages == []


# Tracebacks


def raised(function: Callable[..., object], *arguments: object) -> Exception:
    try:
        function(*arguments)
    except (KeyError, ValueError) as error:
        return error
    raise AssertionError("nothing was raised")


def deep(n: int, text: str) -> None:
    if n:
        deep(n - 1, text)
    raise ValueError(text)


def test_a_traceback_is_without_frames_of_lisa() -> None:
    def fails(_: object) -> None:
        deep(1, "no stock")

    plan = HandlerPlan((Receiver(fails),), None)
    verdict = on_message_sync(plan, Mock(), Mock())
    assert verdict is not None
    assert verdict.error is not None
    found = traceback_of(verdict.error)
    head, first, *_ = found.splitlines()
    assert head == "Traceback (most recent call last):"
    assert first.endswith("in fails")
    assert f'"{__file__}", line ' in first
    assert found.endswith("\nValueError: no stock")


@pytest.mark.parametrize(
    ("n", "text"), [(500, "no"), (3, "ü" * 900), (3, "ü" * 5000), (3, "n\n" * 5000)]
)
def test_a_traceback_is_bounded_and_keeps_its_end(n: int, text: str) -> None:
    found = traceback_of(raised(deep, n, text))
    assert len(found.encode()) <= 2048
    assert found.endswith(text.rstrip()[-200:])
    if len(text) > 900:
        assert found.startswith("...\n")


def test_the_cause_is_part_of_the_traceback() -> None:
    def fails() -> None:
        try:
            deep(0, "first")
        except ValueError as error:
            raise KeyError("second") from error

    found = traceback_of(raised(fails))
    assert found.index("ValueError: first") < found.index("KeyError: 'second'")
