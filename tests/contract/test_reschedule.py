"""reschedule: waiting, retry, ready (not delivered) -> waiting with a new due time."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.keys import WINDOW_HEADER
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.reschedule import Reschedule, Rescheduled
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row, expected

FAR = 4_000_000_000_000
RESCHEDULED, IN_FLIGHT, DONE, UNKNOWN = Rescheduled
READY, HELD = Row("a", 1000), Row("a", 1000, 1, "c1")
FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}

MOVABLE: dict[str, tuple[dict[str, Any], int | None, dict[str, Any]]] = {
    # state, the due time that its ttl counts from (None: from now), what each group keeps
    "waiting": ({"waiting": {"a": FAR + 9}, "lisa": G()}, FAR + 9, {"lisa": G()}),
    "waiting without a group": ({"waiting": {"a": FAR + 9}}, FAR + 9, {}),
    "ready": ({"lisa": G(ready=[READY])}, 1000, {"lisa": G()}),
    "ready again": (
        {"lisa": G(ready=[Row("a", 1000, 3)], **FAILED)},
        None,
        {"lisa": G(**FAILED)},
    ),
    "retry": ({"lisa": G(retry={"a": 5}, **FAILED)}, None, {"lisa": G(**FAILED)}),
    "ready in one, retry in the other": (
        {"lisa": G(retry={"a": 5}, **FAILED), "audit": G(ready=[READY])},
        1000,
        {"lisa": G(**FAILED), "audit": G()},
    ),
    "a group was declared later": (
        {"lisa": G(ready=[READY]), "audit": G()},
        1000,
        {"lisa": G(), "audit": G()},
    ),
}


@pytest.mark.parametrize("stage", MOVABLE)
def test_it_waits_until_the_new_due_time_and_its_ttl_moves(bench: Bench, stage: str) -> None:
    state, was, groups = MOVABLE[stage]
    bench.put(body={"a": "A-"}, policy={"a": "5"}, expiry={"a": FAR + 50}, **state)
    assert bench.call(Reschedule(TOPIC, [("a", str(FAR))])) == [RESCHEDULED]
    after = bench.state()
    ends = after.pop("expiry")["a"]
    if was is None:
        assert FAR + 50 - ends + FAR == bench.now
    else:
        assert ends == FAR + 50 + FAR - was
    assert after == expected(
        waiting={"a": FAR}, body={"a": "A-"}, policy={"a": "5"}, stats={"rescheduled": 1}, **groups
    )


def test_fire_now_is_due_now(bench: Bench) -> None:
    bench.put(waiting={"a": FAR, "b": FAR}, body={"a": "A-", "b": "A-"}, lisa=G())
    said = bench.call(Reschedule(TOPIC, [("a", "+0"), ("b", "+7000")]))
    assert said == [RESCHEDULED, RESCHEDULED]
    bench.check(
        waiting={"a": bench.now, "b": bench.now + 7000},
        body={"a": "A-", "b": "A-"},
        stats={"rescheduled": 2},
        lisa=G(),
    )


REFUSED: dict[str, tuple[Rescheduled, dict[str, Any]]] = {
    "in flight": (IN_FLIGHT, {"body": {"a": "A-"}, "lisa": G(ready=[HELD])}),
    "in flight in one of two": (
        IN_FLIGHT,
        {"body": {"a": "A-"}, "lisa": G(ready=[READY]), "audit": G(ready=[HELD])},
    ),
    "garbage": (DONE, {"body": {"a": "A-"}, "lisa": G(garbage={"a": 1})}),
    "garbage in one of two": (
        DONE,
        {"body": {"a": "A-"}, "lisa": G(ready=[READY]), "audit": G(garbage={"a": 1})},
    ),
    "settled in one": (DONE, {"body": {"a": "A+"}, "lisa": G(), "audit": G(ready=[READY])}),
    "acked": (DONE, {"done": {"a": ("A-", "acked", 1, 1, 1)}, "lisa": G()}),
    "cancelled": (DONE, {"done": {"a": ("A-", "cancelled", 1, 1, 1)}, "lisa": G()}),
    "unknown": (UNKNOWN, {"lisa": G()}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_messages_are_reported_and_unchanged(bench: Bench, case: str) -> None:
    said, state = REFUSED[case]
    bench.put(**state)
    assert bench.call(Reschedule(TOPIC, [("a", str(FAR))])) == [said]
    bench.check(**state)


def test_each_id_of_a_call_has_its_own_answer(bench: Bench) -> None:
    bench.put(
        waiting={"b": 5, "c": 6}, body={"a": "A-", "b": "A-", "c": "A-"}, lisa=G(ready=[HELD])
    )
    said = bench.call(Reschedule(TOPIC, [("a", "7"), ("b", "8"), ("x", "9"), ("b", "10")]))
    assert said == [IN_FLIGHT, RESCHEDULED, UNKNOWN, RESCHEDULED]
    bench.check(
        waiting={"b": 10, "c": 6},
        body={"a": "A-", "b": "A-", "c": "A-"},
        stats={"rescheduled": 2},
        lisa=G(ready=[HELD]),
    )


def test_a_due_time_that_was_not_placed_is_refused_if_there_is_a_window(bench: Bench) -> None:
    """The topic's window, or one that is the first header of the message."""
    body = {"a": "A-", "b": "A-"}
    state: dict[str, Any] = {"waiting": {"a": 5, "b": 6}, "body": body, "lisa": G()}
    bench.put(**state)
    call = Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR))], is_placed=False)
    for window in ("9-17", ""):
        bench.store.ask("HSET", bench.keys.options, "window", window)
        if window:
            with pytest.raises(HasWindow):
                bench.call(call)
    bench.store.ask("HDEL", bench.keys.options, "window")
    own = encode_envelope("A" * 8, "b", {"x": "1", WINDOW_HEADER: "9-17"})
    bench.store.ask("SET", bench.keys.body("b"), own)
    with pytest.raises(HasWindow):
        bench.call(call)
    assert bench.call(Reschedule(TOPIC, [("a", "7")], is_placed=False)) == [RESCHEDULED]
    assert bench.call(Reschedule(TOPIC, [("b", "8")])) == [RESCHEDULED]
    assert bench.state()["waiting"] == {"a": 7, "b": 8}


def test_a_conditional_change_applies_only_to_the_expected_due_time(bench: Bench) -> None:
    body = {"a": "A-", "b": "A-", "c": "A-"}
    bench.put(waiting={"a": 5, "b": 6}, body=body, lisa=G(ready=[Row("c", 5)]))
    items = [("a", f"{FAR}@5"), ("b", f"{FAR}@5"), ("c", f"{FAR}@5")]
    assert bench.call(Reschedule(TOPIC, items)) == [
        Rescheduled.RESCHEDULED,
        Rescheduled.DONE,
        Rescheduled.DONE,
    ]
    bench.check(
        waiting={"a": FAR, "b": 6}, body=body, stats={"rescheduled": 1}, lisa=G(ready=[Row("c", 5)])
    )
