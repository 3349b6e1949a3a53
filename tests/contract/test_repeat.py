"""A call repeated after a lost reply changes nothing and returns the first answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions import loader
from lisa.core.transitions.clear import Clear
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.open import Open
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.set_layout import SetLayout
from tests.contract.bench import TOPIC, item
from tests.contract.samples import BUSY, FANNED, FAR, HELD, LIVE, SAMPLES, Sample, comparable
from tests.contract.state import G, Row, envelope
from tests.rows import enqueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.transitions.base import Transition
    from tests.contract.bench import Bench


@dataclass(frozen=True)
class Case:
    state: dict[str, Any]
    make: Callable[[Bench], Transition[Any]]


def sending(mode: OnDuplicate) -> Callable[[Bench], Transition[Any]]:
    batch = [
        item("a", "+0", "one", ttl_ms=60_000),
        item("n", "+0"),
        item("m", str(FAR), policy="5"),
        item("n", "7", "two"),
    ]
    return lambda _: enqueue(TOPIC, "A" * 8, batch, mode)


def sampled(sample: Sample) -> Case:
    return Case(sample.state, lambda bench: sample.make(bench, sample.ids))


CASES: dict[str, Case] = {
    **{name: sampled(sample) for name, sample in SAMPLES.items()},
    "clear, a shard that is in use": Case(
        {"options": {"accepts": "4"}, "lisa": HELD}, lambda _: Clear(TOPIC, 3, ("lisa",))
    ),
    "ack of several groups": Case(FANNED, lambda bench: SAMPLES["ack"].make(bench, ("a", "b"))),
    "configure, another number of shards": Case(
        {"options": {"layout": "3:4:1:", "shards": "4"}},
        lambda _: Configure(TOPIC, {"shards": "8"}),
    ),
    "set_layout, an older number is forgotten": Case(
        {"options": {"layout": "3:4:2,1:", "emptied:2": "5"}},
        lambda _: SetLayout(TOPIC, "forget", 3, [2]),
    ),
    "set_layout, a layout numbered anew": Case(
        {"options": {"layout": "3:4:1:16", "emptied:1": "5"}},
        lambda _: SetLayout(TOPIC, "renumber", 7, [1, 4, 8]),
    ),
    "set_layout, a layout lost as a whole": Case(
        {}, lambda _: SetLayout(TOPIC, "renumber", 0, [1, 4])
    ),
    "configure, paused and unlimited": Case(
        {}, lambda _: Configure(TOPIC, {"paused": "1", "capacity": None})
    ),
    "configure, declared": Case(
        {"options": {"max_ready": "5"}},
        lambda _: Configure(TOPIC, {"max_ready": "7", "ack_timeout": "900"}, declared=True),
    ),
    "enqueue, new": Case({"lisa": G()}, sending(OnDuplicate.KEEP)),
    "enqueue, keep": Case({"body": {"a": "B-"}, "waiting": {"a": 1}}, sending(OnDuplicate.KEEP)),
    "enqueue, reject": Case({"body": {"a": "B-"}, "lisa": HELD}, sending(OnDuplicate.REJECT)),
    "enqueue, replace": Case({"body": {"a": "B-"}, "lisa": HELD}, sending(OnDuplicate.REPLACE)),
    "open of what is gone": Case(
        {"lisa": HELD}, lambda bench: Open(TOPIC, "lisa", [bench.opening("a")])
    ),
    "open while paused": Case(
        {**BUSY, "options": {"paused": "1"}},
        lambda bench: Open(TOPIC, "lisa", [bench.opening("b"), bench.opening("a")]),
    ),
    "reschedule, to several times": Case(
        {
            "waiting": {"c": 5},
            "body": LIVE,
            "expiry": {"a": FAR, "c": FAR},
            "lisa": G(ready=[Row("a", 1)], retry={"b": 1}, attempts={"b": 1}),
        },
        lambda _: Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR)), ("c", str(FAR + 1))]),
    ),
    "restore, with policies and states": Case(
        {"body": {"a": "B-"}, "lisa": G()},
        lambda _: Restore(
            TOPIC,
            [
                RestoreItem("a", envelope("A-"), 5),
                RestoreItem("n", envelope("A-"), 5, FAR, "0"),
                RestoreItem(
                    "m", envelope("A-"), 5, group_states=(RestoreState("lisa", "garbage", 9, 2),)
                ),
            ],
        ),
    ),
    "retry, and discard": Case(
        BUSY,
        lambda bench: Fail(
            TOPIC,
            "lisa",
            [
                Failure(*bench.receipt("a"), "boom"),
                Failure(*bench.receipt("b"), "boom", "discard"),
            ],
        ),
    ),
}


def test_no_script_is_left_out() -> None:
    assert {name.split()[0].rstrip(",") for name in CASES} == set(loader.names())


@pytest.mark.parametrize("journal", [{}, {"journal": "1"}], ids=["plain", "journaled"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bench", ["valkey", "usual", "redis", "fake"], indirect=True)
def test_a_repeated_call_has_no_further_effect(
    bench: Bench, name: str, journal: dict[str, str]
) -> None:
    case = CASES[name]
    bench.put(**{**case.state, "options": {**case.state.get("options", {}), **journal}})
    transition = case.make(bench)
    first = bench.call(transition)
    once = comparable(bench)
    second = bench.call(transition)
    assert comparable(bench) == once
    if SAMPLES[transition.script].repeats_its_answer:
        assert second == first
