"""ack: in flight -> settled. See test_places for the receipts of earlier deliveries."""

from typing import Any

import pytest

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import NO_LATENESS, Ack, Acked
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row

D = 1_000
HELD = Row("a", D, 1, "c1")
ACKED, LATE, STALE, REPEATED = Acked


def ack(bench: Bench, group: str = "lisa", state: str = "acked", **more: Any) -> Acked:
    """Settle message a, by default with its current receipt."""
    receipt = bench.settlement("a", group=group, **{"due": D, "lateness": NO_LATENESS, **more})
    (said,) = bench.call(Ack(TOPIC, group, [receipt], state))
    return said


def test_it_leaves_a_tombstone_and_nothing_else(bench: Bench) -> None:
    rows = [Row("a", D, 3, "c1"), Row("b", D, 1, "c1")]
    failed: dict[str, Any] = {
        "attempts": {"a": 2, "b": 1},
        "reasons": {"a": "no"},
        "leases": {"a": FAR},
    }
    bench.put(body="ab", policy={"a": "0"}, expiry={"a": FAR}, lisa=G(ready=rows, **failed))
    assert ack(bench, attempt=3) == ACKED
    bench.check(
        body="b",
        done={"a": ("A-", "acked", D, 3, bench.now)},
        stats={"acked@lisa": 1},
        lisa=G(ready=rows[1:], attempts={"b": 1}),
    )


def test_lateness_is_counted_by_letter_and_each_receipt_once(bench: Bench) -> None:
    bench.put(body="abc", lisa=G(ready=[Row(m, D, 1, "c1") for m in "abc"]))
    letters = zip("abca", "d-dd", strict=True)
    batch = [bench.settlement(m, due=D, lateness=letter) for m, letter in letters]
    assert bench.call(Ack(TOPIC, "lisa", batch)) == [ACKED, ACKED, ACKED, REPEATED]
    bench.check(
        done=dict.fromkeys("abc", ("A-", "acked", D, 1, bench.now)),
        stats={"acked@lisa": 3, "late:d@lisa": 2, "late:-@lisa": 1},
        lisa=G(),
    )


@pytest.mark.parametrize(
    "state",
    [
        {"body": {"a": "B-"}, "lisa": G(retry={"a": FAR}, attempts={"a": 1})},
        {"body": {"a": "B-"}, "lisa": G(ready=[Row("a", D, 1, "c2")])},
        {"waiting": {"a": FAR}, "body": {"a": "Br"}, "lisa": G()},
        {"done": {"a": ("B-", "acked", D, 1, D)}, "lisa": G()},
    ],
    ids=["retry", "in flight", "replaced", "settled"],
)
def test_a_receipt_of_another_life_changes_nothing(bench: Bench, state: dict[str, Any]) -> None:
    bench.put(**state)
    assert ack(bench, entry="1-1") == STALE
    bench.check_change(stats={"stale@lisa": 1})


def test_the_body_is_deleted_with_the_last_group(bench: Bench) -> None:
    """It keeps the mark of a message that replaced another; the tombstone has the receipt's."""
    third = G(garbage={"b": D})
    both = {"lisa": G(ready=[HELD]), "audit": G(ready=[HELD])}
    bench.put(body={"a": "Ar"}, policy={"a": "5"}, expiry={"a": FAR}, **both, third=third)
    assert ack(bench) == ACKED
    bench.check_change(body={"a": "AR"}, stats={"acked@lisa": 1}, lisa=G())
    assert ack(bench, entry="1-1") == REPEATED
    assert ack(bench, "audit") == ACKED
    bench.check(
        done={"a": ("A-", "acked", D, 1, bench.now)},
        stats={"acked@lisa": 1, "acked@audit": 1},
        lisa=G(),
        audit=G(),
        third=third,
    )


def test_a_message_past_its_ttl_expires_and_counts_once(bench: Bench) -> None:
    bench.put(body="a", expiry={"a": 5}, lisa=G(ready=[HELD]), audit=G(ready=[HELD]))
    assert [ack(bench, group, "expired") for group in ("lisa", "audit")] == [ACKED] * 2
    done = {"a": ("A-", "expired", D, 1, bench.now)}
    bench.check(done=done, stats={"expired": 1}, lisa=G(), audit=G())


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
    bench.put(body="a", expiry={"a": FAR + 5}, **stage)
    assert ack(bench, state="expired", entry="1-1") == STALE
    bench.check_change(stats={"stale@lisa": 1})


@pytest.mark.parametrize("retention_ms", [0, 30_000])
def test_a_tombstone_lasts_for_the_topics_retention(bench: Bench, retention_ms: int) -> None:
    bench.put(options={"retention": str(retention_ms)}, body="a", lisa=G(ready=[HELD]))
    assert ack(bench) == ACKED
    done = {"a": ("A-", "acked", D, 1, bench.now)} if retention_ms else None
    bench.check_change(body=None, done=done, stats={"acked@lisa": 1}, lisa=G())
    left = bench.store.ask("PTTL", bench.keys.done("a"))
    assert retention_ms - 10_000 < left <= retention_ms


@pytest.mark.not_on_fakeredis("ACL SETUSER")
def test_a_user_without_the_newest_commands_can_settle(bench: Bench) -> None:
    held = G(ready=[Row(m, D, 1, "c1") for m in "abc"])
    bench.put(body="abc", lisa=held, audit=G(retry={"c": FAR}))
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
    bench.check_change(
        body={"c": "A+"},
        done=dict.fromkeys("ab", ("A-", "acked", D, 1, bench.now)),
        stats={"acked@lisa": 3},
        lisa=G(),
    )
