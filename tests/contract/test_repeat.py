"""Any call repeated after a lost reply leaves the state as it was after the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core import scripts
from lisa.core.transitions.ack import Ack
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Open
from lisa.core.transitions.place import Place as OpenPlace
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.prune import Prune
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.restore import Place, Restore, RestoreItem
from lisa.core.transitions.retry import Failure, Retry
from lisa.core.transitions.trim import Trim
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, item
from tests.contract.state import FOREIGN, G, Row, envelope
from tests.rows import enqueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.transitions.base import Transition
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
LONG = 60_000
COUNTED_AGAIN = ("stale@lisa", "cleared@lisa", "duplicate")  # refusals are counted, each time


@dataclass(frozen=True)
class Case:
    state: dict[str, Any]
    make: Callable[[Bench], Transition[Any]]


LIVE = dict.fromkeys("abc", "A-")
HELD = G(ready=[Row("a", 1, 2, "c1"), Row("b", 2, 1, "c1")], attempts={"a": 1}, leases={"a": FAR})
BUSY: dict[str, Any] = {
    "waiting": {"c": FAR}, "body": LIVE, "policy": {"a": "0,0"}, "expiry": {"c": FAR}, "lisa": HELD,
}  # fmt: skip
FANNED = {**BUSY, "audit": G(ready=[Row("a", 1), Row("b", 2, 1, "c9")])}
DEAD = {"body": LIVE, "lisa": G(garbage={"a": 5, "b": 6}, attempts={"a": 2}, reasons={"a": "no"})}
LATE = {
    "body": LIVE, "lisa": G(ready=[Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c1", LONG)],
                            leases={"b": 5}),
}  # fmt: skip


def sending(mode: OnDuplicate) -> Callable[[Bench], Transition[Any]]:
    batch = [
        item("a", "+0", "one", ttl_ms=60_000), item("n", "+0"), item("m", str(FAR), policy="5"),
        item("n", "7", "two"),
    ]  # fmt: skip
    return lambda _: enqueue(TOPIC, "A" * 8, batch, mode)


def acking(bench: Bench) -> Transition[Any]:
    return Ack(TOPIC, "lisa", [bench.settlement("a"), bench.settlement("b")])


CASES: dict[str, Case] = {
    "ack": Case(BUSY, acking),
    "ack of several groups": Case(FANNED, acking),
    "cancel": Case(BUSY, lambda _: Cancel(TOPIC, ["a", "c", "x"])),
    "configure, another number of shards": Case(
        {"options": {"layout": "3:4:1:", "shards": "4"}},
        lambda _: Configure(TOPIC, {"shards": "8"}),
    ),
    "place": Case({}, lambda _: OpenPlace(TOPIC, "close", 3)),
    "place, an older number is forgotten": Case(
        {"options": {"layout": "3:4:2,1:", "emptied:2": "5"}},
        lambda _: OpenPlace(TOPIC, "forget", 3, [2]),
    ),
    "place, a layout numbered anew": Case(
        {"options": {"layout": "3:4:1:16", "emptied:1": "5"}},
        lambda _: OpenPlace(TOPIC, "renumber", 7, [1, 4, 8]),
    ),
    "place, a layout lost as a whole": Case(
        {}, lambda _: OpenPlace(TOPIC, "renumber", 0, [1, 4])
    ),
    "configure": Case({}, lambda _: Configure(TOPIC, {"paused": "1", "capacity": None})),
    "configure, declared": Case(
        {"options": {"max_ready": "5"}},
        lambda _: Configure(TOPIC, {"max_ready": "7", "ack_timeout": "900"}, declared=True),
    ),
    "declare": Case(BUSY, lambda _: Declare(TOPIC, "audit")),
    "enqueue, new": Case({"lisa": G()}, sending(OnDuplicate.KEEP)),
    "enqueue, keep": Case({"body": {"a": "B-"}, "waiting": {"a": 1}}, sending(OnDuplicate.KEEP)),
    "enqueue, reject": Case({"body": {"a": "B-"}, "lisa": HELD}, sending(OnDuplicate.REJECT)),
    "enqueue, replace": Case({"body": {"a": "B-"}, "lisa": HELD}, sending(OnDuplicate.REPLACE)),
    "expire": Case(
        {"body": LIVE, "expiry": {"a": 5, "b": 5, "x": 5}, "lisa": G(ready=[Row("a", 1, 1, "c1")],
                                                                    retry={"b": 3})},
        lambda _: Expire(TOPIC, ["a", "b", "x"], wanted=True),
    ),
    "forget": Case({"consumers": {"c1": "{}", "c2": "{}"}, "body": LIVE, "lisa": HELD},
                   lambda _: Forget(TOPIC, "lisa", ["c1", "c2"], 0)),
    "inspect": Case(FANNED, lambda _: Inspect(TOPIC, ["a", "b", "c", "x"])),
    "mend": Case({"body": LIVE, "lisa": G(entries={"a": None}, retry={"b": 1}, garbage={"b": 1}),
                  "waiting": {"x": 1}}, lambda _: Mend(TOPIC, ["a", "b", "c", "x"])),
    "open": Case(BUSY, lambda bench: Open(TOPIC, "lisa", [bench.opening("a")])),
    "open of what is gone": Case(
        {"lisa": HELD}, lambda bench: Open(TOPIC, "lisa", [bench.opening("a")])
    ),
    "open while paused": Case(
        {**BUSY, "options": {"paused": "1"}},
        lambda bench: Open(TOPIC, "lisa", [bench.opening("b"), bench.opening("a")]),
    ),
    "promote": Case({"waiting": {"a": 1, "c": FAR}, "body": LIVE, "lisa": G(retry={"b": 2}),
                     "audit": G()}, lambda _: Promote(TOPIC)),
    "prune": Case({"options": {"journal": "1"}, "waiting": {"a": 1}, "body": LIVE, "lisa": G()},
                  lambda _: Prune(TOPIC)),
    "pull": Case({"body": LIVE, "lisa": G(ready=[Row("a", 1)])},
                 lambda _: Pull(TOPIC, "lisa", "c1", 10)),
    "purge": Case(DEAD, lambda _: Purge(TOPIC, "lisa", ["a", "x"])),
    "reclaim": Case(LATE, lambda _: Reclaim(TOPIC, "lisa")),
    "release": Case(
        BUSY, lambda bench: Release(TOPIC, "lisa", [bench.receipt("a"), bench.receipt("b")])
    ),
    "requeue": Case(DEAD, lambda _: Requeue(TOPIC, "lisa", ["a", "x"])),
    "reschedule": Case(
        {"waiting": {"c": 5}, "body": LIVE, "expiry": {"a": FAR, "c": FAR},
         "lisa": G(ready=[Row("a", 1)], retry={"b": 1}, attempts={"b": 1})},
        lambda _: Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR)), ("c", str(FAR + 1))]),
    ),
    "restore": Case({"body": {"a": "B-"}, "lisa": G()}, lambda _: Restore(TOPIC, [
        RestoreItem("a", envelope("A-"), 5), RestoreItem("n", envelope("A-"), 5, FAR, "0"),
        RestoreItem("m", envelope("A-"), 5, places=(Place("lisa", "garbage", 9, 2),)),
    ])),
    "retry": Case(BUSY, lambda bench: Retry(TOPIC, "lisa", [
        Failure(*bench.receipt("a"), "boom"), Failure(*bench.receipt("b"), "boom", "discard"),
    ])),
    "trim": Case({"body": LIVE, "lisa": G(ready=[Row("a", 1, 1, FOREIGN)], entries={})},
                 lambda _: Trim(TOPIC, "lisa")),
    "undeclare": Case(FANNED, lambda _: Undeclare(TOPIC, "lisa", ["a", "b"], drop=True)),
    "extend": Case(BUSY, lambda bench: Extend(TOPIC, "lisa", "c1", [bench.receipt("a")])),
}  # fmt: skip


def test_no_script_is_left_out() -> None:
    assert {name.split()[0].rstrip(",") for name in CASES} == set(scripts.names())


@pytest.mark.parametrize("name", CASES)
def test_twice_is_once(bench: Bench, name: str) -> None:
    case = CASES[name]
    bench.put(**case.state)
    transition = case.make(bench)
    first = bench.call(transition)
    once = comparable(bench)
    second = bench.call(transition)
    assert comparable(bench) == once
    if isinstance(transition, Enqueue):
        assert second == first


def comparable(bench: Bench) -> dict[str, Any]:
    state = bench.state()
    stats = {k: n for k, n in state.pop("stats", {}).items() if k not in COUNTED_AGAIN}
    # RESCHEDULED twice is counted twice: the second is as true as the first.
    if "rescheduled" in stats:
        stats["rescheduled"] = "some"
    return {**state, "stats": stats}
