"""Writes an archive in files, each batch of the journal exactly once (see `table`).

Folds new events to messages, and deletes messages by rewriting files. If the process is killed, the
archive remains readable, and a repetition does the rest. Another process that writes meanwhile is
refused at its next commit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import MARK, topics_of
from lisa.pipeline.archive.base import KEEP, ArchiveGap, PresentTopics, Removed, TopicRecord
from lisa.pipeline.archive.batches import BatchSummary, is_new, summarize
from lisa.pipeline.archive.fold import LIFE_SCHEMA_FIELDS, fold_lives, lives, of_lives, with_gone
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.reading import (
    LOG,
    MESSAGES,
    DeltaTables,
    FileArchive,
    FoldState,
    age_s,
    day_of,
    live_folder,
    new_number,
    path,
    save,
    staging,
    sweep,
    with_log_columns,
)
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.table import (
    NO_DAY,
    STATE,
    StagedFile,
    WrittenFile,
    another_writer,
    place_files,
    write_files,
)
from lisa.pipeline.paths import literal
from lisa.pipeline.session import persisted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive.table import ArchiveTable

FOLD_EVENTS, FOLD_EVENTS_BEHIND = 500_000, 20_000_000
FOLD_EVERY_S = 60.0
FOLD_SHARE = 20
"""Folds take at most a twentieth of the time, unless there are many new events."""

TIDY_EVERY_S = 600.0


FEW_LIVE = 200_000
"""Maximum number of live messages whose keys are sent to all executors."""


class FileWriter:
    """The only writer of an archive in files.

    keep: how long replaced files are kept for readers that have opened the archive.
    topics: called at each commit.

    Each method that writes raises ConfigError if Spark's executors do not share the directory with
    the driver.
    """

    def __init__(
        self,
        spark: SparkSession,
        where: str,
        *,
        keep: timedelta = KEEP,
        topics: PresentTopics = lambda _: {},
    ) -> None:
        self._folder = Folder(spark, where)
        self._keep, self._topics = keep, topics
        self._following: str | None = None
        self._swept = 0.0
        self.tables = DeltaTables(spark, self._folder)
        """The tables as of the last commit."""
        self.tables.log.adapt()
        self.tables.messages.adapt()

    def close(self) -> None:
        """Nothing to release: a second writer is refused at its commit."""

    def archive(self) -> FileArchive:
        """Open the archive for reading."""
        return FileArchive(DeltaTables(self.tables.spark, self._folder))

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """Journal -> entry id and number of its last archived event."""
        return self.tables.state.offsets

    def gaps(self) -> Sequence[ArchiveGap]:
        """The recorded gaps."""
        return self.tables.state.gaps

    def file_count(self) -> int:
        """Number of files of both tables."""
        return len(self.tables.log.files()) + len(self.tables.messages.files())

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Fold, compact and delete old files, if due."""
        if self.wants_fold(catching_up=behind) or (last and self.worth_a_fold):
            self.fold()
        if not behind and (last or time.monotonic() - self._swept > TIDY_EVERY_S):
            self._swept = time.monotonic()
            if self.compact():
                self.delete_old()

    def write(
        self, events: DataFrame, batch: int, query: str
    ) -> tuple[int, tuple[ArchiveGap, ...]]:
        """Add a batch exactly once; returns the number of new events, and the gaps in it."""
        tables, before = self.tables, self.tables.state.number
        tables.refresh()
        if self._following is not None and tables.state.number != before:
            raise ConfigError(another_writer(self._folder.where))
        committed = tables.log.transaction(query)
        if committed is not None and committed >= batch:
            return 0, ()
        if self._following != query:
            # If the query's checkpoint was lost, its first batch may repeat committed events under
            # another batch number. Later batches are consecutive.
            events = events.where(is_new(tables.state.offsets))
        number = new_number()
        rows = with_log_columns(events).sortWithinPartitions("day", "topic", "at", "seq")
        staged = self._stage(rows, number)
        self._following = query
        if not staged:
            return 0, ()
        root = staging(number)
        reader = tables.spark.read.schema(LOG_SCHEMA)
        found = summarize(reader.parquet(literal(self._folder.url(root))))
        files = place_files(self._folder, staged, root, LOG, number)
        self._commit_log(files, number, found, query, batch)
        self._folder.delete(root)
        return found.events, found.gaps

    def _commit_log(
        self,
        files: Sequence[WrittenFile],
        number: int,
        found: BatchSummary,
        query: str,
        batch: int,
    ) -> None:
        old, fold = self.tables.state, self.tables.fold
        folded = fold.log == old.number
        state = msgspec.structs.replace(
            old,
            number=number,
            offsets=old.offsets | found.offsets,
            gaps=old.gaps + found.gaps,
            topics=old.topics | self._records(topics_of(found.journals)),
            fold=fold.number,
            unfolded_events=found.events + (0 if folded else old.unfolded_events),
            unfolded_from_ms=(
                found.first_ms if folded else min(found.first_ms, old.unfolded_from_ms)
            ),
        )
        save(self._folder, state)
        self.tables.log.commit(files, {query: batch, STATE: number})
        self.tables.state = state

    def wants_fold(self, *, catching_up: bool = False) -> bool:
        """Whether `messages` is out of date, or enough events arrived to make reading slow.

        A fold rewrites the events of all live messages. The threshold grows with their number, and
        the time until the next fold with the duration of the last: the cost per event stays
        constant. While catching up, only the threshold counts, and it is higher.
        """
        new, fold = self._unfolded, self.tables.fold
        least = FOLD_EVENTS_BEHIND if catching_up else FOLD_EVENTS
        if new >= max(least, fold.live_events):
            return True
        pause = max(FOLD_EVERY_S, FOLD_SHARE * fold.seconds)
        return new > 0 and not catching_up and (not fold.number or age_s(fold.number) > pause)

    @property
    def worth_a_fold(self) -> bool:
        """Whether a fold pays off at the end of a run; its threshold is below `wants_fold`'s."""
        return self._unfolded > max(0, self.tables.fold.live_events // 10)

    @property
    def _unfolded(self) -> int:
        state, fold = self.tables.state, self.tables.fold
        return 0 if fold.log == state.number else state.unfolded_events

    def fold(self) -> None:
        """Bring the table `messages` up to date with the log."""
        tables = self.tables
        if tables.fold.log == tables.state.number:
            return
        began, number = time.monotonic(), new_number()
        folder = live_folder(number)
        messages, live = write_fold(tables, staging(number), folder)
        files = place_files(self._folder, messages, staging(number), MESSAGES, number)
        fold = FoldState(
            number=number,
            log=tables.state.number,
            offsets=tables.state.offsets,
            live=folder,
            live_events=sum(file.rows for file in live),
            live_bytes=sum(file.size for file in live),
            seconds=time.monotonic() - began,
        )
        save(self._folder, fold)
        tables.messages.commit(files, {STATE: number}, replace_undated=True)
        tables.fold = fold

    def compact(self, *, everything: bool = False) -> int:
        """Merge small files where that pays off; returns the number of merged files.

        everything: also merge groups of only a few files, and today's files.
        """
        today = ms_datetime(int(time.time() * 1000)).date().isoformat()
        both = (self.tables.log, self.tables.messages)
        return sum(table.compact(today, everything=everything) for table in both)

    def delete_old(self, *, forget: bool = False) -> None:
        """Delete what neither the current version nor a running reader needs.

        forget: delete everything but the current version, and all statistics of earlier ones.
        """
        tables = self.tables
        for table in (tables.log, tables.messages):
            if forget:
                table.forget()
            else:
                table.vacuum(self._keep)
        used = {path(tables.state.number), path(tables.fold.number), tables.fold.live}
        sweep(self._folder, used, 0 if forget else self._keep.total_seconds())

    def retain(self, cutoff: datetime) -> Removed:
        """Delete messages all of whose lives ended before `cutoff`, with their events.

        Rewrites files with deleted rows. Replaced files remain for an hour for running readers.
        """
        self.fold()
        ended = sf.when(sf.col("settled"), sf.col("settled_at"))
        lives = self.tables.messages.rows().groupBy("topic", "id")
        ends = lives.agg(sf.max(ended).alias("end"), sf.bool_and("settled").alias("settled"))
        old = ends.where(sf.col("settled") & (sf.col("end") < sf.lit(cutoff)))
        removed = self._remove(old.select("topic", "id"))
        self.delete_old()
        return removed

    def erase(self, ids: Collection[str], topics: Collection[str] | None) -> Removed:
        """Delete messages with these ids, and every trace of them in replaced files and commits.

        topics: only in these; None means all. Readers that opened the archive before may fail.
        """
        self.fold()
        named = self.tables.spark.createDataFrame(
            [(message_id,) for message_id in sorted(ids)], "id string"
        )
        if topics is not None:
            owners = [(topic,) for topic in sorted(topics)]
            named = named.crossJoin(self.tables.spark.createDataFrame(owners, "topic string"))
        removed = self._remove(named)
        self.delete_old(forget=True)
        return removed

    def _remove(self, doomed: DataFrame) -> Removed:
        """Delete rows whose columns equal those of a row in `doomed`: `id`, or `topic` and `id`.

        The log is committed first. It counts as folded between the commits, too, because its
        events are the folded ones without the deleted ones, and the offsets are unchanged.
        """
        tables = self.tables
        doomed = persisted(doomed, StorageLevel.DISK_ONLY)
        try:
            number = new_number()
            files, olds, events = self._rewritten(tables.log, doomed, number)
            if olds:
                state = msgspec.structs.replace(
                    tables.state,
                    number=number,
                    fold=tables.fold.number,
                    unfolded_events=0,
                    unfolded_from_ms=int(time.time() * 1000),
                )
                save(self._folder, state)
                tables.log.commit(files, {STATE: number}, remove=olds)
                tables.state = state
            return Removed(self._remove_messages(doomed), events)
        finally:
            doomed.unpersist()

    def _remove_messages(self, doomed: DataFrame) -> int:
        tables, number = self.tables, new_number()
        files, olds, messages = self._rewritten(tables.messages, doomed, number)
        live = tables.live_events()
        is_live = bool(live.join(doomed, doomed.columns, "left_semi").take(1))
        if not olds and not is_live and tables.fold.log == tables.state.number:
            return 0
        fold = msgspec.structs.replace(tables.fold, number=number, log=tables.state.number)
        if is_live:
            kept = live.join(doomed, doomed.columns, "left_anti").select(*EVENT_SCHEMA.names)
            folder = live_folder(number)
            written = write_live(tables, kept, folder)
            fold = msgspec.structs.replace(
                fold,
                live=folder,
                live_events=sum(file.rows for file in written),
                live_bytes=sum(file.size for file in written),
            )
        save(self._folder, fold)
        tables.messages.commit(files, {STATE: number}, remove=olds)
        tables.fold = fold
        return messages

    def _rewritten(
        self, table: ArchiveTable, doomed: DataFrame, number: int
    ) -> tuple[list[WrittenFile], Sequence[str], int]:
        """Copies of the affected files without the rows; these files; the number of such rows."""
        paths = {tuple(file["path"].rsplit("/", 2)[-2:]): file for file in table.files()}
        if not paths:
            return [], (), 0
        rows = table.rows().select(*doomed.columns, "_metadata.file_path")
        found = rows.join(doomed, doomed.columns, "left_semi").select("file_path").distinct()
        olds = [paths[tuple(row.file_path.rsplit("/", 2)[-2:])] for row in found.collect()]
        if not olds:
            return [], (), 0
        before = table.rows(only={file["path"] for file in olds})
        kept = before.join(doomed, doomed.columns, "left_anti").select(*before.columns)
        order = ("day", "topic", "at", "seq") if table.name == LOG else ("day", "topic", "id")
        root = staging(number)
        # Few large files: otherwise each task would write a small one for each day.
        kept = kept.hint("rebalance", sf.col("day"))
        staged = write_files(kept.sortWithinPartitions(*order), self._folder, root, by_day=True)
        count = sum(file["num_records"] for file in olds) - sum(file.rows for file in staged)
        files = place_files(self._folder, staged, root, table.name, number)
        self._folder.delete(root)
        return files, [old["path"] for old in olds], count

    def _stage(self, rows: DataFrame, number: int) -> list[StagedFile]:
        return write_files(rows, self._folder, staging(number), by_day=True)

    def _records(self, topics: Sequence[str]) -> dict[str, TopicRecord]:
        """Present options and groups of topics; earlier ones if the server has lost them."""
        found = {}
        for topic, record in self._topics(topics).items():
            known = self.tables.state.topics.get(topic, TopicRecord({}, ()))
            found[topic] = TopicRecord(
                record.options or known.options, record.groups or known.groups
            )
        return found


def write_fold(
    tables: DeltaTables, staging: str, live: str
) -> tuple[list[StagedFile], list[StagedFile]]:
    """Write the messages of unsettled events to `staging`, and the events of live ones to `live`.

    Both are paths below the archive; returns the files of each.
    """
    if any(MARK in journal for journal in tables.state.offsets):
        return _of_shards(tables, staging, live)
    events = tables.unsettled()
    rows = fold_lives(lives(events, sharded=False))
    messages = _write_messages(tables, rows.withColumn("gone", sf.col("settled")), staging)
    undated = f"{staging}/day={NO_DAY}"
    count = sum(message.rows for message in messages if message.path.startswith(f"{undated}/"))
    if not count:
        return messages, []
    known = tables.spark.read.schema(MESSAGES_SCHEMA).parquet(literal(tables.folder.url(undated)))
    keys = known.select("topic", "id", sf.col("token").alias("life"))
    kept = of_lives(events, sf.broadcast(keys) if count <= FEW_LIVE else keys)
    return messages, write_live(tables, kept, live)


def _of_shards(
    tables: DeltaTables, staging: str, live: str
) -> tuple[list[StagedFile], list[StagedFile]]:
    """The same; events of a settled life may still be needed, because its journals are several."""
    tagged = persisted(with_gone(lives(tables.unsettled())), StorageLevel.DISK_ONLY)
    try:
        messages = _write_messages(tables, fold_lives(tagged, "gone"), staging)
        unended = tagged.where("not gone").drop("gone")
        return messages, write_live(tables, unended, live)
    finally:
        tagged.unpersist()


def _write_messages(tables: DeltaTables, rows: DataFrame, path: str) -> list[StagedFile]:
    if tables.state.gaps:
        rows = _without_known_lives(tables, rows)
    day = sf.when(sf.col("gone"), day_of(sf.col("settled_at")))
    rows = rows.withColumn("day", day).drop("gone")
    rows = rows.sortWithinPartitions("day", "topic", "settled_at", "id")
    return write_files(rows, tables.folder, path, by_day=True)


def write_live(tables: DeltaTables, events: DataFrame, path: str) -> list[StagedFile]:
    """Write the events of live messages to a new directory, durably."""
    # The number is not needed here, but all files must have the same columns.
    events = events.drop(*LIFE_SCHEMA_FIELDS).withColumn("number", sf.lit(0).cast("long"))
    written = write_files(events, tables.folder, path)
    for file in written:
        tables.folder.sync(file.path)
    return written


def _without_known_lives(tables: DeltaTables, rows: DataFrame) -> DataFrame:
    """Drop ended lives without a known beginning whose id has already ended before.

    After a gap, the server may have an older state in which ended messages are live again.
    """
    known = tables.messages.rows(dated=True).select("topic", "id")
    is_unknown = sf.col("gone") & sf.col("token").isNull()
    return rows.where(~is_unknown).unionByName(
        rows.where(is_unknown).join(known, ["topic", "id"], "left_anti").select(*rows.columns)
    )
