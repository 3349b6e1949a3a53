"""extend: in flight, with a new lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.extend import Extend
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
BODIES = {"a": "A-", "b": "A-", "c": "A-"}


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
