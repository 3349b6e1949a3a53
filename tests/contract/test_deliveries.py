"""pull, extend, release, defer: ready -> in flight, and back without an attempt."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lisa.core.delivery import opening
from lisa.core.delivery.opening import Opening
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.windows import window as windows_module
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.delivery import Limits, Open, Pull, Pulled
from lisa.core.transitions.inspect import GroupState, Inspect
from lisa.core.transitions.lease import Begun, Extend, Reclaim, Release
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Deferral, Deferred, Fail, Failure, Postpone, Postponed
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, LONG, G, Row, envelope
from tests.servers import wait_until

HELD = G(ready=[Row("a", 1, 1, "c1")])
READY = G(ready=[Row("a", 1)])
WINDOW = "outside its window"
JOURNAL = pytest.mark.parametrize("journal", ["0", "1"])


def outside(bench: Bench, message_id: str, closes_ms: int, opens_ms: int) -> Deferral:
    return Deferral(*bench.receipt(message_id), opens_ms, closes_ms=closes_ms)


def test_a_delivery_waits_for_its_window_without_an_attempt(bench: Bench) -> None:
    rows = [Row(m, i, 3 if m == "b" else 1, "c1") for i, m in enumerate("abcde")]
    failed: dict[str, Any] = {"attempts": {"b": 2}, "reasons": {"b": "no"}}
    bench.put(body="abcde", lisa=G(ready=rows, leases={"a": FAR, "b": FAR}, **failed))
    deliveries = [
        outside(bench, "a", 1, FAR),
        outside(bench, "b", 0, FAR + 1),
        outside(bench, "c", FAR, FAR + 1),  # still open
        Deferral("d", "1-1", FAR, closes_ms=1),
        outside(bench, "a", 1, FAR),
        outside(bench, "e", 1, 2),  # has opened again
    ]
    call = Postpone(TOPIC, "lisa", deliveries)
    released, stale = Postponed(Deferred.RELEASED), Postponed(Deferred.STALE)
    until = [Postponed(Deferred.DEFERRED, due_ms) for due_ms in (FAR, FAR + 1)]
    answers = [*until, released, stale, stale, released]
    assert bench.call(call) == answers
    left = [Row("d", 3, 1, "c1"), Row("c", 2), Row("e", 4)]
    bench.check_change(
        stats={"deferred@lisa": 2, "released@lisa": 2},
        lisa=G(
            ready=left,
            retry={"a": FAR, "b": FAR + 1},
            attempts={"b": 2},
            reasons={"a": f"{WINDOW} *1", "b": f"{WINDOW} *1"},
        ),
    )
    assert bench.call(call) == answers
    bench.check_unchanged()


def test_the_next_attempt_after_a_window_has_the_same_number(bench: Bench) -> None:
    bench.put(body="a", lisa=HELD)
    opens_ms = bench.clock() + 300
    bench.call(Postpone(TOPIC, "lisa", [outside(bench, "a", 1, opens_ms)]))
    wait_until(lambda: bench.clock() > opens_ms)
    bench.call(Promote(TOPIC))
    ready = G(ready=[Row("a", opens_ms)], reasons={"a": f"{WINDOW} *1"})
    bench.check_change(stats={"deferred@lisa": 1}, lisa=ready)


def deferred(bench: Bench, delay_ms: int, reason: str = "busy") -> Postponed:
    deferral = Deferral(*bench.receipt("a"), delay_ms, reason)
    (said,) = bench.call(Postpone(TOPIC, "lisa", [deferral]))
    return said


def test_a_delay_counts_from_now_and_no_attempt_counts(bench: Bench) -> None:
    """Also beyond the last retry of the policy; each deferral is counted until a failure."""
    failed: dict[str, Any] = {"attempts": {"a": 1}, "leases": {"a": FAR}}
    bench.put(policy={"a": ""}, expiry={"a": FAR}, body="a", lisa=G(ready=HELD.ready, **failed))
    bench.store.ask("HSET", bench.keys.group("lisa").reasons, "a", "by\0\0another program")
    for times in (1, 2):
        said = deferred(bench, 0 if times == 1 else 5_000, "busy\0x")
        assert said == Postponed(Deferred.DEFERRED, said.due_ms)
        waits = G(
            retry={"a": bench.now + (0 if times == 1 else 5_000)},
            attempts={"a": 1},
            reasons={"a": f"busy x *{times}"},
        )
        bench.check_change(stats={"deferred@lisa": times}, lisa=waits)
        if times == 1:
            bench.call(Promote(TOPIC))
            (taken,) = bench.call(Pull(TOPIC, "lisa", "c1", 1, None)).entries
            assert taken.attempt == 2


def test_a_deferral_is_never_shorter_than_asked_for(bench: Bench) -> None:
    for _ in range(40):
        bench.put(body="a", lisa=HELD)
        seconds, micros = bench.store.ask("TIME")
        due_ms = deferred(bench, 7, "").due_ms
        assert due_ms is not None
        assert bench.state()["lisa:reasons"] == {"a": " *1"}, "not that of a window"
        assert due_ms * 1_000 >= int(seconds) * 1_000_000 + int(micros) + 7_000
        bench.store.ask("FLUSHALL")


def test_a_deferral_is_answered_as_before_while_its_message_waits(bench: Bench) -> None:
    """Also after its record has expired, in a call with another record."""
    bench.put(body="a", lisa=HELD)
    deferral = Deferral(*bench.receipt("a"), 5_000, "busy")
    call = Postpone(TOPIC, "lisa", [deferral, deferral])
    first, again = bench.call(call)
    assert again == Postponed(Deferred.STALE)
    assert bench.call(call) == [first, again]
    other = deferral._replace(entry="1-1")
    assert bench.call(Postpone(TOPIC, "lisa", [deferral, other])) == [first, again]
    bench.check_change(
        stats={"deferred@lisa": 1},
        lisa=G(retry={"a": bench.now + 5_000}, reasons={"a": "busy *1"}),
    )


def test_a_failure_ends_the_count_of_deferrals(bench: Bench) -> None:
    bench.put(body="a", lisa=G(ready=HELD.ready, reasons={"a": "busy *3"}))
    bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "boom")]))
    failed = G(retry={"a": bench.now + 20_000}, attempts={"a": 1}, reasons={"a": "boom"})
    bench.check_change(stats={"retried@lisa": 1}, lisa=failed)


def test_open_moves_what_is_outside_its_window(bench: Bench) -> None:
    rows = [Row(m, i, 1, "c1") for i, m in enumerate("abcd")]
    bench.put(body="abcd", expiry={"d": 5}, lisa=G(ready=rows))
    limits = [Limits(1, FAR), Limits(FAR, FAR + 1), None, Limits(1, FAR)]
    said = bench.call(Open(TOPIC, "lisa", [bench.opening(m) for m in "abcd"], limits=limits))
    assert said.envelopes == [None, envelope("A-"), envelope("A-"), envelope("A-")]
    assert (said.past_ttl, said.limits) == ([False, False, False, True], limits)
    bench.check_change(
        stats={"deferred@lisa": 1},
        lisa=G(ready=rows[1:], retry={"a": FAR}, reasons={"a": f"{WINDOW} *1"}),
    )


def test_a_paused_topic_releases_what_is_outside_its_window(bench: Bench) -> None:
    bench.put(options={"paused": "1", "window": "9-17"}, body="a", lisa=HELD)
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("a")], limits=[Limits(1, FAR)]))
    assert (said.paused, said.envelopes) == (True, [None])
    bench.check_change(lisa=READY)


@JOURNAL
def test_a_message_with_a_window_is_opened_only_with_its_limits(bench: Bench, journal: str) -> None:
    bench.put(options={"journal": journal}, body="a", lisa=HELD)
    call = Open(TOPIC, "lisa", [bench.opening("a")], 5_000, late="c1")
    own = encode_envelope("A" * 8, "x", {"lisa-window": "9-17; not 10-11; tz=UTC"})
    for window, body in (("9-17", envelope("A-")), ("", own)):
        bench.store.ask("SET", bench.keys.body("a"), body)
        bench.store.ask("HSET", bench.keys.options, "window", window)
        before = bench.state()
        with pytest.raises(HasWindow):
            bench.call(call)
        assert bench.state() == before


@JOURNAL
@pytest.mark.parametrize("topic_window", ["", "not daily"])
def test_opening_reads_the_windows_first(bench: Bench, journal: str, topic_window: str) -> None:
    """The topic's window never opens, so its message is not moved; the own window decides."""
    options = {"journal": journal, "window": topic_window}
    bench.put(options=options, body="ab", lisa=G(ready=[Row(m, 1, 1, "c1") for m in "ab"]))
    hour = bench.clock() // 3_600_000 % 24
    closed = f"not {hour}-{hour + 2}; tz=UTC" if hour < 22 else "1-20; tz=UTC"
    windows = {"a": {"x": "y" * 2_000, "lisa-window": "always; not 2020-01-01"}}
    windows["b"] = {"lisa-window": closed}  # for at least an hour
    bodies = {m: encode_envelope("A" * 8, "x", headers) for m, headers in windows.items()}
    for message_id, body in bodies.items():
        bench.store.ask("SET", bench.keys.body(message_id), body)
    call = Open(TOPIC, "lisa", [bench.opening(m) for m in "ab"])
    said = bench.store.drive(Opening(bench.store).open(call))
    assert said.envelopes == [bodies["a"], None]
    assert bench.store.ask("ZRANGE", bench.keys.group("lisa").retry, 0, -1) == [b"b"]
    assert bench.store.ask("HGET", bench.keys.stats, "deferred@lisa") == b"1"


def test_a_header_without_a_zone_is_counted_and_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of messages whose sender did not know the window, as of schedules; UTC applies."""
    monkeypatch.setattr(opening, "_told", set())
    bench.put(options={"window": "always; tz=@zone-of"}, body="ab", lisa=HELD)
    for message_id in "ab":
        body = encode_envelope("A" * 8, "x", {"zone-of": "CEST"})
        bench.store.ask("SET", bench.keys.body(message_id), body)
        call = Open(TOPIC, "lisa", [bench.opening("a")])
        bench.store.drive(Opening(bench.store).open(call))
    assert bench.store.ask("HGET", bench.keys.stats, opening.UNKNOWN_ZONES) == b"2"
    (told,) = [one.getMessage() for one in caplog.records if "'CEST'" in one.getMessage()]
    assert told.startswith(f"topic {TOPIC}: header 'zone-of': unknown time zone 'CEST'; write")
    assert told.endswith("; UTC applies")


def test_without_the_holiday_library_entries_are_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "holidays", None)
    windows_module._names_of.cache_clear()  # another test may have filled it
    bench.put(options={"window": "not holidays FR-973"}, body="a", lisa=HELD)
    with pytest.raises(ConfigError, match="holidays"):
        bench.store.drive(Opening(bench.store).open(Open(TOPIC, "lisa", [bench.opening("a")])))
    bench.check_change(stats={"released@lisa": 1}, lisa=READY)


def test_it_takes_unread_entries_in_order_with_their_ack_timeout(bench: Bench) -> None:
    bench.put(body="abc", lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3), Row("c", 3)]))
    said = bench.call(Pull(TOPIC, "lisa", "c2", 1, 700))
    entry = bench.entry("b")
    found = [(one.entry, one.id, one.due_ms, one.attempt) for one in said.entries]
    assert (found, said.paused, said.last_id) == ([(entry, "b", 2, 3)], False, entry)
    rows = [Row("a", 1, 1, "c1"), Row("b", 2, 3, "c2"), Row("c", 3)]
    bench.check_change(lisa=G(ready=rows, leases={"b": bench.now + 700}))


def test_without_unread_entries_it_returns_the_last_id(bench: Bench) -> None:
    bench.put(body="a", lisa=HELD)
    assert bench.call(Pull(TOPIC, "lisa", "c2", 10)) == Pulled(False, bench.entry("a"), [])
    bench.check_unchanged()


def test_a_paused_topic_gives_nothing(bench: Bench) -> None:
    bench.put(options={"paused": "1"}, body="a", lisa=READY)
    assert bench.call(Pull(TOPIC, "lisa", "c1", 10, 700)) == Pulled(True, "", [])
    bench.check_unchanged()


def test_one_call_takes_at_most_500(bench: Bench) -> None:
    many = [f"m{i}" for i in range(510)]
    bench.put(body=many, lisa=G(ready=[Row(m, 1) for m in many]))
    assert len(bench.call(Pull(TOPIC, "lisa", "c1", 9999)).entries) == 500


def pending(bench: Bench, message_id: str) -> tuple[str, int, int]:
    """Owner, idle time in ms and delivery count."""
    ready, entry = bench.keys.group("lisa").ready, bench.entry(message_id)
    ((_, owner, idle, count),) = bench.store.ask("XPENDING", ready, "lisa", entry, entry, 1)
    return owner.decode(), idle, count


def test_only_the_consumers_own_deliveries_are_extended(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c2", LONG), Row("c", 3)]
    bench.put(body="abcd", lisa=G(ready=rows, retry={"d": FAR}))
    counts = {m: pending(bench, m)[2] for m in "ab"}
    receipts = [*map(bench.receipt, "abc"), ("a", "1-1"), ("d", "1-1"), ("x", "1-1")]
    assert bench.call(Extend(TOPIC, "lisa", "c1", receipts)) == [True, *[False] * 5]
    bench.check_unchanged()
    assert pending(bench, "a")[1] <= bench.clock() - bench.start
    assert pending(bench, "b")[1] >= LONG
    assert {m: pending(bench, m)[2] for m in "ab"} == counts


def test_a_handler_that_began_is_recorded_with_or_without_a_new_lease(bench: Bench) -> None:
    rows = [Row(m, 1, 1, "c1", LONG) for m in "abc"]
    bench.put(body="abc", lisa=G(ready=rows, leases={"c": FAR}))
    receipts = [*map(bench.receipt, "abc")]
    for receipt, begun in zip(receipts, Begun, strict=True):
        assert bench.call(Extend(TOPIC, "lisa", "c1", [receipt], begun=begun)) == [True]
    found = [pending(bench, m) for m in "abc"]
    assert [count for _, _, count in found] == [1, 2, 2]
    assert [idle >= LONG for _, idle, _ in found] == [False, False, True]
    bench.check_unchanged()
    bench.call(Extend(TOPIC, "lisa", "c1", receipts))
    assert [pending(bench, m)[2] for m in "abc"] == [1, 2, 2], "it remains known"


def test_the_topics_ack_timeout_ends_a_lease_with_its_own(bench: Bench) -> None:
    """The lease of an earlier extension would end before the time that this call restarts."""
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c1")]
    bench.put(body="ab", lisa=G(ready=rows, leases={"a": FAR, "b": FAR}))
    assert bench.call(Extend(TOPIC, "lisa", "c1", [bench.receipt("a")])) == [True]
    bench.check_change(lisa=G(ready=rows, leases={"b": FAR}))


def test_an_own_ack_timeout_moves_the_lease(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c2")]
    bench.put(body="ab", lisa=G(ready=rows, leases={"a": 5, "b": 5}))
    receipts = [*map(bench.receipt, "ab")]
    assert bench.call(Extend(TOPIC, "lisa", "c1", receipts, 3000)) == [True, False]
    bench.check_change(lisa=G(ready=rows, leases={"a": bench.now + 3000, "b": 5}))


def test_release_appends_a_message_to_ready_with_its_due_time_and_attempt(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1"), Row("b", 2, 3, "c1"), Row("c", 3)]
    failed: dict[str, Any] = {"attempts": {"b": 2}, "reasons": {"b": "no"}}
    bench.put(body="abc", lisa=G(ready=rows, leases={"a": FAR}, **failed))
    receipts = [*map(bench.receipt, "aba")]
    assert bench.call(Release(TOPIC, "lisa", receipts)) == [True, True, False]
    moved = G(ready=[Row("c", 3), Row("a", 1), Row("b", 2, 3)], **failed)
    bench.check_change(stats={"released@lisa": 2}, lisa=moved)
    assert bench.call(Release(TOPIC, "lisa", receipts[:2])) == [False, False]
    bench.check_unchanged()


def test_a_message_with_a_deleted_entry_becomes_due_now(bench: Bench) -> None:
    bench.put(body="a", lisa=HELD)
    receipt = bench.receipt("a")
    bench.store.ask("XDEL", bench.keys.group("lisa").ready, receipt[1])
    assert bench.call(Release(TOPIC, "lisa", [receipt])) == [True]
    assert bench.state()["lisa:ready"] == [("a", bench.now, 1, None)]


def test_when_the_first_attempt_was_due_is_known_until_the_message_dies(bench: Bench) -> None:
    """Through failures, deferrals, releases, and ends of leases."""
    bench.put(options={"retry_delays": "0,0,0", "ack_timeout": 0}, body="a", lisa=G(retry={"a": 7}))

    def in_group() -> GroupState:
        return bench.call(Inspect(TOPIC, ["a"]))[0].group_states[0]

    def fail() -> None:
        bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "boom")]))

    ways: list[Callable[[], object]] = [
        lambda: deferred(bench, 0),
        lambda: bench.call(Release(TOPIC, "lisa", [bench.receipt("a")])),
        fail,
        lambda: bench.call(Reclaim(TOPIC, "lisa")),
        lambda: deferred(bench, 0),
        fail,
    ]
    for i, way in enumerate(ways):
        bench.call(Promote(TOPIC))
        (taken,) = bench.call(Pull(TOPIC, "lisa", "c1", 1, None)).entries
        assert (in_group().state, in_group().first_due_ms) == ("in_flight", 7 if i else None)
        assert taken.attempt == 1 + (i > 2) + (i > 3)
        way()
    assert (in_group().state, in_group().first_due_ms) == ("retry", 7)
    bench.call(Promote(TOPIC))
    bench.call(Pull(TOPIC, "lisa", "c1", 1, None))
    fail()
    assert (in_group().state, in_group().first_due_ms) == ("garbage", None)
