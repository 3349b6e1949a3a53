"""requeue: garbage -> that group's retry. purge: garbage -> settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.purge import Purge
from lisa.core.transitions.requeue import Requeue
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
DEAD: dict[str, Any] = {"attempts": {"a": 3}, "reasons": {"a": "no"}}


def test_requeue_makes_it_due_now_and_resets_its_failures(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"},
        policy={"a": "5"},
        lisa=G(garbage={"a": 5, "b": 6}, attempts={"a": 3, "b": 1}, reasons={"a": "no", "b": "no"}),
        audit=G(garbage={"a": 5}, **DEAD),
    )
    assert bench.call(Requeue(TOPIC, "lisa", ["a", "x", "a"])) == [True, False, False]
    bench.check(
        body={"a": "A-", "b": "A-"},
        policy={"a": "5"},
        stats={"requeued@lisa": 1},
        lisa=G(retry={"a": bench.now}, garbage={"b": 6}, attempts={"b": 1}, reasons={"b": "no"}),
        audit=G(garbage={"a": 5}, **DEAD),
    )
    after = bench.state()
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [False]
    assert bench.state() == after


def test_requeue_ends_the_ttl_of_other_groups(
    bench: Bench,
) -> None:
    bench.put(
        body={"a": "A-"}, expiry={"a": 5}, lisa=G(garbage={"a": 2}), audit=G(retry={"a": FAR})
    )
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [True]
    bench.check(
        body={"a": "A-"},
        stats={"requeued@lisa": 1},
        lisa=G(retry={"a": bench.now}),
        audit=G(retry={"a": FAR}),
    )


ELSEWHERE = [
    {"waiting": {"a": FAR}, "lisa": G()},
    {"lisa": G(ready=[Row("a", 1)])},
    {"lisa": G(ready=[Row("a", 1, 1, "c1")])},
    {"lisa": G(retry={"a": FAR}, **DEAD)},
    {"lisa": G(), "audit": G(garbage={"a": 5}, **DEAD)},
]


@pytest.mark.parametrize("stage", ELSEWHERE)
def test_messages_outside_this_groups_garbage_are_unchanged(
    bench: Bench, stage: dict[str, Any]
) -> None:
    bench.put(body={"a": "A-"}, **stage)
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [False]
    assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [False]
    bench.check(body={"a": "A-"}, **stage)


def test_purge_deletes_the_message(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"},
        policy={"a": "5"},
        expiry={"a": FAR},
        lisa=G(garbage={"a": 5, "b": 6}, **DEAD),
    )
    assert bench.call(Purge(TOPIC, "lisa", ["a", "x", "a"])) == [True, False, False]
    bench.check(
        body={"b": "A-"},
        done={"a": ("A-", "purged", None, 3, bench.now)},
        stats={"purged@lisa": 1},
        lisa=G(garbage={"b": 6}),
    )


def test_purge_by_age_keeps_younger_messages(bench: Bench) -> None:
    bodies = {"a": "A-", "b": "A-", "c": "A-"}
    bench.put(body=bodies, lisa=G(garbage={"a": 5, "b": 6, "c": 7}))
    said = bench.call(Purge(TOPIC, "lisa", ["a", "b", "c"], before_ms=6))
    assert said == [True, True, False]
    assert bench.state()["lisa:garbage"] == {"c": 7}


def test_the_body_is_deleted_with_the_last_group(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"},
        expiry={"a": FAR},
        lisa=G(garbage={"a": 5}, **DEAD),
        audit=G(garbage={"a": 7}, **DEAD),
    )
    assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [True]
    bench.check(
        body={"a": "A+"},
        expiry={"a": FAR},
        stats={"purged@lisa": 1},
        lisa=G(),
        audit=G(garbage={"a": 7}, **DEAD),
    )
    assert bench.call(Purge(TOPIC, "audit", ["a"])) == [True]
    bench.check(
        done={"a": ("A+", "purged", None, 3, bench.now)},
        stats={"purged@lisa": 1, "purged@audit": 1},
        lisa=G(),
        audit=G(),
    )


def test_purging_garbage_without_a_body_writes_no_tombstone(bench: Bench) -> None:
    bench.put(policy={"a": "5"}, expiry={"a": FAR}, lisa=G(garbage={"a": 5}, **DEAD))
    assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [True]
    bench.check(stats={"purged@lisa": 1}, lisa=G())
