"""expire, requeue, purge: ttls and garbage; how long tombstones last."""

from collections.abc import Callable
from typing import Any

import pytest

from lisa.core.transitions.ack import Ack
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.upkeep import Expire, Expired
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, LONG, G, Row

FAILED: dict[str, Any] = {"attempts": {"a": 3}, "reasons": {"a": "no"}}


@pytest.mark.parametrize("expiry", [{"a": FAR}, {}], ids=["later", "none"])
def test_messages_whose_ttl_has_not_ended_do_not_expire(
    bench: Bench, expiry: dict[str, int]
) -> None:
    bench.put(body="a", waiting={"a": 1}, expiry=expiry, lisa=G())
    assert bench.call(Expire(TOPIC, ["a"])) == [Expired.NOT_DUE]
    bench.check_unchanged()


def test_ids_and_ttls_without_a_body_are_cleared(bench: Bench) -> None:
    bench.put(waiting={"a": 5, "b": FAR}, expiry={"c": 5, "d": FAR}, lisa=G())
    assert bench.call(Expire(TOPIC, [*"abcd"])) == [Expired.ORPHAN] * 4
    bench.check(lisa=G())


def test_requeue_makes_it_due_now_and_resets_its_failures(bench: Bench) -> None:
    """The ttl of other groups ends with it."""
    failed: dict[str, Any] = {"attempts": {"a": 3, "b": 1}, "reasons": {"a": "no", "b": "no"}}
    bench.put(
        body="ab",
        policy={"a": "5"},
        expiry={"a": 5},
        lisa=G(garbage={"a": 5, "b": 6}, **failed),
        audit=G(garbage={"a": 5}, **FAILED),
        mail=G(retry={"a": FAR}),
    )
    assert bench.call(Requeue(TOPIC, "lisa", ["a", "x", "a"])) == [True, False, False]
    rest: dict[str, Any] = {"garbage": {"b": 6}, "attempts": {"b": 1}, "reasons": {"b": "no"}}
    bench.check_change(
        expiry=None, stats={"requeued@lisa": 1}, lisa=G(retry={"a": bench.now}, **rest)
    )
    assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [False]
    bench.check_unchanged()


def test_purge_deletes_the_message(bench: Bench) -> None:
    garbage = G(garbage={"a": 5, "b": 6}, **FAILED)
    bench.put(body="ab", policy={"a": "5"}, expiry={"a": FAR}, lisa=garbage)
    assert bench.call(Purge(TOPIC, "lisa", ["a", "x", "a"])) == [True, False, False]
    bench.check(
        body="b",
        done={"a": ("A-", "purged", None, 3, bench.now)},
        stats={"purged@lisa": 1},
        lisa=G(garbage={"b": 6}),
    )


def test_purge_by_age_keeps_younger_messages(bench: Bench) -> None:
    bench.put(body="abc", lisa=G(garbage={"a": 5, "b": 6, "c": 7}))
    assert bench.call(Purge(TOPIC, "lisa", [*"abc"], before_ms=6)) == [True, True, False]
    assert bench.state()["lisa:garbage"] == {"c": 7}


def test_the_body_is_deleted_with_the_last_group(bench: Bench) -> None:
    both = {"lisa": G(garbage={"a": 5}, **FAILED), "audit": G(garbage={"a": 7}, **FAILED)}
    bench.put(body="a", expiry={"a": FAR}, **both)
    assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [True]
    bench.check_change(body={"a": "A+"}, stats={"purged@lisa": 1}, lisa=G())
    assert bench.call(Purge(TOPIC, "audit", ["a"])) == [True]
    done = {"a": ("A+", "purged", None, 3, bench.now)}
    bench.check(done=done, stats={"purged@lisa": 1, "purged@audit": 1}, lisa=G(), audit=G())


def test_purging_garbage_without_a_body_writes_no_tombstone(bench: Bench) -> None:
    bench.put(policy={"a": "5"}, expiry={"a": FAR}, lisa=G(garbage={"a": 5}, **FAILED))
    assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [True]
    bench.check(stats={"purged@lisa": 1}, lisa=G())


DAY_MS = 86_400_000
BOTH = ("long", "short")
"""Ids of a message whose sender may repeat it much later, and of another one."""

HELD = G(ready=[Row(m, 7, 1, "c1") for m in BOTH])
DEAD = G(garbage=dict.fromkeys(BOTH, 5))
WAITING: dict[str, Any] = {"lisa": G(), "waiting": dict.fromkeys(BOTH, 1)}
ENDS: dict[str, tuple[dict[str, Any], Callable[[Bench], Transition[Any]]]] = {
    "ack": (
        {"lisa": HELD},
        lambda bench: Ack(
            TOPIC,
            "lisa",
            [bench.settlement("long", fence="~~~~~~~~-"), bench.settlement("short")],
        ),
    ),
    "cancel": (WAITING, lambda _: Cancel(TOPIC, BOTH)),
    "expire": ({**WAITING, "expiry": dict.fromkeys(BOTH, 2)}, lambda _: Expire(TOPIC, BOTH)),
    "purge": ({"lisa": DEAD}, lambda _: Purge(TOPIC, "lisa", BOTH)),
    "undeclare": ({"lisa": DEAD}, lambda _: Undeclare(TOPIC, "lisa", BOTH)),
}


def end(bench: Bench, name: str, options: dict[str, str]) -> tuple[int, int]:
    """Settle both messages; returns the remaining lifetimes of their tombstones in ms."""
    state, call = ENDS[name]
    bench.put(body={"long": "~-", "short": "A-"}, options=options, **state)
    bench.call(call(bench))
    long, short = (bench.store.ask("PTTL", bench.keys.done(m)) for m in BOTH)
    return long, short


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("options", [{}, {"dedupe_for": str(2 * DAY_MS)}, {"retention": "0"}])
def test_each_tombstone_has_its_own_retention(
    bench: Bench, name: str, options: dict[str, str]
) -> None:
    """A draining shard is kept until the last one expires."""
    long, short = end(bench, name, options)
    wanted = int(options.get("dedupe_for", DAY_MS))
    assert wanted - LONG < long <= wanted
    assert short == -2 if options.get("retention") == "0" else 0 < short <= LONG
    lasting = int(bench.store.ask("HGET", bench.keys.options, "lasting"))
    assert lasting == bench.store.ask("PEXPIRETIME", bench.keys.done("long"))


def test_a_longer_retention_applies_to_both(bench: Bench) -> None:
    assert min(end(bench, "cancel", {"retention": str(3 * DAY_MS)})) > 2 * DAY_MS
    assert bench.send(item("long", "+0", sender="B")) == [Sent.DUPLICATE]
