"""absorb and clear: merge and delete the shards that a topic no longer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.absorb import Absorb
from lisa.core.transitions.clear import Clear
from tests.contract.bench import TOPIC
from tests.contract.state import G, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
LEFT = {"accepts": "-3"}


COUNTERS = {"sent": 4, "acked@lisa": 2}


def absorb(
    bench: Bench, number: int = 3, count: int = 8, counters: Mapping[str, int] = COUNTERS
) -> bool:
    merged = bench.store.keys.topic(TOPIC).history + ":merged"
    return bench.call(Absorb(TOPIC, number, count, counters, {"0of8": 7}, merged))


def test_a_topic_absorbs_the_counters_of_its_former_shards(bench: Bench) -> None:
    bench.put(options={"layout": "3:4:1:8,2"}, stats={"sent": 3, "promoted": 1})
    assert absorb(bench)
    bench.check(
        options={"layout": "3:4:1:2", "removed:8": "1", "journaled:0of8": "7"},
        stats={"sent": 7, "promoted": 1, "acked@lisa": 2},
    )
    assert not absorb(bench)


def test_a_topic_keeps_the_highest_lateness_of_each_group(bench: Bench) -> None:
    """The topic's own or that of its former shards, by value; they are not added up."""
    own = {"late_max@lower": 10_000, "late_max@higher": 9_999, "late_max@kept": 5_000}
    bench.put(options={"layout": "3:4:1:8"}, stats={"late:u@lower": 1, **own})
    absorbed = {"late_max@lower": 9_999, "late_max@higher": 10_000, "late_max@new": 2_000}
    assert absorb(bench, counters={"late:u@lower": 2, **absorbed})
    bench.check(
        options={"layout": "3:4:1:", "removed:8": "1", "journaled:0of8": "7"},
        stats={
            "late:u@lower": 3,
            "late_max@lower": 10_000,
            "late_max@higher": 10_000,
            "late_max@kept": 5_000,
            "late_max@new": 2_000,
        },
    )


@pytest.mark.parametrize(("number", "count"), [(2, 8), (4, 8), (3, 4), (3, 1), (3, 16)])
def test_a_count_in_use_or_of_another_layout_is_not_absorbed(
    bench: Bench, number: int, count: int
) -> None:
    state: dict[str, Any] = {"options": {"layout": "3:4:1:8"}, "stats": {"sent": 3}}
    bench.put(**state)
    assert not absorb(bench, number, count)
    bench.check(**state)


def test_all_keys_of_an_empty_shard_are_deleted(bench: Bench) -> None:
    bench.put(options=LEFT, stats={"sent": 3}, consumers={"c1": "{}"}, lisa=G())
    assert bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check()


@pytest.mark.parametrize(
    "state",
    [
        {"options": {"accepts": "3"}, "lisa": G()},
        {"options": {"accepts": "-4"}, "lisa": G()},
        {"options": LEFT, "waiting": {"m": FAR}, "body": {"m": "A-"}, "lisa": G()},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(ready=[Row("m", 1)])},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(retry={"m": FAR})},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(garbage={"m": 1})},
        {"options": LEFT, "lisa": G(), "audit": G()},
    ],
    ids=["open", "closed by a later layout", "waiting", "ready", "retry", "garbage", "new group"],
)
def test_a_shard_in_use_or_with_messages_is_not_cleared(
    bench: Bench, state: dict[str, Any]
) -> None:
    bench.put(**state)
    assert not bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check(**state)


@pytest.mark.parametrize("accepts", [0, 4])
def test_all_keys_of_an_empty_topic_are_deleted(bench: Bench, accepts: int) -> None:
    options = {"capacity": "9", **({"accepts": str(accepts)} if accepts else {})}
    bench.put(options=options, stats={"sent": 3}, consumers={"c1": "{}"})
    assert bench.call(Clear(TOPIC, accepts, is_whole_topic=True))
    bench.check()


@pytest.mark.parametrize(
    "state",
    [
        {"waiting": {"m": FAR}, "body": {"m": "A-"}},
        {"options": {"accepts": "1"}},
        {"lisa": G()},
        {"body": {"m": "A-"}, "lisa": G(ready=[Row("m", 1)])},
    ],
    ids=["waiting", "another layout", "new group", "ready in a new group"],
)
def test_a_topic_in_use_is_not_cleared(bench: Bench, state: dict[str, Any]) -> None:
    bench.put(**state)
    assert not bench.call(Clear(TOPIC, 0, is_whole_topic=True))
    bench.check(**state)
