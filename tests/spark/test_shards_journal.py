"""The journals of a sharded topic: each is followed separately, and read as one topic."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Producer
from lisa.admin import topics
from lisa.core.model.sharding import Topic
from lisa.manager.pruner import Pruner
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.source.marks import Mark
from tests.shards import Split
from tests.spark.journals import Following, Journal
from tests.spark.stories import envelope, event
from tests.spark.test_archive_fold import frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import redis
    from pyspark.sql import DataFrame, Row, SparkSession

    from tests.spark.stories import Event

pytestmark = pytest.mark.filterwarnings("ignore")

Name = tuple[str, str | None, int]


@pytest.fixture
def split(redis_url: str) -> Iterator[Split]:
    made = Split(redis_url)
    yield made
    made.store.close()


def named(rows: Iterable[Row]) -> list[Name]:
    return sorted((row.topic, row.shard, row.number) for row in rows)


def written(split: Split) -> list[Name]:
    """The number of all events, over all journals."""
    found: list[Name] = []
    for shard_name in split.layout.counted(Topic("orders")):
        last = int(split.store.ask("HGET", split.keys(shard_name).stats, "journaled") or 0)
        shard = shard_name.partition("~")[2] or None
        found += [("orders", shard, number) for number in range(1, last + 1)]
    return found


def key(name: Name) -> tuple[str, str, int]:
    return name[0], name[1] or "", name[2]


class TestStream:
    """`spark.readStream.format("lisa")`."""

    @pytest.mark.parametrize("named_topic", ["orders", None])
    def test_the_stream_continues_across_changes_of_the_shard_count(
        self, split: Split, spark: SparkSession, tmp_path: Path, named_topic: str | None
    ) -> None:
        split.store.drive(topics.set_options(split.store, "orders", {"journal": True}))
        options = {"topic": named_topic} if named_topic else {}
        following = Following(
            spark, split.url, tmp_path, archive="cold", max_events_per_batch=7, **options
        )
        later = timedelta(hours=1)
        rows: list[Row] = []
        with Producer(split.url) as producer:
            for count in (1, 4, 3, 1):
                split.into(count)
                names = [f"{count}-{number}-{len(rows)}" for number in range(12)]
                for name in names:
                    producer.send("orders", name, id=name, delay=later)
                producer.cancel("orders", names[0])
                rows += following.run()
                assert len(rows) == 13 * len({row.id.split("-")[2] for row in rows})
        assert sorted(map(key, ((r.topic, r.shard, r.number) for r in rows))) == sorted(
            map(key, written(split))
        )
        assert {row.shard for row in rows} > {None, "0of4", "2of3"}
        # Spark commits a batch to the source when the next one starts.
        for shard_name in set(split.layout.counted(Topic("orders"))) - {"orders"}:
            last: Any = split.store.ask("HGET", split.keys(shard_name).stats, "journaled")
            told = split.store.ask("HGET", split.keys(shard_name).archived, "cold")
            assert told.split()[1] == last, shard_name

    def test_a_checkpoint_from_before_sharding_continues(
        self, client: redis.Redis, spark: SparkSession, redis_url: str, tmp_path: Path
    ) -> None:
        whole, shard = Journal(client), Journal(client, "orders~1of2")
        whole.write(5)
        following = Following(spark, redis_url, tmp_path)
        assert len(following.run()) == 5
        [offset] = (tmp_path / "checkpoint" / "offsets").glob("0")
        assert offset.read_text().splitlines()[-1].startswith('{"orders": {"id":') or (
            '{"orders":{"id":' in offset.read_text()
        )
        shard.write(4)
        whole.write(1)
        rows = following.run()
        assert {(row.topic, row.shard, row.number) for row in rows} == {
            ("orders", None, 6),
            *(("orders", "1of2", number) for number in range(1, 5)),
        }

    def test_gaps_are_reported_per_journal(
        self, client: redis.Redis, spark: SparkSession, redis_url: str, tmp_path: Path
    ) -> None:
        first, second = (Journal(client, f"orders~{n}of2") for n in range(2))
        following = Following(spark, redis_url, tmp_path)
        first.write(10)
        assert len(following.run()) == 10
        first.write(5)
        second.write(6)
        client.xtrim(second.keys.events, maxlen=2, approximate=False)
        told = "topic 'orders', shard 1of2, lacks events 1 to 4: after 0-0"
        with pytest.raises(Exception, match=told):
            following.run()
        following.change(fail_on_gap="false")
        rows = following.run()
        gap, *events = sorted(rows, key=lambda row: (row.state != "gap", row.shard, row.number))
        assert (gap.topic, gap.shard, gap.number, gap.state) == ("orders", "1of2", 1, "gap")
        assert named(events) == [
            *(("orders", "0of2", n) for n in range(11, 16)),
            *(("orders", "1of2", n) for n in (5, 6)),
        ]
        client.flushall()
        for journal in (first, second):
            Journal(client, journal.topic).write(1)
        rows = following.run()
        assert sorted((row.shard, row.state, row.number) for row in rows) == [
            ("0of2", "gap", 16),
            ("0of2", "ready", 1),
            ("1of2", "gap", 7),
            ("1of2", "ready", 1),
        ]

    def test_each_journal_is_trimmed_to_its_own_recorded_event(
        self, split: Split, client: redis.Redis
    ) -> None:
        client.config_set("stream-node-max-entries", 1)
        try:
            split.into(2)
            shard_names = split.layout.current(Topic("orders"))
            for shard_name in shard_names:
                journal = Journal(client, shard_name)
                journal.write(20)
            entries: Any = [
                client.xrange(split.keys(shard_name).events) for shard_name in shard_names
            ]
            now = split.store.drive(split.store.server_time_ms())
            mark = Mark(entries[0][14][0].decode(), 15)
            client.hset(split.keys(shard_names[0]).archived, "cold", f"{mark.entry} 15 {now}")
            client.hset(
                split.keys(shard_names[1]).archived, "cold", f"{entries[1][3][0].decode()} 4 {now}"
            )
            pruner = Pruner(split.store)
            for shard_name in pruner.pick(shard_names):
                pruner.step(shard_name)
            assert [client.xlen(split.keys(shard_name).events) for shard_name in shard_names] == [
                6,
                17,
            ]
        finally:
            client.config_set("stream-node-max-entries", 100)


SENT: dict[str, Any] = {"id": "m", "state": "sent", "due": 9000}
FIRST = SENT | {"envelope": envelope("firstfir", {"a": 1}), "shard": "0of2"}
SECOND = SENT | {"envelope": envelope("secondse", {"a": 2}), "shard": "1of3"}


def at(ms: int, number: int, **fields: Any) -> Event:
    return event("orders", ms, 0, number, **fields)


def stood(rows: DataFrame) -> dict[str | None, tuple[str, bool]]:
    return {row.token: (row.state, row.settled) for row in rows.collect()}


class TestFoldAcrossShards:
    """An id that lived in one shard, and now lives in another."""

    def test_clock_skew_between_shards_does_not_mix_lives(self, spark: SparkSession) -> None:
        """By the servers' clocks, the second life began before the first one ended."""
        events = [
            at(1000, 1, **FIRST),
            at(1050, 1, **SECOND),
            at(1052, 2, id="m", shard="0of2", state="acked", group="g", settled=True),
        ]
        found = fold(frame(spark, events))
        assert stood(found) == {"firstfir": ("acked", True), "secondse": ("waiting", False)}

    def test_a_life_without_recorded_end(self, spark: SparkSession) -> None:
        events = [at(1000, 1, **FIRST), at(5000, 1, **SECOND)]
        assert stood(fold(frame(spark, events))) == {
            "firstfir": ("lost", True),
            "secondse": ("waiting", False),
        }

    def test_a_life_restored_into_another_shard(self, spark: SparkSession) -> None:
        back = FIRST | {"shard": "1of3", "state": "restored", "due": 8000}
        events = [
            at(1000, 1, **FIRST),
            at(2000, 2, id="m", shard="0of2", state="in_flight", group="g", attempt=1),
            at(9000, 1, **back | {"group": "g", "place": "retry", "attempt": 2}),
        ]
        found = fold(frame(spark, events))
        assert stood(found) == {"firstfir": ("retry", False)}
        ended = at(9900, 2, id="m", shard="1of3", state="acked", group="g", settled=True)
        assert stood(fold(frame(spark, [*events, ended]))) == {"firstfir": ("acked", True)}

    def test_an_end_archived_after_the_next_life(self, spark: SparkSession, tmp_path: Path) -> None:
        """Journals are read independently: one may be archived less far than another."""
        writer = FileWriter(spark, str(tmp_path))
        ends = [
            at(6000, 2, id="m", shard="1of3", state="cancelled", settled=True),
            at(1100, 2, id="m", shard="0of2", state="acked", group="g", settled=True),
        ]
        try:
            writer.write(
                frame(spark, [at(1000, 1, **FIRST), at(5000, 1, **SECOND), ends[0]]), 0, "q"
            )
            writer.fold()
            found = open_archive(spark, str(tmp_path)).messages()
            assert stood(found) == {"firstfir": ("lost", True), "secondse": ("cancelled", True)}
            writer.write(frame(spark, ends[1:]), 1, "q")
            writer.fold()
            archive = open_archive(spark, str(tmp_path))
            assert stood(archive.messages()) == {
                "firstfir": ("acked", True),
                "secondse": ("cancelled", True),
            }
            assert writer.tables.fold.live_events == 0
            assert archive.offsets() == {"orders~0of2": ("1100-0", 2), "orders~1of3": ("6000-0", 2)}
        finally:
            writer.close()
