"""mend and restore: repair what another program or the loss of a server left inconsistent."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.errors import GroupRemoved
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FOREIGN, G, Row, envelope

FAR = 4_000_000_000_000
LIVE = {"a": "A-"}
FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}

RIGHT: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"a": FAR}, "lisa": G()},
    "waiting after failures": {"waiting": {"a": FAR}, "lisa": G(**FAILED), "audit": G()},
    "ready": {"lisa": G(ready=[Row("b", 1, 1, "c1"), Row("a", 1)])},
    "in flight": {"lisa": G(ready=[Row("a", 1, 3, "c1")], leases={"a": FAR}, **FAILED)},
    "retry": {"lisa": G(retry={"a": FAR}, **FAILED)},
    "garbage": {"lisa": G(garbage={"a": 1}, **FAILED)},
    "two groups": {"lisa": G(garbage={"a": 1}, **FAILED), "audit": G(ready=[Row("a", 1)])},
    "owed to one of two": {"lisa": G(), "audit": G(ready=[Row("a", 1)])},
}


@pytest.mark.parametrize("judge", [True, False])
@pytest.mark.parametrize("stage", RIGHT)
def test_consistent_states_are_not_changed(bench: Bench, stage: str, *, judge: bool) -> None:
    state = {"body": {"a": "A-", "b": "A-"}, "policy": {"a": "5"}, "expiry": {"a": FAR}}
    bench.put(**state, **RIGHT[stage])
    assert bench.call(Mend(TOPIC, ["a"], judge)) == [[]]
    bench.check(**state, **RIGHT[stage])


# The fault, what mend reports, and the state afterwards (NOW is the time of the call).
NOW = object()
WRONG: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "live but nowhere": (
        {"body": LIVE, "lisa": G()},
        ["no-place"],
        {"body": LIVE, "waiting": {"a": NOW}, "lisa": G()},
    ),
    "nowhere, with failures remembered": (
        {"body": LIVE, "lisa": G(**FAILED)},
        ["leftover", "no-place"],
        {"body": LIVE, "waiting": {"a": NOW}, "lisa": G()},
    ),
    "its entry was deleted": (
        {"body": LIVE, "lisa": G(entries={"a": None}, **FAILED)},
        ["entry-lost"],
        {"body": LIVE, "lisa": G(retry={"a": NOW}, **FAILED)},
    ),
    "its entry was deleted, its lease was not": (
        {"body": LIVE, "lisa": G(entries={"a": None}, leases={"a": FAR})},
        ["entry-lost"],
        {"body": LIVE, "lisa": G(retry={"a": NOW})},
    ),
    "its entry is another's": (
        {"body": {"a": "A-", "b": "A-"}, "lisa": G(ready=[Row("b", 1)], entries={"a": 0, "b": 0})},
        ["entry-lost"],
        {"body": {"a": "A-", "b": "A-"}, "lisa": G(ready=[Row("b", 1)], retry={"a": NOW})},
    ),
    "its consumer's name was deleted": (
        {"body": LIVE, "lisa": G(ready=[Row("a", 1, 1, FOREIGN)])},
        ["entry-lost"],
        {"body": LIVE, "lisa": G(retry={"a": NOW})},
    ),
    "its entry is lost, but it is in retry": (
        {"body": LIVE, "lisa": G(entries={"a": None}, retry={"a": FAR})},
        ["entry-lost"],
        {"body": LIVE, "lisa": G(retry={"a": FAR})},
    ),
    "ready and in retry": (
        {"body": LIVE, "lisa": G(ready=[Row("a", 1)], retry={"a": 2})},
        ["second-place"],
        {"body": LIVE, "lisa": G(ready=[Row("a", 1)])},
    ),
    "in retry and in garbage": (
        {"body": LIVE, "lisa": G(retry={"a": 2}, garbage={"a": 3})},
        ["second-place"],
        {"body": LIVE, "lisa": G(retry={"a": 2})},
    ),
    "waiting and ready": (
        {"body": LIVE, "waiting": {"a": FAR}, "lisa": G(ready=[Row("a", 1)])},
        ["second-place"],
        {"body": LIVE, "lisa": G(ready=[Row("a", 1)])},
    ),
    "remembered by a group that does not owe it": (
        {"body": LIVE, "lisa": G(ready=[Row("a", 1)]), "audit": G(leases={"a": 5}, **FAILED)},
        ["leftover"],
        {"body": LIVE, "lisa": G(ready=[Row("a", 1)]), "audit": G()},
    ),
    "waiting without a body": ({"waiting": {"a": FAR}, "lisa": G()}, ["no-body"], {"lisa": G()}),
    "everywhere without a body": (
        {
            "waiting": {"a": FAR},
            "policy": {"a": "5"},
            "expiry": {"a": FAR},
            "lisa": G(
                ready=[Row("a", 1, 1, "c1")],
                retry={"a": 1},
                garbage={"a": 2},
                leases={"a": 5},
                **FAILED,
            ),
            "audit": G(entries={"a": None}),
        },
        ["no-body"],
        {"lisa": G(), "audit": G()},
    ),
    "a policy without a body": ({"policy": {"a": "5"}, "lisa": G()}, ["no-body"], {"lisa": G()}),
    "a ttl without a body": ({"expiry": {"a": 5}, "lisa": G()}, ["no-body"], {"lisa": G()}),
    "failures without a body": ({"lisa": G(**FAILED)}, ["no-body"], {"lisa": G()}),
    "a lease without a body": ({"lisa": G(leases={"a": 5})}, ["no-body"], {"lisa": G()}),
}


@pytest.mark.parametrize("case", WRONG)
def test_inconsistent_states_are_reported_and_repaired_once(bench: Bench, case: str) -> None:
    state, said, after = WRONG[case]
    bench.put(**state)
    assert bench.call(Mend(TOPIC, ["a"], judge=True)) == [said]
    bench.check(**state)
    assert bench.call(Mend(TOPIC, ["a"])) == [said]
    bench.check(**_at(bench, after))
    assert bench.call(Mend(TOPIC, ["a"])) == [[]]
    bench.check(**_at(bench, after))


def _at(bench: Bench, state: dict[str, Any]) -> dict[str, Any]:
    waiting = dict.fromkeys(state["waiting"], bench.now) if "waiting" in state else {}
    groups = {
        name: G(
            **(
                vars(group)
                | {"retry": {m: bench.now if at is NOW else at for m, at in group.retry.items()}}
            )
        )
        for name, group in state.items()
        if isinstance(group, G)
    }
    return {**state, "waiting": waiting, **groups}


def test_restored_messages_have_their_earlier_state(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    both = (RestoreState("lisa", "retry", 9, 2), RestoreState("audit", "garbage", 8, 3))
    bench.call(
        Restore(
            TOPIC,
            [
                RestoreItem("a", envelope("A-one"), 7, FAR, "0,5"),
                RestoreItem("b", envelope("A+two"), 7, group_states=both, reason="boom"),
                RestoreItem(
                    "c",
                    envelope("A+one"),
                    7,
                    policy="",  # no retries
                    group_states=(RestoreState("lisa", "retry", 5),),
                ),
            ],
        )
    )
    bench.check(
        body={"a": "A-one", "b": "A+two", "c": "A+one"},
        waiting={"a": 7},
        expiry={"a": FAR},
        policy={"a": "0,5", "c": ""},
        stats={"restored": 3},
        lisa=G(retry={"b": 9, "c": 5}, attempts={"b": 2}, reasons={"b": "boom"}),
        audit=G(garbage={"b": 8}, attempts={"b": 3}, reasons={"b": "boom"}),
    )


def test_messages_due_before_1970_are_restored(bench: Bench) -> None:
    """A full group keeps it in retry, with its due time."""
    bench.put(lisa=G(), audit=G())
    states = (RestoreState("lisa", "retry", -5), RestoreState("audit", "retry", -5))
    bench.call(Restore(TOPIC, [RestoreItem("a", envelope("A-one"), -5, group_states=states)]))
    bench.check(
        body={"a": "A-one"},
        stats={"restored": 1},
        lisa=G(retry={"a": -5}),
        audit=G(retry={"a": -5}),
    )


def test_a_group_that_is_not_declared_is_refused_before_anything_is_written(bench: Bench) -> None:
    bench.put(lisa=G())
    items = [
        RestoreItem("a", envelope("A-"), 7),
        RestoreItem("b", envelope("A-"), 7, group_states=(RestoreState("gone", "retry", 9),)),
    ]
    with pytest.raises(GroupRemoved, match="gone"):
        bench.call(Restore(TOPIC, items))
    bench.check(lisa=G())
