"""Retention and erasure: messages and their events are deleted from archives and journals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from click.testing import Result
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.removal import FileRemover
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.jobs.deletion import erase
from lisa.pipeline.server import Server
from tests.spark.stories import Event, Stories, check, entries, event, frame
from tests.spark.worlds import SMALL, World


def traces(where: Path, message_id: str) -> set[str]:
    """The files with the id in their bytes (statistics, commits) or in a row."""
    found, wanted = set(), re.compile(re.escape(message_id).encode() + rb"(?![0-9])")
    for file in where.rglob("*"):
        if not file.is_file():
            continue
        content = file.read_bytes()
        if file.suffix == ".parquet":
            content += str(pq.ParquetFile(file).read().to_pylist()).encode()
        if wanted.search(content):
            found.add(str(file.relative_to(where)))
    return found


def without(events: list[Event], ids: set[str]) -> list[Event]:
    return [one for one in events if one["id"] not in ids]


@pytest.fixture
def journal() -> Stories:
    return Stories("orders")


@pytest.fixture
def writer(spark: SparkSession, tmp_path: Path, journal: Stories) -> FileWriter:
    """An archive with several days, files, merged files and a checkpoint of its log."""
    writer = FileWriter(spark, str(tmp_path))
    for batch in range(3):
        writer.write(frame(spark, journal.extend(20)), batch, "q")
        if batch == 1:
            writer.fold()
            writer.compact(everything=True)
            DeltaTable(tmp_path / "message_log").create_checkpoint()
    return writer


def test_erasure_leaves_no_trace_of_an_id(
    spark: SparkSession,
    tmp_path: Path,
    writer: FileWriter,
    journal: Stories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an ended message and of one that is live in the archive; statistics contain both.

    An erasure that is killed at any step is completed by the next.
    """
    where = str(tmp_path)
    last = journal.events[-1]["id"]
    live = {row.id for row in writer.archive().messages().where("not settled").collect()} - {last}
    ids = {one["id"] for one in journal.events} - {last}
    doomed = {min(ids), max(ids), min(live)}
    before = [path for one in doomed for path in traces(tmp_path, one)]
    for kind in ("message_log/day=", "_delta_log", ".json", "checkpoint.parquet", "_lisa/live"):
        assert any(kind in path for path in before), kind
    left = without(journal.events, doomed)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for owner, step in ((FileRemover, "_remove_messages"), (FileWriter, "delete_old")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, killed)
            with pytest.raises(KeyboardInterrupt):
                erase(spark, where, doomed, server=None)
        assert entries(open_archive(spark, where).log()) == sorted(
            ("orders", one["number"]) for one in left
        )
    erase(spark, where, doomed, server=None)
    assert [path for one in doomed for path in traces(tmp_path, one)] == []
    check(spark, where, left)
    assert erase(spark, where, doomed, server=None).events == 0
    # A process that has the archive open is refused; a new one continues.
    more = journal.extend(5)
    with pytest.raises(ConfigError, match="another process has written"):
        writer.write(frame(spark, more), 3, "q")
    remover, later = FileRemover(spark, where), FileWriter(spark, where)
    assert later.write(frame(spark, more), 3, "q")[0] == len(more)
    with pytest.raises(ConfigError, match="need `lisa pipeline archive` stopped"):
        remover.erase([left[0]["id"]], None)
    later.fold()
    check(spark, where, left + without(more, doomed))


def test_an_id_is_erased_in_the_given_topics_only(spark: SparkSession, tmp_path: Path) -> None:
    at = 1_790_000_000_000
    events = [
        event(topic, at, number, number, id=name, state="cancelled", settled=True)
        for topic in ("orders", "parcels")
        for number, name in enumerate(("a", "b"), 1)
    ]
    FileWriter(spark, str(tmp_path)).write(frame(spark, events), 0, "q")
    done = erase(spark, str(tmp_path), ["a"], topics=["orders"], server=None)
    assert (done.events, done.messages) == (1, 1)
    with pytest.raises(ConfigError, match="the archive has no topic order; its topics"):
        erase(spark, str(tmp_path), ["b"], topics=["order", "orders"], server=None)
    found = open_archive(spark, str(tmp_path)).messages().select("topic", "id").collect()
    assert sorted(map(tuple, found)) == [("orders", "b"), ("parcels", "a"), ("parcels", "b")]


def test_retention_deletes_messages_that_ended_before(
    spark: SparkSession, tmp_path: Path, writer: FileWriter, journal: Stories
) -> None:
    where = str(tmp_path)
    cutoff = ms_datetime(journal.events[2 * len(journal.events) // 3]["at"])
    lives = writer.archive().messages().groupBy("id")
    ends = lives.agg(sf.max("settled_at").alias("end"), sf.bool_and("settled").alias("all"))
    old = {row.id for row in ends.where(sf.col("all") & (sf.col("end") < sf.lit(cutoff))).collect()}
    assert 0 < len(old) < ends.count()
    removed = FileRemover(spark, where).retain(cutoff)
    left = without(journal.events, old)
    assert removed.events == len(journal.events) - len(left)
    check(spark, where, left)
    # Events of live messages from before the cutoff are kept, so that later ones fold correctly.
    assert min(one["at"] for one in left) / 1000 < cutoff.timestamp()
    more = journal.extend(10)
    later = FileWriter(spark, where)
    later.write(frame(spark, more), 3, "q")
    check(spark, where, left + more)


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    with Server(redis_url).open() as store:
        made = World(store, redis_url, "orders", ["lisa"])
        yield made
        made.close()


def journaled(client: redis.Redis) -> list[str]:
    items: Any = client.xrange(Keys().topic("orders").events)
    return [fields[b"id"].decode() for _, fields in items]


def test_erasure_with_the_journal_and_a_later_audit(  # noqa: PLR0917  its fixtures
    spark: SparkSession,
    client: redis.Redis,
    redis_url: str,
    world: World,
    tmp_path: Path,
    pipeline: Callable[..., Result],
) -> None:
    where, url = str(tmp_path / "archive"), redis_url
    world.send(["a", "b", "person"], delay=timedelta(hours=1))
    archive(spark, where, url=url, once=True)
    words = ("--archive", where, "--id", "person", "--redis", url, *SMALL)
    refused = pipeline("erase", *words)
    assert refused.exit_code == 2
    assert "'person' of topic 'orders' is live" in refused.stderr
    world.cancel(["person"])
    early = pipeline("erase", *words)
    assert early.exit_code == 1
    assert "1 journal entries of these messages are not archived yet" in early.stderr
    assert journaled(client) == ["a", "b", "person"]
    archive(spark, where, url=url, once=True)
    done = pipeline("erase", *words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("1 messages, 1 events and 1 journal entries deleted")
    assert journaled(client) == ["a", "b"]
    assert traces(tmp_path / "archive", "person") == set()
    # The last archived event is not in the journal any more; nothing counts as lost.
    found = audit(spark, lambda: open_archive(spark, where), Server(url))
    assert found.proven
    assert found.counts["live"] == 2
    world.send(["c"], delay=timedelta(hours=1))
    assert archive(spark, where, url=url, once=True).events == 1


def test_entries_that_another_archive_has_not_read_are_kept(
    spark: SparkSession, client: redis.Redis, redis_url: str, world: World, tmp_path: Path
) -> None:
    where, url = str(tmp_path / "archive"), redis_url
    world.send(["person"], delay=timedelta(hours=1))
    archive(spark, str(tmp_path / "slow"), url=url, once=True, name="slow")
    world.cancel(["person"])
    archive(spark, where, url=url, once=True, name="mine")
    done = erase(spark, where, ["person"], server=Server(url))
    assert (done.journal, done.unread) == (1, 1)
    archive(spark, str(tmp_path / "slow"), url=url, once=True, name="slow")
    done = erase(spark, where, ["person"], server=Server(url))
    assert (done.journal, done.unread) == (1, 0)
    assert journaled(client) == []
    assert archive(spark, str(tmp_path / "slow"), url=url, once=True, name="slow").gaps == ()


def test_the_command_retain(
    spark: SparkSession, tmp_path: Path, pipeline: Callable[..., Result]
) -> None:
    where = str(tmp_path / "archive")
    missing = pipeline("retain", "--archive", where, "--keep", "400d", *SMALL)
    assert missing.exit_code == 2
    assert "there is no archive" in missing.stderr
    assert not (tmp_path / "archive" / "message_log").exists()
    old = event("orders", 1_600_000_000_000, 0, 1, id="a", state="cancelled", settled=True)
    new = event("orders", 4_000_000_000_000, 0, 2, id="b", state="cancelled", settled=True)
    FileWriter(spark, where).write(frame(spark, [old, new]), 0, "q")
    done = pipeline("retain", "--archive", where, "--keep", "400d", *SMALL)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("1 messages and 1 events deleted")
    check(spark, where, [new])
    eternal = pipeline("retain", "--archive", where, "--keep", "9999999d", *SMALL)
    assert eternal.exit_code == 2
    assert eternal.stderr.startswith("lisa: keep reaches back before the year 1")
