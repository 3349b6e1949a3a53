"""Folds the new events of an archive in files to files that no table has yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.core.model.sharding import MARK
from lisa.pipeline.archive.fold import fold_lives
from lisa.pipeline.archive.lives import LIFE_SCHEMA_FIELDS, lives, of_lives, with_gone
from lisa.pipeline.archive.reading import Tables, day_of
from lisa.pipeline.archive.schemas import MESSAGES_SCHEMA
from lisa.pipeline.archive.writing_files import NO_DAY, StagedFile, write_files
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FEW_LIVE = 200_000
"""Maximum number of live messages whose keys are sent to all executors."""


def write_fold(
    tables: Tables, staging: str, live: str
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
    count = sum(one.rows for one in messages if one.path.startswith(f"{undated}/"))
    if not count:
        return messages, []
    known = tables.spark.read.schema(MESSAGES_SCHEMA).parquet(literal(tables.folder.url(undated)))
    keys = known.select("topic", "id", sf.col("token").alias("life"))
    kept = of_lives(events, sf.broadcast(keys) if count <= FEW_LIVE else keys)
    return messages, write_live(tables, kept, live)


def _of_shards(
    tables: Tables, staging: str, live: str
) -> tuple[list[StagedFile], list[StagedFile]]:
    """The same; events of a settled life may still be needed, because its journals are several."""
    tagged = with_gone(lives(tables.unsettled())).persist(StorageLevel.DISK_ONLY)
    try:
        messages = _write_messages(tables, fold_lives(tagged, "gone"), staging)
        kept = tagged.where("not gone").drop("gone")
        return messages, write_live(tables, kept, live)
    finally:
        tagged.unpersist()


def _write_messages(tables: Tables, rows: DataFrame, path: str) -> list[StagedFile]:
    if tables.state.gaps:
        rows = _without_known_lives(tables, rows)
    day = sf.when(sf.col("gone"), day_of(sf.col("settled_at")))
    rows = rows.withColumn("day", day).drop("gone")
    rows = rows.sortWithinPartitions("day", "topic", "settled_at", "id")
    return write_files(rows, tables.folder, path, by_day=True)


def write_live(tables: Tables, events: DataFrame, path: str) -> list[StagedFile]:
    """Write the events of live messages to a new directory, durably."""
    # The number is not needed here, but all files must have the same columns.
    events = events.drop(*LIFE_SCHEMA_FIELDS).withColumn("number", sf.lit(0).cast("long"))
    written = write_files(events, tables.folder, path)
    for one in written:
        tables.folder.sync(one.path)
    return written


def _without_known_lives(tables: Tables, rows: DataFrame) -> DataFrame:
    """Drop ended lives without a known beginning whose id has already ended before.

    After a gap, the server may have an older state in which ended messages are live again.
    """
    known = tables.messages.rows(dated=True).select("topic", "id")
    is_unknown = sf.col("gone") & sf.col("token").isNull()
    return rows.where(~is_unknown).unionByName(
        rows.where(is_unknown).join(known, ["topic", "id"], "left_anti").select(*rows.columns)
    )
