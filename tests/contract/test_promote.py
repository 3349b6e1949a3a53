"""promote: waiting and retry -> ready, when due."""

from __future__ import annotations

from typing import Any

import pytest

from lisa.core.model.errors import LisaError
from lisa.core.model.options import BODIES_IN_ENTRIES, BYTES_IN_ENTRY
from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import G, Row, envelope

FAR = 4_000_000_000_000
BODIES = {"w1": "A-", "w2": "A-", "r1": "A-", "r2": "A-"}


def test_due_messages_are_merged_by_due_time(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30, "far": FAR},
        body={**BODIES, "far": "A-", "rfar": "A-"},
        lisa=G(
            retry={"r1": 20, "r2": 40, "rfar": FAR - 1},
            attempts={"r1": 1, "r2": 2},
            reasons={"r1": "no"},
        ),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms, said.paused, said.cut_short, said.expired) == (
        4,
        (),
        FAR - 1,
        False,
        False,
        [],
    )
    assert bench.now == said.now_ms
    bench.check(
        waiting={"far": FAR},
        body={**BODIES, "far": "A-", "rfar": "A-"},
        stats={"promoted": 2},
        lisa=G(
            ready=[Row("w1", 10), Row("r1", 20, 2), Row("w2", 30), Row("r2", 40, 3)],
            retry={"rfar": FAR - 1},
            attempts={"r1": 1, "r2": 2},
            reasons={"r1": "no"},
        ),
    )


def test_messages_due_before_1970_are_promoted(bench: Bench) -> None:
    bench.put(waiting={"w1": -5, "w2": 0}, body=BODIES, lisa=G(retry={"r1": -3}))
    assert bench.call(Promote(TOPIC)).moved == 3
    rows = [Row("w1", -5), Row("r1", -3), Row("w2", 0)]
    bench.check(body=BODIES, stats={"promoted": 2}, lisa=G(ready=rows))


def test_it_is_never_early_by_less_than_a_millisecond_either(bench: Bench) -> None:
    bench.put(lisa=G())
    for n in range(25):
        due = bench.clock() + 3
        bench.store.ask("ZADD", bench.keys.waiting, due, f"m{n}")
        while not bench.call(Promote(TOPIC)).moved:
            pass
        assert bench.clock() >= due


def test_its_now_is_not_ahead_of_the_servers_clock(bench: Bench) -> None:
    """promote compares due times with this time: rounded up, it would promote too early."""
    for _ in range(100):
        now_ms = bench.call(Promote(TOPIC)).now_ms
        seconds, micros = bench.store.ask("TIME")
        assert 1000 * now_ms <= 1_000_000 * int(seconds) + int(micros)


def test_the_next_call_continues_after_the_limit(bench: Bench) -> None:
    bench.put(waiting={"w1": 10, "w2": 30}, body=BODIES, lisa=G(retry={"r1": 20, "r2": 40}))
    said = bench.call(Promote(TOPIC, limit=3))
    assert (said.moved, said.full, said.next_due_ms) == (3, (), 40)
    bench.check(
        body=BODIES,
        stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20), Row("w2", 30)], retry={"r2": 40}),
    )
    said = bench.call(Promote(TOPIC, limit=1))
    assert (said.moved, said.next_due_ms, said.cut_short) == (1, None, True)


def test_a_limit_reached_is_not_a_full_group(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "2"},
        waiting={"w1": 10, "w2": 30},
        body=BODIES,
        lisa=G(retry={"r1": 20, "r2": 40}),
    )
    said = bench.call(Promote(TOPIC, limit=2))
    assert (said.moved, said.full, said.cut_short) == (2, (), True)
    assert bench.call(Promote(TOPIC, limit=2)).full == ("lisa",)


def test_a_single_full_group_leaves_messages_in_waiting(bench: Bench) -> None:
    held = Row("held", 1, 1, "c1")
    bench.put(
        options={"max_ready": "3"},
        waiting={"w1": 10, "w2": 30},
        body={**BODIES, "held": "A-", "old": "A-"},
        lisa=G(ready=[held, Row("old", 2)], retry={"r1": 20, "r2": 40}),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms) == (2, ("lisa",), 30)
    bench.check(
        options={"max_ready": "3"},
        waiting={"w2": 30},
        body={**BODIES, "held": "A-", "old": "A-"},
        stats={"promoted": 1},
        lisa=G(ready=[held, Row("old", 2), Row("w1", 10), Row("r1", 20)], retry={"r2": 40}),
    )


def test_max_ready_drops_no_unread_message(bench: Bench) -> None:
    thirty = {f"m{i:02}": i for i in range(30)}
    bench.put(
        options={"max_ready": "10"}, waiting=thirty, body=dict.fromkeys(thirty, "A-"), lisa=G()
    )
    for _ in range(3):
        bench.call(Promote(TOPIC))
    bench.check(
        options={"max_ready": "10"},
        waiting={m: n for m, n in thirty.items() if n >= 10},
        body=dict.fromkeys(thirty, "A-"),
        stats={"promoted": 10},
        lisa=G(ready=[Row(m, n) for m, n in thirty.items() if n < 10]),
    )


def test_a_full_group_does_not_delay_the_others(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "2"},
        waiting={"w1": 10, "w2": 30},
        body={**BODIES, "old": "A-"},
        lisa=G(),
        audit=G(ready=[Row("old", 1)]),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms) == (3, ("audit",), None)
    bench.check(
        options={"max_ready": "2"},
        body={**BODIES, "old": "A-"},
        stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("w2", 30)]),
        audit=G(ready=[Row("old", 1), Row("w1", 10)], retry={"w2": 30}),
    )


def test_overdue_retries_of_a_full_group_do_not_cut_the_call_short(
    bench: Bench,
) -> None:
    overdue = {f"r{i:04}": i for i in range(300)}
    before = {
        "options": {"max_ready": "1"},
        "body": {**BODIES, **dict.fromkeys([*overdue, "old"], "A-")},
    }
    audit = G(ready=[Row("old", 1)], retry=overdue)
    bench.put(**before, waiting={"w1": 10}, lisa=G(), audit=audit)
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms, said.cut_short) == (1, ("audit",), None, False)
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms, said.cut_short) == (0, ("audit",), None, False)
    bench.check(
        **before,
        stats={"promoted": 1},
        lisa=G(ready=[Row("w1", 10)]),
        audit=G(ready=[Row("old", 1)], retry=overdue | {"w1": 10}),
    )


def test_a_full_group_without_due_messages_is_not_reported(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "1"},
        waiting={"w1": FAR},
        body={**BODIES, "old": "A-"},
        lisa=G(),
        audit=G(ready=[Row("old", 1)]),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms) == (0, (), FAR)


def test_a_full_group_still_reports_messages_past_their_ttl(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "1"},
        body={**BODIES, "old": "A-"},
        expiry={"r1": 25},
        lisa=G(),
        audit=G(ready=[Row("old", 1)], retry={"r1": 20, "r2": 30}),
    )
    assert bench.call(Promote(TOPIC)).expired == ["r1"]


@pytest.mark.parametrize(
    ("groups", "paused"),
    [({"lisa": G()}, True), ({"lisa": G(), "audit": G()}, True), ({}, True), ({}, False)],
)
def test_nothing_moves_while_paused_or_without_a_group(
    bench: Bench, groups: dict[str, G], *, paused: bool
) -> None:
    state: dict[str, Any] = {"waiting": {"w1": 10}, "body": {"w1": "A-"}, **groups}
    state["options"] = {"paused": "1" if paused else "0"}
    bench.put(**state)
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.next_due_ms, said.paused) == (0, None, paused)
    bench.check(**state)


def test_messages_past_their_ttl_are_reported_and_left_for_expire(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30},
        body=BODIES,
        expiry={"w1": 15, "w2": FAR, "r1": 25},
        lisa=G(retry={"r1": 20, "r2": 40}),
        audit=G(retry={"r1": 20}),
    )
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.next_due_ms, sorted(said.expired)) == (3, 10, ["r1", "w1"])
    bench.check(
        waiting={"w1": 10},
        body=BODIES,
        expiry={"w1": 15, "w2": FAR, "r1": 25},
        stats={"promoted": 1},
        lisa=G(ready=[Row("w2", 30), Row("r2", 40)], retry={"r1": 20}),
        audit=G(ready=[Row("w2", 30)], retry={"r1": 20}),
    )


def test_one_call_takes_at_most_250_steps(bench: Bench) -> None:
    many = {f"m{i:04}": i for i in range(600)}
    bench.put(waiting=many, body=dict.fromkeys(many, "A-"), lisa=G(), audit=G())
    said = bench.call(Promote(TOPIC, limit=10_000))
    assert (said.moved, said.cut_short, said.next_due_ms) == (250, True, 125)


def test_waiting_and_retry_share_the_steps_of_a_call(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30}, body=BODIES, lisa=G(retry={"r1": 20, "r2": 40}), audit=G()
    )
    said = bench.call(Promote(TOPIC, limit=4))
    assert (said.moved, said.full, said.next_due_ms) == (4, (), 30)
    bench.check(
        body=BODIES,
        stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20)], retry={"w2": 30, "r2": 40}),
        audit=G(ready=[Row("w1", 10), Row("w2", 30)]),
    )
    assert bench.call(Promote(TOPIC, limit=4)).moved == 2
    bench.check(
        body=BODIES,
        stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20), Row("w2", 30), Row("r2", 40)]),
        audit=G(ready=[Row("w1", 10), Row("w2", 30)]),
    )


@pytest.mark.parametrize(("stored", "interval_ms"), [({}, 0), ({"promote_interval": "2"}, 2)])
@pytest.mark.parametrize("waiting", [{}, {"a": 1}, {"a": FAR}])
def test_it_returns_the_interval(
    bench: Bench, stored: dict[str, str], interval_ms: int, waiting: dict[str, int]
) -> None:
    bench.put(options=stored, waiting=waiting, body=dict.fromkeys(waiting, "A-"), lisa=G())
    assert bench.call(Promote(TOPIC)).interval_ms == interval_ms


@pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])
def test_it_returns_how_much_was_promoted_so_far(bench: Bench, groups: tuple[str, ...]) -> None:
    """A manager that moves nothing notices that another one does."""
    bench.put(
        stats={"promoted": 5},
        waiting={"a": 1, "b": 2, "c": FAR},
        body=dict.fromkeys("abc", "A-"),
        **{group: G() for group in groups},
    )
    results = [bench.call(Promote(TOPIC)) for _ in range(2)]
    assert [(one.moved, one.total) for one in results] == [(2 * len(groups), 7), (0, 7)]


def test_an_unreadable_interval_is_an_error_of_its_topic(bench: Bench) -> None:
    bench.put(options={"promote_interval": "soon"}, lisa=G())
    with pytest.raises(LisaError):
        bench.call(Promote(TOPIC))


def carried(bench: Bench) -> dict[str, list[bytes]]:
    """The fields of each ready entry behind its id and due time, by message id."""
    found = bench.store.ask("XRANGE", bench.keys.group("lisa").ready, "-", "+")
    return {fields[1].decode(): fields[4:] for _, fields in found}


def test_entries_carry_the_short_bodies_of_expected_messages(bench: Bench) -> None:
    long = "A-" + "x" * BYTES_IN_ENTRY
    bench.put(
        options={"ack_timeout": "7000"},
        waiting={"short": 1, "unexpected": 2, "long": 3, "gone": 4, "far": FAR},
        body={"short": "A-", "unexpected": "A-", "long": long, "far": "A-"},
        lisa=G(),
    )
    body = bench.store.ask("GET", bench.keys.body("short"))
    said = bench.call(Promote(TOPIC, expected=["far", "short", "long", "gone", "never"]))
    assert (said.moved, said.next_ids) == (4, ["far"])
    short = [b"ack", b"7000", b"body", body]
    assert carried(bench) == {"short": short, "unexpected": [], "long": [], "gone": []}


def test_a_body_of_the_largest_size_is_carried(bench: Bench) -> None:
    head = len(envelope("A-"))
    bodies = {
        "most": "A-" + "x" * (BYTES_IN_ENTRY - head),
        "more": "A-" + "x" * (BYTES_IN_ENTRY + 1 - head),
    }
    bench.put(waiting={"most": 1, "more": 2}, body=bodies, lisa=G())
    bench.call(Promote(TOPIC, expected=["most", "more"]))
    assert [bool(fields) for fields in carried(bench).values()] == [True, False]


UNUSUAL: dict[str, dict[str, Any]] = {
    "ttl": {"expiry": {"other": FAR}},
    "journal": {"options": {"journal": "1"}},
    "two groups": {"audit": G()},
    "retry": {"waiting": {}, "lisa": G(retry={"w1": 1}, attempts={"w1": 1})},
    "backlog": {"lisa": G(ready=[Row(f"b{n}", 1) for n in range(BODIES_IN_ENTRIES)])},
}


@pytest.mark.parametrize("state", UNUSUAL.values(), ids=UNUSUAL)
def test_entries_carry_no_bodies_in_unusual_states(bench: Bench, state: dict[str, Any]) -> None:
    """A consumer must then ask when it opens them, or they would use memory in vain."""
    bench.put(**{"waiting": {"w1": 1}, "body": BODIES, "lisa": G(), **state})
    assert bench.call(Promote(TOPIC, expected=["w1"])).moved >= 1
    assert b"body" not in carried(bench)["w1"]


@pytest.mark.parametrize(
    ("due", "told"), [(0, 1), (1, 1), (2, 3), (10, 15), (16, 24), (50, 24), (51, 24)]
)
def test_it_tells_what_to_expect_next(bench: Bench, due: int, told: int) -> None:
    waiting = {f"m{n:02}": n + 1 for n in range(due)} | {f"x{n:02}": FAR + n for n in range(25)}
    bench.put(waiting=waiting, body=dict.fromkeys(waiting, "A-"), lisa=G())
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.next_due_ms) == (due, FAR)
    assert said.next_ids == [f"x{n:02}" for n in range(told)]
