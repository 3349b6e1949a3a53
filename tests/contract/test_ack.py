"""ack: in flight -> settled."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import NO_LATENESS, Ack, Acked, Settlement
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row

D = 1_000
FAR = 4_000_000_000_000
HELD = Row("a", D, 1, "c1")
ACKED, LATE, STALE, REPEATED = Acked


def settlement(entry: str, *, fence: str = "AAAAAAAA-", attempt: int = 1) -> Settlement:
    return Settlement("a", entry, fence, D, attempt, "c")


def test_it_leaves_a_tombstone_and_nothing_else(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"},
        policy={"a": "0"},
        expiry={"a": FAR},
        lisa=G(
            ready=[Row("a", D, 3, "c1"), Row("b", D, 1, "c1")],
            attempts={"a": 2, "b": 1},
            reasons={"a": "no"},
            leases={"a": FAR},
        ),
    )
    one = bench.settlement("a", due=D, attempt=3, lateness=NO_LATENESS)
    assert bench.call(Ack(TOPIC, "lisa", [one])) == [ACKED]
    bench.check(
        body={"b": "A-"},
        done={"a": ("A-", "acked", D, 3, bench.now)},
        stats={"acked@lisa": 1},
        lisa=G(ready=[Row("b", D, 1, "c1")], attempts={"b": 1}),
    )


def test_lateness_is_counted_by_letter(bench: Bench) -> None:
    rows = [Row(m, D, 1, "c1") for m in "abc"]
    bench.put(body=dict.fromkeys("abc", "A-"), lisa=G(ready=rows))
    letters = zip("abc", "d-d", strict=True)
    batch = [bench.settlement(m, due=D, lateness=letter) for m, letter in letters]
    assert bench.call(Ack(TOPIC, "lisa", batch)) == [ACKED] * 3
    bench.check(
        done=dict.fromkeys("abc", ("A-", "acked", D, 1, bench.now)),
        stats={"acked@lisa": 3, "late:d@lisa": 2, "late:-@lisa": 1},
        lisa=G(),
    )


def test_the_same_receipt_twice_in_one_call_counts_once(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[HELD]))
    one = bench.settlement("a", due=D)
    assert bench.call(Ack(TOPIC, "lisa", [one, one])) == [ACKED, REPEATED]
    bench.check(
        done={"a": ("A-", "acked", D, 1, bench.now)},
        stats={"acked@lisa": 1, "late:c@lisa": 1},
        lisa=G(),
    )


@pytest.mark.parametrize(
    "stage",
    [
        {"lisa": G(retry={"a": FAR}, attempts={"a": 1}, reasons={"a": "ack timeout"})},
        {"lisa": G(garbage={"a": D}, attempts={"a": 1}, reasons={"a": "ack timeout"})},
        {"lisa": G(ready=[Row("a", D, 2)], attempts={"a": 1})},
        {"lisa": G(ready=[Row("a", D, 2, "c2")], attempts={"a": 1}, leases={"a": FAR})},
        {"waiting": {"a": FAR}, "lisa": G(attempts={"a": 1})},
    ],
    ids=["retry", "garbage", "ready", "in flight elsewhere", "waiting"],
)
def test_a_late_success_settles_the_message_in_any_state(
    bench: Bench, stage: dict[str, Any]
) -> None:
    bench.put(body={"a": "A-"}, policy={"a": "5"}, expiry={"a": FAR}, **stage)
    assert bench.call(Ack(TOPIC, "lisa", [settlement("1-1")])) == [LATE]
    bench.check(
        done={"a": ("A-", "acked", D, 1, bench.now)},
        stats={"acked@lisa": 1, "acked_late@lisa": 1},
        lisa=G(),
    )


@pytest.mark.parametrize(
    "state",
    [
        {"body": {"a": "B-"}, "lisa": G(retry={"a": FAR}, attempts={"a": 1})},
        {"body": {"a": "B-"}, "lisa": G(ready=[Row("a", D, 1, "c2")])},
        {"waiting": {"a": FAR}, "body": {"a": "Br"}, "lisa": G()},
        {"done": {"a": ("B-", "acked", D, 1, D)}, "lisa": G()},
        {"done": {"a": ("A-", "cancelled", D, 0, D)}, "lisa": G()},
        {"lisa": G()},
        {"body": {"a": "A-"}, "lisa": G(), "audit": G(retry={"a": FAR})},
        {
            "waiting": {"a": FAR},
            "body": {"a": "A-"},
            "lisa": G(attempts={"a": 1}, reasons={"a": "no"}),
            "audit": G(),
        },
    ],
    ids=[
        "other life in retry",
        "other life in flight",
        "replaced",
        "other life settled",
        "cancelled",
        "unknown",
        "only another group owed it",
        "waiting again for both",
    ],
)
def test_a_stale_receipt_changes_nothing(bench: Bench, state: dict[str, Any]) -> None:
    bench.put(**state)
    assert bench.call(Ack(TOPIC, "lisa", [settlement("1-1")])) == [STALE]
    bench.check(**state, stats={"stale@lisa": 1})


def test_the_body_is_deleted_with_the_last_group(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"},
        policy={"a": "5"},
        expiry={"a": FAR},
        lisa=G(ready=[HELD]),
        audit=G(ready=[HELD]),
        third=G(garbage={"b": D}),
    )
    assert bench.call(Ack(TOPIC, "lisa", [bench.settlement("a", due=D)])) == [ACKED]
    bench.check(
        body={"a": "A+"},
        policy={"a": "5"},
        expiry={"a": FAR},
        stats={"acked@lisa": 1, "late:c@lisa": 1},
        lisa=G(),
        audit=G(ready=[HELD]),
        third=G(garbage={"b": D}),
    )
    assert bench.call(Ack(TOPIC, "lisa", [settlement("1-1")])) == [REPEATED]
    last = bench.settlement("a", group="audit", due=D)
    assert bench.call(Ack(TOPIC, "audit", [last])) == [ACKED]
    bench.check(
        done={"a": ("A-", "acked", D, 1, bench.now)},
        stats={"acked@lisa": 1, "late:c@lisa": 1, "acked@audit": 1, "late:c@audit": 1},
        lisa=G(),
        audit=G(),
        third=G(garbage={"b": D}),
    )


def test_a_replacing_message_keeps_its_mark_through_the_groups(bench: Bench) -> None:
    bench.put(body={"a": "Ar"}, lisa=G(ready=[HELD]), audit=G(garbage={"a": D}))
    assert bench.call(Ack(TOPIC, "lisa", [bench.settlement("a", due=D)])) == [ACKED]
    assert bench.state()["body"] == {"a": "AR"}


def test_a_late_success_leaves_other_groups_their_message(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(retry={"a": FAR}, attempts={"a": 1}), audit=G(ready=[HELD]))
    assert bench.call(Ack(TOPIC, "lisa", [settlement("1-1")])) == [LATE]
    bench.check(
        body={"a": "A+"},
        stats={"acked@lisa": 1, "acked_late@lisa": 1},
        lisa=G(),
        audit=G(ready=[HELD]),
    )


def test_a_message_past_its_ttl_expires(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]))
    ack = Ack(TOPIC, "lisa", [bench.settlement("a", due=D)], state="expired")
    assert bench.call(ack) == [ACKED]
    bench.check(done={"a": ("A-", "expired", D, 1, bench.now)}, stats={"expired": 1}, lisa=G())


@pytest.mark.parametrize(
    "stage",
    [
        {"waiting": {"a": FAR}, "lisa": G(attempts={"a": 1})},
        {"lisa": G(ready=[Row("a", D, 2)], attempts={"a": 1})},
        {"lisa": G(retry={"a": FAR}, attempts={"a": 1})},
    ],
    ids=["waiting", "ready", "retry"],
)
def test_a_message_rescheduled_after_its_ttl_is_kept(bench: Bench, stage: dict[str, Any]) -> None:
    state: dict[str, Any] = {"body": {"a": "A-"}, "expiry": {"a": FAR + 5}, **stage}
    bench.put(**state)
    assert bench.call(Ack(TOPIC, "lisa", [settlement("1-1")], state="expired")) == [STALE]
    bench.check(**state, stats={"stale@lisa": 1})


def test_a_message_expired_in_two_groups_counts_once(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(ready=[HELD]))
    for group in ("lisa", "audit"):
        one = bench.settlement("a", due=D, group=group)
        assert bench.call(Ack(TOPIC, group, [one], state="expired")) == [ACKED]
    bench.check(
        done={"a": ("A-", "expired", D, 1, bench.now)}, stats={"expired": 1}, lisa=G(), audit=G()
    )


def test_without_retention_no_tombstone_is_written(bench: Bench) -> None:
    bench.put(options={"retention": "0"}, body={"a": "A-"}, lisa=G(ready=[HELD]))
    assert bench.call(Ack(TOPIC, "lisa", [bench.settlement("a", due=D)])) == [ACKED]
    bench.check(options={"retention": "0"}, stats={"acked@lisa": 1, "late:c@lisa": 1}, lisa=G())


def test_a_tombstone_lasts_for_the_topics_retention(bench: Bench) -> None:
    bench.put(options={"retention": "30000"}, body={"a": "A-"}, lisa=G(ready=[HELD]))
    bench.call(Ack(TOPIC, "lisa", [bench.settlement("a", due=D)]))
    assert 20_000 < bench.store.ask("PTTL", bench.keys.done("a")) <= 30_000


@pytest.mark.not_on_fakeredis("ACL SETUSER")
def test_a_user_without_the_newest_commands_can_settle(bench: Bench) -> None:
    bench.put(
        body=dict.fromkeys("abc", "A-"),
        lisa=G(ready=[Row(m, D, 1, "c1") for m in "abc"]),
        audit=G(retry={"c": FAR}),
    )
    batch = [bench.settlement(m, due=D, lateness=NO_LATENESS) for m in "abc"]
    refused = ["-zmscore"]
    refused += ["-msetex"] if bench.store.ask("COMMAND", "INFO", "MSETEX")[0] else []
    rights = ("on", ">pw", "~lisa:*", "&lisa:*", "+@all", *refused)
    bench.store.ask("ACL", "SETUSER", "named", *rights)
    weak = Address(bench.store.connection.address.url, username="named", password="pw")
    store = SyncStore(Connection(weak), Keys())
    try:
        assert store.call(Ack(TOPIC, "lisa", batch)) == [ACKED] * 3
    finally:
        store.close()
        bench.store.ask("ACL", "DELUSER", "named")
    bench.check(
        body={"c": "A+"},
        done=dict.fromkeys("ab", ("A-", "acked", D, 1, bench.now)),
        stats={"acked@lisa": 3},
        lisa=G(),
        audit=G(retry={"c": FAR}),
    )
