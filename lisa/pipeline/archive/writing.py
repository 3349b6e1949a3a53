"""The archive in Parquet: writing it, each batch of the journal exactly once.

A batch is written to a staging directory, its files are moved to where they belong, and the next
version of the manifest makes them count. Killed before that, nothing has happened: a note that
was left before the first move names what is to be cleared away. Killed after it, the batch is
known by its number, and by the last event of each journal, so it is not written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as sf

from lisa.core.clock import ms_datetime
from lisa.core.shards import bases, place_of
from lisa.pipeline.archive.compaction import candidates, compact, exchange
from lisa.pipeline.archive.fold import LIFE_SCHEMA_FIELDS, fold_lives, lives
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.lease import Lease
from lisa.pipeline.archive.manifest import HIDDEN, Manifest, base_of, load, publish, sweep
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
from lisa.pipeline.archive.records import Gap, TopicRecord
from lisa.pipeline.archive.schemas import GAP_STATE, LOG_SCHEMA, MESSAGES_SCHEMA, journal_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

__all__ = ["ParquetWriter", "Survey", "Written", "gaps_of", "is_behind", "survey"]

STAGING = f"{HIDDEN}/staging"
MOVING = f"{HIDDEN}/moving.json"
LIVE = f"{HIDDEN}/live"
KEEP = timedelta(hours=1)
FOLD_EVENTS, FOLD_EVENTS_BEHIND = 500_000, 20_000_000
FOLD_FILES = 2_000
"""However few events they hold: each version names them all, and until then none is compacted."""
LIVE_EVENTS_A_FILE = 5_000
"""So many live events are written anew in about the time in which a file is opened."""
SWEEP_EVERY = 50
COMPRESSION = "zstd"


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a batch: events that are new in the archive, gaps that it told of."""

    events: int = 0
    gaps: tuple[Gap, ...] = ()


class ParquetWriter:
    """The one that writes to a directory; `close` it. Raises ConfigError if there is another.

    keep: for how long whoever opened the archive may go on reading what he saw.
    topics: asked, at each commit, for the present options and groups of the topics in it.
    """

    def __init__(
        self,
        spark: SparkSession,
        where: str,
        *,
        keep: timedelta = KEEP,
        topics: Callable[[Sequence[str]], Mapping[str, TopicRecord]] = lambda _: {},
    ) -> None:
        self._spark = spark
        self._folder = Folder(spark, where)
        self._keep_ms = int(keep.total_seconds() * 1000)
        self._topics = topics
        self._removed: set[str] = set()
        self._unfolded_events = 0
        self._lease = Lease(self._folder)
        self._lease.take()
        try:
            # As INT96 they would carry no bounds, and a search by time would read every file.
            spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
            self.manifest = load(self._folder) or Manifest()
            self._base = base_of(self._folder, self.manifest)
            self._clear()
            self._following: str | None = None
        except BaseException:
            self._lease.release()
            raise

    def close(self) -> None:
        """Let another one write."""
        self._lease.release()

    def archive(self) -> ParquetArchive:
        """What has been written, for reading."""
        return ParquetArchive(self._spark, self._folder, self.manifest)

    def write(self, events: DataFrame, batch_id: int, query: str) -> Written:
        """Add a batch, rows of EVENT_SCHEMA; one that is there already changes nothing.

        query: of which `batch_id` counts the batches.
        """
        if self.manifest.queries.get(query, -1) >= batch_id:
            return Written()
        if self._following != query:
            # Its first batch may be one that was committed, under a number that was lost with the
            # query's checkpoint. From then on batches follow upon each other.
            events = events.where(is_behind(self.manifest.offsets))
        staged = self._stage(with_log_columns(events), LOG)
        self._following = query
        if not staged:
            return Written()
        rows = self._staged_rows(staged)
        found = survey(rows)
        gaps = gaps_of(rows) if any(one.gaps for one in found.values()) else ()
        offsets = {place: one.last for place, one in found.items() if one.last is not None}
        events_there = sum(one.events for one in found.values())
        fresh = self._move(staged)
        made = self.manifest
        self._commit(replace(
            made, files=made.files | fresh, unfolded=made.unfolded | fresh,
            offsets=made.offsets | offsets, gaps=made.gaps + gaps,
            topics=made.topics | self._records(bases(found)),
            queries=made.queries | {query: batch_id},
        ))  # fmt: skip
        self._unfolded_events += events_there
        return Written(events_there, gaps)

    def wants_fold(self, *, catching_up: bool = False) -> bool:
        """Whether so much came since the last fold that reading has become slow.

        What is live is written anew then, so the more there is, the longer it waits: the cost of
        an event stays the same. An archive that is behind takes in what there is first.
        """
        least = FOLD_EVENTS_BEHIND if catching_up else FOLD_EVENTS
        live = self.manifest.live_events
        many = len(self.manifest.unfolded) >= max(FOLD_FILES, live // LIVE_EVENTS_A_FILE)
        return many or self._unfolded_events >= max(least, live)

    @property
    def worth_a_fold(self) -> bool:
        """The same before the end of a run, when there is time."""
        return self._unfolded_events > max(0, self.manifest.live_events // 10)

    def fold(self) -> None:
        """Bring the table `messages` up to date: add those that ended since the last time."""
        if not self.manifest.unfolded:
            return
        made = self.manifest
        tagged = _told_apart(lives(unsettled(self._spark, self._folder, made)))
        tagged = tagged.persist(StorageLevel.DISK_ONLY)
        try:
            gone = tagged.where("gone").drop("gone")
            rows = fold_lives(gone).withColumn("day", day_of(sf.col("settled_at")))
            if made.gaps:
                rows = self._not_told_before(rows)
            ended = self._move(self._stage(rows, MESSAGES))
            left = tagged.where("not gone").drop("gone", *LIFE_SCHEMA_FIELDS)
            # Nothing asks for a number here, and all files have the same columns.
            left = left.withColumn("number", sf.lit(0).cast("long"))
            place = f"{LIVE}/{made.version + 1:08}-{self._mark()}"
            left.write.option("compression", COMPRESSION).parquet(self._folder.url(place))
            count = tagged.where("not gone").count()
        finally:
            tagged.unpersist()
        live = tuple(one.path for one in self._folder.files(place)) if count else ()
        for path in live:
            self._folder.sync(path)
        until = int(time.time() * 1000) + self._keep_ms
        olds = {path.rpartition("/")[0] for path in made.live}
        self._commit(replace(
            made, files=made.files | ended, unfolded={}, live=live, live_events=count,
            dropped=made.dropped + tuple((old, until) for old in sorted(olds)),
        ))  # fmt: skip
        self._unfolded_events = 0

    def compact(self, *, all_of_it: bool = False) -> int:
        """Make few files of many small ones where that is due; how many went.

        all_of_it: also where there are only some, and those of today.
        """
        today = ms_datetime(int(time.time() * 1000)).date().isoformat()
        waiting = {path for swap in self.manifest.swaps for path in (*swap.old, *swap.new)}
        took = 0
        made = self.manifest
        for group in candidates(made, today, skip=waiting, all_of_it=all_of_it):
            schema = LOG_SCHEMA if group.table == LOG else DATED_MESSAGES
            files = {path: made.files[path] for path in group.paths}
            rows = rows_of(self._spark, self._folder, group.table, files, schema)
            staged = self._stage_as(compact(rows, group), group.table)
            made = self.manifest
            fresh = self._move(staged, hidden=True)
            self._commit(exchange(made, group, fresh))
            made = self.manifest
            took += len(group.paths)
        self.settle_swaps()
        return took

    def settle_swaps(self) -> None:
        """Put compacted files in the places of the old ones, once nobody reads these any more."""
        now = int(time.time() * 1000)
        for swap in self.manifest.swaps:
            if swap.since_ms + self._keep_ms > now:
                continue
            made = self.manifest
            seen = {path.removeprefix(f"{HIDDEN}/compacted/"): path for path in swap.new}
            self._note(list(seen))
            for path, hidden in seen.items():
                self._folder.copy(hidden, path)
            files = {path: size for path, size in made.files.items() if path not in swap.new}
            files |= {path: made.files[hidden] for path, hidden in seen.items()}
            self._commit(replace(
                made, files=files, swaps=tuple(one for one in made.swaps if one != swap),
                dropped=(*made.dropped, *((old, 0) for old in swap.old),
                         *((hidden, now + self._keep_ms) for hidden in swap.new)),
            ))  # fmt: skip

    def _stage(self, rows: DataFrame, table: str) -> list[tuple[str, str, int]]:
        """Write rows by day and topic; each file's place now, its place to be, and its size."""
        return self._stage_as(rows, table)

    def _stage_as(self, rows: DataFrame, table: str) -> list[tuple[str, str, int]]:
        place = f"{STAGING}/{self._mark()}/{table}"
        self._folder.delete(place)
        writer = rows.write.option("compression", COMPRESSION).partitionBy("day", "topic")
        writer.parquet(self._folder.url(place))
        found = []
        for number, one in enumerate(self._folder.files(place)):
            partition = one.path.removeprefix(f"{place}/").rpartition("/")[0]
            # Nor do two processes take the same name: one that lost its lease overwrites nothing.
            name = f"{self.manifest.version + 1:08}-{self._mark()}-{number:04}.parquet"
            found.append((one.path, f"{table}/{partition}/{name}", one.size))
        return found

    def _move(self, staged: list[tuple[str, str, int]], *, hidden: bool = False) -> dict[str, int]:
        """Move staged files to where they belong, a note of that left before. Sizes by path."""
        prefix = f"{HIDDEN}/compacted/" if hidden else ""
        targets = {prefix + to: size for _, to, size in staged}
        self._note(list(targets))
        for path, to, _ in staged:
            self._folder.rename(path, prefix + to)
        return targets

    def _note(self, targets: list[str]) -> None:
        self._lease.check()
        told = {"version": self.manifest.version + 1, "paths": targets}
        self._folder.write(MOVING, json.dumps(told))

    def _commit(self, made: Manifest) -> None:
        """Make it the next version, and remove what nobody needs any more."""
        self._lease.check()
        now = int(time.time() * 1000)
        due = [path for path, at in made.dropped if at <= now]
        # Removed after the commit, forgotten with the next one: killed between, it is done then.
        done = set(due) & set(self._removed)
        made = made.next(dropped=tuple(one for one in made.dropped if one[0] not in done))
        self.manifest, self._base = publish(self._folder, made, self._base)
        self._folder.delete(MOVING)
        for path in due:
            if path not in done:
                self._folder.delete(path)
        self._removed = set(due) - done
        if self.manifest.version % SWEEP_EVERY == 0:
            sweep(self._folder, self.manifest, self._keep_ms)

    def _clear(self) -> None:
        """Remove what a predecessor left that was killed."""
        note = self._folder.read(MOVING)
        if note is not None:
            told = json.loads(note)
            if told["version"] > self.manifest.version:
                for path in told["paths"]:
                    self._folder.delete(path)
            self._folder.delete(MOVING)
        self._folder.delete(STAGING)
        current = {path.split("/")[2] for path in self.manifest.live}
        dropped = [path for path, _ in self.manifest.dropped if path.startswith(LIVE)]
        current |= {path.split("/")[2] for path in dropped}
        for name in self._folder.names(LIVE):
            if name not in current:
                self._folder.delete(f"{LIVE}/{name}")
        paths = self.manifest.unfolded
        if paths:
            unfolded = rows_of(self._spark, self._folder, LOG, paths, LOG_SCHEMA)
            self._unfolded_events = unfolded.count()

    def _mark(self) -> str:
        """No two processes stage at the same place: of a killed one a task may write on a while."""
        return self._lease.token

    def _staged_rows(self, staged: list[tuple[str, str, int]]) -> DataFrame:
        root = staged[0][0].partition("/day=")[0]
        return self._spark.read.schema(LOG_SCHEMA).parquet(self._folder.url(root))

    def _records(self, topics: list[str]) -> dict[str, TopicRecord]:
        """The topics as they are now; what an emptied server no longer tells stays as it was."""
        found = {}
        for topic, record in self._topics(topics).items():
            known = self.manifest.topics.get(topic, TopicRecord({}, ()))
            found[topic] = TopicRecord(
                record.options or known.options, record.groups or known.groups
            )
        return found

    def _not_told_before(self, rows: DataFrame) -> DataFrame:
        """Without lives of which nothing but late words are known, and that ended before.

        After a gap a server may be an older one, on which messages live once more that had ended.
        """
        known = rows_of(
            self._spark, self._folder, MESSAGES, self.manifest.files, MESSAGES_SCHEMA
        ).select("topic", "id")
        return rows.where("token is not null").unionByName(
            rows.where("token is null").join(known, ["topic", "id"], "left_anti")
            .select(*rows.columns)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Survey:
    """One journal's part of a batch: its last event (None in a gap alone), and how many of each."""

    last: tuple[str, int] | None
    events: int
    gaps: int


def survey(rows: DataFrame) -> dict[str, Survey]:
    """By place, what a batch holds."""
    is_gap = sf.col("state") == GAP_STATE
    place = sf.struct(sf.unix_millis("at").alias("ms"), "seq", "number")
    found = rows.groupBy(journal_of().alias("journal")).agg(
        sf.max(sf.when(~is_gap, place)).alias("last"),
        sf.count_if(~is_gap).alias("events"),
        sf.count_if(is_gap).alias("gaps"),
    )
    return {
        row["journal"]: Survey(_mark(row["last"]), row["events"], row["gaps"])
        for row in found.collect()
    }


def _mark(place: Row | None) -> tuple[str, int] | None:
    return None if place is None else (f"{place['ms']}-{place['seq']}", place["number"])


def gaps_of(rows: DataFrame) -> tuple[Gap, ...]:
    """The gaps that a batch tells of, each with the event that follows."""
    found = []
    place = sf.struct(sf.unix_millis("at").alias("ms"), "seq", "number")
    is_gap = sf.col("state") == GAP_STATE
    asked = ("topic", "shard", place.alias("place"), "reason")
    for gap in rows.where(is_gap).select(*asked).collect():
        ms, seq, number = gap["place"]
        before, journal = f"{ms}-{seq - 1}", place_of(gap["topic"], gap["shard"])
        behind = rows.where(~is_gap & (journal_of() == journal))
        behind = behind.where(is_behind({journal: (before, 0)}))
        follows = _mark(behind.agg(sf.min(place).alias("first")).collect()[0]["first"])
        to_id, to_number = follows or (None, None)
        first = number <= 1
        found.append(Gap(
            gap["topic"], None if first else before, None if first else number - 1,
            to_id, to_number, gap["reason"], ms_datetime(ms), gap["shard"],
        ))  # fmt: skip
    return tuple(found)


def is_behind(offsets: Mapping[str, tuple[str, int]]) -> Column:
    """Whether an event comes after the last one of its journal that is there."""
    if not offsets:
        return sf.lit(True)  # noqa: FBT003  a literal
    parts = [part for p, (entry, _) in offsets.items() for part in (sf.lit(p), _place(entry))]
    last = sf.element_at(sf.create_map(*parts), journal_of())
    here = sf.struct(sf.unix_millis("at").alias("ms"), sf.col("seq").alias("seq"))
    return last.isNull() | (here > last)


def _place(entry: str) -> Column:
    ms, _, seq = entry.partition("-")
    return sf.struct(
        sf.lit(int(ms)).cast("long").alias("ms"), sf.lit(int(seq)).cast("long").alias("seq")
    )


def _told_apart(events: DataFrame) -> DataFrame:
    """What `lives` gave, with `gone` for the events of lives that have ended.

    Where a life is over only because its id was sent anew in another shard, its own end may be in
    a batch that is still to come: then all of that id's events are kept.
    """
    life = Window.partitionBy("topic", "id", "life")
    last = sf.max_by(sf.struct("next_state", "elsewhere"), sf.struct("at", "seq")).over(life)
    told = events.withColumns({"ended": sf.max("settled").over(life), "last": last})
    waits = sf.max(~sf.col("ended") & sf.col("last.elsewhere"))
    waits = waits.over(Window.partitionBy("topic", "id"))
    gone = (sf.col("ended") | sf.col("last.next_state").isNotNull()) & ~waits
    return told.withColumn("gone", gone).drop("ended", "last")
