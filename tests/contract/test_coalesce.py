"""coalesce: new -> waiting, or a new body for the unstarted message of the same key."""

from typing import Any

import pytest

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import InvalidMessage, KeyFull, TopicFull
from lisa.core.model.keys import keyed_id
from lisa.core.transitions.ack import Ack
from lisa.core.transitions.base import Elsewhere
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.garbage import Purge
from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row, envelope
from tests.rows import Burst, coalesce

PAST = 1_000
ONE, TWO = keyed_id("k", "~1"), keyed_id("k", "~2")
OUTCOMES = (Sent.ACCEPTED, Sent.REPLACED, Sent.REPLACED_IN_FLIGHT, Sent.UPDATED)
ACCEPTED, REPLACED, IN_FLIGHT, UPDATED = OUTCOMES
LISTED, BOTH = {"k": "~1\x1f"}, {"k": "~1\x1f~2\x1f"}
LANES = {"lanes": "1"}
EVERY_RULE = pytest.mark.parametrize("rule", ["d5000,", "t5000", "l+5000"])


def burst(rule: str, body: str = "", key: str = "k", sender: str = "A", **more: Any) -> Burst:
    return Burst(key, rule, encode_envelope(sender * 8, body), **more)


def send(bench: Bench, *items: Burst, sender: str = "A", **options: Any) -> list[tuple[str, Sent]]:
    """Outcomes as pairs of the own id and the outcome, of the key `k`."""
    said = bench.call(coalesce(TOPIC, sender * 8, items, **options))
    return [(answer.id.partition("\x1f")[2], answer.outcome) for answer in said]


def one(bench: Bench, rule: str, body: str, sender: str) -> tuple[str, Sent]:
    return send(bench, burst(rule, body, sender=sender), sender=sender)[0]


def fill(bench: Bench) -> list[str]:
    """Promote what is due in a millisecond; returns the own ids of what consumer c1 then gets."""
    due_ms = bench.clock() + 1
    while bench.clock() < due_ms:
        pass
    bench.call(Promote(TOPIC, expected=(ONE, TWO)))
    taken = bench.call(Pull(TOPIC, "lisa", "c1", 10)).entries
    return [entry.id.partition("\x1f")[2] for entry in taken]


def test_a_debounced_message_is_due_after_the_quiet_time(bench: Bench) -> None:
    bench.put(lisa=G())
    assert one(bench, "d5000,", "x", "A") == ("~1", ACCEPTED)
    bench.check_change(
        waiting={ONE: bench.now + 5_000},
        body={ONE: "A-x"},
        keyed={**LISTED, ONE: bench.now},
        options=LANES,
        stats={"sent": 1},
    )


def test_a_further_send_replaces_body_and_due_time(bench: Bench) -> None:
    bench.put(lisa=G(), waiting={ONE: FAR}, body={ONE: "A-x"}, keyed={**LISTED, ONE: PAST})
    assert one(bench, "d5000,", "y", "B") == ("~1", REPLACED)
    bench.check_change(
        waiting={ONE: bench.now + 5_000},
        body={ONE: "Bry"},
        options=LANES,
        stats={"sent": 1},
    )


def test_no_burst_lasts_longer_than_it_may(bench: Bench) -> None:
    """Counted from the first send, to the millisecond."""
    first = bench.clock() - 50_000
    bench.put(waiting={ONE: FAR}, body={ONE: "A-"}, keyed={**LISTED, ONE: first})
    one(bench, "d20000,60000", "", "B")
    assert bench.state()["waiting"] == {ONE: first + 60_000}
    assert one(bench, "d5000,60000", "", "C") == ("~1", REPLACED)
    assert bench.state()["waiting"] == {ONE: bench.now + 5_000}


def test_times_are_rounded_up(bench: Bench) -> None:
    for n in range(50):
        key = f"k{n}"
        seconds, micros = bench.store.ask("TIME")
        send(bench, burst("d60000,60000", key=key))
        due_ms = int(bench.store.ask("ZSCORE", bench.keys.waiting, keyed_id(key, "~1")))
        assert 1000 * due_ms >= 1_000_000 * int(seconds) + int(micros) + 60_000_000


def test_the_first_throttled_message_is_due_now(bench: Bench) -> None:
    assert one(bench, "t5000", "x", "A") == ("~1", ACCEPTED)
    bench.check(
        waiting={ONE: bench.now},
        body={ONE: "A-x"},
        keyed=LISTED,
        throttled={"k": bench.now + 5_000},
        options=LANES,
        stats={"sent": 1},
    )


def test_the_next_throttled_message_waits_for_its_time(bench: Bench) -> None:
    bench.put(lisa=G())
    one(bench, "t5000", "x", "A")
    first = bench.state()["waiting"][ONE]
    bench.call(Cancel(TOPIC, [ONE]))
    assert one(bench, "t5000", "y", "B") == ("~1", ACCEPTED)
    assert one(bench, "t5000", "z", "C") == ("~1", UPDATED)
    state = bench.state()
    due = state["waiting"][ONE]
    assert first + 5_000 <= due <= first + 5_001
    assert state["throttled"] == {"k": due + 5_000}
    assert state["body"] == {ONE: "Cbz"}


def test_an_interval_that_became_shorter_applies(bench: Bench) -> None:
    """As does the one after the clock was set back."""
    bench.put(throttled={"k": FAR})
    one(bench, "t5000", "x", "A")
    assert bench.state()["waiting"] == {ONE: bench.now + 5_000}


def test_instants_of_throttled_keys_do_not_pile_up(bench: Bench) -> None:
    bench.put(throttled={f"old{n}": PAST + n for n in range(3)})
    send(bench, burst("t5000", key="a"))
    assert bench.state()["throttled"] == {"old2": PAST + 2, "a": bench.now + 5_000}
    send(bench, burst("t9000", key="b", sender="B"), sender="B")
    assert bench.state()["throttled"] == {"a": bench.now + 5_000, "b": bench.now + 9_000}
    assert bench.store.ask("PTTL", bench.keys.throttled) > 5_000


def test_the_latest_body_takes_the_due_time_of_the_first(bench: Bench) -> None:
    assert one(bench, "l+5000", "x", "A") == ("~1", ACCEPTED)
    waiting = bench.state()["waiting"]
    assert waiting == {ONE: bench.now + 5_000}
    assert one(bench, f"l{FAR}", "y", "B") == ("~1", UPDATED)
    bench.check(waiting=waiting, body={ONE: "Bby"}, keyed=LISTED, options=LANES, stats={"sent": 2})


@EVERY_RULE
def test_what_a_group_has_begun_with_stays_and_the_other_id_is_used(
    bench: Bench, rule: str
) -> None:
    started: dict[str, G] = {
        "in flight": G(ready=[Row(ONE, PAST, 1, "c1")]),
        "failed": G(retry={ONE: FAR}, attempts={ONE: 1}),
        "failed, and ready again": G(ready=[Row(ONE, PAST, 2)], attempts={ONE: 1}),
        "dead": G(garbage={ONE: PAST}, attempts={ONE: 1}),
    }
    for group in started.values():
        bench.store.ask("FLUSHALL")
        bench.put(body={ONE: "A-"}, keyed=LISTED, lisa=group, audit=G())
        assert one(bench, rule, "x", "B") == ("~2", ACCEPTED)
        state = bench.state()
        assert state["body"] == {ONE: "A-", TWO: "B-x"}
        assert list(state["waiting"]) == [TWO]
        assert state["keyed"]["k"] == BOTH["k"]
        assert one(bench, rule, "y", "C")[0] == "~2"
        assert bench.state()["body"][ONE] == "A-"


def test_what_one_of_several_groups_has_settled_has_begun(bench: Bench) -> None:
    bench.put(body={ONE: "A+"}, keyed=LISTED, lisa=G(ready=[Row(ONE, PAST)]), audit=G())
    assert one(bench, "d5000,", "x", "B") == ("~2", ACCEPTED)


UNSTARTED: dict[str, dict[str, Any]] = {
    "ready": {"lisa": G(ready=[Row(ONE, PAST)]), "audit": G()},
    "ready in both groups": {"lisa": G(ready=[Row(ONE, PAST)]), "audit": G(ready=[Row(ONE, PAST)])},
    "without room in a group": {"lisa": G(retry={ONE: PAST}), "audit": G(ready=[Row(ONE, PAST)])},
}


@pytest.mark.parametrize("case", UNSTARTED)
def test_a_debounced_message_that_is_ready_waits_again(bench: Bench, case: str) -> None:
    bench.put(body={ONE: "A-x"}, keyed={**LISTED, ONE: PAST}, **UNSTARTED[case])
    assert one(bench, "d5000,", "y", "B") == ("~1", REPLACED)
    bench.check_change(
        waiting={ONE: bench.now + 5_000},
        body={ONE: "Bry"},
        options=LANES,
        stats={"sent": 1},
        lisa=G(),
        audit=G(),
    )


@pytest.mark.parametrize("rule", ["d5000,60000", "t5000", "l+5000"])
@pytest.mark.parametrize("case", UNSTARTED)
def test_what_is_due_keeps_its_place(bench: Bench, case: str, rule: str) -> None:
    """Or a backlog would always overtake a key with frequent sends."""
    bench.put(body={ONE: "A-x"}, keyed={**LISTED, ONE: PAST}, **UNSTARTED[case])
    assert one(bench, rule, "y", "B") == ("~1", UPDATED)
    bench.check_change(body={ONE: "Bby"}, options=LANES, stats={"sent": 1})


def test_a_retry_that_was_deferred_is_due_when_the_burst_is(bench: Bench) -> None:
    bench.put(body={ONE: "A-x"}, keyed={**LISTED, ONE: PAST}, lisa=G(retry={ONE: FAR}))
    assert one(bench, "d5000,60000", "y", "B") == ("~1", REPLACED)
    assert bench.state()["waiting"] == {ONE: PAST + 60_000}


AGAIN = {
    "released": (G(ready=[Row(ONE, PAST)]), TWO),
    "deferred": (G(retry={ONE: FAR - 1}), TWO),
    "deferred for longer": (G(retry={ONE: FAR + 1}), ONE),
}


@EVERY_RULE
@pytest.mark.parametrize("case", AGAIN)
def test_if_one_waits_again_the_later_gets_the_last_body(
    bench: Bench, case: str, rule: str
) -> None:
    """The second one was sent while the first was in flight; no body comes after a newer one."""
    group, later = AGAIN[case]
    bodies = {ONE: "A-", TWO: "B-"}
    bench.put(body=bodies, keyed=BOTH, waiting={TWO: FAR}, lisa=group)
    own_id, outcome = one(bench, rule, "x", "C")
    mark = "r" if outcome == REPLACED else "b"
    assert own_id == later.partition("\x1f")[2]
    assert bench.state()["body"] == {**bodies, later: f"C{mark}x"}


@EVERY_RULE
def test_if_both_have_begun_one_is_replaced(bench: Bench, rule: str) -> None:
    bodies = {ONE: "A-", TWO: "A-"}
    held = Row(TWO, PAST, 1, "c1")
    bench.put(body=bodies, keyed=BOTH, lisa=G(ready=[held], garbage={ONE: PAST}, attempts={ONE: 1}))
    assert one(bench, rule, "x", "B") == ("~1", REPLACED)
    state = bench.state()
    assert state["body"] == {ONE: "Brx", TWO: "A-"}
    assert list(state["waiting"]) == [ONE]
    bench.store.ask("FLUSHALL")
    bench.put(body=bodies, keyed=BOTH, lisa=G(ready=[held], retry={ONE: 5}, attempts={ONE: 1}))
    assert one(bench, rule, "x", "B") == ("~1", REPLACED)
    bench.store.ask("FLUSHALL")
    both = {"lisa": G(ready=[Row(ONE, 1, 1, "c1")]), "audit": G(ready=[Row(TWO, 2, 1, "c2")])}
    bench.put(body=bodies, keyed=BOTH, **both)
    assert one(bench, rule, "x", "B") == ("~1", IN_FLIGHT)
    assert bench.state()["body"] == {ONE: "Bfx", TWO: "A-"}


def test_a_burst_after_the_handling_of_one_begins_anew(bench: Bench) -> None:
    bench.put(lisa=G())
    one(bench, "d0,60000", "x", "A")
    assert fill(bench) == ["~1"]
    assert one(bench, "d0,60000", "y", "B") == ("~2", ACCEPTED)
    bench.call(Ack(TOPIC, "lisa", [bench.settlement(ONE)]))
    state = bench.state()
    assert state["keyed"] == {"k": "~2\x1f", TWO: bench.now}
    assert one(bench, "d0,60000", "z", "C")[0] == "~2"


@pytest.mark.parametrize("end", ["cancel", "purge"])
def test_nothing_remains_of_a_burst_that_ended(bench: Bench, end: str) -> None:
    bench.put(lisa=G(garbage={TWO: 5}), body={TWO: "A-"}, keyed={"k": "~2\x1f", TWO: PAST})
    one(bench, "d5000,", "x", "B")
    if end == "purge":
        bench.call(Purge(TOPIC, "lisa", [TWO]))
    bench.call(Cancel(TOPIC, [ONE, TWO]))
    assert "keyed" not in bench.state()


def test_the_first_send_of_another_rule_forgets_an_earlier_burst(bench: Bench) -> None:
    bodies = {ONE: "A-", TWO: "A-"}
    dead = G(garbage={ONE: 1}, ready=[Row(TWO, 1, 1, "c1")], attempts={ONE: 1})
    bench.put(body=bodies, keyed={**BOTH, ONE: PAST}, lisa=dead)
    one(bench, "l+5000", "x", "B")
    assert bench.state()["keyed"] == BOTH
    assert one(bench, "d5000,60000", "y", "C") == ("~1", REPLACED)
    assert bench.state()["keyed"] == {**BOTH, ONE: bench.now}


def test_ttl_and_policies_are_those_of_the_last_send(bench: Bench) -> None:
    send(bench, burst("d5000,", ttl_ms=7, policy="5"))
    due = bench.state()["waiting"][ONE]
    bench.check(
        waiting={ONE: due},
        body={ONE: "A-"},
        keyed={**LISTED, ONE: bench.now},
        expiry={ONE: due + 7},
        policy={ONE: "5"},
        options=LANES,
        stats={"sent": 1},
    )
    one(bench, "l+0", "x", "B")
    bench.check_change(
        body={ONE: "Bbx"}, expiry=None, policy=None, stats={"sent": 2}, waiting={ONE: due}
    )


def test_a_ttl_counts_from_the_due_time_of_what_is_ready(bench: Bench) -> None:
    bench.put(body={ONE: "A-"}, keyed=LISTED, lisa=G(ready=[Row(ONE, PAST)]))
    send(bench, burst("l+0", ttl_ms=FAR, sender="B"), sender="B")
    assert bench.state()["expiry"] == {ONE: FAR + PAST}


def test_many_keys_in_one_call(bench: Bench) -> None:
    items = [
        burst("d5000,", "1", "a"),
        burst("t5000", "2", "b"),
        burst("d5000,", "3", "a", ttl_ms=9),
        burst(f"l{FAR}", "4", "c", policy="5"),
    ]
    call = coalesce(TOPIC, "A" * 8, items)
    for _ in range(2):
        said = bench.call(call)
        assert said == [
            (keyed_id("a", "~1"), ACCEPTED),
            (keyed_id("b", "~1"), ACCEPTED),
            (keyed_id("a", "~1"), REPLACED),
            (keyed_id("c", "~1"), ACCEPTED),
        ]
        state = bench.state()
        assert sorted(state["body"].values()) == ["A-2", "A-3", "A-4"]
        assert len(state["waiting"]) == 3
        assert state["stats"] == {"sent": 4}
    assert list(state["expiry"]) == [keyed_id("a", "~1")]
    assert list(state["policy"]) == [keyed_id("c", "~1")]


def test_of_the_messages_of_a_key_in_one_call_the_last_is_kept(bench: Bench) -> None:
    items = [burst("d5000,", "1", ttl_ms=7, policy="5"), burst("l+0", "2"), burst("d9000,", "3")]
    outcomes = [outcome for _, outcome in send(bench, *items)]
    assert outcomes == [ACCEPTED, UPDATED, REPLACED]
    bench.check(
        waiting={ONE: bench.now + 9_000},
        body={ONE: "A-3"},
        keyed={**LISTED, ONE: bench.now},
        options=LANES,
        stats={"sent": 3},
    )


def again(call: Coalesce) -> Coalesce:
    """The same call as its caller repeats it once the shards have changed: with another call id."""
    return coalesce(
        TOPIC,
        call.token,
        [Burst(*row) for row in zip(call.keys, call.rules, call.envelopes, strict=True)],
    )


@EVERY_RULE
def test_a_call_repeated_after_anothers_changes_nothing(bench: Bench, rule: str) -> None:
    bench.put(lisa=G())
    call = coalesce(TOPIC, "A" * 8, [burst(rule, "x")])
    first = bench.call(call)
    one(bench, rule, "y", "B")
    before = bench.state()
    assert bench.call(call) == first
    assert bench.state() == before


@EVERY_RULE
def test_a_repeated_call_knows_its_message_by_the_send_token(bench: Bench, rule: str) -> None:
    bench.put(lisa=G())
    call = coalesce(TOPIC, "A" * 8, [burst(rule, "x")])
    first = bench.call(call)
    before = bench.state()
    assert bench.call(again(call)) == first
    assert bench.state() == before
    bench.call(Cancel(TOPIC, [ONE]))
    before = bench.state()
    assert bench.call(again(call)) == first
    assert bench.state() == before


@pytest.mark.parametrize(
    ("mark", "outcome"),
    [*zip("-+rRfFbB", [found for found in OUTCOMES for _ in "12"], strict=True)],
)
def test_a_repeated_call_reports_the_first_outcome(bench: Bench, mark: str, outcome: Sent) -> None:
    bench.put(body={TWO: f"A{mark}"}, keyed={"k": "~2\x1f"}, lisa=G(retry={TWO: FAR}))
    assert one(bench, "d5000,", "x", "A") == ("~2", outcome)
    bench.check_unchanged()


def test_an_older_shard_takes_only_keys_that_have_live_messages_there(bench: Bench) -> None:
    bench.put(options={"accepts": "-3"}, body={ONE: "A-"}, keyed=LISTED, lisa=G(garbage={ONE: 5}))
    items = [burst("d5000,", key="new", sender="B"), burst("d5000,", sender="B")]
    call = coalesce(TOPIC, "B" * 8, items, if_known=True)
    said = bench.store.drive(bench.store.run(call, "-3"))
    assert said == [Elsewhere.UNKNOWN, (TWO, ACCEPTED)]
    assert sorted(bench.state()["body"]) == [ONE, TWO]


def test_capacity_counts_only_what_becomes_live(bench: Bench) -> None:
    bench.put(options={"capacity": "2"}, waiting={ONE: FAR}, body={ONE: "A-"}, keyed=LISTED)
    assert one(bench, "d5000,", "x", "B") == ("~1", REPLACED)
    with pytest.raises(TopicFull, match=r"holds 1 live messages and allows at most 2"):
        send(bench, *[burst("d5000,", key=key, sender="C") for key in "abk"], sender="C")
    assert len(bench.state()["body"]) == 1
    send(bench, *[burst("d5000,", key=key, sender="C") for key in "aak"], sender="C")


def test_a_key_has_no_more_messages_than_allowed(bench: Bench) -> None:
    bench.put(options={"max_per_key": "1"}, waiting={ONE: FAR}, body={ONE: "A-"}, keyed=LISTED)
    assert one(bench, "d5000,", "x", "B") == ("~1", REPLACED)
    bench.store.ask("FLUSHALL")
    held = {"body": {ONE: "A-"}, "keyed": LISTED, "lisa": G(ready=[Row(ONE, 1, 1, "c1")])}
    bench.put(options={"max_per_key": "1"}, **held)
    with pytest.raises(KeyFull, match="key 'k' of topic 'orders' has 1 live messages"):
        send(bench, burst("t5000", key="a", sender="C"), burst("t5000", sender="C"), sender="C")
    bench.check(options={"max_per_key": "1"}, **held)


def test_a_body_above_the_limit_is_refused_and_nothing_sent(bench: Bench) -> None:
    bench.put(options={"max_body_bytes": "3"})
    with pytest.raises(InvalidMessage, match=r"message 'b / ~1' has 4 bytes; .* at most 3"):
        send(bench, burst("t5000", "123", "a"), burst("t5000", "1234", "b"))
    bench.check_unchanged()


@EVERY_RULE
def test_two_messages_of_a_key_never_run_at_once(bench: Bench, rule: str) -> None:
    bench.put(lisa=G())
    rule = rule.replace("5000", "0")
    one(bench, rule, "x", "A")
    assert fill(bench) == ["~1"]
    assert one(bench, rule, "y", "B") == ("~2", ACCEPTED)
    assert fill(bench) == []
    assert one(bench, rule, "z", "C")[0] == "~2"
    bench.call(Ack(TOPIC, "lisa", [bench.settlement(ONE)]))
    assert fill(bench) == ["~2"]
    (entry,) = (bench.opening(TWO),)
    assert bench.call(Open(TOPIC, "lisa", [entry])).envelopes[0] in {
        envelope("Crz"),
        envelope("Cbz"),
    }


def test_what_is_parked_keeps_its_place(bench: Bench) -> None:
    bench.put(lisa=G())
    one(bench, "l+0", "x", "A")
    fill(bench)
    one(bench, "l+0", "y", "B")
    fill(bench)
    parked = bench.store.ask("HGETALL", bench.keys.lanes("lisa").parked)
    assert parked[0] == TWO.encode()
    assert one(bench, "l+0", "z", "C") == ("~2", UPDATED)
    assert bench.store.ask("HGETALL", bench.keys.lanes("lisa").parked) == parked
    assert one(bench, "d5000,", "w", "D") == ("~2", REPLACED)
    assert bench.store.ask("EXISTS", bench.keys.lanes("lisa").parked) == 0
    assert bench.state()["waiting"] == {TWO: bench.now + 5_000}


def test_an_entry_carries_no_body_that_may_change(bench: Bench) -> None:
    bench.put(lisa=G(), options=LANES, waiting={ONE: 5}, body={ONE: "A-"}, keyed=LISTED)
    assert bench.call(Promote(TOPIC, expected=[ONE])).moved == 1
    one(bench, "l+0", "new", "B")
    ((_, fields),) = bench.store.ask("XRANGE", bench.keys.group("lisa").ready, "-", "+")
    assert b"body" not in fields
    taken = bench.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    assert bench.call(Open(TOPIC, "lisa", taken)).envelopes == [envelope("Bbnew")]
