"""Handlers without a server: their signatures and options, outcomes, and tracebacks."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

import lisa
from lisa import ConfigError, Consumer, InvalidMessage, Message, Retry
from lisa.core.model.outcomes import reason_of, traceback_of

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


def test_a_refusal_names_the_handler_or_receiver_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        Consumer().on("orders", takes_two, batch=10)
    assert str(caught.value) == (
        f"topic 'orders': the handler {__name__}.takes_two must take one positional argument, the "
        "batch: missing a required argument: 'user'; define it as takes_two(batch), and give other "
        "arguments defaults or bind them with functools.partial"
    )
    with pytest.raises(ConfigError) as caught:
        Consumer().message_dead.connect(without_arguments)
    assert str(caught.value) == (
        f"the receiver {__name__}.without_arguments of a signal must take the topic and the "
        "message: too many positional arguments; define it as without_arguments(topic, *, message)"
    )


def test_a_decorator_needs_a_topic_and_returns_the_handler() -> None:
    consumer: Any = Consumer()
    with pytest.raises(ConfigError, match=r"write @consumer.on\('TOPIC'\)"):
        consumer.on(print)
    assert consumer.on("orders")(print) is print


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"batch": True},
        {"within": "50ms"},
        {"batch": 5, "within": "soon"},
        {"timeout": "0"},
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": "2"},
        {"retry": "soon"},
    ],
)
def test_invalid_handler_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="orders"):
        Consumer().on("orders", print, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"poll_batch_size": 0},
        {"poll_timeout": timedelta(0)},
        {"poll_timeout": timedelta(microseconds=999)},
        {"prefix": "{"},
        {"name": ""},
    ],
)
def test_invalid_consumer_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Consumer(**options)


def test_handlers_of_a_topic_share_its_options() -> None:
    consumer = Consumer()
    consumer.on("orders", print, retry="1s,2s", concurrency=2)
    consumer.on("orders", print)
    consumer.on("orders", print, retry=["1s", "2s"])
    for options in ({"retry": "1s"}, {"concurrency": 3}):
        with pytest.raises(
            ConfigError, match=f"another handler has a different {next(iter(options))}="
        ):
            consumer.on("orders", print, **options)
    consumer.unsubscribe("orders")
    consumer.on("orders", print, retry="1s")


@pytest.mark.parametrize("pause", [5, 0.5, timedelta(minutes=5)])
def test_a_pause_as_the_reason_of_a_retry_is_refused(pause: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"write Retry\(delay="):
        Retry(pause)
    assert str(Retry(ValueError("busy"))) == "busy"  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="ends beyond the year 9999"):
        Retry(delay=timedelta.max)


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
@pytest.mark.parametrize("name", ["received", "dead"])
def test_other_receivers_are_refused_when_they_are_connected(
    receiver: Any, why: str, name: str
) -> None:
    for signals in (Consumer(), lisa):
        signal = getattr(signals, f"message_{name}")
        for connect in (signal.connect, signal.connect_via("orders")):
            with pytest.raises(ConfigError, match=why):
                connect(receiver)
        assert not list(signal.receivers_for("orders"))


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


def test_reasons_and_tracebacks_are_bounded_and_a_traceback_keeps_its_end() -> None:
    assert (reason_of(ValueError("none")), reason_of(KeyError())) == (
        "ValueError: none",
        "KeyError",
    )
    assert len(reason_of(ValueError("ü" * 2000)).encode()) in (1023, 1024)
    for n, text in [(500, "no"), (3, "ü" * 900), (3, "ü" * 5000), (3, "n\n" * 5000)]:
        found = traceback_of(raised(deep, n, text))
        assert len(found.encode()) <= 2048
        assert found.endswith(text.rstrip()[-200:])
        assert found.startswith("...\n") or len(text) <= 900


def test_the_cause_is_part_of_the_traceback() -> None:
    def fails() -> None:
        try:
            deep(0, "first")
        except ValueError as error:
            raise KeyError("second") from error

    found = traceback_of(raised(fails))
    assert found.index("ValueError: first") < found.index("KeyError: 'second'")
