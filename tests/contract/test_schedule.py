"""schedule: compares a schedule with what its caller saw, creates and drops occurrences."""

from typing import Any

import pytest

from lisa.core.model.errors import Misplaced, TopicFull
from lisa.core.redis.flow import Patience
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row, envelope

BEFORE, AFTER, HELD = "1.5.0 old", b"1.6.0 new", b"1.7q.0 held"
SEEN = "1.5.0"
NEW = NewOccurrence("s@6", FAR, envelope("A-new"))
CREATED: dict[str, Any] = {
    "waiting": {"s@6": FAR},
    "body": {"s@6": "A-new"},
    "schedules": {"s": AFTER.decode()},
    "ticks": {"s": 6},
    "stats": {"sent": 1},
}
FULL = {"options": {"capacity": "1"}, "schedules": {"s": BEFORE}}
X: dict[str, Any] = {"waiting": {"x": FAR}, "body": "x"}
"""The message that fills a topic."""


def change(bench: Bench, **changes: Any) -> ScheduleOutcome:
    """Change the schedule from BEFORE to AFTER, and create one occurrence."""
    given = {"fence": SEEN, "record": AFTER, "score": 6, "creates": [NEW], **changes}
    return bench.call(Schedule(TOPIC, "s", **given))


def test_a_new_schedule_creates_its_first_occurrence(bench: Bench) -> None:
    assert change(bench, fence="") == ScheduleOutcome("done", "", "a")
    bench.check(**CREATED)


def test_nothing_changes_if_the_schedule_is_not_as_its_caller_saw_it(bench: Bench) -> None:
    bench.put(schedules={"s": "1.6.0 other"}, ticks={"s": 6})
    for fence in (SEEN, "", "1.6"):
        assert change(bench, fence=fence) == ScheduleOutcome("changed", "1.6.0", "")
    bench.check_unchanged()


def test_of_two_calls_for_one_tick_the_first_wins(bench: Bench) -> None:
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5})
    assert [change(bench).state for _ in range(2)] == ["done", "changed"]
    bench.check(**CREATED)


@pytest.mark.parametrize(
    "known",
    [
        {"body": {"s@6": "B-"}, "waiting": {"s@6": 5}},
        {"done": {"s@6": ("B-", "acked", 5, 1, 1)}},
        {"done": {"s@6": ("B-", "cancelled", 5, 0, 1)}},
    ],
)
def test_an_id_that_is_known_is_not_created_again(bench: Bench, known: dict[str, Any]) -> None:
    """Even if the topic is full."""
    bench.put(**FULL, **{"waiting": {"x": FAR}, **known}, ticks={"s": 5})
    assert change(bench) == ScheduleOutcome("done", SEEN, "d")
    bench.check_change(schedules={"s": AFTER.decode()}, ticks={"s": 6})


@pytest.mark.parametrize("policy", ["0,5", "", None])
def test_ttl_and_retry_policy_of_an_occurrence(bench: Bench, policy: str | None) -> None:
    """An empty policy means no retries; without a policy it has that of its topic."""
    change(bench, fence="", creates=[NewOccurrence("s@6", FAR, envelope("A-"), 50, policy)])
    state = bench.state()
    assert state["expiry"] == {"s@6": FAR + 50}
    assert state.get("policy") == (None if policy is None else {"s@6": policy})


def test_removing_a_schedule_drops_its_waiting_occurrence_only(bench: Bench) -> None:
    started = G(ready=[Row("s@4", 4)])
    own = {"waiting": {"s@5": 9}, "expiry": {"s@5": 10}, "policy": {"s@5": "0"}}
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5}, **own, body=["s@5", "s@4"], lisa=started)
    gone = change(bench, record=b"", score=None, creates=[], drops=["s@5", "s@4"])
    assert gone == ScheduleOutcome("done", SEEN, "")
    bench.check(body=["s@4"], stats={"cancelled": 1}, lisa=started)


def test_an_edit_replaces_the_occurrence_of_the_same_tick(bench: Bench) -> None:
    bench.put(schedules={"s": BEFORE}, waiting={"s@6": 9}, body={"s@6": "B-old"})
    assert change(bench, drops=["s@6"]).outcomes == "a"
    bench.check(**{**CREATED, "stats": {"sent": 1, "cancelled": 1}})


def test_a_swap_needs_the_dropped_message_to_wait(bench: Bench) -> None:
    started = G(ready=[Row("s@5", 5)])
    bench.put(schedules={"s": BEFORE}, body=["s@4", "s@5"], waiting={"s@4": 4}, lisa=started)
    swap = change(bench, drops=["s@4", "s@5"], swaps=True)
    assert swap == ScheduleOutcome("gone", SEEN, "")
    bench.check_unchanged()
    assert change(bench, drops=["s@4"], swaps=True) == ScheduleOutcome("done", SEEN, "a")
    assert bench.state()["waiting"] == {"s@6": FAR}


READY, STARTED = Row("s@5", 5), Row("s@5", 5, 1, "c1")
RUNNING: dict[str, dict[str, Any]] = {
    "in flight": {"lisa": G(ready=[STARTED])},
    "retry": {"lisa": G(retry={"s@5": 9}, attempts={"s@5": 1})},
    "ready again": {"lisa": G(ready=[Row("s@5", 5, 2)], attempts={"s@5": 1})},
    "settled by one of two": {"body": {"s@5": "A+"}, "a": G(), "lisa": G(ready=[READY])},
    "in flight in one of two": {"a": G(ready=[READY]), "lisa": G(ready=[STARTED])},
}
UNSTARTED: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"s@5": 5}, "lisa": G()},
    "ready": {"lisa": G(ready=[READY])},
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
    bench.put(schedules={"s": BEFORE}, ticks={"s": 5}, **{"body": ["s@5"], **STAGES[stage]})
    done = change(bench, earlier=["s@5"], overlap=overlap, held=HELD, held_score=7)
    if stage in HOLDS[overlap]:
        assert done == ScheduleOutcome("held", SEEN, "n")
        stats = {"overlapped": 1}
        bench.check_change(schedules={"s": HELD.decode()}, ticks={"s": 7}, stats=stats)
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
    queued = "1.6q.0 queued"
    bench.put(schedules={"s": queued}, ticks={"s": 6}, body=["s@5"], lisa=G(ready=[READY]))
    held = {"earlier": ["s@5"], "overlap": "queue_one", "held": queued.encode(), "held_score": 7}
    assert change(bench, fence="1.6q.0", **held).state == "held"
    bench.check_change(ticks={"s": 7})


def test_the_capacity_of_the_topic_counts(bench: Bench) -> None:
    bench.put(**FULL, **X)
    with pytest.raises(TopicFull, match="schedule 's' created nothing"):
        change(bench)
    bench.check_unchanged()
    assert change(bench, drops=["x"]).outcomes == "a"


@pytest.mark.parametrize(
    "replaced", [{"waiting": {"s@5": 5}, "lisa": G()}, {"lisa": G(ready=[READY])}]
)
def test_a_replaced_message_makes_room(bench: Bench, replaced: dict[str, Any]) -> None:
    bench.put(**FULL, body=["s@5"], **replaced)
    assert change(bench, earlier=["s@5"], overlap="replace_unstarted").outcomes == "a"
    assert bench.state()["waiting"] == {"s@6": FAR}


def test_only_a_waiting_message_makes_room_when_it_is_dropped(bench: Bench) -> None:
    bench.put(**FULL, body="x", lisa=G(ready=[Row("x", 5)]))
    with pytest.raises(TopicFull):
        change(bench, drops=["x"])


def test_a_message_that_is_dropped_and_created_again_makes_no_room(bench: Bench) -> None:
    bench.put(**FULL, waiting={"s@6": 6}, body={"s@6": "A-old"})
    more = NewOccurrence("s@7", FAR, envelope("B-new"))
    with pytest.raises(TopicFull):
        change(bench, drops=["s@6"], creates=[NEW, more])
    bench.check_unchanged()
    assert change(bench, drops=["s@6"]) == ScheduleOutcome("done", SEEN, "a")


def test_an_unlimited_capacity_is_stored_as_empty_text(bench: Bench) -> None:
    bench.put(options={"capacity": ""}, schedules={"s": BEFORE})
    assert change(bench).outcomes == "a"


def test_a_shard_of_another_layout_refuses(bench: Bench) -> None:
    bench.put(options={"accepts": "-3"}, schedules={"s": BEFORE})
    call = Schedule(TOPIC, "s", SEEN, AFTER, 6, creates=[NEW])
    with pytest.raises(Misplaced):
        bench.store.drive(bench.store.run(call, "0", Patience(1.0)))
    bench.check_unchanged()
