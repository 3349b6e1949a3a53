"""promote: waiting and retry -> ready, when due."""

from typing import Any

import pytest

from lisa.core.model.errors import LisaError
from lisa.core.model.options import CARRIED_BYTES, CARRIED_ENTRIES
from lisa.core.transitions.promote import Promote, Promoted
from tests.contract.bench import TOPIC, Bench
from tests.contract.state import FAR, G, Row, envelope

OLD = Row("o", 1)
"""It fills a group."""


def promote(bench: Bench, limit: int = 250, **more: Any) -> Promoted:
    return bench.call(Promote(TOPIC, limit, **more))


def test_due_messages_are_merged_by_due_time(bench: Bench) -> None:
    """Also those due before 1970."""
    failed: dict[str, Any] = {"attempts": {"b": 1, "d": 2}, "reasons": {"b": "no"}}
    bench.put(
        waiting={"a": -5, "c": 0, "e": FAR},
        body="abcdef",
        lisa=G(retry={"b": -3, "d": 40, "f": FAR - 1}, **failed),
    )
    said = promote(bench)
    assert (said.moved, said.full, said.next_due_ms) == (4, (), FAR - 1)
    assert (said.paused, said.cut_short, said.expired) == (False, False, [])
    assert bench.now == said.now_ms
    rows = [Row("a", -5), Row("b", -3, 2), Row("c", 0), Row("d", 40, 3)]
    bench.check_change(
        waiting={"e": FAR},
        stats={"promoted": 2},
        lisa=G(ready=rows, retry={"f": FAR - 1}, **failed),
    )


def test_it_is_never_early_by_less_than_a_millisecond_either(bench: Bench) -> None:
    bench.put(lisa=G())
    for n in range(25):
        due = bench.clock() + 3
        bench.store.ask("ZADD", bench.keys.waiting, due, f"m{n}")
        while not promote(bench).moved:
            pass
        assert bench.clock() >= due


def test_its_now_is_not_ahead_of_the_servers_clock(bench: Bench) -> None:
    """promote compares due times with this time: rounded up, it would promote too early."""
    for _ in range(100):
        now_ms = promote(bench).now_ms
        seconds, micros = bench.store.ask("TIME")
        assert 1000 * now_ms <= 1_000_000 * int(seconds) + int(micros)


def test_the_next_call_continues_after_the_limit(bench: Bench) -> None:
    bench.put(waiting={"a": 10, "c": 30}, body="abcd", lisa=G(retry={"b": 20, "d": 40}))
    said = promote(bench, limit=3)
    assert (said.moved, said.full, said.next_due_ms) == (3, (), 40)
    rows = [Row("a", 10), Row("b", 20), Row("c", 30)]
    bench.check_change(waiting=None, stats={"promoted": 2}, lisa=G(ready=rows, retry={"d": 40}))
    said = promote(bench, limit=1)
    assert (said.moved, said.next_due_ms, said.cut_short) == (1, None, True)


def test_a_limit_reached_is_not_a_full_group(bench: Bench) -> None:
    waiting = {"a": 10, "c": 30}
    retry = G(retry={"b": 20, "d": 40})
    bench.put(options={"max_ready": "2"}, waiting=waiting, body="abcd", lisa=retry)
    said = promote(bench, limit=2)
    assert (said.moved, said.full, said.cut_short) == (2, (), True)
    assert promote(bench, limit=2).full == ("lisa",)


def test_a_single_full_group_leaves_messages_in_waiting(bench: Bench) -> None:
    rows = [Row("h", 1, 1, "c1"), Row("o", 2)]
    waiting, retry = {"a": 10, "c": 30}, {"b": 20, "d": 40}
    bench.put(
        options={"max_ready": "3"}, waiting=waiting, body="abcdho", lisa=G(ready=rows, retry=retry)
    )
    said = promote(bench)
    assert (said.moved, said.full, said.next_due_ms) == (2, ("lisa",), 30)
    rows += [Row("a", 10), Row("b", 20)]
    bench.check_change(
        waiting={"c": 30}, stats={"promoted": 1}, lisa=G(ready=rows, retry={"d": 40})
    )


def test_max_ready_drops_no_unread_message(bench: Bench) -> None:
    thirty = {f"m{i:02}": i for i in range(30)}
    bench.put(options={"max_ready": "10"}, waiting=thirty, body=thirty.keys(), lisa=G())
    for _ in range(3):
        promote(bench)
    bench.check_change(
        waiting={m: n for m, n in thirty.items() if n >= 10},
        stats={"promoted": 10},
        lisa=G(ready=[Row(m, n) for m, n in thirty.items() if n < 10]),
    )


def test_a_full_group_does_not_delay_the_others(bench: Bench) -> None:
    waiting = {"a": 10, "c": 30}
    bench.put(
        options={"max_ready": "2"}, waiting=waiting, body="aco", lisa=G(), audit=G(ready=[OLD])
    )
    said = promote(bench)
    assert (said.moved, said.full, said.next_due_ms) == (3, ("audit",), None)
    bench.check_change(
        waiting=None,
        stats={"promoted": 2},
        lisa=G(ready=[Row("a", 10), Row("c", 30)]),
        audit=G(ready=[OLD, Row("a", 10)], retry={"c": 30}),
    )


def test_overdue_retries_of_a_full_group_do_not_cut_the_call_short(bench: Bench) -> None:
    overdue = {f"r{i:04}": i for i in range(300)}
    audit = G(ready=[OLD], retry=overdue)
    body = ["a", "o", *overdue]
    bench.put(options={"max_ready": "1"}, waiting={"a": 10}, body=body, lisa=G(), audit=audit)
    for moved in (1, 0):
        said = promote(bench)
        assert (said.moved, said.full, said.next_due_ms) == (moved, ("audit",), None)
        assert not said.cut_short
    bench.check_change(
        waiting=None,
        stats={"promoted": 1},
        lisa=G(ready=[Row("a", 10)]),
        audit=G(ready=[OLD], retry=overdue | {"a": 10}),
    )


def test_a_full_group_without_due_messages_is_not_reported(bench: Bench) -> None:
    options = {"max_ready": "1"}
    bench.put(options=options, waiting={"a": FAR}, body="ao", lisa=G(), audit=G(ready=[OLD]))
    said = promote(bench)
    assert (said.moved, said.full, said.next_due_ms) == (0, (), FAR)


def test_a_full_group_still_reports_messages_past_their_ttl(bench: Bench) -> None:
    audit = G(ready=[OLD], retry={"b": 20, "d": 30})
    bench.put(options={"max_ready": "1"}, body="bdo", expiry={"b": 25}, lisa=G(), audit=audit)
    assert promote(bench).expired == ["b"]


@pytest.mark.parametrize(
    ("groups", "paused"),
    [({"lisa": G()}, True), ({"lisa": G(), "audit": G()}, True), ({}, True), ({}, False)],
)
def test_nothing_moves_while_paused_or_without_a_group(
    bench: Bench, groups: dict[str, G], *, paused: bool
) -> None:
    bench.put(options={"paused": "01"[paused]}, waiting={"a": 10}, body="a", **groups)
    said = promote(bench)
    assert (said.moved, said.next_due_ms, said.paused) == (0, None, paused)
    bench.check_unchanged()


def test_messages_past_their_ttl_are_reported_and_left_for_expire(bench: Bench) -> None:
    bench.put(
        waiting={"a": 10, "c": 30},
        body="abcd",
        expiry={"a": 15, "c": FAR, "b": 25},
        lisa=G(retry={"b": 20, "d": 40}),
        audit=G(retry={"b": 20}),
    )
    said = promote(bench)
    assert (said.moved, said.next_due_ms, sorted(said.expired)) == (3, 10, ["a", "b"])
    bench.check_change(
        waiting={"a": 10},
        stats={"promoted": 1},
        lisa=G(ready=[Row("c", 30), Row("d", 40)], retry={"b": 20}),
        audit=G(ready=[Row("c", 30)], retry={"b": 20}),
    )


def test_one_call_takes_at_most_250_steps(bench: Bench) -> None:
    many = {f"m{i:04}": i for i in range(600)}
    bench.put(waiting=many, body=many.keys(), lisa=G(), audit=G())
    said = promote(bench, limit=10_000)
    assert (said.moved, said.cut_short, said.next_due_ms) == (250, True, 125)


def test_waiting_and_retry_share_the_steps_of_a_call(bench: Bench) -> None:
    bench.put(waiting={"a": 10, "c": 30}, body="abcd", lisa=G(retry={"b": 20, "d": 40}), audit=G())
    said = promote(bench, limit=4)
    assert (said.moved, said.full, said.next_due_ms) == (4, (), 30)
    rows = [Row("a", 10), Row("b", 20)]
    bench.check_change(
        waiting=None,
        stats={"promoted": 2},
        lisa=G(ready=rows, retry={"c": 30, "d": 40}),
        audit=G(ready=[Row("a", 10), Row("c", 30)]),
    )
    assert promote(bench, limit=4).moved == 2
    bench.check_change(lisa=G(ready=[*rows, Row("c", 30), Row("d", 40)]))


@pytest.mark.parametrize(("stored", "interval_ms"), [({}, 0), ({"promote_interval": "2"}, 2)])
@pytest.mark.parametrize("waiting", [{}, {"a": 1}, {"a": FAR}])
def test_it_returns_the_interval(
    bench: Bench, stored: dict[str, str], interval_ms: int, waiting: dict[str, int]
) -> None:
    bench.put(options=stored, waiting=waiting, body=waiting.keys(), lisa=G())
    assert promote(bench).interval_ms == interval_ms


@pytest.mark.parametrize("groups", [("lisa",), ("lisa", "audit")])
def test_it_returns_how_much_was_promoted_so_far(bench: Bench, groups: tuple[str, ...]) -> None:
    """A manager that moves nothing notices that another one does."""
    waiting = {"a": 1, "b": 2, "c": FAR}
    bench.put(stats={"promoted": 5}, waiting=waiting, body="abc", **dict.fromkeys(groups, G()))
    results = [promote(bench) for _ in range(2)]
    assert [(one.moved, one.total) for one in results] == [(2 * len(groups), 7), (0, 7)]


def test_an_unreadable_interval_is_an_error_of_its_topic(bench: Bench) -> None:
    bench.put(options={"promote_interval": "soon"}, lisa=G())
    with pytest.raises(LisaError):
        promote(bench)


def carried(bench: Bench) -> dict[str, list[bytes]]:
    """The fields of each ready entry behind its id and due time, by message id."""
    found = bench.store.ask("XRANGE", bench.keys.group("lisa").ready, "-", "+")
    return {fields[1].decode(): fields[4:] for _, fields in found}


def test_entries_carry_the_short_envelopes_of_expected_messages(bench: Bench) -> None:
    room = CARRIED_BYTES - len(envelope("A-"))
    most, long = ("A-" + "x" * size for size in (room, room + 1))
    bodies = {"short": "A-", "most": most, "unexpected": "A-", "long": long, "far": "A-"}
    waiting = {"short": 1, "most": 2, "unexpected": 3, "long": 4, "gone": 5, "far": FAR}
    bench.put(options={"ack_timeout": "7000"}, waiting=waiting, body=bodies, lisa=G())
    said = promote(bench, expected=["far", "short", "most", "long", "gone", "never"])
    assert (said.moved, said.next_ids) == (5, ["far"])
    fields = {m: [b"ack", b"7000", b"body", envelope(bodies[m])] for m in ("short", "most")}
    assert carried(bench) == {"unexpected": [], "long": [], "gone": [], **fields}


UNUSUAL: dict[str, dict[str, Any]] = {
    "ttl": {"expiry": {"other": FAR}},
    "journal": {"options": {"journal": "1"}},
    "two groups": {"audit": G()},
    "retry": {"waiting": {}, "lisa": G(retry={"a": 1}, attempts={"a": 1})},
    "deferred": {"waiting": {"b": 1}, "body": "ab", "lisa": G(retry={"a": 1})},
    "backlog": {"lisa": G(ready=[Row(f"b{n}", 1) for n in range(CARRIED_ENTRIES)])},
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_entries_carry_no_envelopes_that_consumers_would_not_use(bench: Bench, case: str) -> None:
    bench.put(**{"waiting": {"a": 1}, "body": "a", "lisa": G(), **UNUSUAL[case]})
    assert promote(bench, expected=["a"]).moved >= 1
    assert b"body" not in carried(bench)["a"]


@pytest.mark.parametrize(
    ("due", "told"), [(0, 1), (1, 1), (2, 3), (10, 15), (16, 24), (50, 24), (51, 24)]
)
def test_it_tells_what_to_expect_next(bench: Bench, due: int, told: int) -> None:
    waiting = {f"m{n:02}": n + 1 for n in range(due)} | {f"x{n:02}": FAR + n for n in range(25)}
    bench.put(waiting=waiting, body=waiting.keys(), lisa=G())
    said = promote(bench)
    assert (said.moved, said.next_due_ms) == (due, FAR)
    assert said.next_ids == [f"x{n:02}" for n in range(told)]
