"""trim: removes only foreign entries from a group's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.trim import Trim, Trimmed
from tests.contract.bench import TOPIC
from tests.contract.state import FOREIGN, G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench


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


def test_windows_go_to_the_end(bench: Bench) -> None:
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
