"""inspect: the state of ids, in every group."""

import pytest

from lisa.core.transitions.inspect import GroupState, Inspect, Inspection, Tombstone
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row, envelope

LATEST = 253_402_300_799_999


def test_it_reports_every_state_and_changes_nothing(bench: Bench) -> None:
    held_by_c1 = G(
        ready=[Row("a", 1, 3, "c1", 5000), Row("b", 2)],
        attempts={"a": 2},
        reasons={"a": "no"},
        garbage={"x": 5},
    )
    bench.put(
        waiting={"w": LATEST},
        body={"w": "A-wait", "a": "A+all", "b": "A-two"},
        expiry={"w": LATEST},
        done={"d": ("Ar", "acked", 7, 2, 9)},
        lisa=held_by_c1,
        audit=G(retry={"a": 4}, garbage={"b": 6}, attempts={"b": 11}, reasons={"b": "bad"}),
    )
    w, a, b, d, unknown = bench.call(Inspect(TOPIC, ["w", "a", "b", "d", "?"]))
    assert w == Inspection(envelope("A-wait"), None, LATEST, LATEST, [])
    held, retry = sorted(a.group_states)[::-1]
    assert a._replace(group_states=[]) == Inspection(envelope("A+all"), None, None, None, [])
    assert held.idle_ms is not None
    assert 5000 <= held.idle_ms <= 5000 + bench.clock() - bench.start
    assert held._replace(idle_ms=None) == GroupState(
        "lisa", "in_flight", 1, 2, "c1", None, "no", bench.entry("a")
    )
    assert retry == GroupState("audit", "retry", 4, 0, None, None, None, None)
    assert sorted(b.group_states) == [
        GroupState("audit", "garbage", 6, 11, None, None, "bad", None),
        GroupState("lisa", "ready", 2, 0, None, None, None, bench.entry("b")),
    ]
    assert d == Inspection(b"", Tombstone("AAAAAAAA", "acked", 7, 2, 9), None, None, [])
    assert unknown == Inspection(b"", None, None, None, [])
    bench.check_unchanged()


@pytest.mark.parametrize("body", ["", "long enough to be seen"])
def test_without_bodies_only_heads_are_returned(bench: Bench, body: str) -> None:
    bench.put(waiting={"a": 1}, body={"a": f"A-{body}"})
    (said,) = bench.call(Inspect(TOPIC, ["a"], bodies=False))
    assert said.envelope == envelope("A-")
