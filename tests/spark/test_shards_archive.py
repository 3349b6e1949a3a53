"""A topic whose shard count changes: archive, audit, search, loss and restore."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import redis
from pyspark.sql import SparkSession

from lisa.admin import topics
from lisa.admin.reading import entry_number
from lisa.core.model.sharding import Topic, shard_suffix, topic_of
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import Inspection
from lisa.pipeline.archive import Archive, open_archive
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs import journal_tail
from lisa.pipeline.jobs.archive import ArchiveResult, archive
from lisa.pipeline.jobs.archive_run import Progress
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.jobs.lookup import inspected, known
from lisa.pipeline.jobs.restore import restore
from lisa.pipeline.jobs.restore_topics import prepare
from lisa.pipeline.jobs.search import Query, search
from lisa.pipeline.server import Server
from tests.servers import flush
from tests.shards import Split
from tests.spark.journals import Journal
from tests.spark.worlds import ArchiveSnapshot, World, counted, frozen

LATER = timedelta(hours=1)
DUE_MS = 4_102_444_800_000  # 2100
LOST_MS = 1_790_000_000_000
WITHIN_S = 240


@dataclass
class Target:
    """An archive with its checkpoint."""

    spark: SparkSession
    url: str
    folder: Path

    @property
    def where(self) -> str:
        return str(self.folder / "archive")

    def follow(self, **more: Any) -> ArchiveResult:
        given: dict[str, Any] = {"once": True, "checkpoint": str(self.folder / "checkpoint")}
        return archive(self.spark, self.where, url=self.url, **given | more)

    def open(self) -> Archive:
        return open_archive(self.spark, self.where)

    def log(self) -> list[tuple[str, str, int]]:
        rows = self.open().log().where("state != 'gap'").select("topic", "shard", "number")
        return sorted((row.topic, row.shard or "", row.number) for row in rows.collect())


@pytest.fixture
def target(spark: SparkSession, redis_url: str, tmp_path: Path) -> Target:
    return Target(spark, redis_url, tmp_path)


@pytest.fixture
def split(redis_url: str) -> Iterator[Split]:
    made = Split(redis_url)
    yield made
    made.store.close()


@pytest.fixture
def world(split: Split) -> Iterator[World]:
    made = World(split.store, split.url, "orders", ["lisa"])
    yield made
    made.close()


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def written(split: Split) -> list[tuple[str, str, int]]:
    """The number of all events, over all journals."""
    found = []
    for shard_name in split.layout.counted(Topic("orders")):
        last = int(split.store.ask("HGET", split.keys(shard_name).stats, "journaled") or 0)
        found += [("orders", shard_name.partition("~")[2], number + 1) for number in range(last)]
    return sorted(found)


def handle(split: Split, world: World, do: Callable[[World, dict[str, Any]], None]) -> None:
    """Deliver all due messages of the present shards, shard by shard."""
    for shard_name in split.layout.current(Topic("orders")):
        one = world.at(shard_name)
        one.promote()
        ready = split.store.ask("XLEN", split.keys(shard_name).group("lisa").ready)
        do(one, {entry.id: entry for entry in one.take("lisa", ready)})


def copies(split: Split) -> Counter[str]:
    """Id -> number of occurrences, over all shards of all shard counts."""
    found: Counter[str] = Counter()
    for shard_name in split.layout.counted(Topic("orders")):
        keys = split.keys(shard_name)
        own = keys.group("lisa")
        for one in (keys.waiting, own.retry, own.garbage):
            found.update(map(text, split.store.ask("ZRANGE", one, 0, -1)))
        found.update(map(text, split.store.ask("HKEYS", own.entries)))
    return found


def seen(split: Split, ids: list[str]) -> dict[str, Inspection]:
    return dict(zip(ids, split.store.drive(inspected(split.store, "orders", ids)), strict=True))


def settle_some(one: World, taken: dict[str, Any]) -> None:
    """Six are acked, three failed, one is in garbage; the others keep their state."""
    one.ack("lisa", [taken[name] for name in names("a", 6) if name in taken])
    one.fail("lisa", [taken[name] for name in ("a6", "a7", "a8") if name in taken], 3_600_000)
    one.fail("lisa", [taken[name] for name in ("a9",) if name in taken], "discard")
    one.release("lisa", [taken[name] for name in ("a10", "a11") if name in taken])


def change_meanwhile(split: Split, world: World, target: Target) -> None:
    """Run the archive, change the shard count, and continue until everything is archived."""
    stop, archived = threading.Event(), len(target.log())
    limit = threading.Timer(WITHIN_S, stop.set)
    changed: list[int] = []

    def told(progress: Progress) -> None:
        if not changed:
            changed.append(split.into(3).shards)
            world.send(names("b", 10), delay=LATER)
            for known in ("a0", "u0"):  # one is settled, one is live under the topic's own keys
                world.producer.send(
                    "orders", {"anew": known}, id=known, on_duplicate="replace", delay=LATER
                )
        if archived + progress.total == len(written(split)):
            stop.set()

    limit.start()
    target.follow(once=False, interval=timedelta(milliseconds=100), progress=told, stop=stop)
    limit.cancel()


def test_archive_audit_search_and_restore_across_shard_changes(
    spark: SparkSession, target: Target, split: Split, world: World, tmp_path: Path
) -> None:
    server = Server(split.url)
    world.send(names("u", 6), delay=LATER)
    world.cancel(["u5"])
    assert target.follow().events == 7, "before the split"
    split.into(4)
    world.send(names("a", 16))
    handle(split, world, settle_some)
    change_meanwhile(split, world, target)

    assert target.log() == written(split), "each event of all shards once"
    assert {shard for _, shard, _ in target.log()} > {"", "0of4", "0of3"}
    live = [*names("u", 5), "a0", *names("a", 16)[6:], *names("b", 10)]
    messages = target.open().messages().where("not settled").select("id").collect()
    assert sorted(row.id for row in messages) == sorted(live)
    checked = audit(spark, target.open, server)
    assert counted(checked) == {
        "live": len(live),
        "acked": 6,
        "cancelled": 2,
    }
    assert checked.proven, checked.gaps
    for name, states in (("a7", ["retry"]), ("a0", ["acked", "waiting"]), ("b3", ["waiting"])):
        rows = search(spark, Query(ids=[name]), archive=target.open(), server=server).collect()
        assert sorted(row.state for row in rows) == states
        assert {row.topic for row in rows} == {"orders"}
    before = seen(split, live)

    flush(split.url)
    result = restore(spark, target.open(), server, f"{tmp_path}/restored")

    assert counted(result) == {"restored": len(live)}
    assert copies(split) == Counter(dict.fromkeys(live, 1))
    assert split.layout.shards == 3
    after = seen(split, live)
    for name in live:
        was, now = before[name], after[name]
        assert now.envelope[:9] == was.envelope[:9], name
        assert now.waiting_due_ms == was.waiting_due_ms, name
        assert [(one.group, one.failed_attempts) for one in now.group_states] == [
            (one.group, one.failed_attempts) for one in was.group_states
        ], name
    again = restore(spark, target.open(), server, f"{tmp_path}/again")
    assert counted(again) == {"live": len(live)}

    target.follow(on_gap="record")
    taken: list[str] = []

    def ack_all(one: World, entries: dict[str, Any]) -> None:
        one.ack("lisa", list(entries.values()))
        taken.extend(entries)

    handle(split, world, ack_all)
    assert sorted(taken) == sorted(names("a", 16)[10:]), "what was ready or in flight"
    target.follow(on_gap="record")
    last = audit(spark, target.open, server)
    assert last.counts["acked"] == 6 + len(taken)
    assert (last.counts["live"], last.missing) == (len(live) - len(taken), 0)
    assert {(gap.topic, gap.shard) for gap in last.gaps} == {
        ("orders", one.partition("~")[2] or None)
        for one in ("orders", *(f"orders~{n}of{count}" for count in (3, 4) for n in range(count)))
    }
    assert len(last.gaps) == 8, "those that came back are told once, and so are the others"


def test_an_archive_without_shard_column_continues(
    spark: SparkSession, target: Target, split: Split, world: World, tmp_path: Path
) -> None:
    """The archive lacks the column `shard`, so its events are those of the topic's own journal."""
    world.send(names("u", 5), delay=LATER)
    world.cancel(["u4"])
    target.follow()
    split.into(2)
    make_old(target)
    assert target.log() == [("orders", "", number) for number in range(1, 7)]
    assert list(target.open().offsets()) == ["orders"]
    assert target.open().messages().count() == 5
    checked = audit(spark, target.open, Server(split.url))
    assert (checked.counts["live"], checked.counts["cancelled"], checked.proven) == (4, 1, True)

    world.send(names("a", 12), delay=LATER)
    for name in ("a0", "u3"):
        assert world.producer.cancel("orders", name) == "cancelled"
    assert target.follow().events == 14
    assert target.log() == written(split)
    assert set(target.open().offsets()) == {"orders", "orders~0of2", "orders~1of2"}
    flush(split.url)
    restore(spark, target.open(), Server(split.url), f"{tmp_path}/restored")
    assert copies(split) == Counter(dict.fromkeys([*names("u", 3), *names("a", 12)[1:]], 1))


def make_old(target: Target) -> None:
    """The archive as an earlier version wrote it."""
    for file in Path(target.where).rglob("*.parquet"):
        table = pq.ParquetFile(file).read()
        if "shard" in table.column_names:
            pq.write_table(table.drop_columns(["shard"]), file)
            (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
    for file in Path(target.where, "_lisa/state").glob("*.json"):
        assert "shard" not in file.read_text(), "nothing of it where there are no shards"


def test_ends_known_only_to_journals_of_shards(
    spark: SparkSession, target: Target, split: Split, world: World, tmp_path: Path
) -> None:
    """A message that ended after the archive, without tombstone: not missing, not restored."""
    split.into(3)
    world.send(names("a", 9), delay=LATER)
    target.follow()
    for name in ("a0", "a1"):
        assert world.producer.cancel("orders", name) == "cancelled"
        shard_name = split.layout.shard_for(Topic("orders"), name)
        assert split.store.ask("DEL", split.keys(shard_name).done(name)) == 1
    world.send(["new"], delay=LATER)
    server = Server(split.url)
    checked = audit(spark, target.open, server)
    assert (checked.counts["live"], checked.counts["cancelled"], checked.proven) == (7, 2, True)
    result = restore(spark, target.open(), server, f"{tmp_path}/restored")
    assert counted(result) == {"live": 8, "settled": 2}
    assert not result.possibly_lost
    assert copies(split) == Counter(dict.fromkeys(["new", *names("a", 9)[2:]], 1))


def test_rows_are_sent_to_all_shards_and_read_as_one_topic(
    spark: SparkSession, split: Split
) -> None:
    given = {"url": split.url, "topic": "orders", "dedupe_for": "2d"}
    for shards, accepted in ((4, 0), (3, 60)):
        split.into(shards)
        rows = spark.range(0, 60 + accepted, 1, 2).selectExpr(
            "cast(id AS string) AS id",
            "concat('body ', id) AS body",
            f"timestamp_millis({DUE_MS}) AS due",
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

        assert counted(checked) == {
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
        assert counted(planned) == told
        assert not split.layout.is_split
        done = restore(spark, archive, server, f"{tmp_path}/done")
        assert counted(done) == told
        assert split.layout.shards == 2
        assert split.copies() == ids[:7]
        assert split.store.drive(split.store.groups("orders")) == ("lisa",)
