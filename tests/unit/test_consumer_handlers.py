"""Handlers without a server: their signatures, options and models, outcomes, and tracebacks."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict, assert_type
from unittest.mock import Mock

import msgspec
import pydantic
import pytest

import lisa
from lisa import Batch, ConfigError, Consumer, Defer, Discard, InvalidMessage, Message, Retry
from lisa.consumer.handlers import BodyMismatch, decoder_for
from lisa.consumer.inflight import combined, verdict_of
from lisa.core.model.envelope import decode_envelope, encode_envelope
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


ACCEPTED: list[Any] = [
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


def test_handlers_of_one_argument_are_accepted() -> None:
    for handler in ACCEPTED:
        for batch in (None, 10):
            assert Consumer().on("orders", handler, batch=batch) is handler
    assert Consumer().on("orders")(print) is print


TOO_MANY = "too many positional arguments"
REFUSED: list[tuple[Any, str]] = [
    (takes_two, "missing a required argument: 'user'"),
    (Shop.method, "missing a required argument: 'message'"),
    (Shop, TOO_MANY),
    (without_arguments, TOO_MANY),
    (keyword_only, TOO_MANY),
    (needs_a_keyword, "missing a required"),
    (of_a_signal, "missing a required"),
    (functools.partial(takes_two, 1, 2), TOO_MANY),
    (generator, "generator contains yield"),
    (asynchronous_generator, "contains yield"),
    (functools.partial(generator), "contains yield"),
    (CalledAsGenerator(), "CalledAsGenerator contains yield"),
]


def test_other_handlers_are_refused_when_they_are_registered() -> None:
    consumer: Any = Consumer()
    for handler, why in REFUSED:
        for register in (consumer.on, consumer.subscribe):
            with pytest.raises(ConfigError, match=why):
                register("orders", handler)
    with pytest.raises(ConfigError, match=r"write @consumer.on\('TOPIC'\)"):
        consumer.on(print)
    assert consumer.topics() == []


def keywords(topic: str, **named: object) -> None: ...


REFUSED_RECEIVERS: list[tuple[Any, str]] = [
    (without_arguments, TOO_MANY),
    (Shop().method, "multiple values for argument 'message'"),
    (keyword_only, TOO_MANY),
    (5, "not callable: 5"),
    (generator, "contains yield"),
    (asynchronous_generator, "contains yield"),
]


def test_receivers_of_signals_take_the_topic_and_the_message() -> None:
    for receiver in (of_a_signal, keywords, functools.partial(of_a_signal)):
        signal = Consumer().message_received
        assert signal.connect(receiver, sender="orders", weak=False) is receiver
        assert list(signal.receivers_for("orders")) == [receiver]
    for owner in (Consumer(), lisa):
        for signal in (owner.message_received, owner.message_dead):
            for connect in (signal.connect, signal.connect_via("orders")):
                for refused, why in REFUSED_RECEIVERS:
                    with pytest.raises(ConfigError, match=why):
                        connect(refused)
            assert not list(signal.receivers_for("orders"))


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


# Options

HANDLER_OPTIONS: dict[str, list[Any]] = {
    "batch": [0, True],
    "within": ["50ms"],  # without batch
    "timeout": ["0"],
    "concurrency": [0, True, "2"],
    "retry": ["soon"],
}
CONSUMER_OPTIONS: dict[str, list[Any]] = {
    "concurrency": [0],
    "poll_batch_size": [0],
    "poll_timeout": [timedelta(0), timedelta(microseconds=999)],
    "prefix": ["{"],
    "name": [""],
}


def test_invalid_options_are_refused() -> None:
    for name, values in HANDLER_OPTIONS.items():
        for value in values:
            with pytest.raises(ConfigError, match="orders"):
                Consumer().on("orders", print, **{name: value})
    with pytest.raises(ConfigError, match="orders"):
        Consumer().on("orders", print, batch=5, within="soon")
    for name, values in CONSUMER_OPTIONS.items():
        for value in values:
            with pytest.raises(ConfigError):
                Consumer(**{name: value})


def test_handlers_of_a_topic_share_its_options() -> None:
    consumer: Any = Consumer()
    consumer.on("orders", print, retry="1s,2s", concurrency=2)
    consumer.on("orders", print)
    consumer.on("orders", print, retry=["1s", "2s"])
    for name, value in (("retry", "1s"), ("concurrency", 3)):
        with pytest.raises(ConfigError, match=f"another handler has a different {name}="):
            consumer.on("orders", print, **{name: value})
    consumer.unsubscribe("orders")
    consumer.on("orders", print, retry="1s")


# Models of bodies: mypy checks these assertions of types, and refuses a comment `type: ignore`
# without an error, so each of these shows that a mistake is found.


class Order(msgspec.Struct):
    number: int


@dataclass
class DataOrder:
    number: int


class DictOrder(TypedDict):
    number: int


class PydanticOrder(pydantic.BaseModel):
    number: int


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="orderNumber")


def message(body: Any) -> Message[Any]:
    return Message(id="1", topic="orders", group="lisa", body=body, due_ms=1)


def decoded(model: Any, body: object) -> Any:
    return decoder_for(model)(decode_envelope(encode_envelope("tokentok", body)))


def test_a_body_is_decoded_as_its_model_or_refused() -> None:
    for model in (Order, DataOrder, DictOrder, PydanticOrder):
        found = decoded(model, {"number": 42})
        assert (found["number"] if isinstance(found, dict) else found.number) == 42
        for wrong in ({"number": "x"}, {"other": 1}, [1], "text", b"\xff"):
            with pytest.raises(BodyMismatch, match=f"the body does not match {model.__name__}"):
                decoded(model, wrong)
    assert (decoded(str, "hello"), decoded(bytes, b"\xff")) == ("hello", b"\xff")
    for body in (Aliased(orderNumber=42), {"orderNumber": 42}):
        assert decoded(Aliased, body) == Aliased(orderNumber=42)
    with pytest.raises(ConfigError, match="cannot be a model"):
        Consumer().on("orders", print, model=Order | DataOrder)


def test_a_model_types_the_body_of_the_message() -> None:
    consumer = Consumer("redis://localhost")

    @consumer.on("orders", model=Order)
    def handle(one: Message[Order]) -> int:
        assert_type(one.body, Order)
        return one.body.number

    @consumer.on("orders", model=Order)
    async def untyped(one: Message) -> None:
        assert_type(one.body, Any)

    @consumer.on("batches", model=Order, batch=2)
    def handle_batch(batch: Batch[Order]) -> list[int]:
        return [assert_type(one.body, Order).number for one in batch]

    @consumer.on("any")
    def handle_any(one: Message) -> str:
        assert_type(one.body, Any)
        return str(one.body)

    assert handle(message(Order(5))) == 5
    assert handle_batch(Batch([message(Order(1)), message(Order(2))])) == [1, 2]
    assert handle_any(message(7)) == "7"
    assert repr(message(7)).startswith("Message(id='1', topic='orders'")


def test_mistakes_are_found_by_the_type_checker() -> None:
    consumer = Consumer("redis://localhost")

    @consumer.on("orders", model=Order)
    def misspelt(one: Message[Order]) -> None:
        _ = one.body.nubmer  # type: ignore[attr-defined]

    @consumer.on("orders", model=Order)  # type: ignore[arg-type]
    def another(one: Message[int]) -> None: ...

    assert consumer.topics() == ["orders"]


# Outcomes


@pytest.mark.parametrize("outcome", [Retry, Defer])
def test_a_pause_as_the_reason_of_an_outcome_is_refused(outcome: type[Retry | Defer]) -> None:
    pause: Any
    for pause in (5, 0.5, timedelta(minutes=5), "5m", "1h30m", "1.5 s", "10 Minutes", "2 days"):
        with pytest.raises(InvalidMessage, match=rf"write {outcome.__name__}\(delay="):
            outcome(pause)
    for reason in ("5m", "404", "5 apples", "m", ValueError("5m")):
        assert str(outcome(reason, delay="5m")) == str(reason)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="ends beyond the year 9999"):
        outcome(delay=timedelta.max)


def test_a_deferral_needs_a_delay_and_a_retry_none() -> None:
    assert (str(Retry("404")), Retry("404").delay) == ("404", None)
    for reason in ("", "busy"):
        with pytest.raises(InvalidMessage, match=r"Defer has no delay; write Defer\(delay='10s'\)"):
            Defer(reason)


def test_of_outcomes_alike_the_one_with_the_longer_delay_counts() -> None:
    short, long = Defer("a", delay="1s"), Defer("b", delay="1m")
    for leaves in ([short, long], [long, short, Discard()]):
        verdict = verdict_of(BaseExceptionGroup("", leaves))
        assert (verdict.delay, verdict.is_deferral) == (60_000, True)
        assert combined(verdict_of(leaves[0]), verdict_of(leaves[1])) == verdict_of(long)


def deep(n: int, text: str) -> None:
    if n:
        deep(n - 1, text)
    raise ValueError(text)


def fails_twice() -> None:
    try:
        deep(0, "first")
    except ValueError as error:
        raise KeyError("second") from error


def traceback_from(function: Callable[..., object], *arguments: object) -> str:
    with pytest.raises((KeyError, ValueError)) as caught:
        function(*arguments)
    return traceback_of(caught.value)


def test_reasons_and_tracebacks_are_bounded_and_a_traceback_keeps_its_cause_and_end() -> None:
    reasons = (reason_of(ValueError("none")), reason_of(KeyError()))
    assert reasons == ("ValueError: none", "KeyError")
    assert len(reason_of(ValueError("ü" * 2000)).encode()) in (1023, 1024)
    for n, text in [(500, "no"), (3, "ü" * 900), (3, "ü" * 5000), (3, "n\n" * 5000)]:
        found = traceback_from(deep, n, text)
        assert len(found.encode()) <= 2048
        assert found.endswith(text.rstrip()[-200:])
        assert found.startswith("...\n") or len(text) <= 900
    found = traceback_from(fails_twice)
    assert found.index("ValueError: first") < found.index("KeyError: 'second'")
