"""renew: in flight, with new leases after the server's clock was changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.renew import Renew
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from tests.contract.bench import Bench

HOUR = 3_600_000
BODIES = {"a": "A-", "b": "A-", "c": "A-"}
SINCE = 30_000  # the clock was set so long ago
LONG = HOUR + 5_000


def idle(bench: Bench) -> list[int]:
    ready = bench.keys.group("lisa").ready
    return [item[2] for item in bench.store.ask("XPENDING", ready, "lisa", "-", "+", 10)]


def test_deliveries_from_before_the_step_are_renewed_once(bench: Bench) -> None:
    ends = bench.clock() - HOUR + 60_000
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c2", LONG), Row("c", 3, 1, "c1", 2_000)]
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
    bench.put(body=BODIES, lisa=G(ready=[Row("b", 2, 1, "c2", LONG)], leases={"b": ends}))
    step = Renew(TOPIC, "lisa", by_ms=-HOUR, since_ms=bench.clock() - SINCE)
    assert [bench.call(step).renewed for _ in range(2)] == [1, 0]
    held = [Row("b", 2, 1, "c2")]
    bench.check(body=BODIES, lisa=G(ready=held, leases={"b": ends - HOUR}))


def test_for_an_unknown_step_only_future_deliveries_are_renewed(
    bench: Bench,
) -> None:
    rows = [Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c2"), Row("c", 3)]
    bench.put(body=BODIES, lisa=G(ready=rows, leases={"b": 5}))
    assert bench.call(Renew(TOPIC, "lisa")) == (None, 0)
    assert idle(bench)[0] >= LONG
    assert [one.id for one in bench.call(Reclaim(TOPIC, "lisa", start="0-0")).moved] == ["a"]


def test_windows_go_to_the_end_and_miss_nothing(bench: Bench) -> None:
    ids = [f"m{i}" for i in range(7)]
    rows = [Row(m, 1, 1, f"c{i % 3}", LONG if i % 2 == 0 else 0) for i, m in enumerate(ids)]
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
    rows = [Row("x", 1, 1, "c1", LONG), Row("a", 2, 1, "c1", LONG)]
    bench.put(body=BODIES, lisa=G(ready=rows, entries={"a": 1}, leases={"a": 5}))
    ready = bench.keys.group("lisa").ready
    first = bench.store.ask("XRANGE", ready, "-", "+", "COUNT", 1)[0][0]
    bench.store.ask("XDEL", ready, first)
    bench.call(Renew(TOPIC, "lisa", HOUR, bench.clock() - SINCE))
    assert bench.state()["lisa:leases"] == {"a": 5 + HOUR}
