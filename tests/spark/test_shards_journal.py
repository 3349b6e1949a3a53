"""The journals of a sharded topic: each is followed separately, and read as one topic."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from lisa import Producer
from lisa.admin import topics
from lisa.admin.journal import forget
from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import Shard, Topic
from lisa.core.transitions.prune import ARCHIVE_HOLDS_MS
from lisa.manager.pruner import Pruner
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.jobs.archive_run import Progress
from lisa.pipeline.source.following import record_archived
from lisa.pipeline.source.journal import JournalReader
from lisa.pipeline.source.journal_offsets import JournalBundle
from lisa.pipeline.source.marks import Mark
from tests.shards import Split
from tests.spark.journals import Following, Journal

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

    def test_the_stream_continues_across_changes_of_the_shard_count(
        self, split: Split, spark: SparkSession, tmp_path: Path
    ) -> None:
        split.store.drive(topics.set_options(split.store, "orders", {"journal": True}))
        following = Following(
            spark, split.url, tmp_path, archive="cold", max_events_per_batch=20, topic="orders"
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


SHARD_NAMES = [f"orders~{number}of8" for number in range(8)]


@pytest.fixture
def exact(client: redis.Redis) -> Iterator[None]:
    """Journals are trimmed exactly."""
    client.config_set("stream-node-max-entries", 1)
    yield
    client.config_set("stream-node-max-entries", 100)


def mark(journal: Journal, number: int) -> Mark:
    entries: Any = journal.client.xrange(journal.keys.events)
    [entry] = [entry for entry, fields in entries if int(fields[b"n"]) == number]
    return Mark(entry.decode(), number)


def report(split: Split, name: str, journal: Journal, number: int) -> None:
    split.store.drive(record_archived(split.store, name, {journal.topic: mark(journal, number)}))


def prune(split: Split, *journals: Journal) -> list[int]:
    """Run one round of the manager; returns the number of events left."""
    pruner = Pruner(split.store)
    for shard_name in pruner.pick([Shard(journal.topic) for journal in journals]):
        pruner.step(shard_name)
    return [journal.client.xlen(journal.keys.events) for journal in journals]


@pytest.mark.usefixtures("exact")
class TestTrimming:
    """The journal of a shard for which an archive has not reported progress yet."""

    @pytest.fixture
    def whole(self, split: Split, client: redis.Redis) -> Journal:
        whole = Journal(client)
        whole.write(10)
        split.into(2)
        return whole

    @pytest.fixture
    def shards(self, whole: Journal, split: Split) -> list[Journal]:
        made = [
            Journal(whole.client, shard_name)
            for shard_name in split.layout.current(Topic("orders"))
        ]
        for journal in made:
            journal.write(20)
            whole.client.hset(journal.keys.options, "journal_max", 5)
        return made

    def test_journals_wait_for_the_slower_of_two_archives(
        self, split: Split, whole: Journal, shards: list[Journal]
    ) -> None:
        for name in ("continuous", "nightly"):
            report(split, name, whole, 10)
        report(split, "continuous", shards[0], 20)
        assert prune(split, whole, *shards) == [1, 20, 20]
        report(split, "nightly", shards[0], 15)
        assert prune(split, *shards) == [6, 20]

    def test_journals_wait_for_the_only_archive(
        self, split: Split, whole: Journal, shards: list[Journal]
    ) -> None:
        report(split, "nightly", whole, 10)
        assert prune(split, *shards) == [20, 20]
        assert split.store.drive(forget(split.store, "orders", "nightly"))
        assert prune(split, *shards) == [5, 5]

    def test_journals_do_not_wait_for_silent_archives(
        self, split: Split, whole: Journal, shards: list[Journal]
    ) -> None:
        now_ms = split.store.drive(split.store.server_time_ms())
        gone_ms = now_ms - ARCHIVE_HOLDS_MS - 1
        for name, record in (("dead", f"1-1 10 {gone_ms}"), ("~trimmed", f"9 {now_ms}")):
            whole.client.hset(whole.keys.archived, name, record)
        report(split, "continuous", whole, 10)
        report(split, "continuous", shards[0], 20)
        assert prune(split, *shards) == [1, 20]


class TestStartPositions:
    """`JournalReader`, called as Spark calls it."""

    @pytest.fixture
    def trimmed(self, client: redis.Redis, split: Split) -> list[Journal]:
        """Eight shards with events 11 to 30 only."""
        split.into(8)
        made = [Journal(client, shard_name) for shard_name in SHARD_NAMES]
        for journal in made:
            journal.write(30)
            client.xtrim(journal.keys.events, maxlen=20, approximate=False)
        return made

    @pytest.fixture
    def reader(self, split: Split) -> Iterator[JournalReader]:
        reader = JournalReader({"url": split.url, "archive": "cold"}, EVENT_SCHEMA)
        yield reader
        reader.stop()

    def test_a_journal_without_events_in_the_first_batch(
        self, trimmed: list[Journal], reader: JournalReader
    ) -> None:
        offset: dict[str, Any] = {}
        read = {journal.topic: 10 for journal in trimmed}
        for _ in range(100):
            end = reader.latestOffset(offset, ReadMaxRows(5))
            if end == offset:
                break
            tasks = reader.partitions(offset, end)
            pieces = [
                one for task in tasks if isinstance(task, JournalBundle) for one in task.ranges
            ]
            assert 1 <= sum(one.end.number - one.begin.number for one in pieces) <= 5
            for one in pieces:
                assert (one.gap, one.begin.number) == (None, read[one.journal])
                read[one.journal] = one.end.number
            offset = end
            reader.commit(offset)
        assert set(read.values()) == {30}

    def test_a_new_checkpoint_of_an_archive_with_other_journals(
        self, split: Split, trimmed: list[Journal], reader: JournalReader
    ) -> None:
        report(split, "cold", trimmed[0], 20)
        told = "shard 1of8, lacks events 1 to 10: after 0-0"
        with pytest.raises(LisaError, match=told):
            reader.latestOffset({}, ReadMaxRows(1000))
        latest = JournalReader(
            {"url": split.url, "archive": "cold", "starting": "latest"}, EVENT_SCHEMA
        )
        assert [one["n"] for one in latest.initialOffset().values()] == [20, *[0] * 7]
        latest.stop()

    def test_an_archive_that_stopped_before_every_journal_had_a_batch(
        self, split: Split, trimmed: list[Journal], spark: SparkSession, tmp_path: Path
    ) -> None:
        """The checkpoint has journals without archived events, and still matches the archive."""
        where, stop = str(tmp_path / "archive"), threading.Event()

        def second(done: Progress) -> None:
            if done.batch == 1:
                stop.set()

        first = archive(
            spark, where, url=split.url, once=True, max_events=2, progress=second, stop=stop
        )
        assert len(first.offsets) < len(trimmed)
        archive(spark, where, url=split.url, once=True)
        log = open_archive(spark, where).log().collect()
        assert sorted((row.shard, row.number) for row in log) == [
            (f"{shard}of8", number) for shard in range(8) for number in range(11, 31)
        ]
