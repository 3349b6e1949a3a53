"""The archive in Parquet: reading it.

    message_log/day=YYYY-MM-DD/topic=T/*.parquet   every event
    messages/day=YYYY-MM-DD/topic=T/*.parquet      messages that ended, by the day of their end
    _lisa/                                         versions, the events of live messages, staging

`messages()` is those that ended, and the fold of what is live: both are small steps from files to
rows, and current with the log. `message_log` may also be read by any other program, as it stands
between two commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import DateType, StructField, StructType

from lisa.core.errors import ConfigError
from lisa.pipeline.archive import Archive
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.manifest import HIDDEN, Manifest, load
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.archive.records import Gap, TopicRecord

__all__ = [
    "COMPACTED", "DATED_MESSAGES", "LOG", "MESSAGES", "ParquetArchive", "day_of", "rows_of",
    "unsettled", "with_log_columns",
]  # fmt: skip

LOG, MESSAGES = "message_log", "messages"
COMPACTED = f"{HIDDEN}/compacted"
"""Below it, the same directories again."""

DATED_MESSAGES = StructType([*MESSAGES_SCHEMA.fields, StructField("day", DateType())])
"""The table as it is stored: by the day on which a message ended."""


class ParquetArchive(Archive):
    """One version of an archive; opened once more, it is the next one."""

    def __init__(self, spark: SparkSession, folder: Folder, manifest: Manifest) -> None:
        self._spark = spark
        self._folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, spark: SparkSession, where: str) -> ParquetArchive:
        """The present version. Raises ConfigError where there is none."""
        folder = Folder(spark, where)
        manifest = load(folder)
        if manifest is None:
            raise ConfigError(f"{where} holds no archive; `lisa pipeline archive --to` makes one")
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
        """For each journal, by its place, the last committed event: entry id and running number."""
        return dict(self.manifest.offsets)

    def topics(self) -> dict[str, TopicRecord]:
        """For each topic what is needed to set it up again."""
        return dict(self.manifest.topics)

    def gaps(self) -> Sequence[Gap]:
        """What the log lacks, by name."""
        return list(self.manifest.gaps)


def rows_of(
    spark: SparkSession, folder: Folder, table: str, files: dict[str, int], schema: StructType
) -> DataFrame:
    """The rows of those files that are a table's."""
    found = spark.createDataFrame([], schema)
    for root in (table, f"{COMPACTED}/{table}"):
        paths = [folder.url(path) for path in files if path.startswith(f"{root}/")]
        if paths:
            # Told the day's type, too: else Spark guesses those of all columns in paths.
            named = schema if table == LOG else DATED_MESSAGES
            reader = spark.read.schema(named).option("basePath", folder.url(root))
            found = found.unionByName(reader.parquet(*paths).select(*schema.names))
    return found


def unsettled(spark: SparkSession, folder: Folder, manifest: Manifest) -> DataFrame:
    """The events of messages that had not ended at the last fold, and all since: EVENT_SCHEMA."""
    events = rows_of(spark, folder, LOG, manifest.unfolded, LOG_SCHEMA).select(*EVENT_SCHEMA.names)
    if manifest.live:
        paths = [folder.url(path) for path in manifest.live]
        events = events.unionByName(spark.read.schema(EVENT_SCHEMA).parquet(*paths))
    return events


def with_log_columns(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA with host and day: LOG_SCHEMA."""
    return events.withColumns({"host": host_of(), "day": day_of(sf.col("at"))})


def day_of(at: Column) -> Column:
    """The day of an instant in UTC, whatever zone the session is set to."""
    return sf.date_from_unix_date(sf.floor(sf.unix_millis(at) / 86_400_000).cast("int"))
