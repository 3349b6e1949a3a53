"""Late policies and ramps: what promote and expire do with the backlog of an outage."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.transitions.expire import Expire, Expired
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.restore import Restore, Restored, RestoreItem
from lisa.core.transitions.retry import Fail, Failure
from lisa.pipeline.jobs.restore_plan import judge
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import G, Row, envelope

MINUTE, FAR = 60_000, 4_000_000_000_000
SKIP, BURY, COLLAPSE = ({"late": f"600000,{then}"} for then in ("skip", "garbage", "collapse"))
OWN = {"own_late": "1"}


def late(bench: Bench, minutes: float) -> int:
    """A due time so many minutes ago."""
    return bench.clock() - int(minutes * MINUTE)


def too_late(bench: Bench) -> list[str]:
    return bench.call(Promote(TOPIC)).expired


@pytest.mark.parametrize("options", [SKIP, BURY])
@pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])
def test_promote_reports_messages_that_are_too_late(
    bench: Bench, options: dict[str, str], groups: tuple[str, ...]
) -> None:
    old, fine = late(bench, 10.1), late(bench, 9)
    state = {"options": options, "body": {"old": "A-", "fine": "A-"}}
    bench.put(**state, waiting={"old": old, "fine": fine}, **{name: G() for name in groups})
    assert too_late(bench) == ["old"]
    bench.check(
        **state,
        waiting={"old": old},
        stats={"promoted": 1},
        **{name: G(ready=[Row("fine", fine)]) for name in groups},
    )


PASSED: dict[str, dict[str, Any]] = {
    "no policy": {},
    "run": {"options": {"late": "0,run"}},
    "no policy any more": {"options": {"late": ""}},
    "a policy of its own: run": {"options": SKIP | OWN, "policy": {"a": "*;0,run"}},
    "a later bound of its own": {"options": SKIP | OWN, "policy": {"a": "5;7200000,skip"}},
    "collapse, but of no schedule": {"options": COLLAPSE},
}


@pytest.mark.parametrize("case", PASSED)
def test_other_late_messages_are_promoted(bench: Bench, case: str) -> None:
    due = late(bench, 60)
    bench.put(waiting={"a": due}, body={"a": "A-"}, lisa=G(), **PASSED[case])
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.NOT_DUE]
    assert too_late(bench) == []
    bench.check(
        body={"a": "A-"}, stats={"promoted": 1}, lisa=G(ready=[Row("a", due)]), **PASSED[case]
    )


def test_a_retry_has_no_late_policy(bench: Bench) -> None:
    """Neither in retry, nor if it was rescheduled after a failure and waits again."""
    due = late(bench, 60)
    failed: dict[str, Any] = {"attempts": {"w": 1, "r": 1}}
    bench.put(
        options=SKIP,
        waiting={"w": due},
        body={"w": "A-", "r": "A-"},
        lisa=G(retry={"r": due + 1}, **failed),
    )
    assert bench.call(Expire(TOPIC, ["w", "r"])) == [Expired.NOT_DUE] * 2
    assert too_late(bench) == []
    bench.check(
        options=SKIP,
        body={"w": "A-", "r": "A-"},
        stats={"promoted": 1},
        lisa=G(ready=[Row("w", due, 2), Row("r", due + 1, 2)], **failed),
    )


def test_skip_settles_the_message(bench: Bench) -> None:
    old, fine = late(bench, 10.1), late(bench, 9)
    bench.put(
        options=SKIP,
        waiting={"old": old, "fine": fine},
        body={"old": "A-", "fine": "A-"},
        policy={"old": "5"},
        expiry={"old": FAR},
        lisa=G(),
    )
    said = bench.call(Expire(TOPIC, ["old", "fine", "old", "none"]))
    assert said == [Expired.SKIPPED, Expired.NOT_DUE, Expired.NOT_DUE, Expired.NOT_DUE]
    bench.check(
        options=SKIP,
        waiting={"fine": fine},
        body={"fine": "A-"},
        done={"old": ("A-", "skipped", old, 0, bench.now)},
        stats={"skipped": 1},
        lisa=G(),
    )


def test_the_end_of_a_ttl_comes_before_a_late_policy(bench: Bench) -> None:
    due = late(bench, 60)
    bench.put(options=SKIP, waiting={"a": due}, body={"a": "A-"}, expiry={"a": 5}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.EXPIRED]
    bench.check(
        options=SKIP,
        done={"a": ("A-", "expired", due, 0, bench.now)},
        stats={"expired": 1},
        lisa=G(),
    )


@pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])
def test_garbage_buries_the_message_in_every_group(bench: Bench, groups: tuple[str, ...]) -> None:
    due = late(bench, 11)
    bench.put(
        options=BURY,
        waiting={"a": due},
        body={"a": "A-"},
        expiry={"a": FAR},
        **{name: G() for name in groups},
    )
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.GARBAGE]
    after = bench.state()
    for name in groups:
        assert after.get(f"{name}:garbage") == {"a": bench.now}
        (reason,) = after[f"{name}:reasons"].values()
        assert reason.startswith("LatePolicy: first promoted 66")
        assert reason.endswith(" ms after its due time")
        assert after["stats"][f"garbage@{name}"] == 1
    assert "waiting" not in after
    assert "expiry" not in after
    assert after["body"] == {"a": "A-"}


def test_a_message_that_returns_from_garbage_is_promoted(bench: Bench) -> None:
    bench.put(options=BURY, waiting={"a": late(bench, 11)}, body={"a": "A-"}, lisa=G())
    bench.call(Expire(TOPIC, ["a"]))
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [True]
    assert bench.call(Promote(TOPIC)).moved == 1


def test_nothing_is_buried_without_a_group(bench: Bench) -> None:
    state = {"options": BURY, "waiting": {"a": late(bench, 11)}, "body": {"a": "A-"}}
    bench.put(**state)
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.NOT_DUE]
    bench.check(**state)


@pytest.mark.parametrize(
    ("newer", "state", "said"),
    [
        ([[]], {}, Expired.KEPT),
        ([["job@2"]], {}, Expired.KEPT),
        ([["job@2"]], {"job@2": FAR}, Expired.KEPT),
        ([["job@3", "job@2"]], {"job@2": 9}, Expired.SKIPPED),
        ([None], {}, Expired.SKIPPED),
    ],
)
def test_collapse_skips_all_but_the_newest_occurrence(
    bench: Bench, newer: list[Any], state: dict[str, int], said: Expired
) -> None:
    due = late(bench, 11)
    bench.put(
        options=COLLAPSE,
        waiting={"job@1": due, **state},
        body=dict.fromkeys(["job@1", *state], "A-"),
        policy={"job@1": "5,6"},
        lisa=G(),
    )
    assert bench.call(Expire(TOPIC, ["job@1"], newer)) == [said]
    after = bench.state()
    if said is Expired.SKIPPED:
        assert after["done"] == {"job@1": ("A-", "skipped", due, 0, bench.now)}
        return
    assert after["policy"] == {"job@1": "5,6;0,run"}
    assert too_late(bench) == []
    assert bench.call(Expire(TOPIC, ["job@1"], newer)) == [Expired.NOT_DUE]


def test_of_several_late_occurrences_in_one_call_the_newest_is_kept(bench: Bench) -> None:
    dues = {f"job@{n}": late(bench, 20 - n) for n in (1, 2, 3)}
    bench.put(options=COLLAPSE, waiting=dues, body=dict.fromkeys(dues, "A-"), lisa=G())
    assert too_late(bench) == list(dues)
    call = Expire(TOPIC, list(dues), [["job@3", "job@2"], ["job@3"], []])
    assert bench.call(call) == [Expired.SKIPPED, Expired.SKIPPED, Expired.KEPT]
    assert bench.call(Promote(TOPIC)).moved == 1
    assert bench.state()["stats"] == {"skipped": 2, "promoted": 1}


@pytest.mark.parametrize("options", [SKIP, {"ramp": "1,1000,oldest"}])
def test_a_message_that_is_sent_late_waits_for_promote(
    bench: Bench, options: dict[str, str]
) -> None:
    bench.put(options=options, lisa=G())
    due = late(bench, 11)
    bench.send(item("a", str(due)), item("b", "+0"))
    assert set(bench.state().get("waiting", ())) == {"a", "b"}
    bench.send(item("c", "+0"))
    assert set(bench.state()["waiting"]) == {"a", "b", "c"}, "nothing overtakes a message"


def test_a_message_with_an_own_policy_that_is_sent_late_waits_for_promote(bench: Bench) -> None:
    due = late(bench, 11)
    bench.put(lisa=G())
    bench.send(item("a", str(due), policy="*;600000,skip"))
    bench.check(
        options=OWN,
        waiting={"a": due},
        body={"a": "A-"},
        policy={"a": "*;600000,skip"},
        stats={"sent": 1},
        lisa=G(),
    )
    assert too_late(bench) == ["a"]
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.SKIPPED]


@pytest.mark.parametrize(
    ("policy", "delay"), [("*;600000,skip", 20_000), ("7000;600000,skip", 7_000), ("7000", 7_000)]
)
def test_retry_delays_stand_before_the_late_policy(bench: Bench, policy: str, delay: int) -> None:
    bench.put(
        options=OWN, body={"a": "A-"}, policy={"a": policy}, lisa=G(ready=[Row("a", 1, 1, "c1")])
    )
    (failed,) = bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "no")]))
    assert failed.due_ms == bench.now + delay


def test_an_empty_retry_policy_before_a_late_policy_means_no_retries(bench: Bench) -> None:
    bench.put(
        options=OWN,
        body={"a": "A-"},
        policy={"a": ";600000,skip"},
        lisa=G(ready=[Row("a", 1, 1, "c1")]),
    )
    (failed,) = bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "no")]))
    assert failed.due_ms is None


def test_a_restored_message_keeps_its_late_policy(bench: Bench) -> None:
    bench.put(lisa=G())
    data = envelope("A-")
    lost = RestoreItem("a", data, late(bench, 11), policy="*;600000,skip")
    assert bench.call(Restore(TOPIC, [lost])) == [Restored.RESTORED]
    assert too_late(bench) == ["a"]


def test_restored_garbage_of_a_late_policy_keeps_its_reason(bench: Bench) -> None:
    bench.put(lisa=G())
    why = "LatePolicy: first promoted 600001 ms after its due time"
    dead = {"group": "lisa", "state": "garbage", "attempts": 0, "due_ms": 1, "at_ms": 5}
    sent = {"id": "a", "token": "A" * 8, "kind": "s", "headers": None, "body": b"x", "policy": None}
    state = {"state": "garbage", "attempts": 0, "due_ms": 1, "expires_ms": None}
    archived = sent | state | {"groups": [dead | {"reason": why}]}
    item = judge(archived, ["lisa"], bench.clock()).item
    assert item is not None
    assert bench.call(Restore(TOPIC, [item])) == [Restored.RESTORED]
    after = bench.state()
    assert (after["lisa:garbage"], after["lisa:reasons"]) == ({"a": 5}, {"a": why})


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
