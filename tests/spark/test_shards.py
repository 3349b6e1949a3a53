"""Sharded topics: rows are sent to all shards and read as one topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.sharding import Topic
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.lookup import known
from tests.shards import Split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

LATER = "timestamp_millis(4102444800000)"


@pytest.fixture
def split(redis_url: str) -> Iterator[Split]:
    made = Split(redis_url)
    yield made
    made.store.close()


def test_rows_are_sent_to_all_shards_and_read_as_one_topic(
    spark: SparkSession, split: Split
) -> None:
    given = {"url": split.url, "topic": "orders", "dedupe_for": "2d"}
    for shards, accepted in ((4, 0), (3, 60)):
        split.into(shards)
        rows = spark.range(0, 60 + accepted, 1, 2).selectExpr(
            "cast(id AS string) AS id", "concat('body ', id) AS body", f"{LATER} AS due"
        )
        with unwrapped():
            rows.write.format("lisa").options(**given).mode("append").save()
        for shard_name in split.layout.current(Topic("orders")):
            assert split.store.drive(split.store.options(shard_name)).dedupe_for.days == 2
    assert split.copies() == sorted(map(str, range(120)))
    assert len(split.waiting()) == 7, "each shard of both layouts has some"
    found = spark.read.format("lisa").option("url", split.url).load()
    assert {(row.topic, row.id) for row in found.select("topic", "id").collect()} == {
        ("orders", str(n)) for n in range(120)
    }
    told = {row.shard for row in found.select("shard").distinct().collect()}
    assert told == {f"{n}of{count}" for count in (3, 4) for n in range(count)}
    one: Any = found.where("id = '7'").select("topic", "body").collect()
    assert [(row.topic, bytes(row.body)) for row in one] == [("orders", b"body 7")]
    seen = split.store.drive(known(split.store, "orders", ["7", "119", "nobody"]))
    assert set(seen) == {"7", "119"}
