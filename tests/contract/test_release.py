"""release: in flight -> ready, without an attempt, as a new entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.release import Release
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
BODIES = {"a": "A-", "b": "A-", "c": "A-"}


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
