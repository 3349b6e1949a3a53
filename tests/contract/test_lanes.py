"""Lanes: what a group's gate lets through, in which order, and when."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from lisa.core.model.keys import keyed_id
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.promote import Promote, Promoted
from lisa.core.transitions.restore import Restore, Restored, RestoreItem
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import G, envelope


@pytest.fixture
def lanes(bench: Bench) -> "Lanes":
    bench.put(lisa=G(), options={"lanes": "1"})
    return Lanes(bench)


class Lanes:
    """A topic with lanes and one group."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.keys = bench.keys.group("lisa")
        self.lane_keys = bench.keys.lanes("lisa")

    def set(self, **options: object) -> None:
        for name, value in options.items():
            self.bench.store.ask("HSET", self.bench.keys.options, name, str(value))
        self.bench.store.ask("HINCRBY", self.bench.keys.options, "lanes_changed", 1)

    def limit(self, key: str, text: str) -> None:
        self.bench.store.ask("HSET", self.bench.keys.limits, key, text)

    def send(self, *names: str, due: str = "+0", policy: str | None = None) -> None:
        """Send messages named `key/id`, or `id` without a key."""
        self.bench.send(*[item(whole(name), due, policy=policy) for name in names])

    def promote(self) -> Promoted:
        return self.bench.call(Promote(TOPIC))

    def ready(self) -> list[str]:
        """The entries of the stream, in order."""
        entries = self.bench.store.ask("XRANGE", self.keys.ready, "-", "+")
        return [name_of(fields[1].decode()) for _, fields in entries]

    def ack(self, *names: str) -> None:
        ids = [whole(name) for name in names]
        self.bench.call(Ack(TOPIC, "lisa", [self.bench.settlement(one) for one in ids]))

    def fail(self, name: str, delay: int | Literal["discard"]) -> None:
        failure = Failure(whole(name), self.bench.entry(whole(name)), "no", delay)
        self.bench.call(Fail(TOPIC, "lisa", [failure]))

    def parked(self) -> list[str]:
        return sorted(
            name_of(one.decode()) for one in self.bench.store.ask("HKEYS", self.lane_keys.parked)
        )

    def is_clean(self) -> bool:
        """Whether nothing is left of any lane."""
        lanes = self.bench.store.ask("HKEYS", self.lane_keys.lanes)
        others = self.lane_keys[1:]
        return {one for one in lanes if one[:1] != b"\x1f"} == set() and not self.bench.store.ask(
            "EXISTS", *others
        )


def whole(name: str) -> str:
    key, slash, own = name.rpartition("/")
    return keyed_id(key, own) if slash else own


def name_of(message_id: str) -> str:
    return message_id.replace("\x1f", "/")


def names(key: str, count: int) -> list[str]:
    return [f"{key}/{n:03}" for n in range(count)]


def test_without_limits_all_is_let_through_in_order_of_due_time(lanes: Lanes) -> None:
    now = lanes.bench.clock()
    for name, before in (("b/1", 5), ("a/1", 9), ("c", 7), ("a/2", 6)):
        lanes.send(name, due=str(now - before))
    lanes.promote()
    assert lanes.ready() == ["a/1", "c", "a/2", "b/1"]
    lanes.ack("a/1", "c", "a/2", "b/1")
    assert lanes.is_clean()


def test_a_key_has_no_more_slots_than_its_concurrency(lanes: Lanes) -> None:
    lanes.set(key_concurrency=2)
    lanes.send(*names("a", 4), *names("b", 1), "x", "y", "z")
    lanes.promote()
    assert sorted(lanes.ready()) == ["a/000", "a/001", "b/000", "x", "y", "z"]
    assert lanes.parked() == ["a/002", "a/003"]
    lanes.promote()
    lanes.ack("a/001", "b/000")
    assert lanes.ready()[-1] == "a/002"
    lanes.ack("a/000", "x", "y", "z")
    lanes.ack("a/002", "a/003")
    assert lanes.ready() == []
    assert lanes.is_clean()


def test_a_group_has_no_more_slots_than_its_concurrency(lanes: Lanes) -> None:
    lanes.set(concurrency=3)
    lanes.send(*names("a", 3), *names("b", 3))
    lanes.promote()
    assert len(lanes.ready()) == 3
    lanes.ack(lanes.ready()[0])
    assert len(lanes.ready()) == 3
    lanes.ack(*lanes.ready())
    lanes.ack(*lanes.ready())
    assert lanes.is_clean()


def test_a_slot_is_given_back_by_whatever_takes_a_message_out(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1)
    lanes.send(*names("a", 5))
    lanes.promote()
    lanes.bench.call(Cancel(TOPIC, [whole("a/000")]))
    lanes.promote()
    assert lanes.ready() == ["a/001"]
    lanes.fail("a/001", 60_000)
    lanes.promote()
    assert lanes.ready() == ["a/002"]
    lanes.fail("a/002", "discard")
    lanes.promote()
    assert lanes.ready() == ["a/003"]
    lanes.bench.send(item(whole("a/003"), "+60000", sender="B"), on_duplicate=OnDuplicate.REPLACE)
    lanes.promote()
    assert lanes.ready() == ["a/004"]
    lanes.bench.call(Cancel(TOPIC, [whole("a/004"), whole("a/003"), whole("a/001")]))
    assert lanes.is_clean()


def test_a_late_ack_gives_a_slot_back_once(lanes: Lanes) -> None:
    lanes.set(order="continue", ordered=1)
    lanes.send("k/1", "k/2", "k/3")
    lanes.promote()
    first = lanes.bench.settlement(whole("k/1"))
    lanes.fail("k/1", 0)
    lanes.promote()
    second = lanes.bench.settlement(whole("k/1"))
    assert lanes.bench.call(Ack(TOPIC, "lisa", [first])) == [Acked.LATE]
    assert lanes.ready() == ["k/2"]
    for settlement in (second, first):
        assert lanes.bench.call(Ack(TOPIC, "lisa", [settlement])) == [Acked.REPEATED]
    lanes.promote()
    assert lanes.ready() == ["k/2"]
    lanes.ack("k/2")
    lanes.ack("k/3")
    assert lanes.is_clean()


def test_a_rate_opens_when_it_may(lanes: Lanes) -> None:
    lanes.set(key_rate="2,60000,1")
    lanes.send(*names("a", 3), "b/1", "c")
    result = lanes.promote()
    assert sorted(lanes.ready()) == ["a/000", "b/1", "c"]
    assert result.next_due_ms is not None
    assert 29_000 < result.next_due_ms - result.now_ms <= 30_001
    lanes.set(key_rate="")
    lanes.promote()
    assert len(lanes.ready()) == 5


def test_a_rate_of_the_group_stops_all_lanes(lanes: Lanes) -> None:
    lanes.set(rate="10,60000,3")
    lanes.send(*names("a", 3), *names("b", 3), "c")
    result = lanes.promote()
    assert len(lanes.ready()) == 3
    assert result.next_due_ms is not None
    assert 5_000 < result.next_due_ms - result.now_ms <= 6_001


def test_a_message_may_cost_more(lanes: Lanes) -> None:
    lanes.set(key_rate="10,60000,5")
    lanes.send("a/1", policy="*;;3,")
    lanes.send("a/2", policy="*;;3,")
    lanes.send("b/1", policy="*;;9,")
    result = lanes.promote()
    assert sorted(lanes.ready()) == ["a/1", "b/1"]
    assert result.next_due_ms is not None
    assert 5_000 < result.next_due_ms - result.now_ms <= 6_001


def test_one_at_a_time_in_the_order_of_due_times_and_sends(lanes: Lanes) -> None:
    lanes.set(order="continue", ordered=1)
    now = lanes.bench.clock()
    for own in "zcab":
        lanes.send(f"k/{own}", due=str(now - 5))
    lanes.send("k/first", due=str(now - 10))
    lanes.promote()
    seen = []
    while ready := lanes.ready():
        assert len(ready) == 1
        seen += ready
        lanes.ack(*ready)
    assert seen == ["k/first", "k/z", "k/c", "k/a", "k/b"]
    assert lanes.is_clean()


@pytest.mark.parametrize("order", ["continue", "hold"])
def test_a_failing_head_holds_its_lane(lanes: Lanes, order: str) -> None:
    lanes.set(order=order, ordered=1)
    lanes.send("k/1", "k/2", "other/1")
    lanes.promote()
    lanes.fail("k/1", 0)
    assert lanes.ready() == ["other/1"]
    lanes.promote()
    assert lanes.ready() == ["other/1", "k/1"]
    lanes.fail("k/1", "discard")
    lanes.promote()
    if order == "continue":
        assert lanes.ready() == ["other/1", "k/2"]
        return
    assert lanes.ready() == ["other/1"]
    lanes.bench.call(Cancel(TOPIC, [whole("k/1")]))
    lanes.promote()
    assert lanes.ready() == ["other/1", "k/2"]


def test_a_quiet_tenant_waits_for_one_round(lanes: Lanes) -> None:
    lanes.set(fair=1, concurrency=1)
    lanes.send(*names("big", 100))
    lanes.promote()
    lanes.ack(*lanes.ready())
    lanes.send("quiet/1")
    lanes.promote()
    lanes.ack(*lanes.ready())
    assert lanes.ready() == ["quiet/1"]


def test_weights_divide_the_slots(lanes: Lanes) -> None:
    lanes.set(fair=1, concurrency=1)
    lanes.limit("a", "weight=3")
    lanes.send(*names("a", 40), *names("b", 40))
    lanes.promote()
    seen = []
    for _ in range(40):
        seen += lanes.ready()
        lanes.ack(*lanes.ready())
    assert sum(one.startswith("a/") for one in seen) == 30


def test_urgent_messages_pass_and_none_waits_beyond_its_slack(lanes: Lanes) -> None:
    lanes.set(concurrency=1)
    now = lanes.bench.clock()
    lanes.send("bulk/1", due=str(now - 3000), policy="*;;,5000")
    lanes.send("bulk/2", due=str(now - 3000), policy="*;;,2500")
    lanes.send("urgent/1", due=str(now - 1000))
    lanes.promote()
    seen: Sequence[Any] = []
    while ready := lanes.ready():
        seen = [*seen, *ready]
        lanes.ack(*ready)
    assert seen == ["urgent/1", "bulk/2", "bulk/1"]


def test_the_stream_is_kept_short(lanes: Lanes) -> None:
    lanes.set(fair=1)
    lanes.send(*names("big", 200))
    result = lanes.promote()
    assert len(lanes.ready()) == 16
    assert result.next_due_ms is not None
    assert result.next_due_ms - result.now_ms <= 250


def test_a_handler_that_meets_a_limit_rests_its_lane(bench: Bench) -> None:
    bench.put(lisa=G())
    lanes = Lanes(bench)
    lanes.send("a/1", "a/2", "b/1")
    rest = Deferral(whole("a/1"), bench.entry(whole("a/1")), 30_000, "full", rests_lane=True)
    (postponed,) = bench.call(Postpone(TOPIC, "lisa", [rest]))
    assert postponed.due_ms is not None
    # Also long after the call, when its record is gone.
    assert bench.call(Postpone(TOPIC, "lisa", [rest])) == [postponed]
    assert bench.call(Inspect(TOPIC, [whole("a/1")]))[0].group_states[0].state == "parked"
    lanes.send("a/3", "b/2")
    result = lanes.promote()
    assert sorted(lanes.ready()) == ["a/2", "b/1", "b/2"]
    assert lanes.parked() == ["a/1", "a/3"]
    assert result.next_due_ms == postponed.due_ms
    lanes.ack("a/2", "b/1", "b/2")
    assert lanes.ready() == []


def test_a_rate_lets_nothing_through_while_no_consumer_reads(lanes: Lanes) -> None:
    lanes.set(key_rate="1000,1,1")
    lanes.send(*names("a", 1))
    lanes.promote()
    long_ago = lanes.bench.clock() - 1_100
    (entry,) = lanes.bench.store.ask("XRANGE", lanes.keys.ready, "-", "+")
    lanes.bench.store.ask("DEL", lanes.keys.ready)
    lanes.bench.store.ask("XGROUP", "CREATE", lanes.keys.ready, "lisa", "0", "MKSTREAM")
    lanes.bench.store.ask("XADD", lanes.keys.ready, f"{long_ago}-0", *entry[1])
    lanes.bench.store.ask("HSET", lanes.keys.entries, whole("a/000"), f"{long_ago}-0")
    lanes.send("a/001", "b/001")
    result = lanes.promote()
    assert lanes.ready() == ["a/000"]
    assert result.next_due_ms is not None
    assert result.next_due_ms - result.now_ms <= 251
    lanes.ack("a/000")
    assert sorted(lanes.ready()) == ["a/001", "b/001"]


def test_a_higher_limit_applies_to_lanes_without_a_free_slot(lanes: Lanes) -> None:
    lanes.set(key_concurrency=1)
    for key in range(600):
        lanes.send(f"{key:03}/1", f"{key:03}/2")
    while len(lanes.ready()) < 600:
        lanes.promote()
        lanes.bench.store.ask("XREADGROUP", "GROUP", "lisa", "c", "STREAMS", lanes.keys.ready, ">")
    assert len(lanes.parked()) == 600
    lanes.set(key_concurrency=2)
    while lanes.promote().moved:
        lanes.bench.store.ask("XREADGROUP", "GROUP", "lisa", "c", "STREAMS", lanes.keys.ready, ">")
    assert lanes.parked() == []
    lanes.ack(*lanes.ready()[:100])
    assert len(lanes.ready()) == 1100


@pytest.mark.parametrize("order", ["", "continue"])
def test_a_lane_held_by_a_dead_message_goes_on_with_another_order(lanes: Lanes, order: str) -> None:
    lanes.set(order="hold", ordered=1)
    lanes.send("k/1", "k/2")
    lanes.promote()
    lanes.fail("k/1", "discard")
    lanes.promote()
    assert lanes.ready() == []
    lanes.set(order=order)
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_what_follows_a_coalesced_message_goes_on_once_that_is_gone(lanes: Lanes) -> None:
    lanes.send("k/~1")
    lanes.promote()
    lanes.bench.store.ask("XREADGROUP", "GROUP", "lisa", "c", "STREAMS", lanes.keys.ready, ">")
    now = lanes.bench.clock()
    lanes.send("k/~2", due=str(now - 10))
    lanes.send("k/1", due=str(now - 5))
    lanes.promote()
    assert lanes.parked() == ["k/1", "k/~2"]
    lanes.bench.call(Cancel(TOPIC, [whole("k/~2")]))
    lanes.promote()
    assert lanes.ready() == ["k/~1", "k/1"]


@pytest.mark.parametrize("then", ["1", "0"])
def test_a_lane_with_fair_turns_is_forgotten_when_its_parked_messages_are_cancelled(
    lanes: Lanes, then: str
) -> None:
    lanes.set(fair=1, key_concurrency=1)
    lanes.send("k/1", "k/2")
    lanes.promote()
    lanes.bench.call(Cancel(TOPIC, [whole("k/2")]))
    lanes.ack("k/1")
    lanes.set(fair=then)
    lanes.promote()
    assert lanes.is_clean()


def test_restored_messages_keep_their_order_before_later_sends(lanes: Lanes) -> None:
    lanes.set(order="continue", ordered=1, journal=1)
    due_ms = lanes.bench.clock() - 1
    sent = {"k/b": "*;;2,,8", "k/a": "*;;,5,9"}
    items = [
        RestoreItem(keyed_id(*name.split("/")), envelope("A-"), due_ms, policy=policy)
        for name, policy in reversed(sent.items())
    ]
    assert lanes.bench.call(Restore(TOPIC, items)) == [Restored.RESTORED] * 2
    lanes.set(slack=5)
    lanes.send("k/0", due=str(due_ms))
    stored = lanes.bench.state()["policy"]
    assert stored == {keyed_id("k", "b"): "*;;2,,8", keyed_id("k", "a"): "*;;,5,9"} | {
        keyed_id("k", "0"): "*;;,,10"
    }
    for name in ("k/b", "k/a", "k/0"):
        lanes.promote()
        assert lanes.ready() == [name]
        lanes.ack(name)
    # The journal has the number, for the next restore.
    keys = lanes.bench.keys
    policies = [
        dict(zip(fields[::2], fields[1::2], strict=True)).get(b"policy")
        for _, fields in lanes.bench.store.ask("XRANGE", keys.events, "-", "+")
    ]
    assert [policy for policy in policies if policy] == [b"*;;,5,9", b"*;;2,,8", b"*;;,,10"]


def test_the_first_of_several_failing_messages_holds_the_lane(lanes: Lanes) -> None:
    lanes.send("k/1", "k/2")
    lanes.promote()
    lanes.set(order="continue")
    for name in ("k/1", "k/2"):
        lanes.fail(name, 0)
        lanes.promote()
    assert lanes.ready() == ["k/1"]
    lanes.ack("k/1")
    lanes.promote()
    assert lanes.ready() == ["k/2"]


def test_a_lane_without_an_order_any_more_forgets_what_held_it(lanes: Lanes) -> None:
    lanes.set(order="continue")
    lanes.send("k/1")
    lanes.promote()
    lanes.fail("k/1", 1000)
    lanes.set(order="")
    lanes.bench.call(Cancel(TOPIC, [whole("k/1")]))
    lanes.promote()
    assert lanes.is_clean()
