"""expire: waiting, retry, ready past its ttl -> settled (expired)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.expire import Expire, Expired
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
EXPIRED, IN_FLIGHT = Expired.EXPIRED, Expired.IN_FLIGHT
NOT_DUE, ORPHAN = Expired.NOT_DUE, Expired.ORPHAN
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


@pytest.mark.parametrize("stage", ENDED)
def test_messages_past_their_ttl_expire(bench: Bench, stage: str) -> None:
    state, due, attempts = ENDED[stage]
    bench.put(body={"a": "A-x"}, policy={"a": "5"}, expiry={"a": 5}, **state)
    twice = bench.call(Expire(TOPIC, ["a", "a"]))
    assert twice == [EXPIRED, NOT_DUE]
    groups = {name: G() for name, value in state.items() if isinstance(value, G)}
    bench.check(
        done={"a": ("A-", "expired", due, attempts, bench.now)}, stats={"expired": 1}, **groups
    )
    after = bench.state()
    assert bench.call(Expire(TOPIC, ["a"])) == [NOT_DUE]
    assert bench.state() == after


UNTOUCHED: dict[str, tuple[Expired, dict[str, Any]]] = {
    "its ttl is not over": (NOT_DUE, {"waiting": {"a": 1}, "expiry": {"a": FAR}, "lisa": G()}),
    "it has no ttl": (NOT_DUE, {"waiting": {"a": 1}, "lisa": G()}),
    "in flight": (
        IN_FLIGHT,
        {"expiry": {"a": 5}, "lisa": G(ready=[Row("a", 1, 3, "c1")], **FAILED)},
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_other_messages_are_not_expired(bench: Bench, case: str) -> None:
    said, state = UNTOUCHED[case]
    bench.put(body={"a": "A-"}, **state)
    assert bench.call(Expire(TOPIC, ["a"])) == [said]
    bench.check(body={"a": "A-"}, **state)


def test_a_delivery_in_flight_finishes_and_other_groups_drop_the_message(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"},
        expiry={"a": 5},
        lisa=G(ready=[HELD]),
        audit=G(retry={"a": 7}, **FAILED),
        third=G(ready=[READY]),
    )
    assert bench.call(Expire(TOPIC, ["a"])) == [IN_FLIGHT]
    bench.check(body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(), third=G())


def test_garbage_has_no_ttl(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"},
        expiry={"a": 5, "b": 5},
        audit=G(retry={"b": 7}),
        lisa=G(garbage={"a": 6, "b": 6}, **FAILED),
    )
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [NOT_DUE, NOT_DUE]
    bench.check(body={"a": "A-", "b": "A-"}, lisa=G(garbage={"a": 6, "b": 6}, **FAILED), audit=G())


def test_a_waiting_id_without_a_body_is_cleared(bench: Bench) -> None:
    bench.put(waiting={"a": 5, "b": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [ORPHAN, ORPHAN]
    bench.check(lisa=G())


def test_a_ttl_without_a_live_message_is_cleared(bench: Bench) -> None:
    bench.put(expiry={"a": 5, "b": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [ORPHAN, ORPHAN]
    bench.check(lisa=G())
