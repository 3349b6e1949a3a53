"""Writes an archive in Parquet, each batch of the journal exactly once (see `commits`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.sharding import topics_of
from lisa.pipeline.archive.base import PresentTopics
from lisa.pipeline.archive.batches import is_new, summarize
from lisa.pipeline.archive.commits import COMPRESSION, LIVE, Commits
from lisa.pipeline.archive.compaction import candidates, compact, exchange
from lisa.pipeline.archive.fold import fold_lives
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.lives import LIFE_SCHEMA_FIELDS, lives, with_gone
from lisa.pipeline.archive.manifest import HIDDEN, Manifest
from lisa.pipeline.archive.parquet import (
    DATED_MESSAGES,
    LOG,
    MESSAGES,
    ParquetArchive,
    day_of,
    rows_of,
    unsettled,
    with_log_columns,
)
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import LOG_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEEP = timedelta(hours=1)
FOLD_EVENTS, FOLD_EVENTS_BEHIND = 500_000, 20_000_000
FOLD_FILES = 2_000
"""Number of unfolded files that triggers a fold, however few events they have: each version lists
all of them, and they are not compacted before."""
LIVE_EVENTS_A_FILE = 5_000
"""Rewriting this many live events takes about as long as opening a file."""


class ParquetWriter:
    """The only writer of an archive's directory; `close` it.

    keep: how long replaced files are kept for readers that have opened the archive.
    topics: called at each commit.

    Raises ConfigError if another process writes to the directory.
    """

    def __init__(
        self,
        spark: SparkSession,
        where: str,
        *,
        keep: timedelta = KEEP,
        topics: PresentTopics = lambda _: {},
    ) -> None:
        self._spark = spark
        self._folder = Folder(spark, where)
        self._keep_ms = int(keep.total_seconds() * 1000)
        self._topics = topics
        self._unfolded_events = 0
        self._following: str | None = None
        self.commits = Commits(self._folder, self._keep_ms)
        try:
            # INT96 timestamps have no statistics: a search by time would read every file.
            spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
            if paths := self.manifest.unfolded:
                unfolded = rows_of(spark, self._folder, LOG, paths, LOG_SCHEMA)
                self._unfolded_events = unfolded.count()
        except BaseException:
            self.commits.close()
            raise

    @property
    def manifest(self) -> Manifest:
        """The current version of the archive."""
        return self.commits.manifest

    def close(self) -> None:
        """Release the lease, so that another process can write."""
        self.commits.close()

    def archive(self) -> ParquetArchive:
        """Open the archive for reading."""
        return ParquetArchive(self._spark, self._folder, self.manifest)

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """Journal -> entry id and number of its last archived event."""
        return self.manifest.offsets

    def gaps(self) -> Sequence[ArchiveGap]:
        """The recorded gaps."""
        return self.manifest.gaps

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Fold and compact, if due."""
        if self.wants_fold(catching_up=behind) or (last and self.worth_a_fold):
            self.fold()
        if not behind:
            self.compact()

    def write(
        self, events: DataFrame, batch: int, query: str
    ) -> tuple[int, tuple[ArchiveGap, ...]]:
        """Add a batch exactly once; returns the number of new events, and the gaps in it."""
        if self.manifest.queries.get(query, -1) >= batch:
            return 0, ()
        if self._following != query:
            # If the query's checkpoint was lost, its first batch may repeat committed events under
            # another batch number. Later batches are consecutive.
            events = events.where(is_new(self.manifest.offsets))
        staged = self.commits.stage(with_log_columns(events), LOG)
        self._following = query
        if not staged:
            return 0, ()
        rows = self._staged_rows(staged)
        found = summarize(rows)
        fresh = self.commits.move(staged)
        made = self.manifest
        self.commits.commit(
            replace(
                made,
                files=made.files | fresh,
                unfolded=made.unfolded | fresh,
                offsets=made.offsets | found.offsets,
                gaps=made.gaps + found.gaps,
                topics=made.topics | self._records(topics_of(found.journals)),
                queries=made.queries | {query: batch},
            )
        )
        self._unfolded_events += found.events
        return found.events, found.gaps

    def wants_fold(self, *, catching_up: bool = False) -> bool:
        """Whether enough events arrived since the last fold to make reading slow.

        A fold rewrites the events of all live messages, so the threshold grows with their number:
        the cost per event stays constant. While catching up, the threshold is higher.
        """
        least = FOLD_EVENTS_BEHIND if catching_up else FOLD_EVENTS
        live = self.manifest.live_events
        many = len(self.manifest.unfolded) >= max(FOLD_FILES, live // LIVE_EVENTS_A_FILE)
        return many or self._unfolded_events >= max(least, live)

    @property
    def worth_a_fold(self) -> bool:
        """Whether a fold pays off at the end of a run; its threshold is below `wants_fold`'s."""
        return self._unfolded_events > max(0, self.manifest.live_events // 10)

    def fold(self) -> None:
        """Update the table `messages`: add the messages that ended since the last fold."""
        if not self.manifest.unfolded:
            return
        made = self.manifest
        tagged = with_gone(lives(unsettled(self._spark, self._folder, made)))
        tagged = tagged.persist(StorageLevel.DISK_ONLY)
        try:
            gone = tagged.where("gone").drop("gone")
            rows = fold_lives(gone).withColumn("day", day_of(sf.col("settled_at")))
            if made.gaps:
                rows = self._without_known_lives(rows)
            ended = self.commits.move(self.commits.stage(rows, MESSAGES))
            left = tagged.where("not gone").drop("gone", *LIFE_SCHEMA_FIELDS)
            # The number is not needed here, but all files must have the same columns.
            left = left.withColumn("number", sf.lit(0).cast("long"))
            folder = f"{LIVE}/{made.version + 1:08}-{self.commits.token}"
            left.write.option("compression", COMPRESSION).parquet(self._folder.url(folder))
            count = tagged.where("not gone").count()
        finally:
            tagged.unpersist()
        live = tuple(one.path for one in self._folder.files(folder)) if count else ()
        for path in live:
            self._folder.sync(path)
        until = int(time.time() * 1000) + self._keep_ms
        olds = {path.rpartition("/")[0] for path in made.live}
        self.commits.commit(
            replace(
                made,
                files=made.files | ended,
                unfolded={},
                live=live,
                live_events=count,
                dropped=made.dropped + tuple((old, until) for old in sorted(olds)),
            )
        )
        self._unfolded_events = 0

    def compact(self, *, everything: bool = False) -> int:
        """Merge small files where that pays off; returns the number of merged files.

        everything: also merge groups of only a few files, and today's files.
        """
        today = ms_datetime(int(time.time() * 1000)).date().isoformat()
        waiting = {path for swap in self.manifest.swaps for path in (*swap.old, *swap.new)}
        took = 0
        made = self.manifest
        for group in candidates(made, today, skip=waiting, everything=everything):
            schema = LOG_SCHEMA if group.table == LOG else DATED_MESSAGES
            files = {path: made.files[path] for path in group.paths}
            rows = rows_of(self._spark, self._folder, group.table, files, schema)
            staged = self.commits.stage(compact(rows, group), group.table)
            made = self.manifest
            fresh = self.commits.move(staged, hidden=True)
            self.commits.commit(exchange(made, group, fresh))
            made = self.manifest
            took += len(group.paths)
        self.settle_swaps()
        return took

    def settle_swaps(self) -> None:
        """Replace old files by the compacted ones once `keep` has passed since the compaction."""
        now = int(time.time() * 1000)
        for swap in self.manifest.swaps:
            if swap.since_ms + self._keep_ms > now:
                continue
            made = self.manifest
            seen = {path.removeprefix(f"{HIDDEN}/compacted/"): path for path in swap.new}
            self.commits.note(list(seen))
            for path, hidden in seen.items():
                self._folder.copy(hidden, path)
            files = {path: size for path, size in made.files.items() if path not in swap.new}
            files |= {path: made.files[hidden] for path, hidden in seen.items()}
            self.commits.commit(
                replace(
                    made,
                    files=files,
                    swaps=tuple(one for one in made.swaps if one != swap),
                    dropped=(
                        *made.dropped,
                        *((old, 0) for old in swap.old),
                        *((hidden, now + self._keep_ms) for hidden in swap.new),
                    ),
                )
            )

    def _staged_rows(self, staged: list[tuple[str, str, int]]) -> DataFrame:
        root = staged[0][0].partition("/day=")[0]
        return self._spark.read.schema(LOG_SCHEMA).parquet(self._folder.url(root))

    def _records(self, topics: Sequence[str]) -> dict[str, TopicRecord]:
        """Present options and groups of topics; earlier ones if the server has lost them."""
        found = {}
        for topic, record in self._topics(topics).items():
            known = self.manifest.topics.get(topic, TopicRecord({}, ()))
            found[topic] = TopicRecord(
                record.options or known.options, record.groups or known.groups
            )
        return found

    def _without_known_lives(self, rows: DataFrame) -> DataFrame:
        """Drop lives without a known beginning whose id has already ended.

        After a gap, the server may have an older state in which ended messages are live again.
        """
        known = rows_of(
            self._spark, self._folder, MESSAGES, self.manifest.files, MESSAGES_SCHEMA
        ).select("topic", "id")
        return rows.where("token is not null").unionByName(
            rows.where("token is null")
            .join(known, ["topic", "id"], "left_anti")
            .select(*rows.columns)
        )
