"""expire, requeue, purge: ttls and garbage; how long tombstones last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lisa.core.transitions.ack import Ack
from lisa.core.transitions.base import Transition
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.expire import Expire, Expired
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import G, Row
from tests.rows import enqueue

FAR = 4_000_000_000_000
EXPIRED, IN_FLIGHT = Expired.EXPIRED, Expired.IN_FLIGHT
NOT_DUE, ORPHAN = Expired.NOT_DUE, Expired.ORPHAN
READY, HELD = Row("a", 1), Row("a", 1, 1, "c1")
FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}

ENDED: dict[str, tuple[dict[str, Any], int | None, int]] = {
    # state, the tombstone's due and attempts
    "waiting": ({"waiting": {"a": 3}, "lisa": G()}, 3, 0),
    "waiting without a group": ({"waiting": {"a": 3}}, 3, 0),
    "waiting after failures": ({"waiting": {"a": 3}, "lisa": G(**FAILED)}, 3, 2),
    "ready": ({"lisa": G(ready=[READY])}, None, 0),
    "retry": ({"lisa": G(retry={"a": 7}, **FAILED)}, None, 2),
    "two groups": ({"lisa": G(ready=[READY]), "audit": G(retry={"a": 7}, **FAILED)}, None, 2),
}


@pytest.mark.parametrize("stage", ENDED)
def test_messages_past_their_ttl_expire(bench: Bench, stage: str) -> None:
    state, due, attempts = ENDED[stage]
    bench.put(body={"a": "A-x"}, policy={"a": "5"}, expiry={"a": 5}, **state)
    twice = bench.call(Expire(TOPIC, ["a", "a"]))
    assert twice == [EXPIRED, NOT_DUE]
    groups = {name: G() for name, value in state.items() if isinstance(value, G)}
    bench.check(
        done={"a": ("A-", "expired", due, attempts, bench.now)}, stats={"expired": 1}, **groups
    )
    after = bench.state()
    assert bench.call(Expire(TOPIC, ["a"])) == [NOT_DUE]
    assert bench.state() == after


UNTOUCHED: dict[str, tuple[Expired, dict[str, Any]]] = {
    "its ttl is not over": (NOT_DUE, {"waiting": {"a": 1}, "expiry": {"a": FAR}, "lisa": G()}),
    "it has no ttl": (NOT_DUE, {"waiting": {"a": 1}, "lisa": G()}),
    "in flight": (
        IN_FLIGHT,
        {"expiry": {"a": 5}, "lisa": G(ready=[Row("a", 1, 3, "c1")], **FAILED)},
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_other_messages_are_not_expired(bench: Bench, case: str) -> None:
    said, state = UNTOUCHED[case]
    bench.put(body={"a": "A-"}, **state)
    assert bench.call(Expire(TOPIC, ["a"])) == [said]
    bench.check(body={"a": "A-"}, **state)


def test_a_delivery_in_flight_finishes_and_other_groups_drop_the_message(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"},
        expiry={"a": 5},
        lisa=G(ready=[HELD]),
        audit=G(retry={"a": 7}, **FAILED),
        third=G(ready=[READY]),
    )
    assert bench.call(Expire(TOPIC, ["a"])) == [IN_FLIGHT]
    bench.check(body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(), third=G())


def test_garbage_has_no_ttl(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"},
        expiry={"a": 5, "b": 5},
        audit=G(retry={"b": 7}),
        lisa=G(garbage={"a": 6, "b": 6}, **FAILED),
    )
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [NOT_DUE, NOT_DUE]
    bench.check(body={"a": "A-", "b": "A-"}, lisa=G(garbage={"a": 6, "b": 6}, **FAILED), audit=G())


def test_a_waiting_id_without_a_body_is_cleared(bench: Bench) -> None:
    bench.put(waiting={"a": 5, "b": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [ORPHAN, ORPHAN]
    bench.check(lisa=G())


def test_a_ttl_without_a_live_message_is_cleared(bench: Bench) -> None:
    bench.put(expiry={"a": 5, "b": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, ["a", "b"])) == [ORPHAN, ORPHAN]
    bench.check(lisa=G())


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


DAY_MS = 86_400_000
READ = G(ready=[Row("long", 7, 1, "c1"), Row("short", 7, 1, "c1")])
DEAD_BOTH = G(garbage={"long": 5, "short": 5})
ENDS: dict[str, tuple[dict[str, Any], Callable[[Bench], Transition[Any]]]] = {
    "ack": (
        {"lisa": READ},
        lambda bench: Ack(
            TOPIC,
            "lisa",
            [
                bench.settlement("long", fence="~~~~~~~~-"),
                bench.settlement("short"),
            ],
        ),
    ),
    "cancel": (
        {"lisa": G(), "waiting": {"long": 1, "short": 1}},
        lambda _: Cancel(TOPIC, ["long", "short"]),
    ),
    "expire": (
        {"lisa": G(), "waiting": {"long": 1, "short": 1}, "expiry": {"long": 2, "short": 2}},
        lambda _: Expire(TOPIC, ["long", "short"]),
    ),
    "purge": ({"lisa": DEAD_BOTH}, lambda _: Purge(TOPIC, "lisa", ["long", "short"])),
    "undeclare": ({"lisa": DEAD_BOTH}, lambda _: Undeclare(TOPIC, "lisa", ["long", "short"])),
}


def spans(bench: Bench) -> dict[str, int]:
    """The remaining lifetime of each id's tombstone in ms."""
    return {m: bench.store.ask("PTTL", bench.keys.done(m)) for m in ("long", "short")}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("options", [{}, {"dedupe_for": str(2 * DAY_MS)}, {"retention": "0"}])
def test_each_tombstone_has_its_own_retention(
    bench: Bench, name: str, options: dict[str, str]
) -> None:
    state, call = ENDS[name]
    bench.put(body={"long": "~-", "short": "A-"}, options=options, **state)
    bench.call(call(bench))
    found = spans(bench)
    wanted = int(options.get("dedupe_for", DAY_MS))
    assert wanted - 60_000 < found["long"] <= wanted
    assert found["short"] == -2 if options.get("retention") == "0" else 0 < found["short"] <= 60_000


def test_a_longer_retention_applies_to_both(bench: Bench) -> None:
    state, call = ENDS["cancel"]
    options = {"retention": str(3 * DAY_MS)}
    bench.put(body={"long": "~-", "short": "A-"}, options=options, **state)
    bench.call(call(bench))
    assert min(spans(bench).values()) > 2 * DAY_MS


def test_a_remembered_id_is_a_duplicate(bench: Bench) -> None:
    bench.put(lisa=G(), waiting={"long": 1}, body={"long": "~-"})
    bench.call(Cancel(TOPIC, ["long"]))
    again = enqueue(TOPIC, "~another", [item("long", "+0")])
    assert bench.call(again) == [Sent.DUPLICATE]


def test_the_topic_records_when_the_last_tombstone_expires(bench: Bench) -> None:
    """A draining shard is kept until then."""
    state, call = ENDS["cancel"]
    bench.put(body={"long": "~-", "short": "A-"}, **state)
    bench.call(call(bench))
    lasting = int(bench.store.ask("HGET", bench.keys.options, "lasting"))
    assert lasting == bench.store.ask("PEXPIRETIME", bench.keys.done("long"))
