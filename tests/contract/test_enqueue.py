"""enqueue: new -> waiting, or straight to ready. See test_places for ids that are known."""

from typing import Any

import pytest

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import InvalidMessage, TopicFull
from lisa.core.transitions import loader
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent, WindowChanged
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row
from tests.rows import Item, enqueue

PAST = 1_000
ACCEPTED, DUPLICATE, REPLACED, IN_FLIGHT, UPDATED, REJECTED = Sent
REPLACE, KEEP_LIVE = OnDuplicate.REPLACE, OnDuplicate.KEEP_LIVE


def test_a_message_that_is_not_due_waits(bench: Bench) -> None:
    said = bench.send(item("a", "+60000", "x"), item("b", FAR, "y", ttl_ms=5, policy="0,7"))
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
    bench.send(item("a", PAST))
    bench.check(waiting={"a": PAST}, body="a", stats={"sent": 1})


def test_due_messages_go_straight_to_every_group_in_order(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    bench.send(item("f", FAR), item("l", 3000), item("e", 2000))
    ready = G(ready=[Row("e", 2000), Row("l", 3000)])
    stats = {"sent": 3, "promoted": 2}
    bench.check(waiting={"f": FAR}, body="fle", stats=stats, lisa=ready, audit=ready)


FULL = {"options": {"max_ready": "1"}, "body": "b"}
FORBIDDEN: dict[str, dict[str, Any]] = {
    "paused": {"options": {"paused": "1"}, "lisa": G()},
    "waiting due": {"waiting": {"b": PAST}, "body": "b", "lisa": G()},
    "retry due": {"body": "b", "lisa": G(retry={"b": PAST})},
    "other group's retry due": {"body": "b", "lisa": G(), "audit": G(retry={"b": PAST})},
    "full": {**FULL, "lisa": G(ready=[Row("b", PAST)])},
    "other full": {**FULL, "lisa": G(), "audit": G(ready=[Row("b", PAST)])},
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_new_messages_wait_when(bench: Bench, case: str) -> None:
    state = FORBIDDEN[case]
    bench.put(**state)
    bench.send(item("a", "+0"))
    waiting = {**state.get("waiting", {}), "a": bench.now}
    bench.check_change(waiting=waiting, body=state.get("body", "") + "a", stats={"sent": 1})


def test_later_messages_and_pending_entries_do_not_prevent_direct_delivery(bench: Bench) -> None:
    held = Row("h", PAST, 1, "c1")
    options = {"max_ready": "2"}
    bench.put(
        options=options, waiting={"w": FAR}, body="wrh", lisa=G(ready=[held], retry={"r": FAR})
    )
    bench.send(item("a", 1), item("b", 2), item("c", 3))
    bench.check_change(
        waiting={"w": FAR, "c": 3},
        body="wrhabc",
        stats={"sent": 3, "promoted": 2},
        lisa=G(ready=[held, Row("a", 1), Row("b", 2)], retry={"r": FAR}),
    )


@pytest.mark.parametrize(
    ("mark", "outcome"),
    [*zip("rRfFbB", [REPLACED] * 2 + [IN_FLIGHT] * 2 + [UPDATED] * 2, strict=True)],
)
def test_a_repeated_replace_reports_the_first_outcome(
    bench: Bench, mark: str, outcome: Sent
) -> None:
    done = {"b": (f"A{mark}", "acked", PAST, 1, PAST)}
    bench.put(body={"a": f"A{mark}"}, done=done, lisa=G(retry={"a": FAR}))
    said = bench.send(item("a", "+0"), item("b", "+0"), on_duplicate=REPLACE)
    assert said == [outcome, outcome]
    bench.check_unchanged()


def test_keep_live_keeps_what_one_of_several_groups_still_owes(bench: Bench) -> None:
    failed: dict[str, Any] = {"attempts": {"a": 1}, "reasons": {"a": "no"}}
    bench.put(body="a", lisa=G(garbage={"a": PAST}, **failed), audit=G(retry={"a": FAR}))
    assert bench.send(item("a", "+0", sender="B"), on_duplicate=KEEP_LIVE) == [DUPLICATE]
    bench.check_change(stats={"duplicate": 1})


@pytest.mark.parametrize(
    ("mode", "second"),
    [*zip(OnDuplicate, (DUPLICATE, DUPLICATE, REPLACED, UPDATED, REJECTED), strict=True)],
)
def test_an_id_twice_in_one_call(bench: Bench, mode: OnDuplicate, second: Sent) -> None:
    first = item("a", FAR, "one", ttl_ms=5, policy="1")
    batch = [first, item("b", FAR), item("a", FAR + 1, "two")]
    is_kept = second in (DUPLICATE, REJECTED)
    for calls in (1, 2):
        assert bench.send(*batch, on_duplicate=mode) == [ACCEPTED, ACCEPTED, second]
        bench.check(
            waiting={"a": FAR + 1 if second is REPLACED else FAR, "b": FAR},
            body={"a": "A-one" if is_kept else "A-two", "b": "A-"},
            expiry={"a": FAR + 5} if is_kept else None,
            policy={"a": "1"} if is_kept else None,
            stats={"sent": 2, **({"duplicate": calls} if second is DUPLICATE else {})},
        )


@pytest.mark.parametrize("settled", ["", "a", "b", "c", "ac", "abc"])
@pytest.mark.parametrize("due", ["+0", "+60000"])
def test_a_repeat_with_new_ids_is_detected_by_any_id(bench: Bench, due: str, settled: str) -> None:
    bench.put(lisa=G())
    for ids in ("abc", "a"):
        batch = [item(one, due) for one in ids]
        assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * len(ids)
        bench.call(Cancel(TOPIC, list(settled)))
        before = bench.state()
        assert bench.send(*batch, are_ids_new=True) == [ACCEPTED] * len(ids)
        assert bench.state() == before


def test_a_repeat_with_new_ids_ignores_capacity(bench: Bench) -> None:
    bench.put(options={"capacity": "2"})
    for _ in range(2):
        assert bench.send(item("a", FAR), item("b", FAR), are_ids_new=True) == [ACCEPTED] * 2
    with pytest.raises(TopicFull):
        bench.send(item("c", FAR, sender="B"), are_ids_new=True)


@pytest.mark.parametrize("bench", ["plain"], indirect=True)
def test_only_calls_that_concern_groups_check_them(bench: Bench) -> None:
    bench.put(lisa=G())
    now, later = item("now", "+0"), item("later", "+60000")

    def answer(*items: Item, are_ids_new: bool = True, further: str = "") -> bytes:
        call = enqueue(TOPIC, "A" * 8, items, are_ids_new=are_ids_new)
        keys, arguments = call.build(bench.keys, ("removed",), "test@here:1")
        script = loader.load("enqueue", call.features | {further})
        bench.store.ask("SCRIPT", "LOAD", script.source)
        reply: list[bytes] = bench.store.ask("EVALSHA", script.sha, len(keys), *keys, *arguments)
        return reply[0]

    assert answer(now) == answer(now, later) == b"GROUPS"
    assert answer(later, are_ids_new=False) == b"GROUPS"
    bench.check_unchanged()
    assert answer(later) == b"OK"
    bench.check_change(waiting={"later": bench.now + 60_000}, body=["later"], stats={"sent": 1})
    bench.store.ask("HSET", bench.keys.options, "capacity", "9")
    assert answer(later) == b"FEATURES"
    assert answer(later, further="capacity") == b"GROUPS"


def test_new_ids_have_ttls_policies_and_due_times_of_their_own(bench: Bench) -> None:
    bench.put(lisa=G())
    batch = [item("a", 7, "x", ttl_ms=FAR), item("b", FAR, policy="5"), item("c", 3)]
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
    early, later = ([item(one, "").envelope for one in ids] for ids in ("abc", "de"))
    assert bench.call(Enqueue(TOPIC, "abc", ["5"], early)) == [ACCEPTED] * 3
    call = Enqueue(TOPIC, "de", [str(FAR)], later, [9, None])
    assert bench.call(call) == [ACCEPTED] * 2
    bench.check_change(
        waiting={"c": 5, "d": FAR, "e": FAR},
        body="abcde",
        expiry={"d": FAR + 9},
        stats={"sent": 5, "promoted": 2},
        lisa=G(ready=[Row("a", 5), Row("b", 5)]),
    )


def test_capacity_is_checked_for_the_batch_before_it_writes(bench: Bench) -> None:
    owed = {"lisa": G(ready=[Row("e", PAST)]), "audit": G(retry={"e": PAST})}
    bench.put(options={"capacity": "4"}, waiting={"w": FAR}, body="we", **owed)
    with pytest.raises(TopicFull, match=r"'orders' holds 2 live messages and allows at most 4"):
        bench.send(item("x", 1), item("y", 1), item("z", 1))
    bench.check_unchanged()
    assert bench.send(item("x", FAR), item("y", FAR)) == [ACCEPTED, ACCEPTED]


def test_capacity_counts_only_ids_that_are_not_live(bench: Bench) -> None:
    done = {"s": ("A-", "acked", PAST, 1, PAST)}
    bench.put(options={"capacity": "1"}, waiting={"a": FAR}, body="a", done=done)
    assert bench.send(item("a", FAR), item("s", 1)) == [ACCEPTED, ACCEPTED]
    assert bench.send(item("s", 1, sender="B")) == [DUPLICATE]
    assert bench.send(item("a", FAR, sender="B"), on_duplicate=REPLACE) == [REPLACED]
    with pytest.raises(TopicFull):
        bench.send(item("s", 1, sender="B"), on_duplicate=REPLACE)


def test_an_id_given_twice_counts_once_against_capacity(bench: Bench) -> None:
    bench.put(options={"capacity": "1"})
    assert bench.send(item("a", FAR), item("a", FAR)) == [ACCEPTED, DUPLICATE]


def test_a_body_above_the_limit_is_refused_and_nothing_sent(bench: Bench) -> None:
    bench.put(options={"max_body_bytes": "3"}, lisa=G())
    with pytest.raises(InvalidMessage, match=r"body of message 'b' has 4 bytes; .* at most 3"):
        bench.send(item("a", 1, "123"), item("b", 1, "1234"))
    bench.check_unchanged()
    with_headers = encode_envelope("A" * 8, "123", {"trace": "long enough"})
    assert bench.send(Item("a", "1", with_headers)) == [ACCEPTED]


def test_the_latest_due_time_keeps_all_its_digits(bench: Bench) -> None:
    latest = 253_402_300_799_999
    bench.put(lisa=G())
    bench.send(item("a", latest, ttl_ms=1))
    assert bench.store.ask("ZSCORE", bench.keys.waiting, "a") == b"253402300799999"
    bench.check_change(waiting={"a": latest}, expiry={"a": latest + 1}, body="a", stats={"sent": 1})


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_must_know_the_topics_window(bench: Bench, n: int) -> None:
    items = [item(f"m{i}", FAR) for i in range(n)]

    def send(known: str | None) -> list[Sent]:
        call = enqueue(TOPIC, "A" * 8, items, are_ids_new=True, window=known)
        return bench.call(call)

    bench.put(options={"window": ""}, lisa=G())
    for window, known in (("", "9-17"), ("9-17", ""), ("9-17", "10-18")):
        bench.store.ask("HSET", bench.keys.options, "window", window)
        with pytest.raises(WindowChanged) as found:
            send(known)
        assert found.value.window == window
        bench.check_change(options={"window": window})
    assert [send(known) for known in ("9-17", None)] == [[ACCEPTED] * n] * 2


def test_each_message_of_a_call_is_known_by_its_own_token(bench: Bench) -> None:
    def sent(*items: Item) -> list[Sent]:
        ids, dues, envelopes, *_ = zip(*items, strict=True)
        return bench.call(Enqueue(TOPIC, ids, dues, envelopes, on_duplicate=REPLACE))

    sent(item("a", FAR, "1", sender="A"), item("b", FAR, "1", sender="B"))
    again = [item("b", FAR, "2", sender="B"), item("a", FAR, "2", sender="C")]
    assert sent(*again, item("c", FAR, "2", sender="C")) == [ACCEPTED, REPLACED, ACCEPTED]
    assert bench.state()["body"] == {"a": "Cr2", "b": "B-1", "c": "C-2"}
