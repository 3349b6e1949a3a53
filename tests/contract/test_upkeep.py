"""reclaim, renew, trim, forget: the upkeep of deliveries, streams and consumer names."""

from typing import Any

from lisa.core.model.options import SUSPECT_REASON
from lisa.core.model.stream import read_all_command
from lisa.core.transitions.delivery import Open
from lisa.core.transitions.groups import Forget
from lisa.core.transitions.lease import ClockState, Reclaim, Reclaimed, Release, Renew, Renewed
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Deferral, Failed, Postpone, Retried
from lisa.core.transitions.upkeep import Trim, Trimmed
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, FOREIGN, LONG, G, Row

WHY = "ack timeout"
HELD, OVERDUE = Row("a", 1, 1, "c1"), Row("a", 1, 1, "c1", LONG)


def reclaim(bench: Bench, group: str = "lisa", **more: Any) -> Reclaimed:
    return bench.call(Reclaim(TOPIC, group, **more))


def moved(said: Reclaimed) -> list[str]:
    return sorted(one.id for one in said.moved)


def delete_first(bench: Bench) -> None:
    """Another program deletes the first entry of the ready stream."""
    ready = bench.keys.group("lisa").ready
    first = bench.store.ask("XRANGE", ready, "-", "+", "COUNT", 1)[0][0]
    bench.store.ask("XDEL", ready, first)


def test_only_overdue_deliveries_are_reclaimed(bench: Bench) -> None:
    rows = [OVERDUE, Row("b", 2, 2, "c1", LONG), Row("c", 3, 1, "c2", 2_000), Row("d", 4)]
    failed = G(ready=rows, attempts={"b": 1}, reasons={"b": "boom"})
    bench.put(options={"retry_delays": "5000"}, body="abcd", expiry={"b": FAR}, lisa=failed)
    said = reclaim(bench)
    due = bench.state()["lisa:retry"]["a"]
    assert said.moved == [
        ("a", 1, Retried(Failed.RETRYING, due, 1)),
        ("b", 2, Retried(Failed.DEAD, None, 2)),
    ]
    assert (said.cursor, said.cleared) == (None, 0)
    assert said.next_end_ms is not None
    assert 8_000 - (bench.clock() - bench.start) <= said.next_end_ms <= 8_000
    bench.check_change(
        expiry=None,
        stats={"reclaimed@lisa": 2, "retried@lisa": 1, "garbage@lisa": 1},
        lisa=G(
            ready=[Row("c", 3, 1, "c2"), Row("d", 4)],
            retry={"a": bench.now + 5000},
            garbage={"b": bench.now},
            attempts={"a": 1, "b": 2},
            reasons={"a": WHY, "b": WHY},
        ),
    )


def test_only_a_handler_that_had_begun_costs_an_attempt(bench: Bench) -> None:
    """Of a handler process; other messages return as suspects, however often."""
    rows = [
        Row("a", 1, 1, "c1-h", LONG),
        Row("b", 2, 2, "c1-h", LONG, begun=True),
        Row("c", 3, 1, "c2-h", LONG, suspect=1, begun=True),
        Row("d", 4, 3, "c3-h", LONG, suspect=99),
        Row("e", 5, 1, "c4", LONG),
    ]
    attempts = {"b": 1, "d": 2}
    bench.put(body="abcde", lisa=G(ready=rows, attempts=attempts, reasons={"d": "boom"}))
    said = reclaim(bench)
    assert (moved(said), said.returned) == (["b", "c", "e"], 2)
    later = bench.now + 20_000
    bench.check_change(
        stats={"reclaimed@lisa": 5, "retried@lisa": 3, "released@lisa": 2},
        lisa=G(
            ready=[Row("a", 1, suspect=1), Row("d", 4, 3, suspect=1)],
            retry=dict.fromkeys("bce", later),
            attempts={"b": 2, "c": 1, "d": 2, "e": 1},
            reasons={"b": WHY, "c": SUSPECT_REASON, "d": "boom", "e": WHY},
        ),
    )


def test_a_suspect_stays_one_until_a_handler_has_ended(bench: Bench) -> None:
    """Through releases, a pause and its retry."""
    rows = [Row("a", 1, 1, "c1-h", suspect=1), Row("b", 2, 2, "c1-h", suspect=1)]
    failed: dict[str, Any] = {"attempts": {"b": 1, "c": 4}, "reasons": {"c": SUSPECT_REASON}}
    bench.put(body="abc", lisa=G(ready=rows, retry={"c": 3}, **failed))
    receipts = [bench.receipt(m) for m in "ab"]
    bench.call(Release(TOPIC, "lisa", receipts[:1]))
    open_window = Deferral(*receipts[1], FAR + 1, closes_ms=FAR)
    bench.call(Postpone(TOPIC, "lisa", [open_window]))
    bench.call(Promote(TOPIC))
    back = [Row("a", 1, suspect=1), Row("b", 2, 2, suspect=1), Row("c", 3, 5, suspect=1)]
    bench.check_change(stats={"released@lisa": 2}, lisa=G(ready=back, **failed))
    bench.store.ask("HSET", bench.keys.options, "paused", 1)
    entry = bench.opening("a")
    bench.store.ask(*read_all_command([bench.keys.group("lisa").ready], "lisa", "c1-h", 1, 0))
    assert bench.call(Open(TOPIC, "lisa", [entry])).paused
    back = [*back[1:], back[0]]
    bench.check_change(options={"paused": "1"}, lisa=G(ready=back, **failed))


def test_the_topics_ack_timeout_decides(bench: Bench) -> None:
    bench.put(options={"ack_timeout": "90000"}, body="a", lisa=G(ready=[OVERDUE]))
    said = reclaim(bench)
    assert said.moved == []
    assert said.next_end_ms is not None
    assert said.next_end_ms <= 30_000


def test_a_due_time_before_1970_is_returned(bench: Bench) -> None:
    bench.put(body="a", lisa=G(ready=[Row("a", -5, 1, "c1", LONG)]))
    assert [one.due_ms for one in reclaim(bench).moved] == [-5]


def test_an_own_ack_timeout_is_respected(bench: Bench) -> None:
    rows = [HELD, Row("b", 2, 1, "c1", LONG), Row("c", 3, 1, "c1", LONG)]
    leases = {"a": 5, "b": FAR, "gone": 7, "d": 8}
    bench.put(body="abcd", lisa=G(ready=rows, leases=leases, retry={"d": FAR}))
    said = reclaim(bench)
    assert sorted((one.id, one.due_ms) for one in said.moved) == [("a", 1), ("c", 3)]
    bench.check_change(
        stats={"reclaimed@lisa": 2, "retried@lisa": 2},
        lisa=G(
            ready=[Row("b", 2, 1, "c1")],
            leases={"b": FAR},
            retry={"a": bench.now + 20_000, "c": bench.now + 20_000, "d": FAR},
            attempts={"a": 1, "c": 1},
            reasons={"a": WHY, "c": WHY},
        ),
    )


def test_the_next_end_of_a_lease_is_returned(bench: Bench) -> None:
    ends = bench.clock() + 3_000
    bench.put(body="a", lisa=G(ready=[HELD], leases={"a": ends}))
    said = reclaim(bench)
    assert said.next_end_ms is not None
    assert (said.moved, said.next_end_ms <= 3_000) == ([], True)


def test_windows_go_to_the_end_and_miss_nothing(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(7)]
    rows = [Row(m, 1, 1, "c1", LONG if i % 2 == 0 else 0) for i, m in enumerate(ids)]
    bench.put(body=ids, lisa=G(ready=rows))
    start: str | None = "-"
    found, calls = list[str](), 0
    while start:
        said = reclaim(bench, start=start, window=2)
        found += moved(said)
        start, calls = said.cursor, calls + 1
    assert (found, calls) == (["m0", "m2", "m4", "m6"], 4)


def test_a_missing_entry_is_cleared_and_does_not_block_others(bench: Bench) -> None:
    """Nor does it concern other groups."""
    rows = [Row("x", 1, 1, "c1", LONG), OVERDUE]
    bench.put(body="a", lisa=G(ready=rows, entries={"a": 1}), audit=G(ready=[OVERDUE]))
    delete_first(bench)
    said = reclaim(bench)
    assert (said.cleared, moved(said)) == (1, ["a"])
    bench.check_change(
        stats={"cleared@lisa": 1, "reclaimed@lisa": 1, "retried@lisa": 1},
        lisa=G(retry={"a": bench.now + 20_000}, attempts={"a": 1}, reasons={"a": WHY}),
    )


def test_a_foreign_entry_is_cleared_and_its_message_unchanged(bench: Bench) -> None:
    """Unless the other program has acknowledged it."""
    rows = [OVERDUE, Row("b", 1, 1, "c1", LONG), Row("x", 1, 1, FOREIGN), Row("b", 1)]
    group = G(ready=rows, entries={"b": 3}, retry={"a": FAR})
    bench.put(body="ab", lisa=group)
    said = reclaim(bench)
    assert (said.moved, said.cleared) == ([], 2)
    left = G(ready=rows[2:], entries={"b": 1}, retry={"a": FAR})
    bench.check_change(stats={"cleared@lisa": 2}, lisa=left)


def test_nothing_is_reclaimed_if_the_clock_is_too_late(bench: Bench) -> None:
    bench.put(body="ab", lisa=G(ready=[OVERDUE, Row("b", 2, 1, "c1", LONG)], leases={"b": 5}))
    said = reclaim(bench, latest_ms=bench.clock() - 1_000)
    assert (said.moved, said.cursor, said.clock) == ([], None, ClockState.LATER)
    bench.check_unchanged()
    said = reclaim(bench, latest_ms=bench.clock() + 60_000)
    assert (moved(said), said.clock) == (["a", "b"], ClockState.FINE)


HOUR = 3_600_000
SINCE = 30_000  # the clock was set so long ago
OLD = HOUR + 5_000


def renew(bench: Bench, by_ms: int = HOUR, **more: Any) -> Renewed:
    return bench.call(Renew(TOPIC, "lisa", by_ms, bench.clock() - SINCE, **more))


def idle(bench: Bench) -> list[int]:
    ready = bench.keys.group("lisa").ready
    return [item[2] for item in bench.store.ask("XPENDING", ready, "lisa", "-", "+", 10)]


def test_deliveries_from_before_the_step_are_renewed_once(bench: Bench) -> None:
    ends = bench.clock() - HOUR + 60_000
    rows = [Row("a", 1, 1, "c1", OLD), Row("b", 2, 1, "c2", OLD), Row("c", 3, 1, "c1", 2_000)]
    bench.put(body="abc", lisa=G(ready=rows, leases={"b": ends}))
    step = Renew(TOPIC, "lisa", by_ms=HOUR, since_ms=bench.clock() - SINCE)
    assert bench.call(step) == (None, 2)
    bench.check_change(lisa=G(ready=rows, leases={"b": ends + HOUR}))
    assert max(idle(bench)[:2]) < 2_000 <= idle(bench)[2]
    assert bench.call(step) == (None, 0)  # another manager that saw the same step
    bench.check_unchanged()
    assert reclaim(bench).moved == []


def test_a_step_back_moves_deadlines_back(bench: Bench) -> None:
    ends = bench.clock() + HOUR + 60_000
    row = Row("b", 2, 1, "c2", OLD)
    bench.put(body="b", lisa=G(ready=[row], leases={"b": ends}))
    step = Renew(TOPIC, "lisa", by_ms=-HOUR, since_ms=bench.clock() - SINCE)
    assert [bench.call(step).renewed for _ in range(2)] == [1, 0]
    bench.check_change(lisa=G(ready=[row], leases={"b": ends - HOUR}))


def test_for_an_unknown_step_only_future_deliveries_are_renewed(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", OLD), Row("b", 2, 1, "c2"), Row("c", 3)]
    bench.put(body="abc", lisa=G(ready=rows, leases={"b": 5}))
    assert bench.call(Renew(TOPIC, "lisa")) == (None, 0)
    assert idle(bench)[0] >= OLD
    assert moved(reclaim(bench, start="0-0")) == ["a"]


def test_renewing_goes_to_the_end_in_windows(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(7)]
    rows = [Row(m, 1, 1, f"c{i % 3}", OLD if i % 2 == 0 else 0) for i, m in enumerate(ids)]
    bench.put(body=ids, lisa=G(ready=rows))
    said = renew(bench, window=2)
    renewed = said.renewed
    while said.cursor is not None:
        said = renew(bench, start=said.cursor, window=2)
        renewed += said.renewed
    assert renewed == 4
    bench.check_unchanged()
    assert max(idle(bench)) < SINCE
    assert renew(bench).renewed == 0


def test_a_missing_entry_does_not_block_others(bench: Bench) -> None:
    rows = [Row("x", 1, 1, "c1", OLD), Row("a", 2, 1, "c1", OLD)]
    bench.put(body="a", lisa=G(ready=rows, entries={"a": 1}, leases={"a": 5}))
    delete_first(bench)
    renew(bench)
    assert bench.state()["lisa:leases"] == {"a": 5 + HOUR}


def test_only_delivered_entries_not_pending_and_not_indexed_are_removed(bench: Bench) -> None:
    rows = [
        Row("x", 1, 1, FOREIGN),
        Row("l", 2, 1, FOREIGN),
        Row("o", 3, 1, "c1"),
        Row("h", 4, 1, "c1"),
        Row("y", 5, 1, FOREIGN),
        Row("n", 6),
        Row("z", 7),
    ]
    bench.put(body="lhn", lisa=G(ready=rows, entries={"l": 1, "h": 3, "n": 5}))
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 2, 5, 3)
    kept = [row for row in rows if row.id not in "xy"]
    left = G(ready=kept, entries={"l": 0, "h": 2, "n": 3})
    bench.check_change(stats={"trimmed@lisa": 2}, lisa=left)


def test_it_never_trims_by_length(bench: Bench) -> None:
    many = [f"m{i}" for i in range(30)]
    bench.put(options={"max_ready": "10"}, body=many, lisa=G(ready=[Row(m, 1) for m in many]))
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 0, 30, 30)
    bench.check_unchanged()


def test_trimming_goes_to_the_end_in_windows(bench: Bench) -> None:
    rows = [Row(f"m{i}", 1, 1, FOREIGN if i % 2 else "c1") for i in range(7)]
    bench.put(lisa=G(ready=rows, entries={}))
    start: str | None = "-"
    removed = calls = 0
    while start:
        said = bench.call(Trim(TOPIC, "lisa", start, 2))
        removed, calls, start = removed + said.removed, calls + 1, said.cursor
    assert (removed, calls, len(bench.state()["lisa:ready"])) == (3, 4, 4)


def test_fewer_entries_than_indexed_are_reported(bench: Bench) -> None:
    bench.put(body="a", lisa=G(entries={"a": None}))
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 0, 0, 1)


def names(bench: Bench) -> set[str]:
    infos = bench.store.ask("XINFO", "CONSUMERS", bench.keys.group("lisa").ready, "lisa")
    return {dict(zip(info[::2], info[1::2], strict=True))[b"name"].decode() for info in infos}


def test_a_name_recently_used_or_with_something_pending_is_never_forgotten(bench: Bench) -> None:
    consumers = {"busy": "{}", "idle": "{}", "gone": "{}"}
    bench.put(body="a", consumers=consumers, lisa=G(ready=[Row("a", 1, 1, "busy")]))
    ready = bench.keys.group("lisa").ready
    bench.store.ask("XGROUP", "CREATECONSUMER", ready, "lisa", "idle")
    assert bench.call(Forget(TOPIC, "lisa", ["idle"], LONG)) == []
    assert names(bench) == {"busy", "idle"}
    bench.check_unchanged()
    assert bench.call(Forget(TOPIC, "lisa", ["busy", "idle", "gone"], 0)) == ["idle", "gone"]
    assert names(bench) == {"busy"}
    bench.check_change(consumers={"busy": "{}"})
