"""How bodies become script calls, and what the report keeps of them."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pydantic
import pytest

from lisa.core.envelope import decode_body, decode_envelope, new_id, new_ids
from lisa.core.keys import check_id
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.producer import Outgoing, SendOutcome, SendReport
from lisa.producer.calls import LARGEST_CALL_BYTES, calls, encode, pieces
from lisa.producer.plan import Plan, SendOptions
from tests.producers import noting


class Struct(msgspec.Struct):
    order: int


@dataclass
class Data:
    order: int


class Model(pydantic.BaseModel):
    order: int


def made(bodies: list[Any], size: int = 500, **options: Any) -> list[Enqueue]:
    plan = Plan.of(cast("SendOptions", options), None)
    return list(calls("orders", plan, encode(plan, bodies), size))


def body_of(envelope: bytes) -> Any:
    parts = decode_envelope(envelope)
    return decode_body(parts.kind, parts.body)


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"order": 42}, {"order": 42}),
        (None, None),
        ([1, 2.5, "é", None], [1, 2.5, "é", None]),
        ("text é", "text é"),
        ("", ""),
        (b"\x00\xff", b"\x00\xff"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (Struct(42), {"order": 42}),
        (Data(42), {"order": 42}),
        (Model(order=42), {"order": 42}),
    ],
    ids=repr,
)
def test_bodies_come_back_as_they_went(body: Any, read: Any) -> None:
    (call,) = made([body, Outgoing(body)], headers={"k": "v"})
    for item in call.items:
        assert body_of(item.envelope) == read
        assert decode_envelope(item.envelope).headers == {"k": "v"}
        assert decode_envelope(item.envelope).token == call.token


def test_each_call_has_a_token_of_its_own_and_at_most_its_size() -> None:
    parts = made(list(range(11)), size=5)
    assert [len(call.items) for call in parts] == [5, 5, 1]
    assert [body_of(item.envelope) for call in parts for item in call.items] == list(range(11))
    assert len({call.token for call in parts}) == 3


def test_a_call_holds_a_bounded_number_of_bytes_or_a_single_message() -> None:
    large, small = b"x" * (LARGEST_CALL_BYTES + 1), b"x" * (LARGEST_CALL_BYTES // 3)
    bodies = [small, small, small, large, small, b""]
    parts = made(bodies)
    assert [body_of(item.envelope) for call in parts for item in call.items] == bodies
    assert [len(call.items) for call in parts] == [2, 1, 1, 2]


def test_outgoing_beside_plain_bodies() -> None:
    (call,) = made(["a", Outgoing("b", id="own", at_ms=5, retry="1s"), "c"])
    first, second, third = call.items
    assert (second.id, second.due, second.policy, body_of(second.envelope)) == (
        "own", "5", "1000", "b",
    )  # fmt: skip
    assert (first.due, first.policy, third.due, third.policy) == ("+0", None, "+0", None)
    assert first.id < third.id


def test_ids_made_together_are_distinct_valid_and_in_order_with_all_others() -> None:
    made_ids: list[str] = []
    for count in (500, 1, 4096, 0):
        made_ids += [*new_ids(count), new_id()]
    assert made_ids == sorted(set(made_ids))
    assert all(check_id(one) == one and len(one) == 22 for one in made_ids)


def test_pieces_draws_only_what_it_gives() -> None:
    drawn: list[int] = []
    source = pieces(noting(drawn, 100), lambda: 10)
    assert next(source) == list(range(10))
    assert drawn == list(range(10))


def test_report_counts_and_iterates() -> None:
    report = SendReport()
    report.add(["a", "b"], [Sent.ACCEPTED, Sent.DUPLICATE])
    report.add(["c", "d", "e"], [Sent.REPLACED, Sent.REJECTED, Sent.ACCEPTED])
    counts = (report.accepted, report.duplicate, report.replaced, report.rejected, len(report))
    assert counts == (2, 1, 1, 1, 5)
    assert list(report) == [
        SendOutcome("a", Sent.ACCEPTED), SendOutcome("b", Sent.DUPLICATE),
        SendOutcome("c", Sent.REPLACED), SendOutcome("d", Sent.REJECTED),
        SendOutcome("e", Sent.ACCEPTED),
    ]  # fmt: skip
    assert "accepted=2 duplicate=1" in repr(report)
    assert not SendReport()
    assert list(SendReport()) == []


def test_a_report_takes_few_bytes_a_message() -> None:
    tracemalloc.start()
    try:
        report = SendReport()
        for _ in range(100):
            report.add(new_ids(500), [Sent.ACCEPTED] * 500)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(report) == 50_000
    assert taken / len(report) < 40
