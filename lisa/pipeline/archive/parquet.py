"""Reads an archive in Parquet.

    message_log/day=YYYY-MM-DD/topic=T/*.parquet   every event
    messages/day=YYYY-MM-DD/topic=T/*.parquet      messages that ended, by the day of their end
    _lisa/                                         versions, the events of live messages, staging

`messages()` is the union of the ended messages and the fold of the live ones, and is current with
the log. Other programs may also read `message_log`, between two commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import DateType, StructField, StructType

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.base import Archive
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.manifest import HIDDEN, Manifest, load
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.archive.records import ArchiveGap, TopicRecord

LOG, MESSAGES = "message_log", "messages"
COMPACTED = f"{HIDDEN}/compacted"
"""Compacted files, in the same directory structure as the tables."""

DATED_MESSAGES = StructType([*MESSAGES_SCHEMA.fields, StructField("day", DateType())])
"""The table `messages` as stored: with the day on which the message ended."""


class ParquetArchive(Archive):
    """One version of an archive in Parquet."""

    def __init__(self, spark: SparkSession, folder: Folder, manifest: Manifest) -> None:
        self._spark = spark
        self._folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, spark: SparkSession, where: str) -> ParquetArchive:
        """Open the current version. Raises ConfigError if the archive does not exist."""
        folder = Folder(spark, where)
        manifest = load(folder)
        if manifest is None:
            raise ConfigError(
                f"there is no archive in {where}; `lisa pipeline archive --to` creates one"
            )
        return cls(spark, folder, manifest)

    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""
        return rows_of(self._spark, self._folder, LOG, self.manifest.files, LOG_SCHEMA)

    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        ended = rows_of(self._spark, self._folder, MESSAGES, self.manifest.files, MESSAGES_SCHEMA)
        if not self.manifest.live and not self.manifest.unfolded:
            return ended
        return ended.unionByName(fold(unsettled(self._spark, self._folder, self.manifest)))

    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event."""
        return dict(self.manifest.offsets)

    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups, as needed to restore it."""
        return dict(self.manifest.topics)

    def gaps(self) -> Sequence[ArchiveGap]:
        """The events that the log lacks."""
        return list(self.manifest.gaps)


def rows_of(
    spark: SparkSession, folder: Folder, table: str, files: dict[str, int], schema: StructType
) -> DataFrame:
    """The rows of one table; `files` may also list files of other tables."""
    found = spark.createDataFrame([], schema)
    for root in (table, f"{COMPACTED}/{table}"):
        paths = [folder.url(path) for path in files if path.startswith(f"{root}/")]
        if paths:
            # With the type of `day`, or Spark would infer the types of all partition columns.
            named = schema if table == LOG else DATED_MESSAGES
            reader = spark.read.schema(named).option("basePath", folder.url(root))
            found = found.unionByName(reader.parquet(*paths).select(*schema.names))
    return found


def unsettled(spark: SparkSession, folder: Folder, manifest: Manifest) -> DataFrame:
    """Events of messages that were live at the last fold, and all later events: EVENT_SCHEMA."""
    events = rows_of(spark, folder, LOG, manifest.unfolded, LOG_SCHEMA).select(*EVENT_SCHEMA.names)
    if manifest.live:
        paths = [folder.url(path) for path in manifest.live]
        events = events.unionByName(spark.read.schema(EVENT_SCHEMA).parquet(*paths))
    return events


def with_log_columns(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA -> rows of LOG_SCHEMA, which has host and day too."""
    return events.withColumns({"host": host_of(), "day": day_of(sf.col("at"))})


def day_of(at: Column) -> Column:
    """The day of a timestamp in UTC, independent of the session's time zone."""
    return sf.date_from_unix_date(sf.floor(sf.unix_millis(at) / 86_400_000).cast("int"))
