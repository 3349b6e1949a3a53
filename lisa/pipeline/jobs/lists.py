"""Writes the output of a job: lists as Parquet and CSV, and a summary as JSON.

The directory may be on any file system that `Folder` reaches, so this also works on a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession


class OutputFolder:
    """One job's output directory. Raises ConfigError if it is not empty."""

    def __init__(self, spark: SparkSession, where: str) -> None:
        self._folder = Folder(spark, where)
        if self._folder.names(""):
            raise ConfigError(f"{where} is not empty; use a new directory for the job's lists")
        self.where = where.removeprefix("file:").rstrip("/")

    def path(self, *parts: str) -> str:
        """A path inside the directory."""
        return self._folder.url("/".join(parts))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        document = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        self._folder.write("summary.json", document.decode() + "\n")

    def remove(self, name: str) -> None:
        """Remove a file or directory inside the directory."""
        self._folder.delete(name)

    def work_copy(self, rows: DataFrame, name: str) -> DataFrame:
        """Write rows to files of the directory `work`, and return them read from there."""
        where = self.path("work", name)
        rows.write.parquet(where)
        return rows.sparkSession.read.schema(rows.schema).parquet(literal(where))

    def write_csv(self, rows: DataFrame, *parts: str, by: str | None = None) -> None:
        """Append rows as CSV with a header; with `by`, one directory per value of that column."""
        writer = rows.write.mode("append").option("header", "true").option("escape", '"')
        (writer.partitionBy(by) if by else writer).csv(self.path(*parts))
