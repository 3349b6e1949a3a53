"""What options do together; docs/reference/combinations.md has all pairs."""

from typing import Any

import pytest

from lisa.core.model.errors import KeyFull, TopicFull
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.delivery import Limits, Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.lease import Release
from lisa.core.transitions.retry import Deferral, Postpone
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from lisa.core.transitions.upkeep import Expire, Expired
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, envelope
from tests.contract.test_lanes import Lanes, lanes, names, whole
from tests.rows import Burst, coalesce

assert lanes is not None


def defer(lanes: Lanes, name: str, ms: int, *, rests: bool = False) -> None:
    where = Deferral(whole(name), lanes.bench.entry(whole(name)), ms, "later", rests_lane=rests)
    lanes.bench.call(Postpone(TOPIC, "lisa", [where]))


def occur(lanes: Lanes, name: str, due: int) -> None:
    """A tick of a schedule creates an occurrence."""
    create = NewOccurrence(whole(name), due, envelope("A-"))
    lanes.bench.call(Schedule(TOPIC, "s", "", b"1.5.0 x", 6, [create]))


def later(lanes: Lanes) -> None:
    """Wait for Redis's next millisecond, and promote."""
    due = lanes.bench.clock() + 1
    while lanes.bench.clock() < due:
        pass
    lanes.promote()


def backlog(lanes: Lanes, *names: str, seconds: float = 20) -> None:
    """Send messages that are late, each a millisecond less than the one before."""
    first = lanes.bench.clock() - int(1000 * seconds)
    for n, name in enumerate(names):
        lanes.send(name, due=str(first + n))


def deliver(lanes: Lanes, name: str, **more: Any) -> str:
    """Read all that is ready, and open one message; returns its letter or its body."""
    lanes.bench.call(Pull(TOPIC, "lisa", "c1", 10))
    entry = lanes.bench.opening(whole(name))
    opened = lanes.bench.call(Open(TOPIC, "lisa", [entry], **more))
    return "x" if opened.past_ttl[0] else (opened.envelopes[0] or b"").decode()


def put_back(lanes: Lanes, name: str, ms: int) -> None:
    """Open a message outside its window, which opens in so many ms."""
    now = lanes.bench.clock()
    assert deliver(lanes, name, limits=[Limits(now - 1, now + ms)]) == ""


def state_of(lanes: Lanes, name: str) -> list[str]:
    (found,) = lanes.bench.call(Inspect(TOPIC, [whole(name)]))
    return ["waiting"] if found.waiting_due_ms else [one.state for one in found.group_states]


def ordered(lanes: Lanes, order: str = "continue") -> None:
    lanes.set(order=order, ordered=1)


# order


def test_a_head_that_meets_a_limit_after_a_failure_keeps_its_lane(lanes: Lanes) -> None:
    ordered(lanes)
    backlog(lanes, "k/1", "k/2")
    lanes.promote()
    lanes.fail("k/1", 0)
    lanes.promote()
    assert lanes.ready() == ["k/1"]
    defer(lanes, "k/1", 1, rests=True)
    assert lanes.ready() == []
    later(lanes)
    later(lanes)
    assert lanes.ready() == ["k/1"]
    lanes.ack("k/1")
    lanes.ack("k/2")
    assert lanes.is_clean()


@pytest.mark.parametrize(
    ("option", "value"), [("order", "continue"), ("key_concurrency", 1), ("concurrency", 1)]
)
def test_what_was_ready_before_counts(bench: Bench, option: str, value: object) -> None:
    bench.put(lisa=G())
    lanes = Lanes(bench)
    lanes.send("k/1")
    assert lanes.ready() == ["k/1"]
    lanes.set(lanes=1, ordered=1, **{option: value})
    lanes.send("k/2")
    lanes.send("k/3")
    lanes.promote()
    assert lanes.ready() == ["k/1"]
    lanes.ack("k/1")
    assert lanes.ready() == ["k/2"]


def test_occurrences_take_their_turn_by_sending(lanes: Lanes) -> None:
    ordered(lanes)
    now = lanes.bench.clock() - 5
    lanes.send("k/1", due=str(now))
    occur(lanes, "k/s@1", now)
    lanes.promote()
    assert lanes.ready() == ["k/1"]


@pytest.mark.parametrize("order", ["continue", "hold"])
@pytest.mark.parametrize("how", ["retry", "defer", "window"])
def test_what_is_not_handled_yet_holds_its_key(lanes: Lanes, order: str, how: str) -> None:
    ordered(lanes, order)
    backlog(lanes, "k/1", "k/2", "other/1")
    lanes.promote()
    if how == "retry":
        lanes.fail("k/1", 60_000)
    elif how == "defer":
        defer(lanes, "k/1", 60_000)
    else:
        put_back(lanes, "k/1", 60_000)
    lanes.promote()
    assert lanes.ready() == ["other/1"]
    lanes.bench.call(Reschedule(TOPIC, [(whole("k/1"), "+60000")]))
    lanes.promote()
    assert lanes.ready() == ["other/1", "k/2"]


@pytest.mark.parametrize("end", ["ttl", "late", "cancel", "purge"])
def test_what_ends_before_its_turn_holds_no_key(lanes: Lanes, end: str) -> None:
    """A message that a late policy moves to garbage was never its key's first."""
    ordered(lanes, "hold")
    backlog(lanes, "k/1", "k/2")
    if end == "late":
        lanes.send("k/0", due=str(lanes.bench.clock() - 30_000), policy="*;25000,garbage")
        lanes.bench.store.ask("HSET", lanes.bench.keys.options, "own_late", 1)
        assert lanes.promote().expired == [whole("k/0")]
        assert lanes.bench.call(Expire(TOPIC, [whole("k/0")])) == [Expired.GARBAGE]
        assert lanes.ready() == ["k/1"]
        return
    lanes.promote()
    lanes.fail("k/1", "discard" if end == "purge" else 60_000)
    lanes.promote()
    assert lanes.ready() == []
    if end == "purge":
        lanes.bench.call(Purge(TOPIC, "lisa", [whole("k/1")]))
    elif end == "cancel":
        lanes.bench.call(Cancel(TOPIC, [whole("k/1")]))
    else:
        lanes.bench.store.ask("ZADD", lanes.bench.keys.expiry, 1, whole("k/1"))
        assert lanes.bench.call(Expire(TOPIC, [whole("k/1")])) == [Expired.EXPIRED]
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_a_requeued_message_that_held_its_key_comes_first(lanes: Lanes) -> None:
    ordered(lanes, "hold")
    backlog(lanes, "k/1", "k/2")
    lanes.promote()
    lanes.fail("k/1", "discard")
    lanes.bench.call(Requeue(TOPIC, "lisa", [whole("k/1")]))
    lanes.promote()
    assert lanes.ready() == ["k/1"]


def test_a_dead_message_does_not_hold_what_is_sent_after_another_order(lanes: Lanes) -> None:
    ordered(lanes, "hold")
    lanes.send("k/1")
    lanes.promote()
    lanes.fail("k/1", "discard")
    ordered(lanes, "continue")
    lanes.promote()
    lanes.send("k/2")
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_a_delivery_that_is_replaced_gives_its_slot_back(lanes: Lanes) -> None:
    """Its handler may still run, beside that of the next message."""
    ordered(lanes)
    backlog(lanes, "k/1", "k/2")
    lanes.promote()
    deliver(lanes, "k/1")
    again = item(whole("k/1"), "+60000", sender="B")
    said = lanes.bench.send(again, on_duplicate=OnDuplicate.REPLACE)
    assert said == [Sent.REPLACED_IN_FLIGHT]
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_an_update_keeps_the_place_by_due_time(lanes: Lanes) -> None:
    ordered(lanes)
    backlog(lanes, "k/1", "k/2", "k/3")
    lanes.promote()
    again = item(whole("k/2"), "+60000", sender="B")
    assert lanes.bench.send(again, on_duplicate=OnDuplicate.UPDATE) == [Sent.UPDATED]
    lanes.promote()
    lanes.ack("k/1")
    assert lanes.ready() == ["k/2"]


def test_slack_counts_within_a_key(lanes: Lanes) -> None:
    ordered(lanes)
    now = lanes.bench.clock()
    lanes.send("k/bulk", due=str(now - 9), policy="*;;,60000")
    lanes.send("k/urgent", due=str(now - 5))
    lanes.promote()
    assert lanes.ready() == ["k/urgent"]


def test_a_retry_has_the_slack_of_its_message(lanes: Lanes) -> None:
    lanes.set(concurrency=1)
    lanes.send("a/1", policy="*;;,60000")
    lanes.promote()
    lanes.fail("a/1", 0)
    lanes.send("b/1")
    lanes.promote()
    assert (lanes.ready(), lanes.parked()) == (["b/1"], ["a/1"])


@pytest.mark.parametrize(("newest", "first"), [("oldest", "k/1"), ("newest", "k/3")])
def test_a_ramp_parks_at_its_rate_and_in_its_order(lanes: Lanes, newest: str, first: str) -> None:
    ordered(lanes)
    lanes.set(ramp=f"10,1000,{newest}")
    backlog(lanes, "k/1", "k/2", "k/3")
    lanes.promote()
    assert (lanes.ready(), lanes.parked()) == ([first], [])


def test_coalesced_messages_stand_in_line_with_others(lanes: Lanes) -> None:
    ordered(lanes)
    lanes.send("k/1")
    lanes.bench.call(coalesce(TOPIC, "A" * 8, [Burst("k", "l+0", envelope("A-"))]))
    lanes.promote()
    assert lanes.ready() == ["k/1"]
    lanes.ack("k/1")
    assert lanes.ready() == ["k/~1"]
    lanes.fail("k/~1", 60_000)
    lanes.bench.call(coalesce(TOPIC, "B" * 8, [Burst("k", "l+0", envelope("B-"))]))
    lanes.promote()
    assert (lanes.ready(), lanes.parked()) == ([], ["k/~2"])


# debounce, throttle, latest


def test_without_an_order_a_retry_may_run_after_a_newer_body(lanes: Lanes) -> None:
    lanes.bench.call(coalesce(TOPIC, "A" * 8, [Burst("k", "l+0", envelope("A-"))]))
    lanes.promote()
    lanes.fail("k/~1", 60_000)
    lanes.bench.call(coalesce(TOPIC, "B" * 8, [Burst("k", "l+0", envelope("B-"))]))
    lanes.promote()
    assert lanes.ready() == ["k/~2"]


def test_a_coalesced_message_that_met_a_limit_takes_the_next_body(lanes: Lanes) -> None:
    lanes.bench.call(coalesce(TOPIC, "A" * 8, [Burst("k", "l+0", envelope("A-x"))]))
    lanes.promote()
    deliver(lanes, "k/~1")
    defer(lanes, "k/~1", 60_000, rests=True)
    (said,) = lanes.bench.call(coalesce(TOPIC, "B" * 8, [Burst("k", "l+0", envelope("B-y"))]))
    assert (said.id, said.outcome) == (whole("k/~1"), Sent.UPDATED)
    assert state_of(lanes, "k/~1") == ["parked"]


# rates, concurrency, turns


@pytest.mark.parametrize("how", ["retry", "defer", "window", "limit", "release", "cancel"])
@pytest.mark.parametrize("option", ["rate", "key_rate"])
def test_what_costs_a_unit_of_a_rate(lanes: Lanes, option: str, how: str) -> None:
    """Each attempt does, and a unit that was spent is not returned."""
    lanes.set(**{option: "1,60000,2"})
    lanes.send("k/1")
    lanes.promote()
    if how == "retry":
        lanes.fail("k/1", 60_000)
    elif how in ("defer", "limit"):
        defer(lanes, "k/1", 1, rests=how == "limit")
    elif how == "window":
        put_back(lanes, "k/1", 60_000)
    elif how == "release":
        lanes.bench.call(Release(TOPIC, "lisa", [lanes.bench.receipt(whole("k/1"))]))
    else:
        lanes.bench.call(Cancel(TOPIC, [whole("k/1")]))
    lanes.bench.store.ask("ZADD", lanes.keys.retry, "XX", 1, whole("k/1"))
    later(lanes)
    later(lanes)
    lanes.send("k/2", "k/3")
    lanes.promote()
    if how in ("release", "cancel"):
        assert lanes.parked() == ["k/3"]
    else:
        assert (lanes.ready(), lanes.parked()) == (["k/1"], ["k/2", "k/3"])


@pytest.mark.parametrize("option", ["concurrency", "key_concurrency", "order"])
@pytest.mark.parametrize("how", ["retry", "defer", "window", "limit", "release", "expire"])
def test_when_a_slot_is_given_back(lanes: Lanes, option: str, how: str) -> None:
    if option == "order":
        ordered(lanes)
    else:
        lanes.set(**{option: 1})
    backlog(lanes, "k/1", "k/2" if option != "concurrency" else "other/2")
    lanes.promote()
    assert lanes.ready() == ["k/1"]
    if how == "retry":
        lanes.fail("k/1", 60_000)
    elif how in ("defer", "limit"):
        defer(lanes, "k/1", 60_000, rests=how == "limit")
    elif how == "window":
        put_back(lanes, "k/1", 60_000)
    elif how == "release":
        lanes.bench.call(Release(TOPIC, "lisa", [lanes.bench.receipt(whole("k/1"))]))
    else:
        lanes.bench.store.ask("ZADD", lanes.bench.keys.expiry, 1, whole("k/1"))
        lanes.bench.call(Expire(TOPIC, [whole("k/1")]))
    lanes.promote()
    is_held = how == "release" or (option == "order" and how != "expire")
    is_resting = option == "key_concurrency" and how == "limit"
    if how == "release":
        assert lanes.ready() == ["k/1"]
    else:
        assert len(lanes.ready()) == (0 if is_held or is_resting else 1)


def test_fair_turns_ignore_slack_between_keys(lanes: Lanes) -> None:
    lanes.set(fair=1, concurrency=1)
    now = lanes.bench.clock()
    lanes.send("a/bulk", due=str(now - 9), policy="*;;,60000")
    lanes.send("b/urgent", due=str(now - 5))
    lanes.promote()
    assert lanes.ready() == ["a/bulk"]


def test_fair_turns_count_cost_and_attempts(lanes: Lanes) -> None:
    lanes.set(fair=1, concurrency=1)
    for n in range(9):
        lanes.send(f"a/{n}", policy="*;;2,")
    lanes.send(*names("b", 9))
    lanes.promote()
    seen = []
    for _ in range(9):
        (name,) = lanes.ready()
        seen.append(name[0])
        if seen.count("b") == 1 and name[0] == "b":
            lanes.fail(name, 0)
            lanes.promote()
        else:
            lanes.ack(name)
    assert seen.count("a") == 3


def test_late_policies_and_ramps_ignore_what_is_parked(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1)
    backlog(lanes, "k/1", "k/2")
    lanes.promote()
    lanes.set(late="1000,skip", ramp="1,60000,oldest", slack=30_000)
    assert lanes.promote().expired == []
    lanes.ack("k/1")
    assert lanes.ready() == ["k/2"]
    backlog(lanes, "k/3", seconds=25)
    assert lanes.promote().expired == [whole("k/3")]


def test_an_updated_message_may_be_too_late(lanes: Lanes) -> None:
    """It waits again, as before its first promotion."""
    backlog(lanes, "k/1")
    lanes.promote()
    lanes.set(late="1000,skip")
    again = item(whole("k/1"), "+0", sender="B")
    assert lanes.bench.send(again, on_duplicate=OnDuplicate.UPDATE) == [Sent.UPDATED]
    assert lanes.promote().expired == [whole("k/1")]


def test_a_parked_message_expires(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1)
    lanes.send("k/1", "k/2", "k/3")
    lanes.promote()
    for own in "23":
        lanes.bench.store.ask("ZADD", lanes.bench.keys.expiry, 1, whole(f"k/{own}"))
    assert lanes.promote().expired == []
    assert lanes.bench.call(Expire(TOPIC, [whole("k/2")])) == [Expired.EXPIRED]
    lanes.ack("k/1")
    assert deliver(lanes, "k/3") == "x"


def test_capacity_and_max_per_key_count_what_is_parked(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1, capacity=2)
    lanes.send("k/1", "k/2")
    lanes.promote()
    with pytest.raises(TopicFull):
        lanes.send("other/1")
    lanes.set(capacity="", max_per_key=2)
    lanes.bench.store.ask("HDEL", lanes.bench.keys.options, "capacity")
    with pytest.raises(KeyFull):
        lanes.send("k/3")
    occur(lanes, "k/s@1", FAR)
    assert state_of(lanes, "k/s@1") == ["waiting"]


@pytest.mark.parametrize(("overlap", "state"), [("skip", "done"), ("queue_one", "held")])
def test_a_parked_occurrence_has_not_begun(lanes: Lanes, overlap: str, state: str) -> None:
    lanes.set(key_concurrency=1)
    lanes.send("k/1", "k/s@1")
    lanes.promote()
    create = NewOccurrence(whole("k/s@2"), FAR, envelope("A-"))
    for way in (overlap, "replace_unstarted"):
        lanes.bench.store.ask("DEL", lanes.bench.keys.schedules)
        call = Schedule(
            TOPIC,
            "s",
            "",
            b"1.5.0 x",
            6,
            [create],
            earlier=[whole("k/s@1")],
            overlap=way,
            held=b"1.5q.0 x",
            held_score=6,
        )
        said = lanes.bench.call(call)
        assert said.state == (state if way == overlap else "done")
    assert state_of(lanes, "k/s@1") == []
    assert lanes.parked() == []


def test_a_pause_stops_the_gate(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1)
    lanes.send("k/1", "k/2")
    lanes.promote()
    lanes.set(paused=1)
    lanes.ack("k/1")
    lanes.promote()
    assert (lanes.ready(), lanes.parked()) == ([], ["k/2"])
    lanes.set(paused=0)
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_each_group_has_its_own_lanes(bench: Bench) -> None:
    options = {"lanes": "1", "key_concurrency": "1", "order@audit": "continue"}
    bench.put(lisa=G(), audit=G(), options=options)
    lanes = Lanes(bench)
    lanes.send("k/1", "k/2")
    lanes.promote()
    lanes.fail("k/1", 60_000)
    lanes.promote()
    assert lanes.ready() == ["k/2"]
    assert sorted(state_of(lanes, "k/2")) == ["parked", "ready"]
