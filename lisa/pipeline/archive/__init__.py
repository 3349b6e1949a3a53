"""The archive: every transition, and every message as it stood last; in Parquet or a database."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from lisa.pipeline.archive.records import Gap, TopicRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Archive", "Gap", "TopicRecord", "default_name", "open_archive"]


class Archive(ABC):
    """What jobs ask of an archive, wherever it stands. It is opened as it stands at that moment."""

    @abstractmethod
    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""

    @abstractmethod
    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""

    @abstractmethod
    def offsets(self) -> dict[str, tuple[str, int]]:
        """For each journal the last committed event: entry id and running number.

        By its place: the topic, or one of the places of a topic that is split (see core.shards).
        """

    @abstractmethod
    def topics(self) -> dict[str, TopicRecord]:
        """For each topic what is needed to set it up again."""

    @abstractmethod
    def gaps(self) -> Sequence[Gap]:
        """What the log lacks, by name."""


def open_archive(
    spark: SparkSession, where: str, properties: Mapping[str, str] | None = None
) -> Archive:
    """The archive at a directory or URL that Hadoop knows, or at a JDBC URL.

    properties: for JDBC (user, password, prefix ...). Raises ConfigError if there is none.
    """
    if where.startswith("jdbc:"):
        from lisa.pipeline.archive import jdbc

        return cast("Archive", jdbc.open(spark, where, dict(properties or {})))
    from lisa.pipeline.archive.parquet import ParquetArchive

    return ParquetArchive.open(spark, where)


def default_name(where: str) -> str:
    """The name under which an archive reports to the journal, where none is given."""
    plain = re.sub(r"[?;].*", "", where).rstrip("/")
    last = re.sub(r"[^A-Za-z0-9_.-]", "-", plain.rpartition("/")[2])[:40].lstrip("~-") or "archive"
    return f"{last}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
