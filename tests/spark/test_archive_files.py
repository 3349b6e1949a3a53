"""The archive in files: commits, cleaning up, compaction, outside readers."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.gateway.page import archived
from lisa.gateway.page.archived import ArchiveQuery
from lisa.pipeline.archive import default_name, open_archive, shared_path, writing
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.shared_path import hosts_without
from lisa.pipeline.archive.state import RANDOM_BITS, new_number
from lisa.pipeline.archive.table import ArchiveTable
from lisa.pipeline.archive.writing import FileWriter
from tests.servers import JVM_PATIENCE, least, wait_until
from tests.spark.stories import Stories, event
from tests.spark.test_archive_fold import expected, frame, told

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers import Processes
    from tests.spark.stories import Event


def entries(rows: Any) -> list[tuple[str, int]]:
    return sorted((row.topic, row.number) for row in rows.select("topic", "number").collect())


def check(spark: SparkSession, where: str, events: list[Event]) -> None:
    """Assert that the archive has exactly these events, and the messages they fold to."""
    archive = open_archive(spark, where)
    log = archive.log()
    assert log.columns == LOG_SCHEMA.names
    wanted = sorted((one["topic"], one["number"]) for one in events)
    assert entries(log) == wanted
    outside = DeltaTable(f"{where}/message_log").to_pyarrow_table(columns=["topic", "number"])
    assert sorted(map(tuple, (one.values() for one in outside.to_pylist()))) == wanted
    messages = archive.messages()
    assert messages.schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    assert told(messages) == expected(events)
    assert archive.offsets() == {
        topic: max(
            (one["number"], (f"{one['at']}-{one['seq']}", one["number"]))
            for one in events
            if one["topic"] == topic
        )[1]
        for topic in {one["topic"] for one in events}
    }


def test_batches_folds_and_compactions(spark: SparkSession, tmp_path: Path) -> None:
    where, events = str(tmp_path / "archive"), []
    orders, other = Stories("orders"), Stories("a:b", 2, begin_ms=1_790_000_040_000)
    seen = {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
    writer = FileWriter(spark, where, keep=timedelta(0), topics=lambda _: seen)
    for batch in range(5):
        some = [*orders.extend(30), *other.extend(10)]
        assert writer.write(frame(spark, some), batch, "q")[0] == len(some)
        assert writer.write(frame(spark, some), batch, "q")[0] == 0  # as after a crash
        events += some
        if batch in {1, 3}:
            writer.fold()
        if batch in {0, 2, 3, 4}:
            check(spark, where, events)
    assert open_archive(spark, where).topics() == seen
    files = writer.file_count()
    writer.fold()
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    assert writer.file_count() < files
    check(spark, where, events)
    assert writer.compact(everything=True) == 0
    on_disk = set((tmp_path / "archive").glob("me*/day=*/*"))  # also no checksum files
    assert len(on_disk) == writer.file_count()
    assert len(list((tmp_path / "archive" / "_lisa" / "state").glob("[!.]*.json"))) == 2


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
    monkeypatch.setattr(writing, "FOLD_SHARE", 0)
    assert writer.wants_fold()
    monkeypatch.setattr(writing, "FOLD_SHARE", 1e9)
    assert not writer.wants_fold()
    check(spark, str(tmp_path), journal.events)


def test_a_commit_whose_answer_was_lost_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store repeats a request without an answer, and then refuses the repetition."""
    journal, commit = Stories("orders"), DeltaTable.create_write_transaction

    def unanswered(*arguments: Any, **named: Any) -> None:
        commit(*arguments, **named)
        raise CommitFailedError("the version exists")

    writer = FileWriter(spark, str(tmp_path))
    monkeypatch.setattr(DeltaTable, "create_write_transaction", unanswered)
    for batch in range(2):
        some = journal.extend(5)
        assert writer.write(frame(spark, some), batch, "q")[0] == len(some)
    writer.fold()
    check(spark, str(tmp_path), journal.events)


def test_files_have_bloom_filters_on_the_id(spark: SparkSession, tmp_path: Path) -> None:
    """Both the batches by Spark, if they have too many ids for a dictionary, and merged files."""

    def has_filter() -> set[bool]:
        found = set()
        for uri in DeltaTable(tmp_path / "message_log").file_uris():
            footer = pq.read_metadata(uri)
            index = footer.schema.names.index("id")
            found.add(footer.row_group(0).column(index).bloom_filter_offset is not None)
        return found

    one = frame(spark, [event("orders", 1_790_000_000_000, 0, 1, id="a", state="sent")])
    many = one.drop("id").crossJoin(spark.range(60_000).selectExpr("uuid() AS id"))
    writer = FileWriter(spark, str(tmp_path))
    for batch in range(2):
        writer.write(many.select(*EVENT_SCHEMA.names).coalesce(1), batch, "q")
    assert has_filter() == {True}
    assert writer.compact(everything=True) == 2
    assert has_filter() == {True}


def test_outside_readers_see_live_messages_and_times(spark: SparkSession, tmp_path: Path) -> None:
    journal = Stories("orders")
    writer = FileWriter(spark, str(tmp_path))
    writer.write(frame(spark, journal.extend(60)), 0, "q")
    writer.fold()
    found = DeltaTable(tmp_path / "messages").to_pandas()
    wanted = expected(journal.events)
    assert {(one.topic, one.id, one.token) for one in found.itertuples()} == set(wanted)
    live = found[~found.settled]
    assert len(live) == sum(not one["settled"] for one in wanted.values()) > 0
    assert live.day.isna().all()
    log = DeltaTable(tmp_path / "message_log").to_pandas(filters=[("state", "=", "sent")])
    assert sorted(log["at"].astype("int64") // 1000) == sorted(
        one["at"] for one in journal.events if one["state"] == "sent"
    )
    page = archived.search(tmp_path, ArchiveQuery(wanted=""), sees=lambda _: True, most=1_000)
    assert page.cursor is None
    assert sorted((one.topic, one.id, one.state) for one in page.hits) == sorted(
        zip(found.topic, found.id, found.state, strict=True)
    )


def test_a_reader_that_opened_before_a_compaction_continues(
    spark: SparkSession, tmp_path: Path
) -> None:
    where = str(tmp_path)
    events: list[Event] = []
    journal = Stories("orders")
    writer = FileWriter(spark, where, keep=timedelta(hours=1))
    for batch in range(3):
        some = journal.extend(10)
        writer.write(frame(spark, some), batch, "q")
        writer.fold()
        events += some
    before = open_archive(spark, where)
    log, messages = before.log(), before.messages()
    assert writer.compact(everything=True) > 0
    writer.delete_old()
    assert len(entries(log)) == len(events)
    assert told(messages) == expected(events)
    check(spark, where, events)


def test_a_reader_that_opened_before_a_fold_continues(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live events are kept for an hour after they were replaced, however old they are."""
    where = str(tmp_path)
    journal, hours_ms = Stories("orders"), 3 * 3_600_000
    writer = FileWriter(spark, where, keep=timedelta(hours=1))
    events = journal.extend(10)
    writer.write(frame(spark, events), 0, "q")
    with monkeypatch.context() as earlier:
        earlier.setattr(writing, "new_number", lambda: new_number() - (hours_ms << RANDOM_BITS))
        writer.fold()
    more = journal.extend(10)
    writer.write(frame(spark, more), 1, "q")
    messages = open_archive(spark, where).messages()
    writer.fold()
    writer.delete_old()
    assert told(messages) == expected(events + more)


POLLS = """
import json, sys
from pathlib import Path
from deltalake import DeltaTable
where, engine = sys.argv[1:]
if engine == "duckdb":
    import duckdb
    def poll():
        files = duckdb.read_parquet(DeltaTable(where + "/message_log").file_uris())
        return files.aggregate("count(*), count(DISTINCT number)").fetchall()[0]
else:
    from deltalake import QueryBuilder
    def poll():
        events = QueryBuilder().register("events", DeltaTable(where + "/message_log"))
        counts = "SELECT count(*), count(DISTINCT number) FROM events"
        return [column[0].as_py() for column in events.execute(counts).read_all().columns]
print("polling", flush=True)
while not Path(where, "stop").exists():
    print(json.dumps(poll()), flush=True)
"""


@pytest.mark.parametrize("engine", ["datafusion", "duckdb"])
def test_outside_readers_see_whole_batches_only(
    spark: SparkSession, tmp_path: Path, processes: Processes, engine: str
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
    reader = processes.start("-c", POLLS, str(tmp_path), engine)
    reader.wait_for("polling", timeout=JVM_PATIENCE)

    def polls() -> list[list[int]]:
        return [json.loads(one) for one in reader.output.splitlines() if one.startswith("[")]

    def has_polled(times: int) -> bool:
        return len(polls()) >= times or not reader.alive

    for batch in range(1, 6):
        write(batch)
        if batch % 2:
            writer.compact(everything=True)
        wanted = len(polls()) + 2
        wait_until(partial(has_polled, wanted), timeout=JVM_PATIENCE)
    (tmp_path / "stop").touch()
    assert reader.wait(timeout=JVM_PATIENCE) == 0
    assert all(rows == distinct and rows in totals for rows, distinct in polls())
    assert polls()[-1][0] == totals[-1]


def test_rows_that_the_driver_does_not_see_are_not_committed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors that write to their own disks: the driver finds no files, or only some of them."""
    where, journal = str(tmp_path / "archive"), Stories("orders")
    writer = FileWriter(spark, where)
    first, second = journal.extend(20), journal.extend(20)
    writer.write(frame(spark, first), 0, "q")
    files = Folder.files

    for seen in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "files", lambda *a, seen=seen: files(*a)[:seen])
            with pytest.raises(LisaError, match=f"wrote {len(second)} rows .* driver sees"):
                writer.write(frame(spark, second), 1, "q")
        check(spark, where, first)
    writer.write(frame(spark, second), 1, "q")
    check(spark, where, first + second)


def test_executors_that_do_not_find_the_token(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("5")
    assert hosts_without(spark, str(tmp_path / "there"), "5") == []
    assert hosts_without(spark, str(tmp_path / "there"), "6") == [socket.gethostname()]
    assert hosts_without(spark, str(tmp_path / "nothing"), "5") == [socket.gethostname()]


def test_a_local_path_with_a_cluster_is_checked(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    begin = 1_790_000_000_000
    some = [event(topic, begin, 0, 1, id="a", state="sent") for topic in topics]
    writer.write(frame(spark, some).coalesce(1), 0, "q")
    writer.fold()
    for name in ("message_log", "messages"):
        delta = DeltaTable(tmp_path / name)
        [one, *_] = delta.file_uris()
        actions: list[AddAction | RemoveAction] = []
        for day in range(365):
            date = (ms_datetime(begin) + timedelta(days=day)).date().isoformat()
            for number in range(3 if day < 364 else 200):
                path = f"day={date}/year-{number}.parquet"
                (tmp_path / name / path).parent.mkdir(exist_ok=True)
                os.link(one, tmp_path / name / path)
                size, stats = Path(one).stat().st_size, json.dumps({"numRecords": 100})
                actions.append(AddAction(path, size, {"day": date}, begin, True, stats))
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


def test_a_table_with_fewer_columns(spark: SparkSession, tmp_path: Path) -> None:
    """A column of a later version is added; older rows have null in it."""
    older = StructType([one for one in LOG_SCHEMA.fields if one.name != "shard"])
    ArchiveTable(spark, Folder(spark, str(tmp_path)), "message_log", older).adapt()
    writer = FileWriter(spark, str(tmp_path))
    events = Stories("orders").extend(10)
    writer.write(frame(spark, events), 0, "q")
    check(spark, str(tmp_path), events)
    assert "shard" in DeltaTable(tmp_path / "message_log").to_pandas().columns


def test_another_program_compacts_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    where, journal = str(tmp_path), Stories("orders")
    writer = FileWriter(spark, where)
    for batch in range(3):
        writer.write(frame(spark, journal.extend(10)), batch, "q")
        DeltaTable(tmp_path / "message_log").optimize.compact()
    writer.fold()
    check(spark, where, journal.events)


def test_a_checkpoint_that_is_ahead(spark: SparkSession, tmp_path: Path) -> None:
    def check_(offsets: dict[str, tuple[str, int]], *gaps: ArchiveGap) -> None:
        check_checkpoint(spark, str(tmp_path), offsets, gaps)

    check_({})  # a new archive
    for batch, entry in enumerate(("5-0", "10-0", "20-0")):
        for name in ("offsets", "commits")[: 2 if batch < 2 else 1]:
            (tmp_path / name).mkdir(exist_ok=True)
            told_ = {"orders": {"id": entry, "n": batch}}
            (tmp_path / name / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(told_)}")
    check_({"orders": ("10-0", 1), "other": ("1-0", 1)})
    check_({"orders": ("20-0", 2)})  # killed before Spark's commit
    for mine in ({"orders": ("9-5", 1)}, {"other": ("10-0", 1)}, {}):
        with pytest.raises(ConfigError, match="topic 'orders' it is at 10-0"):
            check_(mine)
    gap = ArchiveGap("orders", "9-5", 1, None, None, "all of them", ms_datetime(9))
    check_({"orders": ("9-5", 1)}, gap)  # no event since
    with pytest.raises(ConfigError, match="ahead of"):
        check_({"orders": ("9-5", 1)}, replace(gap, after_id="9-4"))


def test_a_kill_before_and_after_the_commit(
    spark: SparkSession, tmp_path: Path, monkeypatch: Any
) -> None:
    where = str(tmp_path)
    journal = Stories("orders")
    first, second = journal.extend(20), journal.extend(20)
    writer = FileWriter(spark, where, keep=timedelta(0))
    writer.write(frame(spark, first), 0, "q")

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveTable, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            writer.write(frame(spark, second), 1, "q")
    check(spark, where, first)
    writer = FileWriter(spark, where, keep=timedelta(0))
    assert writer.write(frame(spark, second), 1, "q")[0] == len(second)
    check(spark, where, first + second)
    writer = FileWriter(spark, where, keep=timedelta(0))
    assert writer.write(frame(spark, second), 1, "q")[0] == 0
    # After the loss of its checkpoint, the same events arrive in another batch.
    third = journal.extend(5)
    assert writer.write(frame(spark, second + third), 0, "another")[0] == len(third)
    check(spark, where, first + second + third)
    writer.delete_old()
    assert len(list(tmp_path.glob("message_log/day=*/*.parquet"))) == writer.file_count()
    assert list((tmp_path / "_lisa" / "staging").iterdir()) == []


def test_a_second_writer_takes_over_and_the_first_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A restarted container continues immediately; its suspended predecessor commits nothing."""
    where, journal = str(tmp_path), Stories("orders")
    first, second = journal.extend(10), journal.extend(10)
    suspended = FileWriter(spark, where)
    suspended.write(frame(spark, first), 0, "q")
    restarted = FileWriter(spark, where)
    restarted.write(frame(spark, second), 1, "q")
    with pytest.raises(ConfigError, match="another process has written to"):
        suspended.write(frame(spark, second), 1, "q")
    check(spark, where, first + second)


def test_two_writers_at_the_same_moment(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process commits between this one's check and its commit."""
    where, journal = str(tmp_path), Stories("orders")
    some = journal.extend(10)
    mine = FileWriter(spark, where)
    commit = ArchiveTable.commit

    def late(table: ArchiveTable, *args: Any, **options: Any) -> None:
        monkeypatch.setattr(ArchiveTable, "commit", commit)
        FileWriter(spark, where).write(frame(spark, some), 0, "q")
        commit(table, *args, **options)

    monkeypatch.setattr(ArchiveTable, "commit", late)
    with pytest.raises(ConfigError, match="another process has written to"):
        mine.write(frame(spark, some), 0, "q")
    check(spark, where, some)


def test_gaps_are_recorded_once(spark: SparkSession, tmp_path: Path) -> None:
    where = str(tmp_path)
    events = Stories("orders").extend(10)
    gap = event(
        "orders",
        events[3]["at"],
        events[3]["seq"] + 1,
        events[3]["number"] + 1,
        id=None,
        state="gap",
        reason="events 5 to 6 are gone",
        actor=None,
    )
    writer = FileWriter(spark, where)
    try:
        writer.write(frame(spark, [*events[:4], gap, *events[6:]]), 0, "q")
        writer.write(frame(spark, [*events[:4], gap, *events[6:]]), 0, "later")
        [found] = open_archive(spark, where).gaps()
    finally:
        writer.close()
    assert (found.topic, found.after_id, found.after_number) == (
        "orders",
        f"{events[3]['at']}-{events[3]['seq']}",
        4,
    )
    assert (found.to_id, found.to_number) == (f"{events[6]['at']}-{events[6]['seq']}", 7)
    assert found.reason == "events 5 to 6 are gone"


def test_opening_a_missing_archive_raises(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no archive in"):
        open_archive(spark, str(tmp_path / "nothing"))


def test_names_of_archives() -> None:
    names = {
        default_name(one) for one in ("/a/b", "/a/b/", "s3a://x/b", "jdbc:postgresql://h/db?u=1")
    }
    assert len(names) == 3
    assert all(len(name) <= 64 and name[0] != "~" for name in names)
