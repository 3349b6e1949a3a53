"""Ramps: how fast promote moves the backlog of an outage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row
from tests.contract.test_late import SKIP, late

if TYPE_CHECKING:
    from tests.contract.bench import Bench


RAMP = {"ramp": "1,3600000,oldest"}
"""One message an hour: the first call may promote one, and the next calls none."""


@pytest.mark.parametrize(("order", "first"), [("oldest", "a"), ("newest", "c")])
@pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])
def test_a_ramp_limits_the_backlog_and_not_what_is_on_time(
    bench: Bench, order: str, first: str, groups: tuple[str, ...]
) -> None:
    dues = {"a": late(bench, 3), "b": late(bench, 2), "c": late(bench, 1), "d": late(bench, 0.05)}
    bench.put(
        options={"ramp": f"1,3600000,{order}"},
        waiting=dues,
        body=dict.fromkeys(dues, "A-"),
        **{name: G() for name in groups},
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.cut_short, said.expired) == (2 * len(groups), False, [])
    assert said.next_due_ms == bench.now + 3_600_000
    assert bench.call(Promote(TOPIC)).moved == 0, "another manager"
    after = bench.state()
    assert after["options"].pop("ramped").isdigit()
    assert after["waiting"] == {name: due for name, due in dues.items() if name not in (first, "d")}
    for name in groups:
        assert after[f"{name}:ready"] == [Row(one, dues[one])[:4] for one in (first, "d")]
    assert after["stats"] == {"promoted": 2}


def test_the_next_message_on_time_comes_before_the_next_of_the_ramp(bench: Bench) -> None:
    soon = bench.clock() + 60_000
    bench.put(
        options=RAMP,
        waiting={"a": 1, "b": 2, "c": soon},
        body=dict.fromkeys("abc", "A-"),
        lisa=G(),
    )
    assert [bench.call(Promote(TOPIC)).next_due_ms for _ in range(2)] == [soon, soon]


def test_what_a_late_policy_or_a_ttl_ends_does_not_use_up_the_ramp(bench: Bench) -> None:
    due = late(bench, 5)
    bench.put(
        options=SKIP | RAMP,
        waiting={"skip": 1, "ttl": due - 1, "a": due, "b": due + 1},
        body=dict.fromkeys(("skip", "ttl", "a", "b"), "A-"),
        expiry={"ttl": due},
        lisa=G(),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.expired) == (1, ["skip", "ttl"])
    assert set(bench.state()["waiting"]) == {"skip", "ttl", "b"}


def test_a_message_without_room_does_not_use_up_the_ramp(bench: Bench) -> None:
    bench.put(
        options=RAMP | {"max_ready": "1"},
        waiting={"a": 1},
        body={"a": "A-", "old": "A-"},
        lisa=G(ready=[Row("old", 1)]),
    )
    assert bench.call(Promote(TOPIC)).full == ("lisa",)
    assert "ramped" not in bench.state()["options"]


def test_a_ramp_used_up_in_the_future_is_not_waited_for(bench: Bench) -> None:
    """The server's clock was set back."""
    bench.put(
        options={"ramp": "1,1000,oldest", "ramped": str(4 * 10**15)},
        waiting={"a": 1, "b": 2},
        body={"a": "A-", "b": "A-"},
        lisa=G(),
    )
    said = bench.call(Promote(TOPIC))
    assert said.next_due_ms is not None
    assert said.next_due_ms - said.now_ms <= 1_001


def test_a_fast_ramp_moves_a_tenth_of_a_second_at_once(bench: Bench) -> None:
    ids = {f"m{n}": n for n in range(100)}
    bench.put(
        options={"ramp": "200,1000,oldest"}, waiting=ids, body=dict.fromkeys(ids, "A-"), lisa=G()
    )
    said = bench.call(Promote(TOPIC))
    assert said.moved == 20
    assert said.next_due_ms == said.now_ms + 20


@pytest.mark.parametrize("ramp", ["3,1000", "9,1000", "7,60000"])
def test_a_ramp_whose_pause_is_a_fraction_of_a_microsecond_moves_messages(
    bench: Bench, ramp: str
) -> None:
    bench.put(options={"ramp": f"{ramp},oldest"}, waiting={"a": 1}, body={"a": "A-"}, lisa=G())
    assert bench.call(Promote(TOPIC)).moved == 1
