"""The journals of a topic that is split: each followed by itself, told as those of one topic."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Producer
from lisa.admin import topics
from lisa.manager.pruner import Pruner
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.writing import ParquetWriter
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
    """Every event that any place has counted."""
    found: list[Name] = []
    for place in split.layout.counted("orders"):
        last = int(split.store.ask("HGET", split.keys(place).stats, "journaled") or 0)
        shard = place.partition("~")[2] or None
        found += [("orders", shard, number) for number in range(1, last + 1)]
    return found


def key(name: Name) -> tuple[str, str, int]:
    return name[0], name[1] or "", name[2]


class TestTheStream:
    """`spark.readStream.format("lisa")`."""

    @pytest.mark.parametrize("named_topic", ["orders", None])
    def test_it_goes_on_through_changes_of_the_number(
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
        # Spark tells a source of a batch's end when the next one begins.
        for place in set(split.layout.counted("orders")) - {"orders"}:
            last: Any = split.store.ask("HGET", split.keys(place).stats, "journaled")
            told = split.store.ask("HGET", split.keys(place).archived, "cold")
            assert told.split()[1] == last, place

    def test_a_checkpoint_of_an_undivided_topic_goes_on(
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
            ("orders", None, 6), *(("orders", "1of2", number) for number in range(1, 5)),
        }  # fmt: skip

    def test_gaps_are_told_for_each_journal(
        self, client: redis.Redis, spark: SparkSession, redis_url: str, tmp_path: Path
    ) -> None:
        first, second = (Journal(client, f"orders~{n}of2") for n in range(2))
        following = Following(spark, redis_url, tmp_path)
        first.write(10)
        assert len(following.run()) == 10
        first.write(5)
        second.write(6)
        client.xtrim(second.keys.events, maxlen=2, approximate=False)
        told = "topic 'orders', shard 1of2, lacks events 1 to 4: behind 0-0"
        with pytest.raises(Exception, match=told):
            following.run()
        following.change(fail_on_gap="false")
        rows = following.run()
        gap, *events = sorted(rows, key=lambda row: (row.state != "gap", row.shard, row.number))
        assert (gap.topic, gap.shard, gap.number, gap.state) == ("orders", "1of2", 1, "gap")
        assert named(events) == [
            *(("orders", "0of2", n) for n in range(11, 16)),
            *(("orders", "1of2", n) for n in (5, 6)),
        ]  # fmt: skip
        client.flushall()
        for journal in (first, second):
            Journal(client, journal.topic).write(1)
        rows = following.run()
        assert sorted((row.shard, row.state, row.number) for row in rows) == [
            ("0of2", "gap", 16), ("0of2", "ready", 1), ("1of2", "gap", 7), ("1of2", "ready", 1),
        ]  # fmt: skip

    def test_each_journal_is_trimmed_behind_its_own_mark(
        self, split: Split, client: redis.Redis
    ) -> None:
        client.config_set("stream-node-max-entries", 1)
        try:
            split.into(2)
            places = split.layout.current("orders")
            for place in places:
                journal = Journal(client, place)
                journal.write(20)
            entries: Any = [client.xrange(split.keys(place).events) for place in places]
            now = split.store.drive(split.store.server_time_us()) // 1000
            mark = Mark(entries[0][14][0].decode(), 15)
            client.hset(split.keys(places[0]).archived, "cold", f"{mark.entry} 15 {now}")
            client.hset(
                split.keys(places[1]).archived, "cold", f"{entries[1][3][0].decode()} 4 {now}"
            )
            pruner = Pruner(split.store)
            for place in pruner.pick(places):
                pruner.step(place)
            assert [client.xlen(split.keys(place).events) for place in places] == [6, 17]
        finally:
            client.config_set("stream-node-max-entries", 100)


SENT: dict[str, Any] = {"id": "m", "state": "sent", "due": 9000}
FIRST = SENT | {"envelope": envelope("firstfir", {"a": 1}), "shard": "0of2"}
SECOND = SENT | {"envelope": envelope("secondse", {"a": 2}), "shard": "1of3"}


def at(ms: int, number: int, **fields: Any) -> Event:
    return event("orders", ms, 0, number, **fields)


def stood(rows: DataFrame) -> dict[str | None, tuple[str, bool]]:
    return {row.token: (row.state, row.settled) for row in rows.collect()}


class TestTheFold:
    """An id that lived in one place, and lives in another."""

    def test_clocks_that_differ_change_no_life(self, spark: SparkSession) -> None:
        """By their clocks the second life began before the first one ended."""
        events = [
            at(1000, 1, **FIRST),
            at(1050, 1, **SECOND),
            at(1052, 2, id="m", shard="0of2", state="acked", group="g", settled=True),
        ]
        found = fold(frame(spark, events))
        assert stood(found) == {"firstfir": ("acked", True), "secondse": ("waiting", False)}

    def test_a_life_whose_end_no_journal_tells(self, spark: SparkSession) -> None:
        events = [at(1000, 1, **FIRST), at(5000, 1, **SECOND)]
        assert stood(fold(frame(spark, events))) == {
            "firstfir": ("lost", True), "secondse": ("waiting", False),
        }  # fmt: skip

    def test_a_life_that_was_put_back_elsewhere(self, spark: SparkSession) -> None:
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

    def test_an_end_that_is_archived_later_than_the_next_life(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Journals are read side by side: one may be behind another."""
        writer = ParquetWriter(spark, str(tmp_path))
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
                "firstfir": ("acked", True), "secondse": ("cancelled", True),
            }  # fmt: skip
            assert writer.manifest.live_events == 0
            assert archive.offsets() == {"orders~0of2": ("1100-0", 2), "orders~1of3": ("6000-0", 2)}
        finally:
            writer.close()
