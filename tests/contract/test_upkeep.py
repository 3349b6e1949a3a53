"""reclaim, renew, trim, forget: the upkeep of deliveries, streams and consumer names."""

from __future__ import annotations

from lisa.core.transitions.forget import Forget
from lisa.core.transitions.reclaim import ClockState, Reclaim
from lisa.core.transitions.renew import Renew
from lisa.core.transitions.retry import Failed, Retried
from lisa.core.transitions.trim import Trim, Trimmed
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FOREIGN, G, Row

FAR = 4_000_000_000_000
LONG = 60_000
WHY = "ack timeout"
BODIES = {"a": "A-", "b": "A-", "c": "A-", "d": "A-"}


def test_only_overdue_deliveries_are_reclaimed(bench: Bench) -> None:
    bench.put(
        options={"retry_delays": "5000"},
        body=BODIES,
        expiry={"b": FAR},
        lisa=G(
            ready=[
                Row("a", 1, 1, "c1", LONG),
                Row("b", 2, 2, "c1", LONG),
                Row("c", 3, 1, "c2", 2_000),
                Row("d", 4),
            ],
            attempts={"b": 1},
            reasons={"b": "boom"},
        ),
    )
    said = bench.call(Reclaim(TOPIC, "lisa"))
    due = bench.state()["lisa:retry"]["a"]
    assert said.moved == [
        ("a", 1, Retried(Failed.RETRYING, due, 1)),
        ("b", 2, Retried(Failed.DEAD, None, 2)),
    ]
    assert (said.cursor, said.cleared) == (None, 0)
    assert said.next_end_ms is not None
    assert 8_000 - (bench.clock() - bench.start) <= said.next_end_ms <= 8_000
    bench.check(
        options={"retry_delays": "5000"},
        body=BODIES,
        stats={"reclaimed@lisa": 2, "retried@lisa": 1, "garbage@lisa": 1},
        lisa=G(
            ready=[Row("c", 3, 1, "c2"), Row("d", 4)],
            retry={"a": bench.now + 5000},
            garbage={"b": bench.now},
            attempts={"a": 1, "b": 2},
            reasons={"a": WHY, "b": WHY},
        ),
    )


def test_the_topics_ack_timeout_decides(bench: Bench) -> None:
    bench.put(
        options={"ack_timeout": "90000"}, body=BODIES, lisa=G(ready=[Row("a", 1, 1, "c1", LONG)])
    )
    said = bench.call(Reclaim(TOPIC, "lisa"))
    assert said.moved == []
    assert said.next_end_ms is not None
    assert said.next_end_ms <= 30_000


def test_a_due_time_before_1970_is_returned(bench: Bench) -> None:
    bench.put(body=BODIES, lisa=G(ready=[Row("a", -5, 1, "c1", LONG)]))
    assert [one.due_ms for one in bench.call(Reclaim(TOPIC, "lisa")).moved] == [-5]


def test_an_own_ack_timeout_is_respected(bench: Bench) -> None:
    bench.put(
        body=BODIES,
        lisa=G(
            ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1", LONG), Row("c", 3, 1, "c1", LONG)],
            leases={"a": 5, "b": FAR, "gone": 7, "d": 8},
            retry={"d": FAR},
        ),
    )
    said = bench.call(Reclaim(TOPIC, "lisa"))
    assert sorted((one.id, one.due_ms) for one in said.moved) == [("a", 1), ("c", 3)]
    bench.check(
        body=BODIES,
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
    bench.put(body=BODIES, lisa=G(ready=[Row("a", 1, 1, "c1")], leases={"a": ends}))
    said = bench.call(Reclaim(TOPIC, "lisa"))
    assert said.next_end_ms is not None
    assert said.next_end_ms <= 3_000
    assert said.moved == []


def test_windows_go_to_the_end_and_miss_nothing(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(7)]
    rows = [Row(m, 1, 1, "c1", LONG if i % 2 == 0 else 0) for i, m in enumerate(ids)]
    bench.put(body=dict.fromkeys(ids, "A-"), lisa=G(ready=rows))
    start, found, calls = "-", [], 0
    while True:
        said = bench.call(Reclaim(TOPIC, "lisa", start=start, window=2))
        found += [one.id for one in said.moved]
        calls += 1
        if said.cursor is None:
            break
        start = said.cursor
    assert found == ["m0", "m2", "m4", "m6"]
    assert calls == 4


def test_a_missing_entry_is_cleared_and_does_not_block_others(bench: Bench) -> None:
    bench.put(
        body=BODIES,
        lisa=G(ready=[Row("x", 1, 1, "c1", LONG), Row("a", 2, 1, "c1", LONG)], entries={"a": 1}),
    )
    ready = bench.keys.group("lisa").ready
    first = bench.store.ask("XRANGE", ready, "-", "+", "COUNT", 1)[0][0]
    bench.store.ask("XDEL", ready, first)
    said = bench.call(Reclaim(TOPIC, "lisa"))
    assert said.cleared == 1
    assert [one.id for one in said.moved] == ["a"]
    bench.check(
        body=BODIES,
        stats={"cleared@lisa": 1, "reclaimed@lisa": 1, "retried@lisa": 1},
        lisa=G(retry={"a": bench.now + 20_000}, attempts={"a": 1}, reasons={"a": WHY}),
    )


def test_a_foreign_entry_is_cleared_and_its_message_unchanged(bench: Bench) -> None:
    bench.put(
        body=BODIES,
        lisa=G(
            ready=[Row("a", 1, 1, "c1", LONG), Row("b", 1, 1, "c1", LONG), Row("b", 1)],
            entries={"b": 2},
            retry={"a": FAR},
        ),
    )
    said = bench.call(Reclaim(TOPIC, "lisa"))
    assert (said.moved, said.cleared) == ([], 2)
    bench.check(
        body=BODIES, stats={"cleared@lisa": 2}, lisa=G(ready=[Row("b", 1)], retry={"a": FAR})
    )


def test_other_groups_keep_their_deliveries(bench: Bench) -> None:
    row = Row("a", 1, 1, "c1", LONG)
    bench.put(body=BODIES, lisa=G(ready=[row]), audit=G(ready=[row]))
    bench.call(Reclaim(TOPIC, "audit"))
    state = bench.state()
    assert state["lisa:ready"] == [("a", 1, 1, "c1")]
    assert list(state["audit:retry"]) == ["a"]


def test_entries_acknowledged_by_another_program_are_ignored(bench: Bench) -> None:
    row = Row("a", 1, 1, FOREIGN)
    bench.put(body=BODIES, lisa=G(ready=[row]))
    assert bench.call(Reclaim(TOPIC, "lisa")).moved == []
    bench.check(body=BODIES, lisa=G(ready=[row]))


def test_nothing_is_reclaimed_if_the_clock_is_too_late(bench: Bench) -> None:
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c1", LONG)]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"b": 5}))
    said = bench.call(Reclaim(TOPIC, "lisa", latest_ms=bench.clock() - 1_000))
    assert (said.moved, said.cursor, said.clock) == ([], None, ClockState.LATER)
    kept = [Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1")]
    bench.check(body=BODIES, lisa=G(ready=kept, leases={"b": 5}))
    said = bench.call(Reclaim(TOPIC, "lisa", latest_ms=bench.clock() + 60_000))
    assert (sorted(one.id for one in said.moved), said.clock) == (["a", "b"], ClockState.FINE)


HOUR = 3_600_000
SINCE = 30_000  # the clock was set so long ago
OLD = HOUR + 5_000


def idle(bench: Bench) -> list[int]:
    ready = bench.keys.group("lisa").ready
    return [item[2] for item in bench.store.ask("XPENDING", ready, "lisa", "-", "+", 10)]


def test_deliveries_from_before_the_step_are_renewed_once(bench: Bench) -> None:
    ends = bench.clock() - HOUR + 60_000
    rows = [
        Row("a", 1, 1, "c1", OLD),
        Row("b", 2, 1, "c2", OLD),
        Row("c", 3, 1, "c1", 2_000),
    ]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"b": ends}))
    step = Renew(TOPIC, "lisa", by_ms=HOUR, since_ms=bench.clock() - SINCE)
    assert bench.call(step) == (None, 2)
    held = [Row("a", 1, 1, "c1"), Row("b", 2, 1, "c2"), Row("c", 3, 1, "c1")]
    after = {"body": BODIES, "lisa": G(ready=held, leases={"b": ends + HOUR})}
    bench.check(**after)
    assert max(idle(bench)[:2]) < 2_000 <= idle(bench)[2]
    assert bench.call(step) == (None, 0)  # another manager that saw the same step
    bench.check(**after)
    assert bench.call(Reclaim(TOPIC, "lisa")).moved == []


def test_a_step_back_moves_deadlines_back(bench: Bench) -> None:
    ends = bench.clock() + HOUR + 60_000
    bench.put(body=BODIES, lisa=G(ready=[Row("b", 2, 1, "c2", OLD)], leases={"b": ends}))
    step = Renew(TOPIC, "lisa", by_ms=-HOUR, since_ms=bench.clock() - SINCE)
    assert [bench.call(step).renewed for _ in range(2)] == [1, 0]
    held = [Row("b", 2, 1, "c2")]
    bench.check(body=BODIES, lisa=G(ready=held, leases={"b": ends - HOUR}))


def test_for_an_unknown_step_only_future_deliveries_are_renewed(
    bench: Bench,
) -> None:
    rows = [Row("a", 1, 1, "c1", OLD), Row("b", 2, 1, "c2"), Row("c", 3)]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"b": 5}))
    assert bench.call(Renew(TOPIC, "lisa")) == (None, 0)
    assert idle(bench)[0] >= OLD
    assert [one.id for one in bench.call(Reclaim(TOPIC, "lisa", start="0-0")).moved] == ["a"]


def test_renewing_goes_to_the_end_in_windows(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(7)]
    rows = [Row(m, 1, 1, f"c{i % 3}", OLD if i % 2 == 0 else 0) for i, m in enumerate(ids)]
    bench.put(body=dict.fromkeys(ids, "A-"), lisa=G(ready=rows))
    since = bench.clock() - SINCE
    said = bench.call(Renew(TOPIC, "lisa", HOUR, since, window=2))
    renewed = said.renewed
    while said.cursor is not None:
        said = bench.call(Renew(TOPIC, "lisa", HOUR, since, start=said.cursor, window=2))
        renewed += said.renewed
    assert renewed == 4
    held = [Row(m, 1, 1, f"c{i % 3}") for i, m in enumerate(ids)]
    bench.check(body=dict.fromkeys(ids, "A-"), lisa=G(ready=held))
    assert max(idle(bench)) < SINCE
    assert bench.call(Renew(TOPIC, "lisa", HOUR, since)).renewed == 0


def test_a_missing_entry_does_not_block_others(bench: Bench) -> None:
    rows = [Row("x", 1, 1, "c1", OLD), Row("a", 2, 1, "c1", OLD)]
    bench.put(body=BODIES, lisa=G(ready=rows, entries={"a": 1}, leases={"a": 5}))
    ready = bench.keys.group("lisa").ready
    first = bench.store.ask("XRANGE", ready, "-", "+", "COUNT", 1)[0][0]
    bench.store.ask("XDEL", ready, first)
    bench.call(Renew(TOPIC, "lisa", HOUR, bench.clock() - SINCE))
    assert bench.state()["lisa:leases"] == {"a": 5 + HOUR}


def test_only_delivered_entries_not_pending_and_not_indexed_are_removed(bench: Bench) -> None:
    bodies = {"lost": "A-", "held": "A-", "new": "A-"}
    bench.put(
        body=bodies,
        lisa=G(
            ready=[
                Row("x", 1, 1, FOREIGN),
                Row("lost", 2, 1, FOREIGN),
                Row("odd", 3, 1, "c1"),
                Row("held", 4, 1, "c1"),
                Row("y", 5, 1, FOREIGN),
                Row("new", 6),
                Row("z", 7),
            ],
            entries={"lost": 1, "held": 3, "new": 5},
        ),
    )
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 2, 5, 3)
    bench.check(
        body=bodies,
        stats={"trimmed@lisa": 2},
        lisa=G(
            ready=[
                Row("lost", 2, 1, FOREIGN),
                Row("odd", 3, 1, "c1"),
                Row("held", 4, 1, "c1"),
                Row("new", 6),
                Row("z", 7),
            ],
            entries={"lost": 0, "held": 2, "new": 3},
        ),
    )


def test_it_never_trims_by_length(bench: Bench) -> None:
    many = [f"m{i}" for i in range(30)]
    group = G(ready=[Row(m, 1) for m in many])
    bench.put(options={"max_ready": "10"}, body=dict.fromkeys(many, "A-"), lisa=group)
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 0, 30, 30)
    bench.check(options={"max_ready": "10"}, body=dict.fromkeys(many, "A-"), lisa=group)


def test_trimming_goes_to_the_end_in_windows(bench: Bench) -> None:
    rows = [Row(f"m{i}", 1, 1, FOREIGN if i % 2 else "c1") for i in range(7)]
    bench.put(lisa=G(ready=rows, entries={}))
    start, removed, calls = "-", 0, 0
    while True:
        said = bench.call(Trim(TOPIC, "lisa", start, 2))
        removed, calls = removed + said.removed, calls + 1
        if said.cursor is None:
            break
        start = said.cursor
    assert (removed, calls) == (3, 4)
    assert len(bench.state()["lisa:ready"]) == 4


def test_fewer_entries_than_indexed_are_reported(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(entries={"a": None}))
    assert bench.call(Trim(TOPIC, "lisa")) == Trimmed(None, 0, 0, 1)


def names(bench: Bench) -> set[str]:
    infos = bench.store.ask("XINFO", "CONSUMERS", bench.keys.group("lisa").ready, "lisa")
    return {dict(zip(info[::2], info[1::2], strict=True))[b"name"].decode() for info in infos}


def test_a_name_with_something_pending_is_never_forgotten(bench: Bench) -> None:
    held = G(ready=[Row("a", 1, 1, "busy")])
    bench.put(body={"a": "A-"}, consumers={"busy": "{}", "idle": "{}", "gone": "{}"}, lisa=held)
    ready = bench.keys.group("lisa").ready
    bench.store.ask("XGROUP", "CREATECONSUMER", ready, "lisa", "idle")
    said = bench.call(Forget(TOPIC, "lisa", ["busy", "idle", "gone"], 0))
    assert said == ["idle", "gone"]
    assert names(bench) == {"busy"}
    bench.check(body={"a": "A-"}, consumers={"busy": "{}"}, lisa=held)


def test_a_recently_used_name_is_kept(bench: Bench) -> None:
    bench.put(consumers={"idle": "{}"}, lisa=G())
    bench.store.ask("XGROUP", "CREATECONSUMER", bench.keys.group("lisa").ready, "lisa", "idle")
    assert bench.call(Forget(TOPIC, "lisa", ["idle"], 60_000)) == []
    assert names(bench) == {"idle"}
    bench.check(consumers={"idle": "{}"}, lisa=G())
