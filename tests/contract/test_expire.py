"""expire: waiting, retry, ready past its ttl -> settled (expired)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.expire import Expire, Expired
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row, envelope

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
EXPIRED, IN_FLIGHT, NOT_DUE, ORPHAN = Expired
READY, HELD = Row("a", 1), Row("a", 1, 1, "c1")
FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}

ENDED: dict[str, tuple[dict[str, Any], int | None, int]] = {
    # state, the tombstone's due and attempts
    "waiting": ({"waiting": {"a": 3}, "lisa": G()}, 3, 0),
    "waiting without a group": ({"waiting": {"a": 3}}, 3, 0),
    "waiting after failures": ({"waiting": {"a": 3}, "lisa": G(**FAILED)}, 3, 2),
    "ready": ({"lisa": G(ready=[READY])}, None, 0),
    "retry": ({"lisa": G(retry={"a": 7}, **FAILED)}, None, 2),
    "two groups": ({"lisa": G(ready=[READY]), "audit": G(retry={"a": 7}, **FAILED)}, None, 2),
}


@pytest.mark.parametrize("place", ENDED)
def test_what_is_past_its_ttl_ends(bench: Bench, place: str) -> None:
    state, due, attempts = ENDED[place]
    bench.put(body={"a": "A-x"}, policy={"a": "5"}, expiry={"a": 5}, **state)
    twice = bench.call(Expire(TOPIC, ["a", "a"], wanted=True))
    assert twice == [(EXPIRED, envelope("A-x")), (NOT_DUE, b"")]
    groups = {name: G() for name, value in state.items() if isinstance(value, G)}
    bench.check(
        done={"a": ("A-", "expired", due, attempts, bench.now)}, stats={"expired": 1}, **groups
    )
    after = bench.state()
    assert bench.call(Expire(TOPIC, ["a"], wanted=True)) == [(NOT_DUE, b"")]
    assert bench.state() == after


UNTOUCHED: dict[str, tuple[Expired, dict[str, Any]]] = {
    "its ttl is not over": (NOT_DUE, {"waiting": {"a": 1}, "expiry": {"a": FAR}, "lisa": G()}),
    "it has no ttl": (NOT_DUE, {"waiting": {"a": 1}, "lisa": G()}),
    "in flight": (
        IN_FLIGHT, {"expiry": {"a": 5}, "lisa": G(ready=[Row("a", 1, 3, "c1")], **FAILED)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_it_may_not_end_it_leaves(bench: Bench, case: str) -> None:
    said, state = UNTOUCHED[case]
    bench.put(body={"a": "A-"}, **state)
    assert bench.call(Expire(TOPIC, ["a"])) == [(said, b"")]
    bench.check(body={"a": "A-"}, **state)


def test_what_one_group_has_in_flight_finishes_and_is_not_tried_elsewhere(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(retry={"a": 7}, **FAILED),
        third=G(ready=[READY]),
    )  # fmt: skip
    assert bench.call(Expire(TOPIC, ["a"])) == [(IN_FLIGHT, b"")]
    bench.check(body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(), third=G())


def test_in_garbage_it_has_no_ttl_any_more(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"}, expiry={"a": 5, "b": 5}, audit=G(retry={"b": 7}),
        lisa=G(garbage={"a": 6, "b": 6}, **FAILED),
    )  # fmt: skip
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [(NOT_DUE, b""), (NOT_DUE, b"")]
    bench.check(body={"a": "A-", "b": "A-"}, lisa=G(garbage={"a": 6, "b": 6}, **FAILED), audit=G())


def test_a_ttl_without_a_live_message_is_cleared(bench: Bench) -> None:
    bench.put(expiry={"a": 5, "b": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [(ORPHAN, b""), (ORPHAN, b"")]
    bench.check(lisa=G())
