"""Archives of sharded topics: trimming of journals, and start positions."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from lisa.admin.journal import forget
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.sharding import Shard, Topic
from lisa.core.transitions.prune import ARCHIVE_HOLDS_MS
from lisa.manager.pruner import Pruner
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.source.following import record_archived
from lisa.pipeline.source.journal import JournalReader
from lisa.pipeline.source.journal_offsets import JournalBundle
from lisa.pipeline.source.marks import Mark
from tests.shards import Split
from tests.spark.journals import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis
    from pyspark.sql import SparkSession

    from lisa.pipeline.jobs.archive_run import Progress

pytestmark = pytest.mark.filterwarnings("ignore")

SHARD_NAMES = [f"orders~{number}of8" for number in range(8)]


@pytest.fixture
def split(redis_url: str, client: redis.Redis) -> Iterator[Split]:
    """A topic whose journals are trimmed exactly."""
    made = Split(redis_url)
    client.config_set("stream-node-max-entries", 1)
    yield made
    client.config_set("stream-node-max-entries", 100)
    made.store.close()


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


@pytest.mark.parametrize(
    "more", [{"gap": ["", "0-0", 1, 2, None]}, {"from": {"id": "4-0", "n": 4}}]
)
def test_a_checkpoint_with_events_that_the_archive_lacks_is_ahead(
    spark: SparkSession, tmp_path: Path, more: dict[str, Any]
) -> None:
    begun = {"id": "5-0", "n": 5, "from": {"id": "5-0", "n": 5}}
    folder = Folder(spark, str(tmp_path))
    folder.write("commits/0", "v1\n{}")
    folder.write("offsets/0", f"v1\n{{}}\n{json.dumps({'orders': begun})}")
    check_checkpoint(spark, str(tmp_path), {}, ())
    with pytest.raises(ConfigError, match="ahead of the archive"):
        check_checkpoint(spark, str(tmp_path), {"orders": ("4-0", 4)}, ())
    folder.write("offsets/0", f"v1\n{{}}\n{json.dumps({'orders': begun | more})}")
    with pytest.raises(ConfigError, match="ahead of the archive"):
        check_checkpoint(spark, str(tmp_path), {}, ())
