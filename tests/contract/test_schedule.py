"""schedule: compares a schedule with what its caller saw, creates and drops occurrences."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.errors import Misplaced, TopicFull
from lisa.core.redis.patience import Patience
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row, envelope

FAR = 4_000_000_000_000
BEFORE, AFTER, HELD = "1.5.0 old", b"1.6.0 new", b"1.7q.0 held"
SEEN = "1.5.0"
NEW = NewOccurrence("s@6", FAR, envelope("A-new"))


def call(**changes: Any) -> Schedule:
    """The change from BEFORE to AFTER that creates one occurrence."""
    given = {"fence": SEEN, "record": AFTER, "score": 6, "creates": [NEW], **changes}
    return Schedule(TOPIC, "s", **given)


def test_a_new_schedule_creates_its_first_occurrence(bench: Bench) -> None:
    assert bench.call(call(fence="")) == ScheduleOutcome("done", "", "a")
    bench.check(
        waiting={"s@6": FAR},
        body={"s@6": "A-new"},
        schedules={"s": AFTER.decode()},
        ticks={"s": 6},
        stats={"sent": 1},
    )


def test_nothing_changes_if_the_schedule_is_not_as_its_caller_saw_it(bench: Bench) -> None:
    bench.put(schedules={"s": "1.6.0 other"}, ticks={"s": 6})
    assert bench.call(call()) == ScheduleOutcome("changed", "1.6.0", "")
    assert bench.call(call(fence="")) == ScheduleOutcome("changed", "1.6.0", "")
    assert bench.call(call(fence="1.6")) == ScheduleOutcome("changed", "1.6.0", "")
    bench.check(schedules={"s": "1.6.0 other"}, ticks={"s": 6})


def test_of_two_calls_for_one_tick_the_first_wins(bench: Bench) -> None:
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5})
    assert bench.call(call()).state == "done"
    assert bench.call(call()).state == "changed"
    bench.check(
        waiting={"s@6": FAR},
        body={"s@6": "A-new"},
        schedules={"s": AFTER.decode()},
        ticks={"s": 6},
        stats={"sent": 1},
    )


@pytest.mark.parametrize(
    "known",
    [
        {"body": {"s@6": "B-"}, "waiting": {"s@6": 5}},
        {"done": {"s@6": ("B-", "acked", 5, 1, 1)}},
        {"done": {"s@6": ("B-", "cancelled", 5, 0, 1)}},
    ],
)
def test_an_id_that_is_known_is_not_created_again(bench: Bench, known: dict[str, Any]) -> None:
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5}, **known)
    assert bench.call(call()) == ScheduleOutcome("done", SEEN, "d")
    bench.check(schedules={"s": AFTER.decode()}, ticks={"s": 6}, **known)


@pytest.mark.parametrize("policy", ["0,5", ""])
def test_ttl_and_retry_policy_of_an_occurrence(bench: Bench, policy: str) -> None:
    """An empty policy means no retries."""
    bench.call(call(fence="", creates=[NewOccurrence("s@6", FAR, envelope("A-"), 50, policy)]))
    state = bench.state()
    assert state["expiry"] == {"s@6": FAR + 50}
    assert state.get("policy") == {"s@6": policy}


def test_an_occurrence_without_a_policy_has_that_of_its_topic(bench: Bench) -> None:
    bench.call(call(fence="", creates=[NewOccurrence("s@6", FAR, envelope("A-"))]))
    assert "policy" not in bench.state()


def test_removing_a_schedule_drops_its_waiting_occurrence_only(bench: Bench) -> None:
    bench.put(
        schedules={"s": BEFORE},
        ticks={"s": 5},
        waiting={"s@5": 9},
        expiry={"s@5": 10},
        policy={"s@5": "0"},
        body={"s@5": "A-", "s@4": "A-"},
        lisa=G(ready=[Row("s@4", 4)]),
    )
    gone = call(record=b"", score=None, creates=[], drops=["s@5", "s@4"])
    assert bench.call(gone) == ScheduleOutcome("done", SEEN, "")
    bench.check(body={"s@4": "A-"}, stats={"cancelled": 1}, lisa=G(ready=[Row("s@4", 4)]))


def test_an_edit_replaces_the_occurrence_of_the_same_tick(bench: Bench) -> None:
    bench.put(schedules={"s": BEFORE}, waiting={"s@6": 9}, body={"s@6": "B-old"})
    assert bench.call(call(drops=["s@6"])).outcomes == "a"
    state = bench.state()
    assert (state["body"], state["waiting"]) == ({"s@6": "A-new"}, {"s@6": FAR})


def test_a_swap_replaces_a_waiting_message(bench: Bench) -> None:
    bench.put(schedules={"s": BEFORE}, body={"s@5": "A-"}, waiting={"s@5": 5})
    assert bench.call(call(drops=["s@5"], swaps=True)) == ScheduleOutcome("done", SEEN, "a")
    assert bench.state()["waiting"] == {"s@6": FAR}


def test_a_swap_needs_the_dropped_message_to_wait(bench: Bench) -> None:
    before: dict[str, Any] = {
        "schedules": {"s": BEFORE},
        "body": {"s@4": "A-", "s@5": "A-"},
        "waiting": {"s@4": 4},
        "lisa": G(ready=[Row("s@5", 5)]),
    }
    bench.put(**before)
    swap = call(drops=["s@4", "s@5"], swaps=True)
    assert bench.call(swap) == ScheduleOutcome("gone", SEEN, "")
    bench.check(**before)


RUNNING: dict[str, dict[str, Any]] = {
    "in flight": {"lisa": G(ready=[Row("s@5", 5, 1, "c1")])},
    "retry": {"lisa": G(retry={"s@5": 9}, attempts={"s@5": 1})},
    "ready again": {"lisa": G(ready=[Row("s@5", 5, 2)], attempts={"s@5": 1})},
    "settled by one of two": {"body": {"s@5": "A+"}, "a": G(), "lisa": G(ready=[Row("s@5", 5)])},
    "in flight in one of two": {
        "a": G(ready=[Row("s@5", 5)]),
        "lisa": G(ready=[Row("s@5", 5, 1, "c1")]),
    },
}
UNSTARTED: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"s@5": 5}, "lisa": G()},
    "ready": {"lisa": G(ready=[Row("s@5", 5)])},
    "without room": {"lisa": G(retry={"s@5": 5})},
}
ENDED: dict[str, dict[str, Any]] = {
    "garbage": {"lisa": G(garbage={"s@5": 5})},
    "unknown": {"body": {}, "lisa": G()},
}
STAGES: dict[str, dict[str, Any]] = {**RUNNING, **UNSTARTED, **ENDED}
HOLDS: dict[str, Any] = {
    "allow": (),
    "skip": RUNNING,
    "queue_one": {**RUNNING, **UNSTARTED},
    "replace_unstarted": (),
}


@pytest.mark.parametrize("overlap", HOLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_earlier_occurrence_prevents(bench: Bench, stage: str, overlap: str) -> None:
    before = {"body": {"s@5": "A-"}, **STAGES[stage]}
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5}, **before)
    asked = call(earlier=["s@5"], overlap=overlap, held=HELD, held_score=7)
    done = bench.call(asked)
    if stage in HOLDS[overlap]:
        assert done == ScheduleOutcome("held", SEEN, "n")
        bench.check(
            schedules={"s": HELD.decode()}, ticks={"s": 7}, stats={"overlapped": 1}, **before
        )
        return
    assert done == ScheduleOutcome("done", SEEN, "a")
    state = bench.state()
    assert state["ticks"] == {"s": 6}
    is_replaced = overlap == "replace_unstarted" and stage in UNSTARTED
    assert ("s@5" in state["body"]) == (stage != "unknown" and not is_replaced)
    assert state.get("done", {}).keys() == ({"s@5"} if is_replaced else set())
    if is_replaced:
        assert state["done"]["s@5"][:2] == ("A-", "cancelled")
        assert state["waiting"] == {"s@6": FAR}
        assert state["lisa:ready"] == []


def test_a_tick_that_waits_for_an_earlier_occurrence_is_counted_once(bench: Bench) -> None:
    before: dict[str, Any] = {"body": {"s@5": "A-"}, "lisa": G(ready=[Row("s@5", 5)])}
    bench.put(schedules={"s": "1.6q.0 queued"}, ticks={"s": 6}, **before)
    asked = call(
        fence="1.6q.0", earlier=["s@5"], overlap="queue_one", held=b"1.6q.0 queued", held_score=7
    )
    assert bench.call(asked).state == "held"
    bench.check(schedules={"s": "1.6q.0 queued"}, ticks={"s": 7}, **before)


def test_the_capacity_of_the_topic_counts(bench: Bench) -> None:
    before = {"schedules": {"s": BEFORE}, "waiting": {"x": FAR}, "body": {"x": "A-"}}
    bench.put(options={"capacity": "1"}, **before)
    with pytest.raises(TopicFull, match="schedule 's' created nothing"):
        bench.call(call())
    bench.check(options={"capacity": "1"}, **before)
    assert bench.call(call(drops=["x"])).outcomes == "a"


@pytest.mark.parametrize(
    "replaced", [{"waiting": {"s@5": 5}, "lisa": G()}, {"lisa": G(ready=[Row("s@5", 5)])}]
)
def test_a_replaced_message_makes_room(bench: Bench, replaced: dict[str, Any]) -> None:
    bench.put(options={"capacity": "1"}, schedules={"s": BEFORE}, body={"s@5": "A-"}, **replaced)
    assert bench.call(call(earlier=["s@5"], overlap="replace_unstarted")).outcomes == "a"
    assert bench.state()["waiting"] == {"s@6": FAR}


def test_only_a_waiting_message_makes_room_when_it_is_dropped(bench: Bench) -> None:
    before = {"schedules": {"s": BEFORE}, "body": {"x": "A-"}, "lisa": G(ready=[Row("x", 5)])}
    bench.put(options={"capacity": "1"}, **before)
    with pytest.raises(TopicFull):
        bench.call(call(drops=["x"]))


def test_a_message_that_is_dropped_and_created_again_makes_no_room(bench: Bench) -> None:
    before: dict[str, Any] = {
        "schedules": {"s": BEFORE},
        "waiting": {"s@6": 6},
        "body": {"s@6": "A-old"},
    }
    bench.put(options={"capacity": "1"}, **before)
    more = NewOccurrence("s@7", FAR, envelope("B-new"))
    with pytest.raises(TopicFull):
        bench.call(call(drops=["s@6"], creates=[NEW, more]))
    bench.check(options={"capacity": "1"}, **before)
    assert bench.call(call(drops=["s@6"])) == ScheduleOutcome("done", SEEN, "a")


def test_a_known_message_needs_no_room(bench: Bench) -> None:
    done = {"s@6": ("B-", "acked", 5, 1, 1)}
    bench.put(
        options={"capacity": "1"},
        schedules={"s": BEFORE},
        done=done,
        waiting={"x": FAR},
        body={"x": "A-"},
    )
    assert bench.call(call()).outcomes == "d"


def test_an_unlimited_capacity_is_stored_as_empty_text(bench: Bench) -> None:
    bench.put(options={"capacity": ""}, schedules={"s": BEFORE})
    assert bench.call(call()).outcomes == "a"


def test_a_shard_of_another_layout_refuses(bench: Bench) -> None:
    bench.put(options={"accepts": "-3"}, schedules={"s": BEFORE})
    with pytest.raises(Misplaced):
        bench.store.drive(bench.store.run_at(call(), "0", Patience(1.0)))
    bench.check(options={"accepts": "-3"}, schedules={"s": BEFORE})
