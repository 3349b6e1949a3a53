"""pull: ready -> in flight, with its own ack timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lisa.core.transitions.pull import Pull, Pulled
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

BODIES = {"a": "A-", "b": "A-", "c": "A-"}


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
