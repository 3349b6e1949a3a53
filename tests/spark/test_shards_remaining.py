"""The remainders of sharded topics' journals: listed once, reported per journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from lisa.admin import topics
from lisa.admin.reading import entry_number
from lisa.core.model.sharding import Topic, shard_suffix, topic_of
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.jobs import journal_tail
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.jobs.restore import restore
from lisa.pipeline.jobs.restore_topics import prepare
from lisa.pipeline.server import Server
from tests.servers import flush
from tests.shards import Split
from tests.spark.journals import Journal
from tests.spark.worlds import ArchiveSnapshot, World, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive import Archive

LOST_MS = 1_790_000_000_000


@pytest.fixture
def split(redis_url: str) -> Iterator[Split]:
    made = Split(redis_url)
    yield made
    made.store.close()


@dataclass
class Known:
    """An archive's offsets and gaps, and how often they were read."""

    committed: dict[str, tuple[str, int]]
    named_gaps: list[ArchiveGap] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def offsets(self) -> dict[str, tuple[str, int]]:
        self.asked.append("offsets")
        return self.committed

    def gaps(self) -> list[ArchiveGap]:
        self.asked.append("gaps")
        return self.named_gaps

    def topics(self) -> dict[str, TopicRecord]:
        record = TopicRecord({"journal": "1"}, ("lisa",))
        return {topic_of(shard_name): record for shard_name in self.committed}

    @property
    def archive(self) -> Archive:
        return cast("Archive", self)


def lost(shard_name: str, entry: str, number: int) -> ArchiveGap:
    """A recorded gap after an event."""
    at = datetime.fromtimestamp(entry_number(entry)[0] / 1000, UTC)
    return ArchiveGap(
        topic_of(shard_name),
        entry,
        number,
        None,
        None,
        "came back empty",
        at,
        shard_suffix(shard_name),
    )


def test_remainders_of_many_topics_need_one_listing(split: Split, client: redis.Redis) -> None:
    """The list of all shards may be long, so it is read once, as is the archive."""
    names = [f"t{number}" for number in range(5)]
    offsets: dict[str, tuple[str, int]] = {}
    for name in names:
        options = {"journal": True, "shards": 2}
        split.store.drive(topics.set_options(split.store, name, options))
        for shard_name in split.store.drive(split.store.layout(Topic(name))).current(Topic(name)):
            Journal(client, shard_name).write(2)
            events: Any = client.xrange(split.keys(shard_name).events)
            offsets[shard_name] = (events[0][0].decode(), 1)
    known = Known(offsets)
    client.config_resetstat()

    remainders, groups = prepare(split.store, known.archive, None, dry_run=True)

    commands: Any = client.info("commandstats")
    assert commands["cmdstat_zrange"]["calls"] == 1
    assert known.asked.count("gaps") == 1
    assert known.asked.count("offsets") <= 2
    assert [one.journal for one in remainders] == sorted(offsets)
    assert all(one.whole and one.last_number == 2 for one in remainders)
    assert list(groups) == names
    known.asked.clear()
    assert split.store.drive(journal_tail.find_remainders(split.store, known.archive, [])) == []


def test_a_sharded_topic_whose_shards_were_all_lost(split: Split) -> None:
    """Without a journal of its own, the losses of its shards do not start at the beginning."""
    shard_names = [f"orders~{number}of4" for number in range(4)]
    offset = (f"{LOST_MS}-0", 3)
    known = Known(
        dict.fromkeys(shard_names, offset),
        [lost(shard_name, *offset) for shard_name in shard_names],
    )

    seen = split.store.drive(journal_tail.find_remainders(split.store, known.archive, ["orders"]))

    assert [(one.journal, one.whole, one.archived_ms) for one in seen] == [
        (shard_name, False, LOST_MS) for shard_name in shard_names
    ]
    _, groups = prepare(split.store, known.archive, ["orders"], dry_run=False)
    assert groups == {"orders": ("lisa",)}
    assert split.store.drive(split.store.groups("orders")) == ("lisa",)


def test_a_topic_without_journals_uses_its_own_journal(split: Split) -> None:
    (one,) = split.store.drive(
        journal_tail.find_remainders(split.store, Known({}).archive, ["orders"])
    )
    assert (one.journal, one.whole, one.archived_ms) == ("orders", False, None)


@pytest.fixture
def world(split: Split) -> Iterator[World]:
    made = World(split.store, split.url, "orders", ["lisa"])
    yield made
    made.close()


class TestAudit:
    """With a server that knows more than the archive."""

    def test_an_end_in_a_journal_archived_less_far_than_the_next_life(
        self, spark: SparkSession, split: Split, world: World, tmp_path: Path
    ) -> None:
        server = Server(split.url)
        world.send(["ends", "gone"])
        world.promote()
        taken = {entry.id: entry for entry in world.take("lisa", 2)}
        behind = frozen(spark, server, ["orders"], f"{tmp_path}/behind")
        world.ack("lisa", [taken["ends"]])
        for key in ("done:ends", "body:gone"):  # an expired tombstone, and a body deleted by hand
            assert split.store.ask("DEL", f"lisa:{{orders}}:{key}") == 1
        layout = split.into(4)
        world.send(["ends", "gone"], delay=timedelta(hours=1))
        shards = sorted({layout.shard_for(Topic("orders"), one) for one in ("ends", "gone")})
        ahead = frozen(spark, server, shards, f"{tmp_path}/ahead")
        archive: Any = ArchiveSnapshot(
            behind.events.unionByName(ahead.events),
            behind.committed | ahead.committed,
            behind.records,
        )

        checked = audit(spark, lambda: archive, server)

        assert {one: n for one, n in checked.counts.items() if n} == {
            "live": 2,
            "acked": 1,
            "missing": 1,
        }
        assert [row["id"] for row in checked.first["missing"]] == ["gone"]
        offline = audit(spark, lambda: archive, None)
        assert (offline.counts["live"], offline.missing) == (2, 2)

    def test_a_recorded_loss_is_not_in_earlier_ranges(
        self, spark: SparkSession, split: Split, world: World, tmp_path: Path
    ) -> None:
        layout = split.into(2)
        ids = [f"a{number}" for number in range(8)]
        world.send(ids, delay=timedelta(hours=1))
        server = Server(split.url)
        archive = frozen(spark, server, layout.current(Topic("orders")), f"{tmp_path}/log")
        archive.named_gaps += [
            lost(shard_name, *end) for shard_name, end in archive.committed.items()
        ]
        flush(split.url)

        now = datetime.now(UTC)
        assert audit(spark, lambda: archive, server, end=now - timedelta(hours=1)).gaps == []
        assert {gap.shard for gap in audit(spark, lambda: archive, server).gaps} == {"0of2", "1of2"}


class TestRestore:
    """Only the server with the topic's own keys came back empty."""

    def test_messages_in_shards_of_a_lost_layout_are_not_restored(
        self, spark: SparkSession, split: Split, world: World, tmp_path: Path
    ) -> None:
        layout = split.into(2)
        ids = [f"a{number}" for number in range(8)]
        world.send(ids, delay=timedelta(hours=1))
        server = Server(split.url)
        archive = frozen(spark, server, layout.current(Topic("orders")), f"{tmp_path}/log")
        assert world.producer.cancel("orders", "a7") == "cancelled"
        keys = split.store.ask("KEYS", f"{split.keys('orders').options.rpartition(':')[0]}:*")
        options = {"journal": "1", "retry_delays": "3600000", "shards": "2"}
        archive.records = {"orders": TopicRecord(options, ("lisa",))}
        assert split.store.ask("DEL", *keys)
        assert not split.layout.is_split

        told = {"live": 7, "settled": 1}
        planned = restore(spark, archive, server, f"{tmp_path}/plan", dry_run=True)
        assert {one: n for one, n in planned.counts.items() if n} == told
        assert not split.layout.is_split
        done = restore(spark, archive, server, f"{tmp_path}/done")
        assert {one: n for one, n in done.counts.items() if n} == told
        assert split.layout.shards == 2
        assert split.copies() == ids[:7]
        assert split.store.drive(split.store.groups("orders")) == ("lisa",)
