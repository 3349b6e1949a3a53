"""Late policies and ramps: what promote and expire do with the backlog of an outage."""

from dataclasses import replace
from typing import Any

import pytest

from lisa.core.transitions.garbage import Requeue
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.restore import Restore, Restored, RestoreItem
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.upkeep import Expire, Expired
from lisa.pipeline.jobs.restore import judge
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row, envelope

MINUTE = 60_000
SKIP, BURY, COLLAPSE = ({"late": f"600000,{then}"} for then in ("skip", "garbage", "collapse"))
OWN = {"own_late": "1"}
GROUPS = pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])


def late(bench: Bench, minutes: float) -> int:
    """A due time so many minutes ago."""
    return bench.clock() - int(minutes * MINUTE)


def too_late(bench: Bench) -> list[str]:
    return bench.call(Promote(TOPIC)).expired


def expire(bench: Bench, ids: str = "a") -> list[Expired]:
    return bench.call(Expire(TOPIC, list(ids)))


@pytest.mark.parametrize("options", [SKIP, BURY])
@GROUPS
def test_promote_reports_messages_that_are_too_late(
    bench: Bench, options: dict[str, str], groups: tuple[str, ...]
) -> None:
    old, fine = late(bench, 10.1), late(bench, 9)
    bench.put(
        options=options, waiting={"o": old, "f": fine}, body="of", **dict.fromkeys(groups, G())
    )
    assert too_late(bench) == ["o"]
    ready = dict.fromkeys(groups, G(ready=[Row("f", fine)]))
    bench.check_change(waiting={"o": old}, stats={"promoted": 1}, **ready)


PASSED: dict[str, dict[str, Any]] = {
    "no policy": {},
    "run": {"options": {"late": "0,run"}},
    "no policy any more": {"options": {"late": ""}},
    "a policy of its own: run": {"options": SKIP | OWN, "policy": {"a": "*;0,run"}},
    "a later bound of its own": {"options": SKIP | OWN, "policy": {"a": "5;7200000,skip"}},
    "collapse, but of no schedule": {"options": COLLAPSE},
    "a later bound, a cost and a slack of its own": {
        "options": SKIP | OWN,
        "policy": {"a": "5;7200000,skip;3,1000"},
    },
}


@pytest.mark.parametrize("case", PASSED)
def test_other_late_messages_are_promoted(bench: Bench, case: str) -> None:
    due = late(bench, 60)
    bench.put(waiting={"a": due}, body="a", lisa=G(), **PASSED[case])
    assert expire(bench) == [Expired.NOT_DUE]
    assert too_late(bench) == []
    bench.check_change(waiting=None, stats={"promoted": 1}, lisa=G(ready=[Row("a", due)]))


def test_a_retry_has_no_late_policy(bench: Bench) -> None:
    """Neither in retry, nor if it was rescheduled after a failure and waits again."""
    due, failed = late(bench, 60), G(attempts={"w": 1, "r": 1})
    bench.put(
        options=SKIP, waiting={"w": due}, body="wr", lisa=replace(failed, retry={"r": due + 1})
    )
    assert expire(bench, "wr") == [Expired.NOT_DUE] * 2
    assert too_late(bench) == []
    ready = replace(failed, ready=[Row("w", due, 2), Row("r", due + 1, 2)])
    bench.check_change(waiting=None, stats={"promoted": 1}, lisa=ready)


@pytest.mark.parametrize("policy", ["*;;5,", ";;,1000", "0;;5,1000,7"])
def test_cost_and_slack_leave_the_topic_s_late_policy_in_force(bench: Bench, policy: str) -> None:
    due = late(bench, 60)
    bench.put(options=SKIP | OWN, waiting={"a": due}, body="a", policy={"a": policy}, lisa=G())
    assert too_late(bench) == ["a"]
    assert expire(bench) == [Expired.SKIPPED]


def test_skip_settles_the_message(bench: Bench) -> None:
    """The end of a ttl comes before a late policy."""
    old, fine = late(bench, 10.1), late(bench, 9)
    waiting, expiry = {"o": old, "f": fine, "e": old}, {"o": FAR, "e": 5}
    bench.put(options=SKIP, waiting=waiting, body="ofe", policy={"o": "5"}, expiry=expiry, lisa=G())
    assert expire(bench, "ofo-e") == ["skipped", "not_due", "not_due", "not_due", "expired"]
    done = {m: ("A-", how, old, 0, bench.now) for m, how in (("o", "skipped"), ("e", "expired"))}
    bench.check(
        options=SKIP,
        waiting={"f": fine},
        body="f",
        done=done,
        stats={"skipped": 1, "expired": 1},
        lisa=G(),
    )


@GROUPS
def test_garbage_buries_the_message_in_every_group(bench: Bench, groups: tuple[str, ...]) -> None:
    due = late(bench, 11)
    empty = dict.fromkeys(groups, G())
    bench.put(options=BURY, waiting={"a": due}, body="a", expiry={"a": FAR}, **empty)
    assert expire(bench) == [Expired.GARBAGE]
    after = bench.state()
    for name in groups:
        assert after.get(f"{name}:garbage") == {"a": bench.now}
        (reason,) = after[f"{name}:reasons"].values()
        assert reason.startswith("LatePolicy: first promoted 66")
        assert reason.endswith(" ms after its due time")
        assert after["stats"][f"garbage@{name}"] == 1
    assert not {"waiting", "expiry"} & after.keys()
    assert after["body"] == {"a": "A-"}
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [True]
    assert bench.call(Promote(TOPIC)).moved == 1


def test_nothing_is_buried_without_a_group(bench: Bench) -> None:
    bench.put(options=BURY, waiting={"a": late(bench, 11)}, body="a")
    assert expire(bench) == [Expired.NOT_DUE]
    bench.check_unchanged()


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
    waiting = {"job@1": late(bench, 11), **state}
    bench.put(options=COLLAPSE, waiting=waiting, body=waiting.keys(), policy={"job@1": "5,6"})
    bench.put(lisa=G())
    assert bench.call(Expire(TOPIC, ["job@1"], newer)) == [said]
    after = bench.state()
    if said is Expired.SKIPPED:
        assert after["done"] == {"job@1": ("A-", "skipped", waiting["job@1"], 0, bench.now)}
        return
    assert after["policy"] == {"job@1": "5,6;0,run"}
    assert too_late(bench) == []
    assert bench.call(Expire(TOPIC, ["job@1"], newer)) == [Expired.NOT_DUE]


@pytest.mark.parametrize(
    ("own", "kept"), [("*;;3,", "*;0,run;3,"), ("5;1000,collapse;,7", "5;0,run;,7")]
)
def test_an_occurrence_kept_by_collapse_keeps_its_cost(bench: Bench, own: str, kept: str) -> None:
    bench.put(options=COLLAPSE | OWN, waiting={"job@1": late(bench, 11)}, body=["job@1"])
    bench.put(policy={"job@1": own}, lisa=G())
    assert bench.call(Expire(TOPIC, ["job@1"], [[]])) == [Expired.KEPT]
    assert bench.state()["policy"] == {"job@1": kept}


def test_of_several_late_occurrences_in_one_call_the_newest_is_kept(bench: Bench) -> None:
    dues = {f"job@{n}": late(bench, 20 - n) for n in (1, 2, 3)}
    bench.put(options=COLLAPSE, waiting=dues, body=dues.keys(), lisa=G())
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
    bench.send(item("a", late(bench, 11)), item("b", "+0"))
    assert set(bench.state().get("waiting", ())) == {"a", "b"}
    bench.send(item("c", "+0"))
    assert set(bench.state()["waiting"]) == {"a", "b", "c"}, "nothing overtakes a message"


def test_a_message_with_an_own_cost_that_is_sent_late_is_ready_at_once(bench: Bench) -> None:
    due, own = late(bench, 11), "*;;5,1000"
    bench.put(lisa=G())
    bench.send(item("a", due, policy=own))
    ready = G(ready=[Row("a", due)])
    bench.check_change(body="a", policy={"a": own}, stats={"sent": 1, "promoted": 1}, lisa=ready)


def test_a_message_with_an_own_policy_that_is_sent_late_waits_for_promote(bench: Bench) -> None:
    due, own = late(bench, 11), "*;600000,skip"
    bench.put(lisa=G())
    bench.send(item("a", due, policy=own))
    bench.check_change(
        options=OWN, waiting={"a": due}, body="a", policy={"a": own}, stats={"sent": 1}
    )
    assert too_late(bench) == ["a"]
    assert expire(bench) == [Expired.SKIPPED]


@pytest.mark.parametrize(
    ("policy", "delay"),
    [
        ("*;600000,skip", 20_000),
        ("7000;600000,skip", 7_000),
        ("7000", 7_000),
        (";6,skip", None),
        ("*;;5,", 20_000),
        ("7000;;,1000", 7_000),
        (";;5,1000,3", None),
    ],
)
def test_retry_delays_stand_before_the_late_policy_and_the_cost(
    bench: Bench, policy: str, delay: int | None
) -> None:
    """An empty retry policy means no retries."""
    bench.put(options=OWN, body="a", policy={"a": policy}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    (failed,) = bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "no")]))
    assert failed.due_ms == (None if delay is None else bench.now + delay)


def test_a_restored_message_keeps_its_late_policy(bench: Bench) -> None:
    bench.put(lisa=G())
    lost = RestoreItem("a", envelope("A-"), late(bench, 11), policy="*;600000,skip")
    assert bench.call(Restore(TOPIC, [lost])) == [Restored.RESTORED]
    assert too_late(bench) == ["a"]


def test_restored_garbage_of_a_late_policy_keeps_its_reason(bench: Bench) -> None:
    bench.put(lisa=G())
    why = "LatePolicy: first promoted 600001 ms after its due time"
    state = {"state": "garbage", "attempts": 0, "due_ms": 1}
    sent = {"id": "a", "token": "A" * 8, "kind": "s", "headers": None, "body": b"x", "policy": None}
    dead = state | {"group": "lisa", "at_ms": 5, "reason": why}
    item = judge(
        sent | state | {"expires_ms": None, "groups": [dead]}, ["lisa"], bench.clock()
    ).item
    assert item is not None
    assert bench.call(Restore(TOPIC, [item])) == [Restored.RESTORED]
    after = bench.state()
    assert (after["lisa:garbage"], after["lisa:reasons"]) == ({"a": 5}, {"a": why})


RAMP = {"ramp": "1,3600000,oldest"}
"""One message an hour: the first call may promote one, and the next calls none."""


@pytest.mark.parametrize(("order", "first"), [("oldest", "a"), ("newest", "c")])
@GROUPS
def test_a_ramp_limits_the_backlog_and_not_what_is_on_time(
    bench: Bench, order: str, first: str, groups: tuple[str, ...]
) -> None:
    dues = {m: late(bench, minutes) for m, minutes in zip("abcd", (3, 2, 1, 0.05), strict=True)}
    options = {"ramp": f"1,3600000,{order}"}
    bench.put(options=options, waiting=dues, body="abcd", **dict.fromkeys(groups, G()))
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
    bench.put(options=RAMP, waiting={"a": 1, "b": 2, "c": soon}, body="abc", lisa=G())
    assert [bench.call(Promote(TOPIC)).next_due_ms for _ in range(2)] == [soon, soon]


def test_what_a_late_policy_or_a_ttl_ends_does_not_use_up_the_ramp(bench: Bench) -> None:
    due = late(bench, 5)
    waiting = {"s": 1, "t": due - 1, "a": due, "b": due + 1}
    bench.put(options=SKIP | RAMP, waiting=waiting, body="stab", expiry={"t": due}, lisa=G())
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.expired) == (1, ["s", "t"])
    assert set(bench.state()["waiting"]) == {"s", "t", "b"}


def test_a_message_without_room_does_not_use_up_the_ramp(bench: Bench) -> None:
    full = G(ready=[Row("o", 1)])
    bench.put(options=RAMP | {"max_ready": "1"}, waiting={"a": 1}, body="ao", lisa=full)
    assert bench.call(Promote(TOPIC)).full == ("lisa",)
    assert "ramped" not in bench.state()["options"]


def test_a_ramp_used_up_in_the_future_is_not_waited_for(bench: Bench) -> None:
    """The server's clock was set back."""
    options = {"ramp": "1,1000,oldest", "ramped": str(4 * 10**15)}
    bench.put(options=options, waiting={"a": 1, "b": 2}, body="ab", lisa=G())
    said = bench.call(Promote(TOPIC))
    assert said.next_due_ms is not None
    assert said.next_due_ms - said.now_ms <= 1_001


def test_a_fast_ramp_moves_a_tenth_of_a_second_at_once(bench: Bench) -> None:
    ids = {f"m{n}": n for n in range(100)}
    bench.put(options={"ramp": "200,1000,oldest"}, waiting=ids, body=ids.keys(), lisa=G())
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.next_due_ms) == (20, said.now_ms + 20)


@pytest.mark.parametrize("ramp", ["3,1000", "9,1000", "7,60000"])
def test_a_ramp_whose_pause_is_a_fraction_of_a_microsecond_moves_messages(
    bench: Bench, ramp: str
) -> None:
    bench.put(options={"ramp": f"{ramp},oldest"}, waiting={"a": 1}, body="a", lisa=G())
    assert bench.call(Promote(TOPIC)).moved == 1
