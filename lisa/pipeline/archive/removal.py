"""Deletes messages and all of their events from an archive in files (see `jobs.deletion`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.fold_files import write_live
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.reading import LOG
from lisa.pipeline.archive.records import Removed
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.archive.state import live_folder, new_number, save, staging
from lisa.pipeline.archive.table import STATE
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.archive.writing_files import WrittenFile, place_files, write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive.table import ArchiveTable


class FileRemover:
    """Deletes from an archive in files. Rewrites only files with deleted rows.

    If the process is killed, the archive remains readable; a repetition deletes the rest. Another
    process that writes to the archive is refused at its next commit.

    Raises ConfigError if there is no archive, or one of the old layout.
    """

    def __init__(self, spark: SparkSession, where: str) -> None:
        open_archive(spark, where)  # the writer would create the archive
        self._spark, self._folder = spark, Folder(spark, where)
        self._writer = FileWriter(spark, where)
        self._tables = self._writer.tables

    def close(self) -> None:
        """Nothing to release."""

    def retain(self, cutoff: datetime) -> Removed:
        """Delete messages all of whose lives ended before `cutoff`, with their events.

        Replaced files remain for an hour for running readers.
        """
        self._writer.fold()
        ended = sf.when(sf.col("settled"), sf.col("settled_at"))
        lives = self._tables.messages.rows().groupBy("topic", "id")
        ends = lives.agg(sf.max(ended).alias("end"), sf.bool_and("settled").alias("settled"))
        old = ends.where(sf.col("settled") & (sf.col("end") < sf.lit(cutoff)))
        removed = self._remove(old.select("topic", "id"))
        self._writer.delete_old()
        return removed

    def erase(self, ids: Collection[str], topics: Collection[str] | None) -> Removed:
        """Delete messages with these ids, and every trace of them in replaced files and commits.

        topics: only in these; None means all. Readers that opened the archive before may fail.
        """
        self._writer.fold()
        named = self._spark.createDataFrame([(one,) for one in sorted(ids)], "id string")
        if topics is not None:
            owners = [(one,) for one in sorted(topics)]
            named = named.crossJoin(self._spark.createDataFrame(owners, "topic string"))
        removed = self._remove(named)
        self._writer.delete_old(forget=True)
        return removed

    def _remove(self, doomed: DataFrame) -> Removed:
        """Delete rows whose columns equal those of a row in `doomed`: `id`, or `topic` and `id`.

        The log is committed first. It counts as folded between the commits, too, because its
        events are the folded ones without the deleted ones, and the offsets are unchanged.
        """
        tables = self._tables
        doomed = doomed.persist(StorageLevel.DISK_ONLY)
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
        tables, number = self._tables, new_number()
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
                fold, live=folder, live_events=sum(one.rows for one in written)
            )
        save(self._folder, fold)
        tables.messages.commit(files, {STATE: number}, remove=olds)
        tables.fold = fold
        return messages

    def _rewritten(
        self, table: ArchiveTable, doomed: DataFrame, number: int
    ) -> tuple[list[WrittenFile], Sequence[str], int]:
        """Copies of the affected files without the rows; these files; the number of such rows."""
        paths = {tuple(one["path"].rsplit("/", 2)[-2:]): one for one in table.files()}
        if not paths:
            return [], (), 0
        rows = table.rows().select(*doomed.columns, "_metadata.file_path")
        found = rows.join(doomed, doomed.columns, "left_semi").select("file_path").distinct()
        olds = [paths[tuple(row.file_path.rsplit("/", 2)[-2:])] for row in found.collect()]
        if not olds:
            return [], (), 0
        before = table.rows(only={one["path"] for one in olds})
        kept = before.join(doomed, doomed.columns, "left_anti").select(*before.columns)
        order = ("day", "topic", "at", "seq") if table.name == LOG else ("day", "topic", "id")
        root = staging(number)
        # Few large files: otherwise each task would write a small one for each day.
        kept = kept.hint("rebalance", sf.col("day"))
        staged = write_files(kept.sortWithinPartitions(*order), self._folder, root, by_day=True)
        count = sum(one["num_records"] for one in olds) - sum(one.rows for one in staged)
        files = place_files(self._folder, staged, root, table.name, number)
        self._folder.delete(root)
        return files, [one["path"] for one in olds], count
