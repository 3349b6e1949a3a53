"""pull, extend, release, defer: ready -> in flight, and back without an attempt."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lisa.core.delivery.opening import Opening
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.windows import public_holidays
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.defer import Defer, Deferred, Outside
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.open import Limits, Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull, Pulled
from lisa.core.transitions.release import Release
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row, envelope
from tests.servers import wait_until

FAR = 4_000_000_000_000
BODIES = dict.fromkeys("abcd", "A-")
OWN = encode_envelope("A" * 8, "x", {"lisa-window": "9-17; not 10-11; tz=UTC"})


def outside(bench: Bench, message_id: str, closes_ms: int, opens_ms: int) -> Outside:
    return Outside(*bench.receipt(message_id), closes_ms, opens_ms)


def test_a_delivery_waits_for_its_window_without_an_attempt(bench: Bench) -> None:
    rows = [Row(one, i, 3 if one == "b" else 1, "c1") for i, one in enumerate("abcd")]
    leases = {"a": FAR, "b": FAR}
    bench.put(
        body=BODIES, lisa=G(ready=rows, attempts={"b": 2}, reasons={"b": "no"}, leases=leases)
    )
    call = Defer(
        TOPIC,
        "lisa",
        [
            outside(bench, "a", 1, FAR),
            outside(bench, "b", 0, FAR + 1),
            outside(bench, "c", FAR, FAR + 1),  # still open
            Outside("d", "1-1", 1, FAR),
            outside(bench, "a", 1, FAR),
        ],
    )
    waits, gone = Deferred.WAITING, Deferred.STALE
    assert bench.call(call) == [waits, waits, Deferred.RELEASED, gone, gone]
    after = {
        "body": BODIES,
        "stats": {"deferred@lisa": 2, "released@lisa": 1},
        "lisa": G(
            ready=[Row("d", 3, 1, "c1"), Row("c", 2)],
            retry={"a": FAR, "b": FAR + 1},
            attempts={"b": 2},
            reasons={"b": "no"},
        ),
    }
    bench.check(**after)
    assert bench.call(call) == [waits, waits, Deferred.RELEASED, gone, gone]
    bench.check(**after)


def test_a_window_that_has_opened_again_releases_the_delivery(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    assert bench.call(Defer(TOPIC, "lisa", [outside(bench, "a", 1, 2)])) == [Deferred.RELEASED]
    bench.check(body={"a": "A-"}, stats={"released@lisa": 1}, lisa=G(ready=[Row("a", 1)]))


def test_the_next_attempt_after_a_window_has_the_same_number(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    opens_ms = bench.clock() + 300
    bench.call(Defer(TOPIC, "lisa", [outside(bench, "a", 1, opens_ms)]))
    wait_until(lambda: bench.clock() > opens_ms)
    bench.call(Promote(TOPIC))
    bench.check(body={"a": "A-"}, stats={"deferred@lisa": 1}, lisa=G(ready=[Row("a", opens_ms)]))


def test_open_moves_what_is_outside_its_window(bench: Bench) -> None:
    rows = [Row(one, i, 1, "c1") for i, one in enumerate("abcd")]
    bench.put(body=BODIES, expiry={"d": 5}, lisa=G(ready=rows))
    limits = [Limits(1, FAR), Limits(FAR, FAR + 1), None, Limits(1, FAR)]
    said = bench.call(Open(TOPIC, "lisa", [bench.opening(one) for one in "abcd"], limits=limits))
    assert said.envelopes == [None, envelope("A-"), envelope("A-"), envelope("A-")]
    assert said.past_ttl == [False, False, False, True]
    assert said.limits == limits
    bench.check(
        body=BODIES,
        expiry={"d": 5},
        stats={"deferred@lisa": 1},
        lisa=G(ready=[row for row in rows if row.id != "a"], retry={"a": FAR}),
    )


def test_a_paused_topic_releases_what_is_outside_its_window(bench: Bench) -> None:
    options = {"paused": "1", "window": "9-17"}
    bench.put(options=options, body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("a")], limits=[Limits(1, FAR)]))
    assert (said.paused, said.envelopes) == (True, [None])
    bench.check(options=options, body={"a": "A-"}, lisa=G(ready=[Row("a", 1)]))


@pytest.mark.parametrize("journal", ["0", "1"])
def test_a_message_with_a_window_is_opened_only_with_its_limits(bench: Bench, journal: str) -> None:
    options = {"journal": journal}
    bench.put(options=options, body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    call = Open(TOPIC, "lisa", [bench.opening("a")], 5_000, late="c1")
    for window, body in (("9-17", envelope("A-")), ("", OWN)):
        bench.store.ask("SET", bench.store.keys.topic(TOPIC).body("a"), body)
        bench.store.ask("HSET", bench.store.keys.topic(TOPIC).options, "window", window)
        before = bench.state()
        with pytest.raises(HasWindow):
            bench.call(call)
        assert bench.state() == before


@pytest.mark.parametrize("journal", ["0", "1"])
@pytest.mark.parametrize("topic_window", ["", "not daily"])
def test_opening_reads_the_windows_first(bench: Bench, journal: str, topic_window: str) -> None:
    """The topic's window never opens, so its message is not moved; the own window decides."""
    options = {"journal": journal, "window": topic_window}
    rows = [Row(one, 1, 1, "c1") for one in "ab"]
    bench.put(options=options, body={"a": "A-", "b": "A-"}, lisa=G(ready=rows))
    keys = bench.store.keys.topic(TOPIC)
    long = {"x": "y" * 2_000, "lisa-window": "always; not 2020-01-01"}
    now_open = encode_envelope("A" * 8, "x", long)
    closed = encode_envelope("A" * 8, "x", {"lisa-window": closed_now(bench)})
    bench.store.ask("MSET", keys.body("a"), now_open, keys.body("b"), closed)
    opening = Opening(bench.store)
    call = Open(TOPIC, "lisa", [bench.opening(one) for one in "ab"])
    said = bench.store.drive(opening.open(call))
    assert said.envelopes == [now_open, None]
    assert bench.store.ask("ZRANGE", keys.group("lisa").retry, 0, -1) == [b"b"]
    assert bench.store.ask("HGET", keys.stats, "deferred@lisa") == b"1"


def test_without_the_holiday_library_entries_are_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "holidays", None)
    public_holidays._dates_of.cache_clear()  # another test may have filled it
    options = {"window": "not holidays FR-973"}
    bench.put(options=options, body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    with pytest.raises(ConfigError, match="holidays"):
        bench.store.drive(Opening(bench.store).open(Open(TOPIC, "lisa", [bench.opening("a")])))
    bench.check(
        options=options,
        body={"a": "A-"},
        stats={"released@lisa": 1},
        lisa=G(ready=[Row("a", 1)]),
    )


def closed_now(bench: Bench) -> str:
    """A window that is closed for at least an hour from now, in UTC."""
    hour = bench.clock() // 3_600_000 % 24
    return f"not {hour}-{hour + 2}; tz=UTC" if hour < 22 else "1-20; tz=UTC"


def test_it_takes_unread_entries_in_order(bench: Bench) -> None:
    bench.put(body=BODIES, lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3), Row("c", 3)]))
    said = bench.call(Pull(TOPIC, "lisa", "c2", 1))
    assert [(one.entry, one.id, one.due_ms, one.attempt) for one in said.entries] == [
        (bench.entry("b"), "b", 2, 3)
    ]
    assert (said.paused, said.last_id) == (False, bench.entry("b"))
    bench.check(
        body=BODIES, lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3, "c2"), Row("c", 3)])
    )


def test_an_own_ack_timeout_is_written_in_the_same_step(bench: Bench) -> None:
    bench.put(body=BODIES, lisa=G(ready=[Row("a", 1), Row("b", 2), Row("c", 3)]))
    assert len(bench.call(Pull(TOPIC, "lisa", "c1", 2, 700)).entries) == 2
    bench.check(
        body=BODIES,
        lisa=G(
            ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1"), Row("c", 3)],
            leases={"a": bench.now + 700, "b": bench.now + 700},
        ),
    )


def test_without_unread_entries_it_returns_the_last_id(bench: Bench) -> None:
    state: dict[str, Any] = {"body": BODIES, "lisa": G(ready=[Row("a", 1, 1, "c1")])}
    bench.put(**state)
    assert bench.call(Pull(TOPIC, "lisa", "c2", 10)) == Pulled(False, bench.entry("a"), [])
    bench.check(**state)


def test_a_paused_topic_gives_nothing(bench: Bench) -> None:
    state: dict[str, Any] = {
        "options": {"paused": "1"},
        "body": BODIES,
        "lisa": G(ready=[Row("a", 1)]),
    }
    bench.put(**state)
    assert bench.call(Pull(TOPIC, "lisa", "c1", 10, 700)) == Pulled(True, "", [])
    bench.check(**state)


def test_each_group_is_pulled_separately(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1)]), audit=G(ready=[Row("a", 1)]))
    bench.call(Pull(TOPIC, "audit", "c1", 10))
    bench.check(
        body={"a": "A-"}, lisa=G(ready=[Row("a", 1)]), audit=G(ready=[Row("a", 1, 1, "c1")])
    )


def test_one_call_takes_at_most_500(bench: Bench) -> None:
    many = [f"m{i}" for i in range(510)]
    bench.put(body=dict.fromkeys(many, "A-"), lisa=G(ready=[Row(m, 1) for m in many]))
    assert len(bench.call(Pull(TOPIC, "lisa", "c1", 9999)).entries) == 500


def pending(bench: Bench, message_id: str) -> tuple[str, int, int]:
    """Owner, idle time in ms and delivery count."""
    ready, entry = bench.keys.group("lisa").ready, bench.entry(message_id)
    ((_, owner, idle, count),) = bench.store.ask("XPENDING", ready, "lisa", entry, entry, 1)
    return owner.decode(), idle, count


def test_only_the_consumers_own_deliveries_are_extended(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", 60_000), Row("b", 2, 1, "c2", 60_000), Row("c", 3)]
    bench.put(body=BODIES, lisa=G(ready=rows, retry={"d": FAR}))
    counts = {m: pending(bench, m)[2] for m in "ab"}
    receipts = [
        bench.receipt("a"),
        bench.receipt("b"),
        bench.receipt("c"),
        ("a", "1-1"),
        ("d", "1-1"),
        ("x", "1-1"),
    ]
    said = bench.call(Extend(TOPIC, "lisa", "c1", receipts))
    assert said == [True, False, False, False, False, False]
    bench.check(body=BODIES, lisa=G(ready=rows, retry={"d": FAR}))
    assert pending(bench, "a")[1] <= bench.clock() - bench.start
    assert pending(bench, "b")[1] >= 60_000
    assert {m: pending(bench, m)[2] for m in "ab"} == counts


def test_the_topics_ack_timeout_ends_a_lease_with_its_own(bench: Bench) -> None:
    """The lease of an earlier extension would end before the time that this call restarts."""
    rows = [Row("a", 1, 1, "c1", 60_000), Row("b", 2, 1, "c1")]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"a": FAR, "b": FAR}))
    assert bench.call(Extend(TOPIC, "lisa", "c1", [bench.receipt("a")])) == [True]
    bench.check(body=BODIES, lisa=G(ready=rows, leases={"b": FAR}))


def test_an_own_ack_timeout_moves_the_lease(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", 60_000), Row("b", 2, 1, "c2")]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"a": 5, "b": 5}))
    receipts = [bench.receipt("a"), bench.receipt("b")]
    assert bench.call(Extend(TOPIC, "lisa", "c1", receipts, 3000)) == [True, False]
    bench.check(body=BODIES, lisa=G(ready=rows, leases={"a": bench.now + 3000, "b": 5}))


def test_it_is_appended_to_ready_with_its_due_time_and_attempt(bench: Bench) -> None:
    bench.put(
        body=BODIES,
        lisa=G(
            ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3, "c1"), Row("c", 3)],
            attempts={"b": 2},
            reasons={"b": "no"},
            leases={"a": FAR},
        ),
    )
    receipts = [bench.receipt("a"), bench.receipt("b")]
    assert bench.call(Release(TOPIC, "lisa", receipts)) == [True, True]
    bench.check(
        body=BODIES,
        stats={"released@lisa": 2},
        lisa=G(
            ready=[Row("c", 3), Row("a", 1), Row("b", 2, 3)],
            attempts={"b": 2},
            reasons={"b": "no"},
        ),
    )
    after = bench.state()
    assert bench.call(Release(TOPIC, "lisa", receipts)) == [False, False]
    assert bench.state() == after


def test_a_stale_receipt_changes_nothing(bench: Bench) -> None:
    group = G(ready=[Row("a", 1, 1, "c1")], retry={"b": FAR})
    bench.put(body=BODIES, lisa=group)
    assert bench.call(Release(TOPIC, "lisa", [("a", "1-1"), ("b", "1-1"), ("x", "1-1")])) == [
        False,
        False,
        False,
    ]
    bench.check(body=BODIES, lisa=group)


def test_the_same_receipt_twice_in_one_call_makes_one_entry(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    receipt = bench.receipt("a")
    assert bench.call(Release(TOPIC, "lisa", [receipt, receipt])) == [True, False]
    bench.check(body={"a": "A-"}, stats={"released@lisa": 1}, lisa=G(ready=[Row("a", 1)]))


def test_a_message_with_a_deleted_entry_becomes_due_now(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    receipt = bench.receipt("a")
    bench.store.ask("XDEL", bench.keys.group("lisa").ready, receipt[1])
    assert bench.call(Release(TOPIC, "lisa", [receipt])) == [True]
    state = bench.state()
    ((message_id, due, attempt, holder),) = state["lisa:ready"]
    assert (message_id, due, attempt, holder) == ("a", bench.now, 1, None)
