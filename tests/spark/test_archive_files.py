"""The archive in files: commits, cleaning up, compaction, conversion, outside readers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.gateway.page import archived
from lisa.gateway.page.archived import ArchiveQuery
from lisa.pipeline.archive import default_name, open_archive, shared_path, writing
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.archive.conversion import convert
from lisa.pipeline.archive.fold import fold_lives
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.lives import LIFE_SCHEMA_FIELDS, lives, with_gone
from lisa.pipeline.archive.old_layout import OldArchive
from lisa.pipeline.archive.reading import day_of, with_log_columns
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA
from lisa.pipeline.archive.shared_path import hosts_without
from lisa.pipeline.archive.state import RANDOM_BITS, new_number
from lisa.pipeline.archive.table import ArchiveTable
from lisa.pipeline.archive.writing import FileWriter
from tests.servers import JVM_PATIENCE, Processes, least, wait_until
from tests.spark.stories import (
    BEGIN_MS,
    Event,
    Stories,
    check,
    entries,
    envelope,
    event,
    expected,
    frame,
    told,
)


def dies(*_: Any, **__: Any) -> None:
    """Replaces a step at which the process is killed."""
    raise KeyboardInterrupt


def test_batches_folds_and_compactions(spark: SparkSession, tmp_path: Path) -> None:
    """The first version of the table lacks a column; another program compacts it, too."""
    root = tmp_path / "archive"
    where, events = str(root), []
    older = StructType([one for one in LOG_SCHEMA.fields if one.name != "shard"])
    ArchiveTable(spark, Folder(spark, where), "message_log", older).adapt()
    orders, other = Stories("orders"), Stories("a:b", 2, begin_ms=BEGIN_MS + 40_000)
    seen = {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
    writer = FileWriter(spark, where, keep=timedelta(0), topics=lambda _: seen)
    for batch in range(4):
        some = [*orders.extend(20), *other.extend(10)]
        assert writer.write(frame(spark, some), batch, "q")[0] == len(some)
        assert writer.write(frame(spark, some), batch, "q")[0] == 0  # as after a crash
        events += some
        if batch == 1:
            check(spark, where, events)
            writer.fold()
        if batch == 2:
            DeltaTable(root / "message_log").optimize.compact()
    assert "shard" in DeltaTable(root / "message_log").to_pandas().columns
    check(spark, where, events)
    assert open_archive(spark, where).topics() == seen
    files = writer.file_count()
    writer.fold()
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    assert writer.file_count() < files
    check(spark, where, events)
    assert writer.compact(everything=True) == 0
    on_disk = set(root.glob("me*/day=*/*"))  # also no checksum files
    assert len(on_disk) == writer.file_count()
    assert len(list((root / "_lisa" / "state").glob("[!.]*.json"))) == 2
    # What other programs see.
    found = DeltaTable(root / "messages").to_pandas()
    wanted = expected(events)
    assert {(one.topic, one.id, one.token) for one in found.itertuples()} == set(wanted)
    live = found[~found.settled]
    assert len(live) == sum(not one["settled"] for one in wanted.values()) > 0
    assert live.day.isna().all()
    log = DeltaTable(root / "message_log").to_pandas(filters=[("state", "=", "sent")])
    assert sorted(log["at"].astype("int64") // 1000) == sorted(
        one["at"] for one in events if one["state"] == "sent"
    )
    page = archived.search(root, ArchiveQuery(wanted=""), sees=lambda _: True, most=1_000)
    assert page.cursor is None
    assert sorted((one.topic, one.id, one.state) for one in page.hits) == sorted(
        zip(found.topic, found.id, found.state, strict=True)
    )


def test_messages_are_brought_up_to_date_at_intervals(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few events; a long fold makes the interval longer."""
    journal = Stories("orders")
    writer = FileWriter(spark, str(tmp_path))
    assert not writer.wants_fold()
    writer.write(frame(spark, journal.extend(1)), 0, "q")
    assert writer.wants_fold()
    assert not writer.wants_fold(catching_up=True)
    writer.tidy(last=False, behind=False)
    assert not writer.wants_fold()
    writer.write(frame(spark, journal.extend(1)), 1, "q")
    assert not writer.wants_fold()
    monkeypatch.setattr(writing, "age_s", lambda _: 61)
    for share, wants in ((0, True), (1e9, False)):
        monkeypatch.setattr(writing, "FOLD_SHARE", share)
        assert writer.wants_fold() == wants


def test_a_batch_that_fails_at_its_commit_is_written_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, journal = str(tmp_path / "archive"), Stories("orders")
    first, second = journal.extend(20), journal.extend(20)
    writer = FileWriter(spark, where, keep=timedelta(0))
    commit, files = DeltaTable.create_write_transaction, Folder.files

    def unanswered(*arguments: Any, **named: Any) -> None:
        """An object store repeats a request without an answer, and refuses the repetition."""
        commit(*arguments, **named)
        raise CommitFailedError("the version exists")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "create_write_transaction", unanswered)
        assert writer.write(frame(spark, first), 0, "q")[0] == len(first)
    for seen in (0, 1):  # executors write to their own disks: the driver finds too few files
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "files", lambda *a, seen=seen: files(*a)[:seen])
            with pytest.raises(LisaError, match=f"wrote {len(second)} rows .* driver sees"):
                writer.write(frame(spark, second).repartition(2), 1, "q")
    with monkeypatch.context() as patched:
        patched.setattr(ArchiveTable, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            writer.write(frame(spark, second), 1, "q")
    check(spark, where, first)
    writer = FileWriter(spark, where, keep=timedelta(0))
    assert writer.write(frame(spark, second), 1, "q")[0] == len(second)
    writer = FileWriter(spark, where, keep=timedelta(0))
    assert writer.write(frame(spark, second), 1, "q")[0] == 0
    # After the loss of its checkpoint, the same events arrive in another batch.
    third = journal.extend(5)
    assert writer.write(frame(spark, second + third), 0, "another")[0] == len(third)
    check(spark, where, first + second + third)
    writer.delete_old()
    root = Path(where)
    assert len(list(root.glob("message_log/day=*/*.parquet"))) == writer.file_count()
    assert list((root / "_lisa" / "staging").iterdir()) == []


def test_a_second_writer_takes_over_and_the_first_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted container continues immediately; its suspended predecessor commits nothing."""
    where, journal = str(tmp_path), Stories("orders")
    first, second, third = journal.extend(10), journal.extend(10), journal.extend(10)
    suspended = FileWriter(spark, where)
    suspended.write(frame(spark, first), 0, "q")
    restarted = FileWriter(spark, where)
    restarted.write(frame(spark, second), 1, "q")
    with pytest.raises(ConfigError, match="another process has written to"):
        suspended.write(frame(spark, second), 1, "q")
    # Another process commits between this one's check and its commit.
    commit = ArchiveTable.commit

    def late(table: ArchiveTable, *args: Any, **options: Any) -> None:
        monkeypatch.setattr(ArchiveTable, "commit", commit)
        FileWriter(spark, where).write(frame(spark, third), 2, "q")
        commit(table, *args, **options)

    monkeypatch.setattr(ArchiveTable, "commit", late)
    with pytest.raises(ConfigError, match="another process has written to"):
        restarted.write(frame(spark, third), 2, "q")
    check(spark, where, journal.events)


def test_files_have_bloom_filters_on_the_id(spark: SparkSession, tmp_path: Path) -> None:
    """Both the batches by Spark, if they have too many ids for a dictionary, and merged files."""

    def has_filter() -> set[bool]:
        found = set()
        for uri in DeltaTable(tmp_path / "message_log").file_uris():
            footer = pq.read_metadata(uri)
            index = footer.schema.names.index("id")
            found.add(footer.row_group(0).column(index).bloom_filter_offset is not None)
        return found

    one = frame(spark, [event("orders", BEGIN_MS, 0, 1, id="a", state="sent")])
    many = one.drop("id").crossJoin(spark.range(60_000).selectExpr("uuid() AS id"))
    writer = FileWriter(spark, str(tmp_path))
    for batch in range(2):
        writer.write(many.select(*EVENT_SCHEMA.names).coalesce(1), batch, "q")
    assert has_filter() == {True}
    assert writer.compact(everything=True) == 2
    assert has_filter() == {True}


def test_a_reader_continues_while_the_archive_is_folded_and_compacted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live events are kept for an hour after they were replaced, however old they are."""
    where = str(tmp_path)
    journal, hours_ms = Stories("orders"), 3 * 3_600_000
    writer = FileWriter(spark, where, keep=timedelta(hours=1))
    writer.write(frame(spark, journal.extend(10)), 0, "q")
    with monkeypatch.context() as earlier:
        earlier.setattr(writing, "new_number", lambda: new_number() - (hours_ms << RANDOM_BITS))
        writer.fold()
    writer.write(frame(spark, journal.extend(10)), 1, "q")
    before = open_archive(spark, where)
    log, messages = before.log(), before.messages()
    writer.fold()
    writer.delete_old()
    assert told(messages) == expected(journal.events)
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    assert len(entries(log)) == len(journal.events)
    assert told(messages) == expected(journal.events)


POLLS = """
import json, sys
from pathlib import Path
import duckdb
from deltalake import DeltaTable, QueryBuilder
where = sys.argv[1]
def duck():
    files = duckdb.read_parquet(DeltaTable(where + "/message_log").file_uris())
    return files.aggregate("count(*), count(DISTINCT number)").fetchall()[0]
def datafusion():
    events = QueryBuilder().register("events", DeltaTable(where + "/message_log"))
    counts = "SELECT count(*), count(DISTINCT number) FROM events"
    return [column[0].as_py() for column in events.execute(counts).read_all().columns]
print("polling", flush=True)
while not Path(where, "stop").exists():
    for poll in (duck, datafusion):
        print(json.dumps(poll()), flush=True)
"""


def test_outside_readers_see_whole_batches_only(
    spark: SparkSession, tmp_path: Path, processes: Processes
) -> None:
    """The archive writes and compacts meanwhile.

    The readers avoid `to_pandas` and `to_pyarrow_dataset`, which may abort a program at its exit.
    """
    journal = Stories("orders")
    writer = FileWriter(spark, str(tmp_path), keep=timedelta(hours=1))
    totals = [0]

    def write(batch: int) -> None:
        some = journal.extend(20)
        writer.write(frame(spark, some), batch, "q")
        totals.append(totals[-1] + len(some))

    write(0)
    reader = processes.start("-c", POLLS, str(tmp_path))
    reader.wait_for("polling", timeout=JVM_PATIENCE)

    def polls() -> list[list[int]]:
        return [json.loads(one) for one in reader.output.splitlines() if one.startswith("[")]

    def has_polled(times: int) -> bool:
        return len(polls()) >= times or not reader.alive

    for batch in range(1, 4):
        write(batch)
        if batch % 2:
            writer.compact(everything=True)
        wait_until(partial(has_polled, len(polls()) + 4), timeout=JVM_PATIENCE)
    (tmp_path / "stop").touch()
    assert reader.wait(timeout=JVM_PATIENCE) == 0
    assert all(rows == distinct and rows in totals for rows, distinct in polls())
    assert polls()[-1][0] == totals[-1]


def test_a_local_path_with_a_cluster_is_checked(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("5")
    assert hosts_without(spark, str(tmp_path / "there"), "5") == []
    assert hosts_without(spark, str(tmp_path / "there"), "6") == [socket.gethostname()]
    assert hosts_without(spark, str(tmp_path / "nothing"), "5") == [socket.gethostname()]
    asked: list[str] = []

    def blind(_: Any, path: str, token: str) -> list[str]:
        assert Path(path).read_text("utf-8") == token
        asked.append(path)
        return ["worker-2"]

    monkeypatch.setattr(shared_path, "hosts_without", blind)
    FileWriter(spark, str(tmp_path / "local"))
    assert asked == []
    monkeypatch.setattr(shared_path, "is_local", lambda _: False)
    with pytest.raises(ConfigError, match="worker-2 do not see"):
        FileWriter(spark, str(tmp_path / "cluster"))
    assert len(asked) == 1


def test_a_year_of_a_hundred_topics_is_planned_within_a_second(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A day has one merged file; the current day has the files of its last batches."""
    where = str(tmp_path)
    writer = FileWriter(spark, where)
    topics = [f"t{number:03}" for number in range(100)]
    some = [event(topic, BEGIN_MS, 0, 1, id="a", state="sent") for topic in topics]
    writer.write(frame(spark, some).coalesce(1), 0, "q")
    writer.fold()
    for name in ("message_log", "messages"):
        delta = DeltaTable(tmp_path / name)
        [one, *_] = delta.file_uris()
        actions: list[AddAction | RemoveAction] = []
        for day in range(365):
            date = (ms_datetime(BEGIN_MS) + timedelta(days=day)).date().isoformat()
            for number in range(3 if day < 364 else 200):
                path = f"day={date}/year-{number}.parquet"
                (tmp_path / name / path).parent.mkdir(exist_ok=True)
                os.link(one, tmp_path / name / path)
                size, stats = Path(one).stat().st_size, json.dumps({"numRecords": 100})
                actions.append(AddAction(path, size, {"day": date}, BEGIN_MS, True, stats))
        for first in range(0, len(actions), 50):
            some_files = actions[first : first + 50]
            delta.create_write_transaction(some_files, "append", delta.schema(), ["day"])
            delta.update_incremental()

    context: Any = spark.sparkContext
    jvm = context._gateway.proc.pid

    def cpu_s() -> float:
        """Processor time of this process and its JVM, which other processes do not change."""
        fields = Path(f"/proc/{jvm}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def plan(table: str) -> float:
        began = cpu_s()
        rows = getattr(open_archive(spark, where), table)()
        rows.where("topic = 't001' and id = 'a'")._jdf.queryExecution().executedPlan()
        return cpu_s() - began

    assert len(DeltaTable(tmp_path / "message_log").file_uris()) > 1_200
    assert least(lambda: plan("log"), 1) < 1
    assert least(lambda: plan("messages"), 1) < 1


def test_a_checkpoint_that_is_ahead(spark: SparkSession, tmp_path: Path) -> None:
    def check_(offsets: dict[str, tuple[str, int]], *gaps: ArchiveGap) -> None:
        check_checkpoint(spark, str(tmp_path), offsets, gaps)

    def planned(batch: int, **offset: Any) -> None:
        (tmp_path / "offsets").mkdir(exist_ok=True)
        (tmp_path / "offsets" / str(batch)).write_text(
            f"v1\n{{}}\n{json.dumps({'orders': offset})}"
        )

    check_({})  # a new archive
    (tmp_path / "commits").mkdir()
    for batch, last in enumerate(("5-0", "10-0", "20-0")):
        planned(batch, id=last, n=batch)
        if batch < 2:
            (tmp_path / "commits" / str(batch)).write_text("v1\n{}")
    check_({"orders": ("10-0", 1), "other": ("1-0", 1)})
    check_({"orders": ("20-0", 2)})  # killed before Spark's commit
    for mine in ({"orders": ("9-5", 1)}, {"other": ("10-0", 1)}, {}):
        with pytest.raises(ConfigError, match="topic 'orders' it is at 10-0"):
            check_(mine)
    gap = ArchiveGap("orders", "9-5", 1, None, None, "all of them", ms_datetime(9))
    check_({"orders": ("9-5", 1)}, gap)  # no event since
    with pytest.raises(ConfigError, match="ahead of"):
        check_({"orders": ("9-5", 1)}, replace(gap, after_id="9-4"))
    # A journal without an archived event yet.
    begun: dict[str, Any] = {"id": "10-0", "n": 5, "from": {"id": "10-0", "n": 5}}
    planned(1, **begun)
    check_({})
    with pytest.raises(ConfigError, match="ahead of the archive"):
        check_({"orders": ("4-0", 4)})
    for more in ({"gap": ["", "0-0", 1, 2, None]}, {"from": {"id": "4-0", "n": 4}}):
        planned(1, **begun | more)
        with pytest.raises(ConfigError, match="ahead of the archive"):
            check_({})


def test_gaps_are_recorded_once(spark: SparkSession, tmp_path: Path) -> None:
    where, events = str(tmp_path), Stories("orders").extend(10)
    last, following = events[3], events[6]
    gap = event(
        *("orders", last["at"], last["seq"] + 1, last["number"] + 1),
        id=None,
        state="gap",
        reason="events 5 to 6 are gone",
        actor=None,
    )
    writer = FileWriter(spark, where)
    for query in ("q", "later"):
        writer.write(frame(spark, [*events[:4], gap, *events[6:]]), 0, query)
    [found] = open_archive(spark, where).gaps()
    assert (found.topic, found.reason) == ("orders", "events 5 to 6 are gone")
    assert (found.after_id, found.after_number) == (f"{last['at']}-{last['seq']}", 4)
    assert (found.to_id, found.to_number) == (f"{following['at']}-{following['seq']}", 7)


def test_an_end_archived_after_the_next_life(spark: SparkSession, tmp_path: Path) -> None:
    """Journals of shards are read independently: one may be archived less far than another."""

    def at(ms: int, number: int, token: str = "", **fields: Any) -> Event:
        begun = {"state": "sent", "due": 9000, "envelope": envelope(token, 1)} if token else {}
        return event("orders", ms, 0, number, **begun, id="m", **fields)

    def stood() -> dict[str | None, str]:
        rows = open_archive(spark, str(tmp_path)).messages().collect()
        return {row.token: row.state for row in rows if row.settled}

    late = at(1100, 2, shard="0of2", state="acked", group="g", settled=True)
    known = [
        at(1000, 1, "firstfir", shard="0of2"),
        at(5000, 1, "secondse", shard="1of3"),
        at(6000, 2, shard="1of3", state="cancelled", settled=True),
    ]
    writer = FileWriter(spark, str(tmp_path))
    for batch, (events, first) in enumerate(((known, "lost"), ([late], "acked"))):
        writer.write(frame(spark, events), batch, "q")
        writer.fold()
        assert stood() == {"firstfir": first, "secondse": "cancelled"}
    assert writer.tables.fold.live_events == 0
    assert open_archive(spark, str(tmp_path)).offsets() == {
        "orders~0of2": ("1100-0", 2),
        "orders~1of3": ("6000-0", 2),
    }


def test_missing_archives_and_names(spark: SparkSession, tmp_path: Path) -> None:
    for missing in (open_archive, convert):
        with pytest.raises(ConfigError, match="there is no archive in"):
            missing(spark, str(tmp_path / "nothing"))
    names = {
        default_name(one) for one in ("/a/b", "/a/b/", "s3a://x/b", "jdbc:postgresql://h/db?u=1")
    }
    assert len(names) == 3
    assert all(len(name) <= 64 and name[0] != "~" for name in names)


def write_old(spark: SparkSession, where: Path, first: list[Event], later: list[Event]) -> None:
    """An archive as version 0.1 wrote it: some events folded, later ones not; some files merged.

    One day and topic, so that the files' own lists stay short.
    """
    (where / "_lisa").mkdir(parents=True)

    def files(rows: DataFrame, root: str) -> dict[str, int]:
        before = set(where.rglob("*.parquet"))
        writer = rows.write.mode("append").partitionBy("day", "topic")
        writer.parquet(str(where / root))
        new = set(where.rglob("*.parquet")) - before
        return {str(one.relative_to(where)): one.stat().st_size for one in new}

    tagged = with_gone(lives(frame(spark, first)))
    ended = fold_lives(tagged.where("gone").drop("gone"))
    ended = ended.withColumn("day", day_of(sf.col("settled_at")))
    merged = files(with_log_columns(frame(spark, first)), "_lisa/compacted/message_log")
    merged |= files(ended, "messages")
    unfolded = files(with_log_columns(frame(spark, later)), "message_log")
    live = tagged.where("not gone").drop("gone", *LIFE_SCHEMA_FIELDS)
    live = live.withColumn("number", sf.lit(0).cast("long"))
    live.write.parquet(str(where / "_lisa" / "live" / "00000007-aa"))
    live_files = (where / "_lisa" / "live").rglob("*.parquet")
    gone = "message_log/day=2026-09-21/topic=orders/gone.parquet"
    last = later[-1]
    manifest = {
        "version": 8,
        "at_ms": BEGIN_MS,
        "queries": {"q": 1},
        "offsets": {"orders": (f"{last['at']}-{last['seq']}", last["number"])},
        "topics": {"orders": ({"journal": "1"}, ("lisa",))},
        "gaps": [],
        "unfolded": unfolded,
        "live": [str(one.relative_to(where)) for one in live_files],
        "live_events": live.count(),
        "swaps": [],
        "dropped": [],
        "base": 5,
        "added": unfolded,
        "removed": [gone],
    }
    (where / "_lisa" / "files-00000005.json").write_text(json.dumps(merged | {gone: 1}))
    (where / "_lisa" / "00000007.json").write_text("{}")
    (where / "_lisa" / "00000008.json").write_text(json.dumps(manifest))


def test_an_old_archive_is_read_and_converted(
    spark: SparkSession,
    tmp_path: Path,
    pipeline: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversion that was interrupted at any step is repeated."""
    where, journal = tmp_path / "archive", Stories("orders")
    first, later, new = journal.extend(40), journal.extend(20), journal.extend(10)
    write_old(spark, where, first, later)
    old = open_archive(spark, str(where))
    assert isinstance(old, OldArchive)
    assert len(entries(old.log())) == len(first + later)
    assert told(old.messages()) == expected(first + later)
    with pytest.raises(ConfigError, match=f"convert it once: lisa pipeline convert {where}"):
        FileWriter(spark, str(where))
    (where / "_lisa" / "checkpoint").mkdir()
    for step in ("FileWriter.fold", "remove"):
        with monkeypatch.context() as patched:
            patched.setattr(f"lisa.pipeline.archive.conversion.{step}", dies)
            with pytest.raises(KeyboardInterrupt):
                convert(spark, str(where))
        check(spark, str(where), first + later)

    done = pipeline("convert", str(where), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["events"] == len(first + later)
    assert open_archive(spark, str(where)).topics()["orders"].groups == ("lisa",)
    assert not [one for one in where.rglob("*") if "topic=" in str(one)]
    names = {one.name for one in (where / "_lisa").iterdir()}
    assert names == {"checkpoint", "live", "staging", "state"}
    again = pipeline("convert", str(where))
    assert "has the present layout already" in again.output
    writer = FileWriter(spark, str(where))
    assert writer.write(frame(spark, later), 1, "q")[0] == 0  # the last batch before the conversion
    writer.write(frame(spark, new), 2, "q")
    check(spark, str(where), first + later + new)
