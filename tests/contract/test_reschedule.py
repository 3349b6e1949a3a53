"""reschedule and cancel: several ids, conditions, windows. See test_places for each place."""

import pytest

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.keys import WINDOW_HEADER
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.change import Cancel, Reschedule, Rescheduled
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row

RESCHEDULED, IN_FLIGHT, DONE, UNKNOWN = Rescheduled
HELD = Row("a", 1000, 1, "c1")


def test_fire_now_is_due_now(bench: Bench) -> None:
    bench.put(waiting={"a": FAR, "b": FAR}, body="ab", lisa=G())
    said = bench.call(Reschedule(TOPIC, [("a", "+0"), ("b", "+7000")]))
    assert said == [RESCHEDULED, RESCHEDULED]
    bench.check_change(waiting={"a": bench.now, "b": bench.now + 7000}, stats={"rescheduled": 2})


def test_each_id_of_a_call_has_its_own_answer(bench: Bench) -> None:
    bench.put(waiting={"b": 5, "c": 6}, body="abc", lisa=G(ready=[HELD]))
    said = bench.call(Reschedule(TOPIC, [("a", "7"), ("b", "8"), ("x", "9"), ("b", "10")]))
    assert said == [IN_FLIGHT, RESCHEDULED, UNKNOWN, RESCHEDULED]
    bench.check_change(waiting={"b": 10, "c": 6}, stats={"rescheduled": 2})
    cancelled = bench.call(Cancel(TOPIC, ["a", "b", "x", "c", "b"]))
    assert cancelled == ["in_flight", "cancelled", "unknown", "cancelled", "cancelled"]
    done = {m: ("A-", "cancelled", due, 0, bench.now) for m, due in (("b", 10), ("c", 6))}
    bench.check_change(body="a", waiting=None, done=done, stats={"rescheduled": 2, "cancelled": 2})


def test_a_due_time_that_was_not_placed_is_refused_if_there_is_a_window(bench: Bench) -> None:
    """The topic's window, or one that is the first header of the message."""
    bench.put(waiting={"a": 5, "b": 6}, body="ab", lisa=G())
    call = Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR))], is_placed=False)
    bench.store.ask("HSET", bench.keys.options, "window", "9-17")
    with pytest.raises(HasWindow):
        bench.call(call)
    bench.store.ask("HSET", bench.keys.options, "window", "")
    own = encode_envelope("A" * 8, "b", {"x": "1", WINDOW_HEADER: "9-17"})
    bench.store.ask("SET", bench.keys.body("b"), own)
    with pytest.raises(HasWindow):
        bench.call(call)
    assert bench.call(Reschedule(TOPIC, [("a", "7")], is_placed=False)) == [RESCHEDULED]
    assert bench.call(Reschedule(TOPIC, [("b", "8")])) == [RESCHEDULED]
    assert bench.state()["waiting"] == {"a": 7, "b": 8}


def test_a_conditional_change_applies_only_to_the_expected_due_time(bench: Bench) -> None:
    bench.put(waiting={"a": 5, "b": 6}, body="abc", lisa=G(ready=[Row("c", 5)]))
    said = bench.call(Reschedule(TOPIC, [(one, f"{FAR}@5") for one in "abc"]))
    assert said == [RESCHEDULED, DONE, DONE]
    bench.check_change(waiting={"a": FAR, "b": 6}, stats={"rescheduled": 1})
