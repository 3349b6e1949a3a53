"""mend and restore: repair what another program or the loss of a server left inconsistent."""

from dataclasses import replace
from typing import Any

import pytest

from lisa.core.model.errors import GroupRemoved
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.upkeep import Mend
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, FOREIGN, G, Row, envelope

FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}
READY = G(ready=[Row("a", 1)])
RIGHT: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"a": FAR}, "lisa": G()},
    "waiting after failures": {"waiting": {"a": FAR}, "lisa": G(**FAILED), "audit": G()},
    "ready": {"lisa": G(ready=[Row("b", 1, 1, "c1"), Row("a", 1)])},
    "in flight": {"lisa": G(ready=[Row("a", 1, 3, "c1")], leases={"a": FAR}, **FAILED)},
    "retry": {"lisa": G(retry={"a": FAR}, **FAILED)},
    "garbage": {"lisa": G(garbage={"a": 1}, **FAILED)},
    "two groups": {"lisa": G(garbage={"a": 1}, **FAILED), "audit": READY},
    "owed to one of two": {"lisa": G(), "audit": READY},
}


@pytest.mark.parametrize("judge", [True, False])
@pytest.mark.parametrize("stage", RIGHT)
def test_consistent_states_are_not_changed(bench: Bench, stage: str, *, judge: bool) -> None:
    bench.put(body="ab", policy={"a": "5"}, expiry={"a": FAR}, **RIGHT[stage])
    assert bench.call(Mend(TOPIC, ["a"], judge)) == [[]]
    bench.check_unchanged()


NOW = 5 * FAR  # in a state afterwards: the time of the call
LIVE: dict[str, Any] = {"body": "a"}
RETRY = {"lisa": G(retry={"a": NOW})}
WAITS = {"waiting": {"a": NOW}, "lisa": G()}
WRONG: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    # the fault; what mend reports; the changes that it makes to a live message
    "live but nowhere": (LIVE | {"lisa": G()}, ["no-place"], WAITS),
    "nowhere, with failures remembered": (
        LIVE | {"lisa": G(**FAILED)},
        ["leftover", "no-place"],
        WAITS,
    ),
    "its entry was deleted": (
        LIVE | {"lisa": G(entries={"a": None}, **FAILED)},
        ["entry-lost"],
        {"lisa": G(retry={"a": NOW}, **FAILED)},
    ),
    "its entry was deleted, its lease was not": (
        LIVE | {"lisa": G(entries={"a": None}, leases={"a": FAR})},
        ["entry-lost"],
        RETRY,
    ),
    "its entry is another's": (
        {"body": "ab", "lisa": G(ready=[Row("b", 1)], entries={"a": 0, "b": 0})},
        ["entry-lost"],
        {"lisa": G(ready=[Row("b", 1)], retry={"a": NOW})},
    ),
    "its consumer's name was deleted": (
        LIVE | {"lisa": G(ready=[Row("a", 1, 1, FOREIGN)])},
        ["entry-lost"],
        RETRY,
    ),
    "its entry is lost, but it is in retry": (
        LIVE | {"lisa": G(entries={"a": None}, retry={"a": FAR})},
        ["entry-lost"],
        {"lisa": G(retry={"a": FAR})},
    ),
    "ready and in retry": (
        LIVE | {"lisa": G(ready=READY.ready, retry={"a": 2})},
        ["second-place"],
        {"lisa": READY},
    ),
    "in retry and in garbage": (
        LIVE | {"lisa": G(retry={"a": 2}, garbage={"a": 3})},
        ["second-place"],
        {"lisa": G(retry={"a": 2})},
    ),
    "waiting and ready": (
        LIVE | {"waiting": {"a": FAR}, "lisa": READY},
        ["second-place"],
        {"waiting": None},
    ),
    "remembered by a group that does not owe it": (
        LIVE | {"lisa": READY, "audit": G(leases={"a": 5}, **FAILED)},
        ["leftover"],
        {"audit": G()},
    ),
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
        {"audit": G()},
    ),
    "waiting without a body": ({"waiting": {"a": FAR}}, ["no-body"], {}),
    "a policy without a body": ({"policy": {"a": "5"}}, ["no-body"], {}),
    "a ttl without a body": ({"expiry": {"a": 5}}, ["no-body"], {}),
    "failures without a body": ({"lisa": G(**FAILED)}, ["no-body"], {}),
    "a lease without a body": ({"lisa": G(leases={"a": 5})}, ["no-body"], {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_inconsistent_states_are_reported_and_repaired_once(bench: Bench, case: str) -> None:
    state, said, changes = WRONG[case]
    bench.put(**{"lisa": G(), **state})
    assert bench.call(Mend(TOPIC, ["a"], judge=True)) == [said]
    bench.check_unchanged()
    assert bench.call(Mend(TOPIC, ["a"])) == [said]
    if "body" in state:
        bench.check_change(**with_now(bench, changes))
    else:
        bench.check(lisa=G(), **changes)
    assert bench.call(Mend(TOPIC, ["a"])) == [[]]
    bench.check_unchanged()


def with_now(bench: Bench, changes: dict[str, Any]) -> dict[str, Any]:
    def at(dues: Any) -> Any:
        return dues and {m: bench.now if due == NOW else due for m, due in dues.items()}

    return {
        name: replace(part, retry=at(part.retry)) if isinstance(part, G) else at(part)
        for name, part in changes.items()
    }


def test_restored_messages_have_their_earlier_state(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    both = (RestoreState("lisa", "retry", 9, 2), RestoreState("audit", "garbage", 8, 3))
    one = (RestoreState("lisa", "retry", 5),)
    items = [
        RestoreItem("a", envelope("A-one"), 7, FAR, "0,5"),
        RestoreItem("b", envelope("A+two"), 7, group_states=both, reason="boom"),
        RestoreItem("c", envelope("A+one"), 7, policy="", group_states=one),  # no retries
    ]
    bench.call(Restore(TOPIC, items))
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
    bench.call(Restore(TOPIC, [RestoreItem("a", envelope("A-"), -5, group_states=states)]))
    late = G(retry={"a": -5})
    bench.check(body="a", stats={"restored": 1}, lisa=late, audit=late)


def test_a_group_that_is_not_declared_is_refused_before_anything_is_written(bench: Bench) -> None:
    bench.put(lisa=G())
    gone = (RestoreState("gone", "retry", 9),)
    items = [RestoreItem(m, envelope("A-"), 7, group_states=gone * (m == "b")) for m in "ab"]
    with pytest.raises(GroupRemoved, match="gone"):
        bench.call(Restore(TOPIC, items))
    bench.check_unchanged()
