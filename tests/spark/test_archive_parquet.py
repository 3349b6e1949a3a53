"""The archive in Parquet: commits, cleaning up, compaction."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive import default_name, open_archive
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.lease import PATH as LEASE
from lisa.pipeline.archive.lease import Lease
from lisa.pipeline.archive.manifest import Manifest, load, publish
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.writing import ParquetWriter
from tests.spark.stories import Stories, event
from tests.spark.test_archive_fold import expected, frame, told

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

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
    assert entries(spark.read.parquet(f"{where}/message_log")) == wanted
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
    writer = ParquetWriter(spark, where, keep=timedelta(0), topics=lambda _: seen)
    try:
        for batch in range(5):
            some = [*orders.extend(30), *other.extend(10)]
            assert writer.write(frame(spark, some), batch, "q")[0] == len(some)
            assert writer.write(frame(spark, some), batch, "q")[0] == 0  # as after a crash
            events += some
            if batch in {1, 3}:
                writer.fold()
            if batch in {0, 2, 3, 4}:
                check(spark, where, events)
        before = open_archive(spark, where)
        assert before.topics() == seen
        files = len(writer.manifest.files)
        writer.fold()
        assert writer.compact(everything=True) > 0
        assert len(writer.manifest.files) < files
        check(spark, where, events)
        assert writer.compact(everything=True) == 0
    finally:
        writer.close()
    found = (tmp_path / "archive" / "message_log").rglob("[!.]*.parquet")
    on_disk = {str(one.relative_to(where)) for one in found}
    assert on_disk == {path for path in writer.manifest.files if path.startswith("message_log")}


def test_a_reader_that_opened_before_a_compaction_continues(
    spark: SparkSession, tmp_path: Path
) -> None:
    where = str(tmp_path)
    events: list[Event] = []
    journal = Stories("orders")
    writer = ParquetWriter(spark, where, keep=timedelta(hours=1))
    try:
        for batch in range(3):
            some = journal.extend(10)
            writer.write(frame(spark, some), batch, "q")
            writer.fold()
            events += some
        before = open_archive(spark, where)
        log, messages = before.log(), before.messages()
        assert writer.compact(everything=True) > 0
        numbers = entries(log)
        assert len(numbers) == len(events)
        assert told(messages) == expected(events)
        check(spark, where, events)
        # After an hour the new files replace the old ones.
        between = open_archive(spark, where)
        aged = tuple(replace(swap, since_ms=0) for swap in writer.manifest.swaps)
        writer.commits.manifest = replace(writer.manifest, swaps=aged)
        writer.settle_swaps()
        check(spark, where, events)
        assert entries(between.log()) == numbers
        assert all(not path.startswith("_lisa") for path in writer.manifest.files)
    finally:
        writer.close()


def test_many_files_of_few_events_are_folded(
    spark: SparkSession, tmp_path: Path, monkeypatch: Any
) -> None:
    """Otherwise each version would list all the files, and they would never be compacted."""
    monkeypatch.setattr("lisa.pipeline.archive.writing.FOLD_FILES", 4)
    journal = Stories("orders")
    writer = ParquetWriter(spark, str(tmp_path))
    try:
        for batch in range(4):
            due = len(writer.manifest.unfolded) >= 4
            assert writer.wants_fold(catching_up=True) == due
            writer.write(frame(spark, journal.extend(1)), batch, "q")
        assert writer.wants_fold(catching_up=True)
        writer.fold()
        assert not writer.wants_fold()
        check(spark, str(tmp_path), journal.events)
    finally:
        writer.close()


def test_a_lease_stays_readable_while_it_is_renewed(
    spark: SparkSession, tmp_path: Path, monkeypatch: Any
) -> None:
    """A check during a renewal must not report the lease as lost."""
    monkeypatch.setattr("lisa.pipeline.archive.lease.BEAT_S", 0.0)
    folder = Folder(spark, str(tmp_path))
    lease = Lease(folder)
    lease.take()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            text = folder.read(LEASE)
            assert text is not None
            assert json.loads(text)["token"] == lease.token
            lease.check()
    finally:
        lease.release()
    assert folder.read(LEASE) is None


def test_a_version_committed_by_another_process_is_not_replaced(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A process that was suspended after checking its lease, until another one took over."""
    folder = Folder(spark, str(tmp_path))
    theirs = Manifest().next(offsets={"orders": ("5-0", 5)})
    publish(folder, theirs, {})
    with pytest.raises(ConfigError, match="another process has committed"):
        publish(folder, Manifest().next(offsets={"orders": ("4-0", 4)}), {})
    assert load(folder) == theirs


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


def test_a_half_written_archive(spark: SparkSession, tmp_path: Path, monkeypatch: Any) -> None:
    """Killed after the files were moved, but before the commit."""
    where = str(tmp_path)
    journal = Stories("orders")
    first, second = journal.extend(20), journal.extend(20)
    writer = ParquetWriter(spark, where)
    writer.write(frame(spark, first), 0, "q")

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lisa.pipeline.archive.commits.publish", dies)
        with pytest.raises(KeyboardInterrupt):
            writer.write(frame(spark, second), 1, "q")
    check_only_by_name = open_archive(spark, where)
    assert len(entries(check_only_by_name.log())) == len(first)
    assert len(entries(spark.read.parquet(f"{where}/message_log"))) == len(first) + len(second)
    writer.close()
    (tmp_path / "_lisa" / "staging" / "rest").mkdir(parents=True, exist_ok=True)
    (tmp_path / "_lisa" / ".00000002.json.tmp").write_text('{"half')
    writer = ParquetWriter(spark, where)
    try:
        check(spark, where, first)
        assert not (tmp_path / "_lisa" / "staging").exists()
        writer.write(frame(spark, second), 1, "q")
        check(spark, where, first + second)
        writer.close()
        # After the loss of its checkpoint, the same events arrive in another batch.
        writer = ParquetWriter(spark, where)
        third = journal.extend(5)
        assert writer.write(frame(spark, second + third), 0, "another")[0] == len(third)
        check(spark, where, first + second + third)
    finally:
        writer.close()


def test_only_one_process_writes(spark: SparkSession, tmp_path: Path) -> None:
    where = str(tmp_path)
    writer = ParquetWriter(spark, where)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* stop that process"):
        ParquetWriter(spark, where)
    lease = tmp_path / "_lisa" / "lease.json"
    told_ = json.loads(lease.read_text())
    lease.unlink()
    (tmp_path / "_lisa" / ".lease.json.crc").unlink(missing_ok=True)
    lease.write_text(json.dumps(told_ | {"token": "mine"}))
    with pytest.raises(ConfigError, match="another process writes"):
        writer.write(frame(spark, Stories("orders").extend(1)), 0, "q")
    writer.close()  # must not release the other process's lease
    lease.write_text(json.dumps(told_ | {"pid": 2**22 - 7, "token": "dead"}))
    ParquetWriter(spark, where).close()  # a holder killed on this machine is detected immediately
    lease.write_text(json.dumps(told_ | {"host": "elsewhere"}))
    with pytest.raises(ConfigError, match="elsewhere"):
        ParquetWriter(spark, where)
    lease.write_text(json.dumps(told_ | {"host": "elsewhere", "seen": told_["seen"] - 100}))
    ParquetWriter(spark, where).close()


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
    writer = ParquetWriter(spark, where)
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
