"""Retention and erasure: messages and their events are deleted from archives and journals."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.deletion import erase
from tests.spark.jobs import KEYS, Jobs
from tests.spark.stories import Event, Stories, entries, event
from tests.spark.worlds import SMALL


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
def writer(jobs: Jobs, journal: Stories) -> FileWriter:
    """An archive with several days, files, merged files and a checkpoint of its log."""
    writer = jobs.writer()
    for batch in range(3):
        writer.write(jobs.frame(journal.extend(20)), batch, "q")
        if batch == 1:
            writer.fold()
            writer.compact(everything=True)
            DeltaTable(f"{jobs.where}/message_log").create_checkpoint()
    return writer


def test_erasure_leaves_no_trace_of_an_id(
    jobs: Jobs, writer: FileWriter, journal: Stories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an ended message and of one that is live in the archive; statistics contain both.

    An erasure that is killed at any step is completed by the next.
    """
    root, last = Path(jobs.where), journal.events[-1]["id"]
    live = {row.id for row in writer.archive().messages().where("not settled").collect()} - {last}
    ids = {one["id"] for one in journal.events} - {last}
    doomed = {min(ids), max(ids), min(live)}
    before = [path for one in doomed for path in traces(root, one)]
    for kind in ("message_log/day=", "_delta_log", ".json", "checkpoint.parquet", "_lisa/live"):
        assert any(kind in path for path in before), kind
    left = without(journal.events, doomed)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for owner, step in ((FileWriter, "_remove_messages"), (FileWriter, "delete_old")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, killed)
            with pytest.raises(KeyboardInterrupt):
                erase(jobs.spark, jobs.where, doomed, server=None)
        numbers = sorted(("orders", one["number"]) for one in left)
        assert entries(jobs.opened().log()) == numbers
    erase(jobs.spark, jobs.where, doomed, server=None)
    assert [path for one in doomed for path in traces(root, one)] == []
    jobs.check(left)
    assert erase(jobs.spark, jobs.where, doomed, server=None).events == 0
    # A process that has the archive open is refused; a new one continues.
    more = journal.extend(5)
    with pytest.raises(ConfigError, match="another process has written"):
        writer.write(jobs.frame(more), 3, "q")
    remover, later = jobs.writer(), jobs.writer()
    assert later.write(jobs.frame(more), 3, "q")[0] == len(more)
    with pytest.raises(ConfigError, match="need `lisa pipeline archive` stopped"):
        remover.erase([left[0]["id"]], None)
    later.fold()
    jobs.check(left + without(more, doomed))


def test_retention_deletes_messages_that_ended_before(
    jobs: Jobs, writer: FileWriter, journal: Stories
) -> None:
    cutoff = ms_datetime(journal.events[2 * len(journal.events) // 3]["at"])
    lives = writer.archive().messages().groupBy("id")
    ends = lives.agg(sf.max("settled_at").alias("end"), sf.bool_and("settled").alias("all"))
    old = {row.id for row in ends.where(sf.col("all") & (sf.col("end") < sf.lit(cutoff))).collect()}
    assert 0 < len(old) < ends.count()
    removed = jobs.writer().retain(cutoff)
    left = without(journal.events, old)
    assert removed.events == len(journal.events) - len(left)
    jobs.check(left)
    # Events of live messages from before the cutoff are kept, so that later ones fold correctly.
    assert min(one["at"] for one in left) / 1000 < cutoff.timestamp()
    more = journal.extend(10)
    jobs.writer().write(jobs.frame(more), 3, "q")
    jobs.check(left + more)


def test_the_commands_on_given_topics_and_times(jobs: Jobs) -> None:
    retain = ("retain", "--archive", jobs.where, *SMALL, "--keep")
    assert "there is no archive" in jobs.command(*retain, "400d", code=2).stderr
    assert not Path(jobs.where, "message_log").exists()
    events = [
        event(topic, at, number, number, id=name, state="cancelled", settled=True)
        for topic in ("orders", "parcels")
        for number, (name, at) in enumerate(
            (("a", 1_600_000_000_000), ("b", 1_600_000_000_000), ("new", 4_000_000_000_000)), 1
        )
    ]
    jobs.writer().write(jobs.frame(events), 0, "q")
    done = erase(jobs.spark, jobs.where, ["a"], topics=["orders"], server=None)
    assert (done.events, done.messages) == (1, 1)
    with pytest.raises(ConfigError, match="the archive has no topic order; its topics"):
        erase(jobs.spark, jobs.where, ["b"], topics=["order", "orders"], server=None)
    jobs.check([one for one in events if (one["topic"], one["id"]) != ("orders", "a")])
    done_too = jobs.command(*retain, "400d")
    assert done_too.stdout.startswith("3 messages and 3 events deleted")
    jobs.check([one for one in events if one["id"] == "new"])
    eternal = jobs.command(*retain, "9999999d", code=2)
    assert eternal.stderr.startswith("lisa: keep reaches back before the year 1")


def journaled(jobs: Jobs) -> list[str]:
    items: Any = jobs.client.xrange(KEYS.events)
    return [fields[b"id"].decode() for _, fields in items]


def test_erasure_with_the_journal_and_a_later_audit(jobs: Jobs) -> None:
    world = jobs.world()
    world.send(["a", "b", "person"], delay=timedelta(hours=1))
    jobs.archive()
    words = ("erase", "--archive", jobs.where, "--id", "person", "--redis", jobs.url, *SMALL)
    assert "'person' of topic 'orders' is live" in jobs.command(*words, code=2).stderr
    world.cancel(["person"])
    early = jobs.command(*words, code=1)
    assert "1 journal entries of these messages are not archived yet" in early.stderr
    assert journaled(jobs) == ["a", "b", "person"]
    jobs.archive()
    done = jobs.command(*words)
    assert done.stdout.startswith("1 messages, 1 events and 1 journal entries deleted")
    assert journaled(jobs) == ["a", "b"]
    assert traces(Path(jobs.where), "person") == set()
    # The last archived event is not in the journal any more; nothing counts as lost.
    found = jobs.audit(jobs.opened)
    assert found.proven
    assert found.counts["live"] == 2
    world.send(["c"], delay=timedelta(hours=1))
    assert jobs.archive().events == 1


def test_entries_that_another_archive_has_not_read_are_kept(jobs: Jobs) -> None:
    world, slow = jobs.world(), jobs.new_path()
    world.send(["person"], delay=timedelta(hours=1))
    jobs.archive(slow, name="slow")
    world.cancel(["person"])
    jobs.archive(name="mine")
    done = erase(jobs.spark, jobs.where, ["person"], server=jobs.server)
    assert (done.journal, done.unread) == (1, 1)
    jobs.archive(slow, name="slow")
    done = erase(jobs.spark, jobs.where, ["person"], server=jobs.server)
    assert (done.journal, done.unread) == (1, 0)
    assert journaled(jobs) == []
    assert jobs.archive(slow, name="slow").gaps == ()
