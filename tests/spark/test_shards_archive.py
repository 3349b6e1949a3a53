"""A topic whose shard count changes: archive, audit, search, loss and restore."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from lisa.core.model.sharding import Topic
from lisa.core.transitions.base import text
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.database import Database, JdbcConnection
from lisa.pipeline.jobs.archive import ArchiveResult, archive
from lisa.pipeline.jobs.archive_run import Progress
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.jobs.lookup import inspected
from lisa.pipeline.jobs.restore import restore
from lisa.pipeline.jobs.search import Query, search
from lisa.pipeline.server import Server
from tests import databases
from tests.servers import flush
from tests.shards import Split
from tests.spark.worlds import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.archive import Archive

LATER = timedelta(hours=1)
WITHIN_S = 240


@dataclass
class Target:
    """The target of an archive, with its checkpoint and properties."""

    spark: SparkSession
    url: str
    where: str
    checkpoint: str
    properties: dict[str, str] = field(default_factory=dict)

    def follow(self, **more: Any) -> ArchiveResult:
        given = {"once": True} | more
        return archive(
            self.spark,
            self.where,
            url=self.url,
            name="cold",
            checkpoint=self.checkpoint,
            properties=self.properties,
            **given,
        )

    def open(self) -> Archive:
        return open_archive(self.spark, self.where, self.properties)

    def log(self) -> list[tuple[str, str, int]]:
        rows = self.open().log().where("state != 'gap'").select("topic", "shard", "number")
        return sorted((row.topic, row.shard or "", row.number) for row in rows.collect())


@pytest.fixture(
    params=["folder", *(pytest.param(one, marks=pytest.mark.slow) for one in databases.KINDS)]
)
def target(
    request: pytest.FixtureRequest, spark: SparkSession, redis_url: str, tmp_path: Path
) -> Iterator[Target]:
    checkpoint = str(tmp_path / "checkpoint")
    if request.param == "folder":
        yield Target(spark, redis_url, str(tmp_path / "archive"), checkpoint)
        return
    lacks = databases.missing(request.param)
    if lacks:
        pytest.skip(lacks)
    server = databases.start(request.param)
    try:
        yield Target(spark, redis_url, server.url, checkpoint, server.properties)
    finally:
        server.stop()


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
    assert {one: n for one, n in checked.counts.items() if n} == {
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

    assert {one: n for one, n in result.counts.items() if n} == {"restored": len(live)}
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
    assert {one: n for one, n in again.counts.items() if n} == {"live": len(live)}

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
    if not target.properties:
        for file in Path(target.where).rglob("*.parquet"):
            table = pq.ParquetFile(file).read()
            if "shard" in table.column_names:
                pq.write_table(table.drop_columns(["shard"]), file)
                (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
        for file in Path(target.where, "_lisa/state").glob("*.json"):
            told = json.loads(file.read_text())
            assert "shard" not in json.dumps(told), "nothing of it where there are no shards"
        return
    key = {"postgresql": "DROP CONSTRAINT {}_pkey", "mariadb": "DROP PRIMARY KEY"}
    database = Database.of(target.where, target.properties)
    connection = JdbcConnection(target.spark, database)
    statement = connection._connection.createStatement()
    for table, columns in (
        ("message_log", 'topic, "at", seq, number'),
        ("lisa_archive_topics", "topic"),
        ("lisa_archive_gaps", 'topic, after_id, "at"'),
    ):
        drop = key[database.kind.name].format(table)
        statement.execute(f"ALTER TABLE {table} {drop}, ADD PRIMARY KEY ({columns})")
        statement.execute(f"ALTER TABLE {table} DROP COLUMN shard")
    statement.execute("UPDATE lisa_archive SET layout = 1")
    connection.close()


def test_ends_known_only_to_journals_of_shards(
    spark: SparkSession, split: Split, world: World, tmp_path: Path
) -> None:
    """A message that ended after the archive, without tombstone: not missing, not restored."""
    target = Target(spark, split.url, str(tmp_path / "archive"), str(tmp_path / "checkpoint"))
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
    assert {one: n for one, n in result.counts.items() if n} == {"live": 8, "settled": 2}
    assert not result.possibly_lost
    assert copies(split) == Counter(dict.fromkeys(["new", *names("a", 9)[2:]], 1))
