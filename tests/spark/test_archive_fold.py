"""The fold of events into messages, compared with a reference in plain Python, and single cases."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lisa.pipeline.archive.fold import fold, fold_lives, host_of
from lisa.pipeline.archive.lives import lives, of_lives, with_gone
from lisa.pipeline.archive.schemas import MESSAGES_SCHEMA
from tests.spark.stories import Event, Stories, envelope, event, expected, frame, told


@pytest.mark.parametrize(("seed", "sharded"), [(1, True), (2, False)])
def test_fold_agrees_with_a_plain_python_fold(
    spark: SparkSession, seed: int, *, sharded: bool
) -> None:
    events = [*Stories("orders", seed).extend(400), *Stories("a:b", seed).extend(80)]
    assert len({one["state"] for one in events}) == 15
    shuffled = sorted(events, key=lambda one: hash((one["id"], one["number"])))
    several = frame(spark, [*shuffled, *shuffled[:50]])  # repeated events are harmless
    made = fold(several) if sharded else fold_lives(lives(several, sharded=False))
    assert made.schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    found, wanted = told(made), expected(events)
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        assert found[key] == one, key
    assert {one["state"] for one in found.values()} >= {"waiting", "acked", "cancelled", "lost"}
    if not sharded:
        return
    tagged = with_gone(lives(several))
    gone = {tuple(row) for row in tagged.where("gone").select("topic", "id", "life").collect()}
    assert gone == {key for key, one in found.items() if one["settled"]}
    live = made.where("not settled").select("topic", "id", sf.col("token").alias("life"))
    kept = of_lives(several, live).select("topic", "id", "life", "at", "seq")
    expected_events = tagged.where("not gone").select(*kept.columns)
    assert sorted(map(str, kept.collect())) == sorted(map(str, expected_events.collect()))


SENT: dict[str, Any] = {"id": "m", "state": "sent", "due": 9000}
SENT["envelope"] = envelope("tokentok", {"a": 1})


def at(ms: int, number: int, **fields: Any) -> Event:
    return event("orders", ms, 0, number, **fields)


def test_damaged_and_unknown_envelopes_are_kept_as_bodies(spark: SparkSession) -> None:
    damaged = [
        *(b"", b"1", b"1tokentok-j00", b"1tokentok-jzzzz{}", b"1tokentok-jffff{}"),
        *(b"1tokentok-x0000{}", b"1tokentok-j0003{}", b"1tokentok-j0002[]{}"),
        b"2tokentok-j0000{}",  # another version
    ]
    token_only = b"1\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8-j0000{}"
    events = [
        at(1000 + i, i + 1, **SENT | {"id": f"m{i}", "envelope": data})
        for i, data in enumerate([*damaged, token_only])
    ]
    found = {row.id: row for row in fold(frame(spark, events)).collect()}
    assert len(found) == len(events)
    for i, data in enumerate(damaged):
        row = found[f"m{i}"]
        assert (row.kind, row.headers, row.body) == (None, None, data)
    assert row.token == "tokentok"
    assert found[f"m{len(damaged)}"].kind == "j"


def test_a_restored_message_has_its_restored_state(spark: SparkSession) -> None:
    back = SENT | {"state": "restored", "attempt": 2, "reason": "boom"}
    events = [
        SENT,
        {"id": "m", "group": "a", "state": "acked", "attempt": 1},
        {"id": "m", "group": "b", "state": "in_flight", "attempt": 3},
        back | {"group": "b", "place": "retry"},
        back | {"group": "c", "place": "garbage", "attempt": 5},
    ]
    [found] = fold(frame(spark, [at(1000 + i, i + 1, **e) for i, e in enumerate(events)])).collect()
    assert (found.state, found.settled, found.attempts) == ("retry", False, 5)
    assert [(g.group, g.state, g.attempts) for g in found.groups] == [
        *(("a", "acked", 0), ("b", "retry", 2), ("c", "garbage", 5))
    ]


def test_hosts_of_actors(spark: SparkSession) -> None:
    actors = ["manager@a.b:1", "consumer@a:b:9", "gateway/buyer@eu@box:22", "lost", "x@:3", None]
    rows = spark.createDataFrame([(a,) for a in actors], "actor string").select(host_of())
    assert [r[0] for r in rows.collect()] == ["a.b", "a:b", "box", None, None, None]


FIRST = SENT | {"envelope": envelope("firstfir", {"a": 1}), "shard": "0of2"}
SECOND = SENT | {"envelope": envelope("secondse", {"a": 2}), "shard": "1of3"}
END = {"id": "m", "state": "acked", "group": "g", "settled": True}


def stood(rows: DataFrame) -> dict[str | None, tuple[str, bool]]:
    return {row.token: (row.state, row.settled) for row in rows.collect()}


def test_lives_of_an_id_that_moved_to_another_shard(spark: SparkSession) -> None:
    # By the servers' clocks, the second life began before the first one ended.
    events = [at(1000, 1, **FIRST), at(1050, 1, **SECOND), at(1052, 2, shard="0of2", **END)]
    both = {"firstfir": ("acked", True), "secondse": ("waiting", False)}
    assert stood(fold(frame(spark, events))) == both
    # Without a recorded end.
    events = [at(1000, 1, **FIRST), at(5000, 1, **SECOND)]
    assert stood(fold(frame(spark, events))) == both | {"firstfir": ("lost", True)}
    # Restored into another shard.
    back = FIRST | {"shard": "1of3", "state": "restored", "due": 8000}
    events = [
        at(1000, 1, **FIRST),
        at(2000, 2, id="m", shard="0of2", state="in_flight", group="g", attempt=1),
        at(9000, 1, **back | {"group": "g", "place": "retry", "attempt": 2}),
    ]
    assert stood(fold(frame(spark, events))) == {"firstfir": ("retry", False)}
    ended = fold(frame(spark, [*events, at(9900, 2, shard="1of3", **END)]))
    assert stood(ended) == {"firstfir": ("acked", True)}
