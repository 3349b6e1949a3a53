"""Bodies are typed by `model=`: `make types` runs mypy on the assertions of types here.

mypy refuses a comment `type: ignore` without an error, so each shows that a mistake is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import msgspec
import pydantic
import pytest

from lisa import Batch, ConfigError, Consumer, Message
from lisa.consumer.models import BodyMismatch, reader_for
from lisa.core.model.envelope import decode_envelope, encode_envelope


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
    return reader_for(model)(decode_envelope(encode_envelope("tokentok", body)))


@pytest.mark.parametrize("model", [Order, DataOrder, DictOrder, PydanticOrder])
def test_a_body_is_decoded_as_its_model_or_refused(model: Any) -> None:
    found = decoded(model, {"number": 42})
    assert (found["number"] if isinstance(found, dict) else found.number) == 42
    for body in ({"number": "x"}, {"other": 1}, [1], "text", b"\xff"):
        with pytest.raises(BodyMismatch, match=f"the body does not match {model.__name__}"):
            decoded(model, body)


def test_text_bytes_and_aliases_of_fields_are_read_and_unions_refused() -> None:
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
