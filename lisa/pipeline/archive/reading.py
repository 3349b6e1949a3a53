"""Reads an archive in files: two Delta tables, which other programs can read too.

    message_log/   every event, by the day of the event
    messages/      messages, by the day of their end; without a day those that had not ended
    _lisa/         state documents, events of live messages, Spark's checkpoint

The table `messages` is as of the last fold; `messages()` folds the later events and is current
with the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import DateType, StructField, StructType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.base import Archive
from lisa.pipeline.archive.batches import is_new
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.state import load_states
from lisa.pipeline.archive.table import ArchiveTable
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.archive.folder import Folder
    from lisa.pipeline.archive.records import ArchiveGap, TopicRecord

LOG, MESSAGES = "message_log", "messages"

DATED_MESSAGES = StructType([*MESSAGES_SCHEMA.fields, StructField("day", DateType())])
"""The table `messages` as stored: with the day on which the message ended."""


class Tables:
    """The two tables of an archive and their states, as of the last `refresh`."""

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self.spark, self.folder = spark, folder
        self.log = ArchiveTable(spark, folder, LOG, LOG_SCHEMA)
        self.messages = ArchiveTable(spark, folder, MESSAGES, DATED_MESSAGES)
        self.refresh()

    def refresh(self) -> None:
        """Read the current versions."""
        self.state, self.fold = load_states(self.folder, self.log, self.messages)

    def unsettled(self) -> DataFrame:
        """Events of messages that were live at the last fold, and later events: EVENT_SCHEMA."""
        found = self.live_events()
        if self.fold.log == self.state.number:
            return found
        since = sf.lit(ms_datetime(self.state.unfolded_from_ms))
        later = self.log.rows().where((sf.col("day") >= day_of(since)) & (sf.col("at") >= since))
        later = later.where(is_new(self.fold.offsets)).select(*EVENT_SCHEMA.names)
        return found.unionByName(later)

    def live_events(self) -> DataFrame:
        """Events of messages that were live at the last fold: EVENT_SCHEMA."""
        if not self.fold.live_events:
            return self.spark.createDataFrame([], EVENT_SCHEMA)
        reader = self.spark.read.schema(EVENT_SCHEMA)
        return reader.parquet(literal(self.folder.url(self.fold.live)))


class FileArchive(Archive):
    """A snapshot of an archive in files. Raises ConfigError if the archive does not exist."""

    def __init__(self, tables: Tables) -> None:
        if not tables.state.number:
            raise ConfigError(
                f"there is no archive in {tables.folder.where}; `lisa pipeline archive --to` "
                "creates one"
            )
        self._tables = tables

    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""
        return self._tables.log.rows().select(*LOG_SCHEMA.names)

    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        tables = self._tables
        if tables.fold.log == tables.state.number:
            return tables.messages.rows().select(*MESSAGES_SCHEMA.names)
        ended = tables.messages.rows(dated=True).select(*MESSAGES_SCHEMA.names)
        return ended.unionByName(fold(tables.unsettled()))

    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event."""
        return dict(self._tables.state.offsets)

    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups, as needed to restore it."""
        return dict(self._tables.state.topics)

    def gaps(self) -> Sequence[ArchiveGap]:
        """The events that the log lacks."""
        return list(self._tables.state.gaps)


def with_log_columns(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA -> rows of LOG_SCHEMA, which has host and day too."""
    return events.withColumns({"host": host_of(), "day": day_of(sf.col("at"))})


def day_of(at: Column) -> Column:
    """The day of a timestamp in UTC, independent of the session's time zone."""
    return sf.date_from_unix_date(sf.floor(sf.unix_millis(at) / 86_400_000).cast("int"))
