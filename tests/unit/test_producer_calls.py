"""Conversion of bodies to script calls, and the send report."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import msgspec
import pydantic
import pytest

from lisa.core.model.clock import OLDEST_DUE_MS
from lisa.core.model.envelope import (
    decode_body,
    decode_envelope,
    encode_headers,
    encode_tail,
    encode_tails,
    new_id,
    new_ids,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id
from lisa.core.model.options import BYTES_PER_CALL, LARGEST_BODY_BYTES
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.producer import Outgoing, SendOutcome, SendReport
from lisa.producer.calls import MOST, calls, encode, pieces
from lisa.producer.plan import SendOptions, SendPlan
from tests.producers import noting


class Struct(msgspec.Struct):
    order: int


@dataclass
class Data:
    order: int


class Model(pydantic.BaseModel):
    order: int


def made(bodies: list[Any], size: int = 500, **options: Any) -> list[Enqueue]:
    plan = SendPlan.of(cast("SendOptions", options), None)
    return list(calls("orders", plan.on_duplicate, encode(plan, bodies), size))


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
    ids=lambda value: type(value).__name__,
)
def test_bodies_survive_a_round_trip(body: Any, read: Any) -> None:
    (call,) = made([body, Outgoing(body)], headers={"k": "v"})
    for envelope in call.envelopes:
        assert body_of(envelope) == read
        assert decode_envelope(envelope).headers == {"k": "v"}
        assert decode_envelope(envelope).token == call.token


def test_each_call_has_a_token_of_its_own_and_at_most_its_size() -> None:
    parts = made(list(range(11)), size=10)
    assert [len(call.ids) for call in parts] == [5, 5, 1]
    assert [body_of(envelope) for call in parts for envelope in call.envelopes] == list(range(11))
    assert len({call.token for call in parts}) == 3


def test_messages_due_later_are_not_limited_by_the_number_of_groups() -> None:
    parts = made(list(range(2 * MOST + 1)), size=1, delay=timedelta(hours=1))
    assert [len(call.ids) for call in parts] == [MOST, MOST, 1]


def test_calls_are_smaller_where_a_message_costs_the_server_more() -> None:
    def sizes(bodies: list[Any], **options: Any) -> list[int]:
        return [len(call.ids) for call in made(bodies, 8, **options)]

    hour = timedelta(hours=1)
    assert sizes([1] * 8, delay=hour) == [8]
    assert sizes([1] * 8, at_ms=4_000_000_000_000) == [8]
    assert sizes([1] * 8) == [4] * 2, "straight to ready"
    assert sizes([1] * 8, at_ms=OLDEST_DUE_MS) == [4] * 2, "straight to ready"
    own = [Outgoing(1, at_ms=OLDEST_DUE_MS + n) for n in range(8)]
    assert sizes(own) == [4] * 2, "a due time each"
    known = [Outgoing(1, id=str(n)) for n in range(8)]
    assert sizes(known, delay=hour) == [4] * 2, "may be known"
    assert sizes(known, delay=hour, on_duplicate="replace") == [2] * 4, "may replace others"


def test_a_call_holds_a_bounded_number_of_bytes_or_a_single_message() -> None:
    large, small = b"x" * (BYTES_PER_CALL + 1), b"x" * (BYTES_PER_CALL // 3)
    bodies = [small, small, small, large, small, b""]
    parts = made(bodies)
    assert [body_of(envelope) for call in parts for envelope in call.envelopes] == bodies
    assert [len(call.ids) for call in parts] == [2, 1, 1, 2]


def test_outgoing_beside_plain_bodies() -> None:
    (call,) = made(["a", Outgoing("b", id="own", at_ms=OLDEST_DUE_MS, retry="1s"), "c"])
    first, second, third = call.ids
    assert second == "own"
    assert first < third
    assert list(call.dues) == ["+0", str(OLDEST_DUE_MS), "+0"]
    assert list(call.policies) == [None, "1000", None]
    assert [body_of(envelope) for envelope in call.envelopes] == ["a", "b", "c"]
    assert not call.are_ids_new


def test_a_common_due_time_is_passed_once() -> None:
    (plain,) = made(["a", "b"], at_ms=OLDEST_DUE_MS)
    (rows,) = made([Outgoing("a", at_ms=OLDEST_DUE_MS), "b"], at_ms=OLDEST_DUE_MS)
    assert [list(call.dues) for call in (plain, rows)] == [[str(OLDEST_DUE_MS)]] * 2
    assert plain.are_ids_new
    assert rows.are_ids_new
    dues = [str(OLDEST_DUE_MS + n) for n in range(3)]
    parts = made([Outgoing(due, at_ms=int(due)) for due in dues], size=4)
    assert [list(call.dues) for call in parts] == [dues[:2], dues[2:]]


@pytest.mark.parametrize("bodies", [[b"a", b""], ["é", ""], [{"n": 1}, {"n": None}], ["a", b"a"]])
def test_many_bodies_are_encoded_like_single_ones(bodies: list[Any]) -> None:
    headers = encode_headers({"k": "v"})
    assert encode_tails(bodies, headers) == [encode_tail(body, headers) for body in bodies]


@pytest.mark.parametrize(
    "bad", ["\ud800", {"n": float("nan")}, {"n": object()}, b"x" * (LARGEST_BODY_BYTES + 1)]
)
def test_many_bodies_are_refused_like_single_ones(bad: Any) -> None:
    with pytest.raises(InvalidMessage) as alone:
        encode_tail(bad, b"0000")
    with pytest.raises(InvalidMessage) as among:
        encode_tails([type(bad)(), bad], b"0000")
    assert str(among.value) == str(alone.value)


def test_ids_made_together_are_distinct_valid_and_in_order_with_all_others() -> None:
    made_ids: list[str] = []
    for count in (500, 1, 4096, 0):
        made_ids += [*new_ids(count), new_id()]
    assert made_ids == sorted(set(made_ids))
    assert all(check_id(one) == one and len(one) == 22 for one in made_ids)


def test_pieces_draws_only_what_it_gives() -> None:
    drawn: list[int] = []
    source = pieces(noting(drawn, 2 * MOST))
    assert next(source) == list(range(MOST))
    assert drawn == list(range(MOST))


def test_report_counts_and_iterates() -> None:
    report = SendReport()
    report.add(["a", "b"], [Sent.ACCEPTED, Sent.DUPLICATE])
    report.add(["c", "d", "e"], [Sent.REPLACED, Sent.REJECTED, Sent.ACCEPTED])
    counts = (report.accepted, report.duplicate, report.replaced, report.rejected, len(report))
    assert counts == (2, 1, 1, 1, 5)
    assert list(report) == [
        SendOutcome("a", Sent.ACCEPTED),
        SendOutcome("b", Sent.DUPLICATE),
        SendOutcome("c", Sent.REPLACED),
        SendOutcome("d", Sent.REJECTED),
        SendOutcome("e", Sent.ACCEPTED),
    ]
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
