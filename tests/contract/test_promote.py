"""promote: waiting and retry -> ready, when due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
BODIES = {"w1": "A-", "w2": "A-", "r1": "A-", "r2": "A-"}


def test_what_is_due_is_merged_by_due_and_the_rest_stays(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30, "far": FAR}, body={**BODIES, "far": "A-", "rfar": "A-"},
        lisa=G(retry={"r1": 20, "r2": 40, "rfar": FAR - 1}, attempts={"r1": 1, "r2": 2},
               reasons={"r1": "no"}),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms, said.paused, said.cut_short, said.expired) == (
        4, 0, FAR - 1, False, False, [],
    )  # fmt: skip
    assert bench.now == said.now_ms
    bench.check(
        waiting={"far": FAR}, body={**BODIES, "far": "A-", "rfar": "A-"}, stats={"promoted": 2},
        lisa=G(
            ready=[Row("w1", 10), Row("r1", 20, 2), Row("w2", 30), Row("r2", 40, 3)],
            retry={"rfar": FAR - 1}, attempts={"r1": 1, "r2": 2}, reasons={"r1": "no"},
        ),
    )  # fmt: skip


def test_what_was_due_before_1970_moves_like_any_other(bench: Bench) -> None:
    bench.put(waiting={"w1": -5, "w2": 0}, body=BODIES, lisa=G(retry={"r1": -3}))
    assert bench.call(Promote(TOPIC)).moved == 3
    rows = [Row("w1", -5), Row("r1", -3), Row("w2", 0)]
    bench.check(body=BODIES, stats={"promoted": 2}, lisa=G(ready=rows))


def test_it_is_never_early(bench: Bench) -> None:
    bench.call(Promote(TOPIC))  # the server knows the script from here on
    due = bench.clock() + 60
    bench.put(waiting={"a": due}, body={"a": "A-"}, lisa=G())
    while not (said := bench.call(Promote(TOPIC))).moved:
        assert said.now_ms < due
        assert said.next_due_ms == due
    assert said.now_ms >= due
    assert bench.clock() >= due


def test_it_is_never_early_by_less_than_a_millisecond_either(bench: Bench) -> None:
    bench.put(lisa=G())
    for n in range(25):
        due = bench.clock() + 3
        bench.store.ask("ZADD", bench.keys.waiting, due, f"m{n}")
        while not bench.call(Promote(TOPIC)).moved:
            pass
        assert bench.clock() >= due


def test_its_now_is_not_ahead_of_the_servers_clock(bench: Bench) -> None:
    """By which it judges what is due: rounded up, it would be by part of a millisecond."""
    for _ in range(100):
        now_ms = bench.call(Promote(TOPIC)).now_ms
        seconds, micros = bench.store.ask("TIME")
        assert 1000 * now_ms <= 1_000_000 * int(seconds) + int(micros)


def test_the_limit_cuts_and_the_next_call_goes_on(bench: Bench) -> None:
    bench.put(waiting={"w1": 10, "w2": 30}, body=BODIES, lisa=G(retry={"r1": 20, "r2": 40}))
    said = bench.call(Promote(TOPIC, limit=3))
    assert (said.moved, said.full, said.next_due_ms) == (3, 0, 40)
    bench.check(
        body=BODIES, stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20), Row("w2", 30)], retry={"r2": 40}),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC, limit=1))
    assert (said.moved, said.next_due_ms, said.cut_short) == (1, None, True)


def test_a_limit_reached_is_not_a_full_group(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "2"}, waiting={"w1": 10, "w2": 30}, body=BODIES,
        lisa=G(retry={"r1": 20, "r2": 40}),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC, limit=2))
    assert (said.moved, said.full, said.cut_short) == (2, 0, True)
    assert bench.call(Promote(TOPIC, limit=2)).full == 1


def test_one_full_group_leaves_the_rest_where_it_is(bench: Bench) -> None:
    held = Row("held", 1, 1, "c1")
    bench.put(
        options={"max_ready": "3"}, waiting={"w1": 10, "w2": 30},
        body={**BODIES, "held": "A-", "old": "A-"},
        lisa=G(ready=[held, Row("old", 2)], retry={"r1": 20, "r2": 40}),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms) == (2, 1, 30)
    bench.check(
        options={"max_ready": "3"}, waiting={"w2": 30},
        body={**BODIES, "held": "A-", "old": "A-"}, stats={"promoted": 1},
        lisa=G(ready=[held, Row("old", 2), Row("w1", 10), Row("r1", 20)], retry={"r2": 40}),
    )  # fmt: skip


def test_no_unread_message_is_dropped_for_a_bound(bench: Bench) -> None:
    thirty = {f"m{i:02}": i for i in range(30)}
    bench.put(options={"max_ready": "10"}, waiting=thirty, body=dict.fromkeys(thirty, "A-"),
              lisa=G())  # fmt: skip
    for _ in range(3):
        bench.call(Promote(TOPIC))
    bench.check(
        options={"max_ready": "10"}, waiting={m: n for m, n in thirty.items() if n >= 10},
        body=dict.fromkeys(thirty, "A-"), stats={"promoted": 10},
        lisa=G(ready=[Row(m, n) for m, n in thirty.items() if n < 10]),
    )  # fmt: skip


def test_every_group_gets_what_is_due(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30}, body=BODIES, lisa=G(retry={"r1": 20}, attempts={"r1": 1}),
        audit=G(),
    )  # fmt: skip
    assert bench.call(Promote(TOPIC)).moved == 5
    bench.check(
        body=BODIES, stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20, 2), Row("w2", 30)], attempts={"r1": 1}),
        audit=G(ready=[Row("w1", 10), Row("w2", 30)]),
    )  # fmt: skip


def test_a_full_group_among_several_holds_up_nobody(bench: Bench) -> None:
    bench.put(
        options={"max_ready": "2"}, waiting={"w1": 10, "w2": 30}, body={**BODIES, "old": "A-"},
        lisa=G(), audit=G(ready=[Row("old", 1)]),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.full, said.next_due_ms) == (3, 1, 30)
    bench.check(
        options={"max_ready": "2"}, body={**BODIES, "old": "A-"}, stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("w2", 30)]),
        audit=G(ready=[Row("old", 1), Row("w1", 10)], retry={"w2": 30}),
    )  # fmt: skip


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


def test_what_is_past_its_ttl_is_named_and_left_for_expire(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30}, body=BODIES, expiry={"w1": 15, "w2": FAR, "r1": 25},
        lisa=G(retry={"r1": 20, "r2": 40}), audit=G(retry={"r1": 20}),
    )  # fmt: skip
    said = bench.call(Promote(TOPIC))
    assert (said.moved, said.next_due_ms, sorted(said.expired)) == (3, 10, ["r1", "w1"])
    bench.check(
        waiting={"w1": 10}, body=BODIES, expiry={"w1": 15, "w2": FAR, "r1": 25},
        stats={"promoted": 1},
        lisa=G(ready=[Row("w2", 30), Row("r2", 40)], retry={"r1": 20}),
        audit=G(ready=[Row("w2", 30)], retry={"r1": 20}),
    )  # fmt: skip


def test_one_call_does_at_most_250_steps_whatever_it_is_asked(bench: Bench) -> None:
    many = {f"m{i:04}": i for i in range(600)}
    bench.put(waiting=many, body=dict.fromkeys(many, "A-"), lisa=G(), audit=G())
    said = bench.call(Promote(TOPIC, limit=10_000))
    assert (said.moved, said.cut_short, said.next_due_ms) == (250, True, 125)


def test_what_waits_and_what_is_retried_share_the_steps_of_a_call(bench: Bench) -> None:
    bench.put(
        waiting={"w1": 10, "w2": 30}, body=BODIES, lisa=G(retry={"r1": 20, "r2": 40}), audit=G()
    )
    said = bench.call(Promote(TOPIC, limit=4))
    assert (said.moved, said.full, said.next_due_ms) == (4, 0, 30)
    bench.check(
        body=BODIES, stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20)], retry={"w2": 30, "r2": 40}),
        audit=G(ready=[Row("w1", 10), Row("w2", 30)]),
    )  # fmt: skip
    assert bench.call(Promote(TOPIC, limit=4)).moved == 2
    bench.check(
        body=BODIES, stats={"promoted": 2},
        lisa=G(ready=[Row("w1", 10), Row("r1", 20), Row("w2", 30), Row("r2", 40)]),
        audit=G(ready=[Row("w1", 10), Row("w2", 30)]),
    )  # fmt: skip
