"""enqueue: new -> waiting, or straight to ready."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import InvalidMessage, TopicFull
from lisa.core.transitions import loader
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent, WindowChanged
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import G, Row
from tests.rows import Item, enqueue

FAR = 4_000_000_000_000
PAST = 1_000
ACCEPTED, DUPLICATE, REPLACED, REJECTED = Sent


def test_a_message_that_is_not_due_waits(bench: Bench) -> None:
    said = bench.send(item("a", "+60000", "x"), item("b", str(FAR), "y", ttl_ms=5, policy="0,7"))
    assert said == [ACCEPTED, ACCEPTED]
    bench.check(
        waiting={"a": bench.now + 60_000, "b": FAR},
        body={"a": "A-x", "b": "A-y"},
        expiry={"b": FAR + 5},
        policy={"b": "0,7"},
        stats={"sent": 2},
    )


def test_a_delay_is_rounded_up_and_zero_is_due_now(bench: Bench) -> None:
    bench.send(item("a", "+1"), item("b", "+0"))
    waiting = bench.state()["waiting"]
    assert waiting["a"] - waiting["b"] in {1, 2}


def test_a_delay_never_ends_early(bench: Bench) -> None:
    """Exact to the microsecond: the time of the send is rounded up, too."""
    for n in range(50):
        seconds, micros = bench.store.ask("TIME")
        bench.send(item(f"m{n}", "+60000"))
        due_ms = bench.store.ask("ZSCORE", bench.keys.waiting, f"m{n}")
        assert 1000 * int(due_ms) >= 1_000_000 * int(seconds) + int(micros) + 60_000_000


def test_due_messages_wait_until_a_group_is_declared(bench: Bench) -> None:
    bench.send(item("a", str(PAST)))
    bench.check(waiting={"a": PAST}, body={"a": "A-"}, stats={"sent": 1})


def test_due_messages_go_straight_to_every_group_in_order(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    bench.send(item("far", str(FAR)), item("late", "3000"), item("early", "2000"))
    rows = [Row("early", 2000), Row("late", 3000)]
    bench.check(
        waiting={"far": FAR},
        body={"late": "A-", "early": "A-", "far": "A-"},
        stats={"sent": 3, "promoted": 2},
        lisa=G(ready=rows),
        audit=G(ready=rows),
    )


@pytest.mark.parametrize(
    "forbids",
    [
        {"options": {"paused": "1"}, "lisa": G()},
        {"waiting": {"b": PAST}, "body": {"b": "B-"}, "lisa": G()},
        {"body": {"b": "B-"}, "lisa": G(retry={"b": PAST})},
        {"body": {"b": "B-"}, "lisa": G(), "audit": G(retry={"b": PAST})},
        {"options": {"max_ready": "1"}, "body": {"b": "B-"}, "lisa": G(ready=[Row("b", PAST)])},
        {
            "options": {"max_ready": "1"},
            "body": {"b": "B-"},
            "lisa": G(),
            "audit": G(ready=[Row("b", PAST)]),
        },
    ],
    ids=["paused", "waiting due", "retry due", "other group's retry due", "full", "other full"],
)
def test_new_messages_wait_when(bench: Bench, forbids: dict[str, Any]) -> None:
    bench.put(**forbids)
    bench.send(item("a", "+0"))
    after = {"waiting": {}, **forbids}
    after["body"] = {**forbids.get("body", {}), "a": "A-"}
    after["waiting"] = {**after["waiting"], "a": bench.now}
    bench.check(**after, stats={"sent": 1})


def test_later_messages_and_pending_entries_do_not_prevent_direct_delivery(
    bench: Bench,
) -> None:
    held = Row("held", PAST, 1, "c1")
    bench.put(
        options={"max_ready": "2"},
        waiting={"w": FAR},
        body={"w": "B-", "r": "B-", "held": "B-"},
        lisa=G(ready=[held], retry={"r": FAR}),
    )
    bench.send(item("a", "1"), item("b", "2"), item("c", "3"))
    bench.check(
        options={"max_ready": "2"},
        waiting={"w": FAR, "c": 3},
        body={"w": "B-", "r": "B-", "held": "B-", "a": "A-", "b": "A-", "c": "A-"},
        stats={"sent": 3, "promoted": 2},
        lisa=G(ready=[held, Row("a", 1), Row("b", 2)], retry={"r": FAR}),
    )


LIFE: dict[str, dict[str, Any]] = {
    "waiting": {"waiting": {"a": FAR}, "body": {"a": "A-"}, "lisa": G()},
    "ready": {"body": {"a": "A-"}, "lisa": G(ready=[Row("a", PAST)])},
    "in flight": {"body": {"a": "A-"}, "lisa": G(ready=[Row("a", PAST, 1, "c1")])},
    "retry": {
        "body": {"a": "A-"},
        "lisa": G(retry={"a": PAST}, attempts={"a": 1}, reasons={"a": "no"}),
    },
    "garbage": {
        "body": {"a": "A-"},
        "policy": {"a": "0"},
        "expiry": {"a": FAR},
        "lisa": G(garbage={"a": PAST}, attempts={"a": 2}, reasons={"a": "no"}),
    },
    "partly settled": {"body": {"a": "A+"}, "lisa": G(), "audit": G(retry={"a": FAR})},
    "settled": {"done": {"a": ("A-", "acked", PAST, 1, PAST)}, "lisa": G()},
}
STAGES = pytest.mark.parametrize("stage", LIFE)


@STAGES
@pytest.mark.parametrize("mode", OnDuplicate)
def test_the_same_send_token_is_a_replay(bench: Bench, stage: str, mode: OnDuplicate) -> None:
    bench.put(**LIFE[stage])
    assert bench.send(item("a", "+0"), on_duplicate=mode) == [ACCEPTED]
    bench.check(**LIFE[stage])


@pytest.mark.parametrize("mark", "rR")
def test_a_repeated_replace_reports_replaced(bench: Bench, mark: str) -> None:
    state: dict[str, Any] = {"body": {"a": f"A{mark}"}, "lisa": G(retry={"a": FAR})}
    state["done"] = {"b": (f"A{mark}", "acked", PAST, 1, PAST)}
    bench.put(**state)
    said = bench.send(item("a", "+0"), item("b", "+0"), on_duplicate=OnDuplicate.REPLACE)
    assert said == [REPLACED, REPLACED]
    bench.check(**state)


@STAGES
def test_keep_reports_a_duplicate_and_changes_nothing(bench: Bench, stage: str) -> None:
    bench.put(**LIFE[stage])
    assert bench.send(item("a", "+0", sender="B"), sender="B") == [DUPLICATE]
    bench.check(**LIFE[stage], stats={"duplicate": 1})


@STAGES
def test_reject_changes_nothing(bench: Bench, stage: str) -> None:
    bench.put(**LIFE[stage])
    said = bench.send(item("a", "+0", sender="B"), sender="B", on_duplicate=OnDuplicate.REJECT)
    assert said == [REJECTED]
    bench.check(**LIFE[stage])


@STAGES
def test_replace_resets_the_message(bench: Bench, stage: str) -> None:
    bench.put(**LIFE[stage])
    new = item("a", str(FAR + 1), "new", sender="B")
    assert bench.send(new, sender="B", on_duplicate=OnDuplicate.REPLACE) == [REPLACED]
    groups = {"audit": G()} if stage == "partly settled" else {}
    bench.check(waiting={"a": FAR + 1}, body={"a": "Brnew"}, stats={"sent": 1}, lisa=G(), **groups)


@STAGES
def test_keep_live_replaces_only_ended_messages(bench: Bench, stage: str) -> None:
    bench.put(**LIFE[stage])
    new = item("a", str(FAR + 1), "new", sender="B")
    said = bench.send(new, sender="B", on_duplicate=OnDuplicate.KEEP_LIVE)
    if stage in ("garbage", "settled"):
        assert said == [REPLACED]
        bench.check(waiting={"a": FAR + 1}, body={"a": "Brnew"}, stats={"sent": 1}, lisa=G())
    else:
        assert said == [DUPLICATE]
        bench.check(**LIFE[stage], stats={"duplicate": 1})


def test_keep_live_keeps_what_one_of_several_groups_still_owes(bench: Bench) -> None:
    state: dict[str, Any] = {
        "body": {"a": "A-"},
        "lisa": G(garbage={"a": PAST}, attempts={"a": 1}, reasons={"a": "no"}),
        "audit": G(retry={"a": FAR}),
    }
    bench.put(**state)
    new = item("a", "+0", sender="B")
    assert bench.send(new, sender="B", on_duplicate=OnDuplicate.KEEP_LIVE) == [DUPLICATE]
    bench.check(**state, stats={"duplicate": 1})


@pytest.mark.parametrize(
    ("mode", "second", "lasts"),
    [
        (OnDuplicate.KEEP, DUPLICATE, ("A-one", FAR)),
        (OnDuplicate.KEEP_LIVE, DUPLICATE, ("A-one", FAR)),
        (OnDuplicate.REJECT, REJECTED, ("A-one", FAR)),
        (OnDuplicate.REPLACE, REPLACED, ("A-two", FAR + 1)),
    ],
)
def test_an_id_twice_in_one_call(
    bench: Bench, mode: OnDuplicate, second: Sent, lasts: tuple[str, int]
) -> None:
    batch = [
        item("a", str(FAR), "one", ttl_ms=5, policy="1"),
        item("b", str(FAR)),
        item("a", str(FAR + 1), "two"),
    ]
    assert bench.send(*batch, on_duplicate=mode) == [ACCEPTED, ACCEPTED, second]
    extras: dict[str, Any] = {"expiry": {"a": FAR + 5}, "policy": {"a": "1"}}
    stats = {"sent": 2, "duplicate": 1} if second is DUPLICATE else {"sent": 2}
    after: dict[str, Any] = {
        "waiting": {"a": lasts[1], "b": FAR},
        "body": {"a": lasts[0], "b": "A-"},
        **({} if mode is OnDuplicate.REPLACE else extras),
    }
    bench.check(**after, stats=stats)
    assert bench.send(*batch, on_duplicate=mode) == [ACCEPTED, ACCEPTED, second]
    if second is DUPLICATE:
        stats["duplicate"] = 2
    bench.check(**after, stats=stats)


def test_a_batch_of_old_and_new_ids_handles_each_separately(bench: Bench) -> None:
    bench.put(
        waiting={"a": FAR},
        body={"a": "B-"},
        done={"b": ("B-", "cancelled", None, 0, PAST)},
        lisa=G(),
    )
    said = bench.send(item("a", "1"), item("b", "2"), item("c", "3", "new"))
    assert said == [DUPLICATE, DUPLICATE, ACCEPTED]
    bench.check(
        waiting={"a": FAR},
        body={"a": "B-", "c": "A-new"},
        done={"b": ("B-", "cancelled", None, 0, PAST)},
        stats={"sent": 1, "duplicate": 2, "promoted": 1},
        lisa=G(ready=[Row("c", 3)]),
    )


@pytest.mark.parametrize("settled", ["", "a", "b", "c", "ac", "abc"])
@pytest.mark.parametrize("due", ["+0", "+60000"])
def test_a_repeat_with_new_ids_is_detected_by_any_id(bench: Bench, due: str, settled: str) -> None:
    bench.put(lisa=G())
    batch = [item(one, due) for one in "abc"]
    assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * 3
    bench.call(Cancel(TOPIC, list(settled)))
    before = bench.state()
    assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * 3
    assert bench.state() == before


@pytest.mark.parametrize("settled", ["", "a"])
def test_a_repeat_with_one_new_id_adds_nothing(bench: Bench, settled: str) -> None:
    bench.put(lisa=G())
    assert bench.send(item("a", "+60000"), are_ids_new=True) == [ACCEPTED]
    bench.call(Cancel(TOPIC, list(settled)))
    before = bench.state()
    assert bench.send(item("a", "+60000"), are_ids_new=True) == [ACCEPTED]
    assert bench.state() == before


def test_a_repeat_with_new_ids_ignores_capacity(bench: Bench) -> None:
    bench.put(options={"capacity": "2"})
    batch = [item("a", str(FAR)), item("b", str(FAR))]
    assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * 2
    assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * 2
    with pytest.raises(TopicFull):
        bench.send(item("c", str(FAR), sender="B"), sender="B", are_ids_new=True)


def test_only_calls_that_concern_groups_check_them(bench: Bench) -> None:
    bench.put(lisa=G())
    now, later = item("now", "+0"), item("later", "+60000")

    def answer(*items: Item, are_ids_new: bool = True) -> bytes:
        call = enqueue(TOPIC, "A" * 8, items, are_ids_new=are_ids_new)
        keys, arguments = call.build(bench.keys, ("removed",), "test@here:1")
        script = loader.load("enqueue")
        bench.store.ask("SCRIPT", "LOAD", script.source)
        reply: list[bytes] = bench.store.ask("EVALSHA", script.sha, len(keys), *keys, *arguments)
        return reply[0]

    assert answer(now) == answer(now, later) == b"GROUPS"
    assert answer(later, are_ids_new=False) == b"GROUPS"
    bench.check(lisa=G())
    assert answer(later) == b"OK"
    bench.check(
        waiting={"later": bench.now + 60_000}, body={"later": "A-"}, stats={"sent": 1}, lisa=G()
    )
    bench.store.ask("HSET", bench.keys.options, "capacity", "9")
    assert answer(later) == b"GROUPS"


def test_new_ids_have_ttls_policies_and_due_times_of_their_own(bench: Bench) -> None:
    bench.put(lisa=G())
    batch = [
        item("a", "7", "x", ttl_ms=FAR),
        item("b", str(FAR), policy="5"),
        item("c", "3"),
    ]
    assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * 3
    bench.check(
        waiting={"b": FAR},
        body={"a": "A-x", "b": "A-", "c": "A-"},
        expiry={"a": FAR + 7},
        policy={"b": "5"},
        stats={"sent": 3, "promoted": 2},
        lisa=G(ready=[Row("c", 3), Row("a", 7)]),
    )


def test_one_due_time_for_all(bench: Bench) -> None:
    bench.put(options={"max_ready": "2"}, lisa=G())
    token = "A" * 8
    envelopes = [item(one, "").envelope for one in "abc"]
    assert bench.call(Enqueue(TOPIC, token, "abc", ["5"], envelopes)) == [ACCEPTED] * 3
    later = [item(one, "").envelope for one in "de"]
    ttls = [9, None]
    assert bench.call(Enqueue(TOPIC, token, "de", [str(FAR)], later, ttls)) == [ACCEPTED] * 2
    bench.check(
        options={"max_ready": "2"},
        waiting={"c": 5, "d": FAR, "e": FAR},
        body=dict.fromkeys("abcde", "A-"),
        expiry={"d": FAR + 9},
        stats={"sent": 5, "promoted": 2},
        lisa=G(ready=[Row("a", 5), Row("b", 5)]),
    )


def test_capacity_is_checked_for_the_batch_before_it_writes(bench: Bench) -> None:
    state: dict[str, Any] = {
        "options": {"capacity": "4"},
        "waiting": {"w": FAR},
        "body": {"w": "B-", "e": "B-"},
        "lisa": G(ready=[Row("e", PAST)]),
        "audit": G(retry={"e": PAST}),
    }
    bench.put(**state)
    with pytest.raises(TopicFull, match=r"'orders' holds 2 live messages and allows at most 4"):
        bench.send(item("x", "1"), item("y", "1"), item("z", "1"))
    bench.check(**state)
    assert bench.send(item("x", str(FAR)), item("y", str(FAR))) == [ACCEPTED, ACCEPTED]


def test_capacity_counts_only_ids_that_are_not_live(bench: Bench) -> None:
    full: dict[str, Any] = {
        "options": {"capacity": "1"},
        "waiting": {"a": FAR},
        "body": {"a": "A-"},
        "done": {"s": ("A-", "acked", PAST, 1, PAST)},
    }
    bench.put(**full)
    assert bench.send(item("a", str(FAR)), item("s", "1")) == [ACCEPTED, ACCEPTED]
    assert bench.send(item("s", "1", sender="B"), sender="B") == [DUPLICATE]
    replaced = item("a", str(FAR + 1), sender="B")
    assert bench.send(replaced, sender="B", on_duplicate=OnDuplicate.REPLACE) == [REPLACED]
    with pytest.raises(TopicFull):
        bench.send(item("s", "1", sender="B"), sender="B", on_duplicate=OnDuplicate.REPLACE)


def test_an_id_given_twice_counts_once_against_capacity(bench: Bench) -> None:
    bench.put(options={"capacity": "1"})
    assert bench.send(item("a", str(FAR)), item("a", str(FAR))) == [ACCEPTED, DUPLICATE]


def test_a_body_above_the_limit_is_refused_and_nothing_sent(bench: Bench) -> None:
    state: dict[str, Any] = {"options": {"max_body_bytes": "3"}, "lisa": G()}
    bench.put(**state)
    with pytest.raises(InvalidMessage, match=r"body of message 'b' has 4 bytes; .* at most 3"):
        bench.send(item("a", "1", "123"), item("b", "1", "1234"))
    bench.check(**state)
    with_headers = encode_envelope("A" * 8, "123", {"trace": "long enough"})
    assert bench.send(Item("a", "1", with_headers)) == [ACCEPTED]


def test_the_latest_due_time_keeps_all_its_digits(bench: Bench) -> None:
    latest = 253_402_300_799_999
    bench.put(lisa=G())
    bench.send(item("a", str(latest), ttl_ms=1))
    assert bench.store.ask("ZSCORE", bench.keys.waiting, "a") == b"253402300799999"
    bench.check(
        waiting={"a": latest},
        expiry={"a": latest + 1},
        body={"a": "A-"},
        stats={"sent": 1},
        lisa=G(),
    )


def test_a_call_must_know_the_topics_window(bench: Bench) -> None:
    bench.put(options={"window": "9-17"}, lisa=G())
    before = bench.state()
    for known in ("", "10-18"):
        call = enqueue(TOPIC, "A" * 8, [item("a", str(FAR), "one")], window=known)
        with pytest.raises(WindowChanged) as found:
            bench.call(call)
        assert found.value.window == "9-17"
        assert bench.state() == before
    for i, accepted in enumerate(("9-17", None)):
        call = enqueue(TOPIC, "A" * 8, [item(f"m{i}", str(FAR), "one")], window=accepted)
        assert bench.call(call) == [Sent.ACCEPTED]


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_for_a_removed_window_is_refused(bench: Bench, n: int) -> None:
    """One new message would take the usual case."""
    bench.put(options={"window": ""}, lisa=G())
    items = [item(f"m{i}", str(FAR), "one") for i in range(n)]
    with pytest.raises(WindowChanged):
        bench.call(enqueue(TOPIC, "A" * 8, items, are_ids_new=True, window="9-17"))
    assert bench.call(enqueue(TOPIC, "A" * 8, items, are_ids_new=True)) == [Sent.ACCEPTED] * n
