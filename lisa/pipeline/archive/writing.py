"""Writes an archive in files, each batch of the journal exactly once (see `table`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import topics_of
from lisa.pipeline.archive.base import PresentTopics
from lisa.pipeline.archive.batches import BatchSummary, is_new, summarize
from lisa.pipeline.archive.fold_files import write_fold
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.old_layout import OldArchive, convert_first, is_old
from lisa.pipeline.archive.reading import (
    LOG,
    MESSAGES,
    FileArchive,
    Tables,
    with_log_columns,
)
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import LOG_SCHEMA
from lisa.pipeline.archive.shared_path import check_shared
from lisa.pipeline.archive.state import (
    FoldState,
    age_s,
    live_folder,
    new_number,
    path,
    save,
    staging,
    sweep,
)
from lisa.pipeline.archive.table import STATE, another_writer
from lisa.pipeline.archive.writing_files import StagedFile, WrittenFile, place_files, write_files
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEEP = timedelta(hours=1)
FOLD_EVENTS, FOLD_EVENTS_BEHIND = 500_000, 20_000_000
FOLD_EVERY_S = 60.0
FOLD_SHARE = 20
"""Folds take at most a twentieth of the time, unless there are many new events."""

TIDY_EVERY_S = 600.0


class FileWriter:
    """The only writer of an archive in files.

    keep: how long replaced files are kept for readers that have opened the archive.
    topics: called at each commit.
    converting: whether an archive of the old layout may be in the directory.

    Raises ConfigError if the archive has the old layout, or if Spark's executors do not share the
    directory with the driver.
    """

    def __init__(
        self,
        spark: SparkSession,
        where: str,
        *,
        keep: timedelta = KEEP,
        topics: PresentTopics = lambda _: {},
        converting: bool = False,
    ) -> None:
        self._folder = Folder(spark, where)
        self._keep, self._topics = keep, topics
        self._following: str | None = None
        self._swept = 0.0
        # INT96 timestamps have no statistics: a search by time would read every file.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        self.tables = Tables(spark, self._folder)
        """The tables as of the last commit."""
        if not self.tables.state.number and not converting and is_old(self._folder):
            raise ConfigError(convert_first(where))
        check_shared(spark, self._folder)
        self.tables.log.adapt()
        self.tables.messages.adapt()

    def close(self) -> None:
        """Nothing to release: a second writer is refused at its commit."""

    def archive(self) -> FileArchive:
        """Open the archive for reading."""
        return FileArchive(Tables(self.tables.spark, self._folder))

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
        self._commit_log(files, number, found, {query: batch})
        self._folder.delete(root)
        return found.events, found.gaps

    def copy(self, old: OldArchive) -> int:
        """Commit the log of an archive of the old layout, unless it was; returns its events."""
        tables, number = self.tables, new_number()
        known = old.manifest
        if tables.state.number:
            return tables.log.row_count()
        staged = self._stage(old.log().sortWithinPartitions("day", "topic", "at", "seq"), number)
        count = sum(one.rows for one in staged)
        files = place_files(self._folder, staged, staging(number), LOG, number)
        tables.state = msgspec.structs.replace(tables.state, topics=known.topics)
        found = BatchSummary((), count, known.offsets, known.gaps)
        self._commit_log(files, number, found, known.queries)
        return count

    def _commit_log(
        self,
        files: Sequence[WrittenFile],
        number: int,
        found: BatchSummary,
        queries: Mapping[str, int],
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
        self.tables.log.commit(files, {**queries, STATE: number})
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
            live_events=sum(one.rows for one in live),
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
