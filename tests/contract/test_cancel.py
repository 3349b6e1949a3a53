"""cancel: waiting, retry, ready, garbage -> settled, truthfully."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.transitions.cancel import Cancel, Cancelled
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row

FAR = 4_000_000_000_000
CANCELLED, IN_FLIGHT, DONE, UNKNOWN = Cancelled
READY, HELD = Row("a", 1), Row("a", 1, 1, "c1")
REST = G(ready=[Row("b", 1, 1, "c1")], retry={"c": FAR}, attempts={"c": 1}, reasons={"c": "no"})

CANCELLABLE: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"a": FAR}, "lisa": G()},
    "waiting, due, no group": {"waiting": {"a": 1}},
    "waiting after a failure": {"waiting": {"a": FAR}, "lisa": G(attempts={"a": 2})},
    "ready": {"lisa": G(ready=[READY])},
    "retry": {"lisa": G(retry={"a": 5}, attempts={"a": 2}, reasons={"a": "no"})},
    "garbage": {"lisa": G(garbage={"a": 5}, attempts={"a": 2}, reasons={"a": "no"})},
    "ready in one, retry in one, garbage in one": {
        "lisa": G(ready=[READY]),
        "audit": G(retry={"a": 5}, attempts={"a": 2}),
        "third": G(garbage={"a": 5}, attempts={"a": 1}, reasons={"a": "no"}),
    },
    "a group was declared later": {"lisa": G(ready=[READY]), "audit": G()},
}


@pytest.mark.parametrize("stage", CANCELLABLE)
def test_messages_neither_in_flight_nor_settled_are_cancelled(bench: Bench, stage: str) -> None:
    state = CANCELLABLE[stage]
    bench.put(body={"a": "A-"}, policy={"a": "5"}, expiry={"a": FAR}, **state)
    assert bench.call(Cancel(TOPIC, ["a"])) == [CANCELLED]
    groups = {name: G() for name, value in state.items() if isinstance(value, G)}
    attempts = max(g.attempts.get("a", 0) for g in [G(), *state.values()] if isinstance(g, G))
    due = state.get("waiting", {}).get("a")
    bench.check(
        done={"a": ("A-", "cancelled", due, attempts, bench.now)}, stats={"cancelled": 1}, **groups
    )
    after = bench.state()
    assert bench.call(Cancel(TOPIC, ["a"])) == [CANCELLED]
    assert bench.state() == after


REFUSED: dict[str, tuple[Cancelled, dict[str, Any]]] = {
    "in flight": (IN_FLIGHT, {"body": {"a": "A-"}, "lisa": G(ready=[HELD])}),
    "in flight in one of two": (
        IN_FLIGHT,
        {"body": {"a": "A-"}, "lisa": G(ready=[READY]), "audit": G(ready=[HELD])},
    ),
    "settled in one, ready in the other": (
        DONE,
        {"body": {"a": "A+"}, "lisa": G(), "audit": G(ready=[READY])},
    ),
    "settled in one, garbage in the other, replaced once": (
        DONE,
        {"body": {"a": "AR"}, "lisa": G(garbage={"a": 1}), "audit": G()},
    ),
    "acked": (DONE, {"done": {"a": ("A-", "acked", 1, 1, 1)}, "lisa": G()}),
    "expired": (DONE, {"done": {"a": ("A-", "expired", 1, 1, 1)}, "lisa": G()}),
    "purged": (DONE, {"done": {"a": ("A-", "purged", 1, 1, 1)}, "lisa": G()}),
    "unknown": (UNKNOWN, {"lisa": G()}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_messages_are_reported_and_unchanged(bench: Bench, case: str) -> None:
    said, state = REFUSED[case]
    bench.put(**state)
    assert bench.call(Cancel(TOPIC, ["a"])) == [said]
    bench.check(**state)


def test_each_id_of_a_call_has_its_own_answer(bench: Bench) -> None:
    bodies = {"a": "A-", "b": "A-", "c": "A-"}
    bench.put(waiting={"a": FAR}, body=bodies, lisa=REST)
    said = bench.call(Cancel(TOPIC, ["b", "a", "x", "c", "a"]))
    assert said == [IN_FLIGHT, CANCELLED, UNKNOWN, CANCELLED, CANCELLED]
    bench.check(
        body={"b": "A-"},
        stats={"cancelled": 2},
        lisa=G(ready=[Row("b", 1, 1, "c1")]),
        done={
            "a": ("A-", "cancelled", FAR, 0, bench.now),
            "c": ("A-", "cancelled", None, 1, bench.now),
        },
    )
