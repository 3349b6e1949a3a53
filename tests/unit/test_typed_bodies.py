"""Bodies are typed by `model=`: `make types` runs mypy on the assertions of types here.

mypy refuses a comment `type: ignore` without an error, so each shows that a mistake is found.
"""

from __future__ import annotations

from typing import Any, assert_type

import msgspec

from lisa import Batch, Consumer, Message


class Order(msgspec.Struct):
    number: int


def message(body: Any) -> Message[Any]:
    return Message(id="1", topic="orders", group="lisa", body=body, due_ms=1)


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

    assert handle(message(Order(5))) == 5
    assert handle_batch(Batch([message(Order(1)), message(Order(2))])) == [1, 2]
    assert consumer.topics() == ["batches", "orders"]


def test_mistakes_are_found_by_the_type_checker() -> None:
    consumer = Consumer("redis://localhost")

    @consumer.on("orders", model=Order)
    def misspelt(one: Message[Order]) -> None:
        _ = one.body.nubmer  # type: ignore[attr-defined]

    @consumer.on("orders", model=Order)  # type: ignore[arg-type]
    def another(one: Message[int]) -> None: ...

    assert consumer.topics() == ["orders"]


def test_a_handler_without_a_model_takes_any_body() -> None:
    consumer = Consumer("redis://localhost")

    @consumer.on("orders")
    def handle(one: Message) -> str:
        assert_type(one.body, Any)
        return str(one.body)

    assert handle(message(7)) == "7"
    assert repr(message(7)).startswith("Message(id='1', topic='orders'")
