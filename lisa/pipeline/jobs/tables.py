"""Where the job `archive` writes: Parquet files, or a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.core.shards import bases
from lisa.pipeline.archive.parquet import with_log_columns
from lisa.pipeline.archive.schemas import GAP_STATE, LOG_SCHEMA
from lisa.pipeline.archive.writing import ParquetWriter, gaps_of, is_behind, survey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive.records import Gap, TopicRecord

__all__ = ["DatabaseTables", "ParquetTables"]

Topics = Callable[[Sequence[str]], Mapping[str, "TopicRecord"]]


class ParquetTables:
    """See `lisa.pipeline.archive.writing`."""

    def __init__(self, spark: SparkSession, where: str, keep: timedelta, topics: Topics) -> None:
        self._writer = ParquetWriter(spark, where, keep=keep, topics=topics)

    def write(self, events: DataFrame, batch: int, query: str) -> tuple[int, Sequence[Gap]]:
        """Add a batch exactly once; how many events it had, and which gaps."""
        done = self._writer.write(events, batch, query)
        return done.events, done.gaps

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """For each journal, by its place, the last event that is there."""
        return self._writer.manifest.offsets

    def gaps(self) -> Sequence[Gap]:
        """What is recorded as gone."""
        return self._writer.manifest.gaps

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Fold and compact where that is due."""
        wants = self._writer.wants_fold(catching_up=behind)
        if wants or (last and self._writer.worth_a_fold):
            self._writer.fold()
        if not behind:
            self._writer.compact()

    def close(self) -> None:
        """Let another process write."""
        self._writer.close()


class DatabaseTables:
    """See `lisa.pipeline.archive.jdbc`."""

    def __init__(
        self, spark: SparkSession, where: str, properties: Mapping[str, str], topics: Topics
    ) -> None:
        from lisa.pipeline.archive import jdbc

        self._topics = topics
        self._writer = jdbc.writer(spark, where, properties)
        self._offsets = jdbc.open(spark, where, properties).offsets()
        self._first = True

    def write(self, events: DataFrame, batch: int, query: str) -> tuple[int, Sequence[Gap]]:  # noqa: ARG002
        """Add a batch exactly once; how many events it had, and which gaps."""
        if self._first:
            # Spark may repeat one that is there, by a journal that has been lost since.
            events = events.where(is_behind(self._offsets))
        rows = with_log_columns(events).select(*LOG_SCHEMA.names).persist()
        try:
            found = survey(rows)
            self._first = False
            if not found:
                return 0, ()
            has_gaps = not rows.where(sf.col("state") == GAP_STATE).isEmpty()
            gaps = gaps_of(rows) if has_gaps else ()
            self._writer.write(rows, batch, self._topics(bases(found)), gaps)
        finally:
            rows.unpersist()
        self._offsets |= {place: one.last for place, one in found.items() if one.last is not None}
        return sum(one.events for one in found.values()), gaps

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """For each journal, by its place, the last event that is there."""
        return self._offsets

    def gaps(self) -> Sequence[Gap]:
        """What is recorded as gone."""
        return self._writer.archive().gaps()

    def tidy(self, *, last: bool, behind: bool) -> None:
        """The database does that by itself."""

    def close(self) -> None:
        """Let another process write."""
        self._writer.close()
