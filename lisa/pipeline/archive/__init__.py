"""The archive: every transition and the last state of every message, in files or a database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.base import (
    KEEP,
    Archive,
    ArchiveGap,
    ArchiveWriter,
    PresentTopics,
    TopicRecord,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Archive",
    "ArchiveGap",
    "TopicRecord",
    "default_name",
    "open_archive",
    "open_files",
    "open_writer",
]

IN_SQL = (
    "only `archive` and `restore` use an archive in a database: for everything else, query it with "
    "SQL (how-to/pipeline-keep.md, Can a database keep the journal?), or keep an archive in files"
)


def open_archive(
    spark: SparkSession, where: str, properties: Mapping[str, str] | None = None
) -> Archive:
    """Open the archive at a directory, its URL, or a JDBC URL.

    properties: for JDBC: user, password, table_prefix and settings of the driver.

    Raises ConfigError if the archive does not exist.
    """
    if where.startswith("jdbc:"):
        from lisa.pipeline.archive.database import Database
        from lisa.pipeline.archive.jdbc import JdbcArchive

        return JdbcArchive(spark, Database.of(where, properties or {}))
    return open_files(spark, where)


def open_files(spark: SparkSession, where: str) -> Archive:
    """Open the archive at a directory or its URL. Raises ConfigError for one in a database."""
    if where.startswith("jdbc:"):
        raise ConfigError(IN_SQL)
    from lisa.pipeline.archive.folder import Folder
    from lisa.pipeline.archive.reading import DeltaTables, FileArchive

    return FileArchive(DeltaTables(spark, Folder(spark, where)))


def open_writer(
    spark: SparkSession,
    where: str,
    properties: Mapping[str, str] | None = None,
    *,
    keep: timedelta = KEEP,
    topics: PresentTopics = lambda _: {},
) -> ArchiveWriter:
    """Open the archive for writing, and create it if it is missing. `close` the writer.

    keep: how long replaced files are kept for running readers. topics: called for each batch. For
    errors, see `FileWriter` and `JdbcWriter`.
    """
    if where.startswith("jdbc:"):
        from lisa.pipeline.archive.jdbc import JdbcWriter

        return JdbcWriter(spark, where, properties or {}, topics=topics)
    from lisa.pipeline.archive.writing import FileWriter

    return FileWriter(spark, where, keep=keep, topics=topics)


def default_name(where: str) -> str:
    """The default name under which an archive reports its progress to the journal."""
    plain = re.sub(r"[?;].*", "", where).rstrip("/")
    last = re.sub(r"[^A-Za-z0-9_.-]", "-", plain.rpartition("/")[2])[:40].lstrip("~-") or "archive"
    return f"{last}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
