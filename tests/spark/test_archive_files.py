"""The archive in files: commits, folds, cleaning up, compaction, outside readers."""

import json
import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.gateway.page import search
from lisa.gateway.page.search import ArchiveQuery
from lisa.pipeline.archive import default_name, open_archive, writing
from lisa.pipeline.archive.base import ArchiveGap, TopicRecord
from lisa.pipeline.archive.fold import (
    fold,
    fold_lives,
    host_of,
    lives,
    of_lives,
    with_gone,
)
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.reading import RANDOM_BITS, new_number
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.table import ArchiveTable
from lisa.pipeline.jobs.archive import check_checkpoint
from lisa.pipeline.session import changed
from tests.servers import least
from tests.spark.jobs import Jobs
from tests.spark.stories import (
    BEGIN_MS,
    Event,
    Stories,
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


@pytest.mark.parametrize(("seed", "sharded"), [(1, True), (2, False)])
def test_fold_agrees_with_a_plain_python_fold(
    spark: SparkSession, seed: int, *, sharded: bool
) -> None:
    events = [*Stories("orders", seed).extend(400), *Stories("a:b", seed).extend(80)]
    assert len({one["state"] for one in events}) == 15
    shuffled = sorted(events, key=lambda one: hash((one["id"], one["number"])))
    several = frame(spark, [*shuffled, *shuffled[:50]])  # repeated events are harmless
    made = fold(several) if sharded else fold_lives(lives(several, sharded=False))
    assert made.schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    found, wanted = told(made), expected(events)
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        assert found[key] == one, key
    assert {one["state"] for one in found.values()} >= {"waiting", "acked", "cancelled", "lost"}
    if not sharded:
        return
    tagged = with_gone(lives(several))
    gone = {tuple(row) for row in tagged.where("gone").select("topic", "id", "life").collect()}
    assert gone == {key for key, one in found.items() if one["settled"]}
    live = made.where("not settled").select("topic", "id", sf.col("token").alias("life"))
    kept = of_lives(several, live).select("topic", "id", "life", "at", "seq")
    expected_events = tagged.where("not gone").select(*kept.columns)
    assert sorted(map(str, kept.collect())) == sorted(map(str, expected_events.collect()))


SENT: dict[str, Any] = {"id": "m", "state": "sent", "due": 9000}
SENT["envelope"] = envelope("tokentok", {"a": 1})
FIRST = SENT | {"envelope": envelope("firstfir", {"a": 1}), "shard": "0of2"}
SECOND = SENT | {"envelope": envelope("secondse", {"a": 2}), "shard": "1of3"}
END = {"id": "m", "state": "acked", "group": "g", "settled": True}


def at(ms: int, number: int, **fields: Any) -> Event:
    return event("orders", ms, 0, number, **fields)


def stood(rows: DataFrame) -> dict[str | None, tuple[str, bool]]:
    return {row.token: (row.state, row.settled) for row in rows.collect()}


def test_damaged_envelopes_restored_messages_and_actors(spark: SparkSession) -> None:
    damaged = [
        *(b"", b"1", b"1tokentok-j00", b"1tokentok-jzzzz{}", b"1tokentok-jffff{}"),
        *(b"1tokentok-x0000{}", b"1tokentok-j0003{}", b"1tokentok-j0002[]{}"),
        b"2tokentok-j0000{}",  # another version
    ]
    token_only = b"1\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8-j0000{}"
    events = [
        at(1000 + i, i + 1, **SENT | {"id": f"m{i}", "envelope": data})
        for i, data in enumerate([*damaged, token_only])
    ]
    back = SENT | {"id": "back", "state": "restored", "attempt": 2, "reason": "boom"}
    deferred = {"id": "late", "group": "a", "state": "deferred", "attempt": 2, "due": 9000}
    for i, one in enumerate(
        [
            SENT | {"id": "late"},
            deferred | {"reason": "busy"},
            SENT | {"id": "back"},
            {"id": "back", "group": "a", "state": "acked", "attempt": 1},
            {"id": "back", "group": "b", "state": "in_flight", "attempt": 3},
            back | {"group": "b", "place": "retry"},
            back | {"group": "c", "place": "garbage", "attempt": 5},
        ]
    ):
        events.append(at(2000 + i, len(events) + 1, **one))
    found = {row.id: row for row in fold(frame(spark, events)).collect()}
    assert len(found) == len(damaged) + 3
    (waits,) = found["late"].groups
    assert (waits.state, waits.attempts, waits.reason) == ("retry", 2, "busy")
    for i, data in enumerate(damaged):
        row = found[f"m{i}"]
        assert (row.kind, row.headers, row.body) == (None, None, data)
    assert row.token == "tokentok"
    assert found[f"m{len(damaged)}"].kind == "j"
    restored = found["back"]
    assert (restored.state, restored.settled, restored.attempts) == ("retry", False, 5)
    assert [(g.group, g.state, g.attempts) for g in restored.groups] == [
        *(("a", "acked", 0), ("b", "retry", 2), ("c", "garbage", 5))
    ]
    actors = ["manager@a.b:1", "consumer@a:b:9", "gateway/buyer@eu@box:22", "lost", "x@:3", None]
    rows = spark.createDataFrame([(a,) for a in actors], "actor string").select(host_of())
    assert [r[0] for r in rows.collect()] == ["a.b", "a:b", "box", None, None, None]


def test_lives_of_an_id_that_moved_to_another_shard(spark: SparkSession) -> None:
    def folded(*events: Event) -> dict[str | None, tuple[str, bool]]:
        return stood(fold(frame(spark, events)))

    both = {"firstfir": ("acked", True), "secondse": ("waiting", False)}
    # By the servers' clocks, the second life began before the first one ended.
    end = at(1052, 2, shard="0of2", **END)
    assert folded(at(1000, 1, **FIRST), at(1050, 1, **SECOND), end) == both
    # Without a recorded end.
    lost = folded(at(1000, 1, **FIRST), at(5000, 1, **SECOND))
    assert lost == both | {"firstfir": ("lost", True)}
    # Restored into another shard.
    back = FIRST | {"shard": "1of3", "state": "restored", "due": 8000}
    events = [
        at(1000, 1, **FIRST),
        at(2000, 2, id="m", shard="0of2", state="in_flight", group="g", attempt=1),
        at(9000, 1, **back | {"group": "g", "place": "retry", "attempt": 2}),
    ]
    assert folded(*events) == {"firstfir": ("retry", False)}
    assert folded(*events, at(9900, 2, shard="1of3", **END)) == {"firstfir": ("acked", True)}


def test_an_end_archived_after_the_next_life(jobs: Jobs) -> None:
    """Journals of shards are read independently: one may be archived less far than another."""
    known = [
        at(1000, 1, **FIRST),
        at(5000, 1, **SECOND),
        at(6000, 2, id="m", shard="1of3", state="cancelled", settled=True),
    ]
    writer = jobs.writer()
    for batch, (events, first) in enumerate(
        ((known, "lost"), ([at(1100, 2, shard="0of2", **END)], "acked"))
    ):
        writer.write(jobs.frame(events), batch, "q")
        writer.fold()
        assert stood(jobs.opened().messages()) == {
            "firstfir": (first, True),
            "secondse": ("cancelled", True),
        }
    assert writer.tables.fold.live_events == 0
    offsets = {"orders~0of2": ("1100-0", 2), "orders~1of3": ("6000-0", 2)}
    assert jobs.opened().offsets() == offsets


def test_batches_folds_and_compactions(jobs: Jobs) -> None:
    """The first version of the table lacks a column; another program compacts it, too."""
    root, events = Path(jobs.where), []
    older = StructType([one for one in LOG_SCHEMA.fields if one.name != "shard"])
    ArchiveTable(jobs.spark, Folder(jobs.spark, jobs.where), "message_log", older).adapt()
    orders, other = Stories("orders"), Stories("a:b", 2, begin_ms=BEGIN_MS + 40_000)
    seen = {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
    writer = jobs.writer(keep=timedelta(0), topics=lambda _: seen)
    for batch in range(4):
        some = [*orders.extend(20), *other.extend(10)]
        assert writer.write(jobs.frame(some), batch, "q")[0] == len(some)
        assert writer.write(jobs.frame(some), batch, "q")[0] == 0  # as after a crash
        events += some
        if batch == 1:
            jobs.check(events)
            writer.fold()
        if batch == 2:
            DeltaTable(root / "message_log").optimize.compact()
    assert "shard" in DeltaTable(root / "message_log").to_pandas().columns
    jobs.check(events)
    assert jobs.opened().topics() == seen
    files = writer.file_count()
    writer.fold()
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    assert writer.file_count() < files
    jobs.check(events)
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
    page = search.search_archive(root, ArchiveQuery(wanted=""), sees=lambda _: True, most=1_000)
    assert page.cursor is None
    assert sorted((one.topic, one.id, one.state) for one in page.hits) == sorted(
        zip(found.topic, found.id, found.state, strict=True)
    )


def test_messages_are_brought_up_to_date_at_intervals(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few events; a long fold makes the interval longer."""
    journal, writer = Stories("orders"), jobs.writer()
    assert not writer.wants_fold()
    writer.write(jobs.frame(journal.extend(1)), 0, "q")
    assert writer.wants_fold()
    assert not writer.wants_fold(catching_up=True)
    writer.tidy(last=False, behind=False)
    assert not writer.wants_fold()
    writer.write(jobs.frame(journal.extend(1)), 1, "q")
    assert not writer.wants_fold()
    monkeypatch.setattr(writing, "age_s", lambda _: 61)
    for share, wants in ((0, True), (1e9, False)):
        monkeypatch.setattr(writing, "FOLD_SHARE", share)
        assert writer.wants_fold() == wants


def test_a_batch_that_fails_at_its_commit_is_written_once(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Stories("orders")
    first, second = journal.extend(20), journal.extend(20)
    writer = jobs.writer(keep=timedelta(0))
    commit, files = DeltaTable.create_write_transaction, Folder.files

    def unanswered(*arguments: Any, **named: Any) -> None:
        """An object store repeats a request without an answer, and refuses the repetition."""
        commit(*arguments, **named)
        raise CommitFailedError("the version exists")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "create_write_transaction", unanswered)
        assert writer.write(jobs.frame(first), 0, "q")[0] == len(first)
    for seen in (0, 1):  # executors write to their own disks: the driver finds too few files
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "files", lambda *a, seen=seen: files(*a)[:seen])
            with pytest.raises(LisaError, match=f"wrote {len(second)} rows .* driver sees"):
                writer.write(jobs.frame(second).repartition(2), 1, "q")
    with monkeypatch.context() as patched:
        patched.setattr(ArchiveTable, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            writer.write(jobs.frame(second), 1, "q")
    jobs.check(first)
    for written in (len(second), 0):
        writer = jobs.writer(keep=timedelta(0))
        assert writer.write(jobs.frame(second), 1, "q")[0] == written
    # After the loss of its checkpoint, the same events arrive in another batch.
    third = journal.extend(5)
    assert writer.write(jobs.frame(second + third), 0, "another")[0] == len(third)
    jobs.check(first + second + third)
    writer.delete_old()
    root = Path(jobs.where)
    assert len(list(root.glob("message_log/day=*/*.parquet"))) == writer.file_count()
    assert list((root / "_lisa" / "staging").iterdir()) == []


def test_a_second_writer_takes_over_and_the_first_is_refused(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted container continues immediately; its suspended predecessor commits nothing."""
    journal = Stories("orders")
    first, second, third = (jobs.frame(journal.extend(10)) for _ in range(3))
    suspended = jobs.writer()
    suspended.write(first, 0, "q")
    restarted = jobs.writer()
    restarted.write(second, 1, "q")
    with pytest.raises(ConfigError, match="another process has written to"):
        suspended.write(second, 1, "q")
    # Another process commits between this one's check and its commit.
    commit = ArchiveTable.commit

    def late(table: ArchiveTable, *args: Any, **options: Any) -> None:
        monkeypatch.setattr(ArchiveTable, "commit", commit)
        jobs.writer().write(third, 2, "q")
        commit(table, *args, **options)

    monkeypatch.setattr(ArchiveTable, "commit", late)
    with pytest.raises(ConfigError, match="another process has written to"):
        restarted.write(third, 2, "q")
    jobs.check(journal.events)


def test_files_have_bloom_filters_on_the_id(jobs: Jobs) -> None:
    """Both the batches by Spark, if they have too many ids for a dictionary, and merged files."""

    def has_filter() -> set[bool]:
        found = set()
        for uri in DeltaTable(f"{jobs.where}/message_log").file_uris():
            footer = pq.read_metadata(uri)
            index = footer.schema.names.index("id")
            found.add(footer.row_group(0).column(index).bloom_filter_offset is not None)
        return found

    one = jobs.frame([at(BEGIN_MS, 1, id="a", state="sent")])
    many = one.drop("id").crossJoin(jobs.spark.range(60_000).selectExpr("uuid() AS id"))
    writer = jobs.writer()
    for batch in range(2):
        writer.write(many.select(*EVENT_SCHEMA.names).coalesce(1), batch, "q")
    assert has_filter() == {True}
    assert writer.compact(everything=True) == 2
    assert has_filter() == {True}


def test_an_id_is_looked_for_only_in_files_whose_statistics_may_have_it(jobs: Jobs) -> None:
    """Also ids longer than the statistics of merged files, and events after the last fold."""
    ids, writer = [f"{'é' * 120}{number:02}" for number in range(40)], jobs.writer()
    for batch in range(4):
        some = range(10 * batch, 10 * batch + 10)
        ended = [at(BEGIN_MS + n, n + 1, id=ids[n], state="cancelled", settled=True) for n in some]
        writer.write(jobs.frame(ended).coalesce(1), batch, "q")
        if batch < 3:
            writer.fold()

    def files(**chosen: list[str]) -> int:
        """How many files of ended messages are read."""
        return sum("/messages/" in file for file in jobs.opened().messages(**chosen).inputFiles())

    def found(wanted: list[str]) -> list[str]:
        rows = jobs.opened().messages(["orders", "else"], wanted).select("id").collect()
        return sorted(row.id for row in rows)

    assert [files(ids=[one]) for one in ids[::10]] == [1, 1, 1, 0]
    assert [files(ids=[ids[0], ids[-1]]), files(topics=["orders"]), files(topics=["else"])] == [
        1,
        3,
        0,
    ]
    assert found(ids[::13]) == ids[::13]
    writer.fold()
    assert writer.compact(everything=True) > 0
    assert [files(ids=[one]) for one in (ids[0], ids[-1], "z")] == [1, 1, 0]
    assert found([ids[0], ids[-1], "z"]) == [ids[0], ids[-1]]


def test_readers_see_whole_batches_while_the_archive_is_folded_and_compacted(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live events are kept for an hour after they were replaced, however old they are."""
    journal, hours_ms = Stories("orders"), 3 * 3_600_000
    writer = jobs.writer(keep=timedelta(hours=1))
    writer.write(jobs.frame(journal.extend(10)), 0, "q")
    with monkeypatch.context() as earlier:
        earlier.setattr(writing, "new_number", lambda: new_number() - (hours_ms << RANDOM_BITS))
        writer.fold()
    totals, commit = [len(journal.events)], ArchiveTable.commit

    def others_see() -> None:
        """What DuckDB and DataFusion read from the log's files."""
        table = DeltaTable(f"{jobs.where}/message_log")
        counts = "SELECT count(*), count(DISTINCT number) FROM events"
        columns = QueryBuilder().register("events", table).execute(counts).read_all().columns
        rows = duckdb.read_parquet(table.file_uris())
        [seen] = rows.aggregate("count(*), count(DISTINCT number)").fetchall()
        assert seen == (totals[-1], totals[-1]) == tuple(one[0].as_py() for one in columns)

    def watched(table: ArchiveTable, *arguments: Any, **named: Any) -> None:
        others_see()
        commit(table, *arguments, **named)
        totals.append(len(journal.events))
        others_see()

    monkeypatch.setattr(ArchiveTable, "commit", watched)
    writer.write(jobs.frame(journal.extend(10)), 1, "q")
    before = jobs.opened()
    log, messages = before.log(), before.messages()
    writer.fold()
    writer.delete_old()
    assert told(messages) == expected(journal.events)
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    others_see()
    assert len(totals) == 3
    assert len(entries(log)) == len(journal.events)
    assert told(messages) == expected(journal.events)


def test_a_year_of_a_hundred_topics_is_planned_within_a_second(jobs: Jobs) -> None:
    """A day has one merged file; the current day has the files of its last batches."""
    writer, root = jobs.writer(), Path(jobs.where)
    topics = [f"t{number:03}" for number in range(100)]
    some = [event(topic, BEGIN_MS, 0, 1, id="a", state="sent") for topic in topics]
    writer.write(jobs.frame(some).coalesce(1), 0, "q")
    writer.fold()
    for name in ("message_log", "messages"):
        delta = DeltaTable(root / name)
        [one, *_] = delta.file_uris()
        actions: list[AddAction | RemoveAction] = []
        for day in range(365):
            date = (ms_datetime(BEGIN_MS) + timedelta(days=day)).date().isoformat()
            for number in range(3 if day < 364 else 200):
                path = f"day={date}/year-{number}.parquet"
                (root / name / path).parent.mkdir(exist_ok=True)
                os.link(one, root / name / path)
                size, stats = Path(one).stat().st_size, json.dumps({"numRecords": 100})
                actions.append(AddAction(path, size, {"day": date}, BEGIN_MS, True, stats))
        for first in range(0, len(actions), 50):
            some_files = actions[first : first + 50]
            delta.create_write_transaction(some_files, "append", delta.schema(), ["day"])
            delta.update_incremental()

    context: Any = jobs.spark.sparkContext
    jvm = context._gateway.proc.pid

    def cpu_s() -> float:
        """Processor time of this process and its JVM, which other processes do not change."""
        fields = Path(f"/proc/{jvm}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def plan(table: str) -> float:
        began = cpu_s()
        rows = getattr(jobs.opened(), table)()
        rows.where("topic = 't001' and id = 'a'")._jdf.queryExecution().executedPlan()
        return cpu_s() - began

    assert len(DeltaTable(root / "message_log").file_uris()) > 1_200
    assert least(lambda: plan("log"), 1) < 1
    assert least(lambda: plan("messages"), 1) < 1


def test_a_checkpoint_that_is_ahead(spark: SparkSession, tmp_path: Path) -> None:
    def check_(offsets: dict[str, tuple[str, int]], *gaps: ArchiveGap) -> None:
        check_checkpoint(spark, str(tmp_path), offsets, gaps)

    def planned(batch: int, **offset: Any) -> None:
        text = f"v1\n{{}}\n{json.dumps({'orders': offset})}"
        (tmp_path / "offsets" / str(batch)).write_text(text)

    check_({})  # a new archive
    (tmp_path / "commits").mkdir()
    (tmp_path / "offsets").mkdir()
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


def test_a_small_fold_of_shards_has_few_tasks(jobs: Jobs) -> None:
    """Spark plans 200 tasks for each shuffle."""
    writer, tracker = jobs.writer(), jobs.spark.sparkContext.statusTracker()
    writer.write(jobs.frame([at(1000, 1, **FIRST), at(5000, 1, **SECOND)]), 0, "q")
    before = set(tracker.getJobIdsForGroup())
    usual = {"spark.sql.adaptive.enabled": "true", "spark.sql.shuffle.partitions": "200"}
    with changed(jobs.spark, usual):
        writer.fold()
    ran = [tracker.getJobInfo(job) for job in {*tracker.getJobIdsForGroup()} - before]
    stages = [tracker.getStageInfo(stage) for job in ran if job for stage in job.stageIds]
    assert 0 < sum(stage.numTasks for stage in stages if stage and stage.numCompletedTasks) < 20


def test_damaged_archives_are_refused(jobs: Jobs) -> None:
    """Each with the name of the file; no older state and no part of the rows is read instead."""

    def read() -> None:
        archive = jobs.opened()
        archive.log()
        archive.messages()

    journal, root = Stories("orders"), Path(jobs.where)
    first, second = journal.extend(20), journal.extend(20)
    writer = jobs.writer()
    writer.write(jobs.frame(first), 0, "q")
    writer.fold()
    DeltaTable(root / "message_log").create_checkpoint()
    writer.write(jobs.frame(second), 1, "q")
    [live] = (root / "_lisa" / "live").glob("*/*.parquet")
    log, data = root / "message_log" / "_delta_log", DeltaTable(root / "message_log").file_uris()
    last, checkpoint = log / f"{2:020}.json", log / f"{1:020}.checkpoint.parquet"
    begun = last.read_bytes().splitlines(keepends=True)
    state = root / "_lisa" / "state" / f"{writer.tables.state.number}.json"
    cures = {last: "delete it, and", checkpoint: "delete it and _last_checkpoint", live.parent: ""}
    for path, left in (
        *((last, cut) for cut in (b"", begun[0], b"".join(begun)[:-20])),
        *((checkpoint, cut) for cut in (b"", checkpoint.read_bytes()[:500])),
        *((path, b"") for path in (state, Path(data[0]), live)),
        *((path, None) for path in (state, Path(data[0]), live)),
    ):
        whole = path.read_bytes()
        path.unlink()
        if left is not None:
            path.write_bytes(left)
        named = path.parent if path == live or (path == state and left is None) else path
        with pytest.raises(LisaError, match=f"{named}.*{cures.get(path, 'restore')}") as refused:
            read()
        assert "\n" not in str(refused.value)
        if path not in (Path(data[0]), live):
            with pytest.raises(LisaError, match=str(named)):
                jobs.writer()
        path.write_bytes(whole)
    jobs.check(first + second)
    last.write_bytes(b"")  # the crash of a computer
    last.unlink()
    jobs.check(first)
    assert jobs.writer().write(jobs.frame(second), 1, "q")[0] == len(second)
    jobs.check(first + second)
    shutil.rmtree(log)
    for tried in (jobs.opened, jobs.writer):
        with pytest.raises(LisaError, match="message_log has files but no _delta_log"):
            tried()


def test_missing_archives_and_names(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no archive in"):
        open_archive(spark, str(tmp_path / "nothing"))
    places = ("/a/b", "/a/b/", "s3a://x/b", "jdbc:postgresql://h/db?u=1")
    names = {default_name(one) for one in places}
    assert len(names) == 3
    assert all(len(name) <= 64 and name[0] != "~" for name in names)
