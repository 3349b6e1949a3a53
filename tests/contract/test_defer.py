"""defer, and open outside a window: in flight -> retry until it opens, without an attempt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from lisa.core.delivery.opening import Opening
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.windows import public_holidays
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.defer import Defer, Deferred, Outside
from lisa.core.transitions.open import Limits, Open
from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row, envelope
from tests.servers import wait_until

if TYPE_CHECKING:
    from tests.contract.bench import Bench

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
