"""What a job leaves behind: lists as Parquet and CSV, a summary as JSON, all in one directory.

The directory is any that Hadoop knows, so the same works on a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Folder"]


class Folder:
    """One job's output directory. Raises ConfigError if there is something in it already."""

    def __init__(self, spark: SparkSession, where: str) -> None:
        self._spark = spark
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  Hadoop's file systems have no face in Python
        self._path = jvm.org.apache.hadoop.fs.Path
        root = self._path(where)
        self._files = root.getFileSystem(
            spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001  likewise
        )
        if self._files.exists(root) and len(self._files.listStatus(root)) > 0:
            raise ConfigError(f"{where} is not empty; name a new directory for the job's lists")
        self._files.mkdirs(root)
        self.where = str(root.toString()).removeprefix("file:")

    def path(self, *parts: str) -> str:
        """A path inside it."""
        return "/".join([self.where, *parts])

    def write_text(self, name: str, text: str) -> str:
        """Write one small file; its path."""
        out = self._files.create(self._path(self.path(name)))
        try:
            out.write(bytearray(text.encode()))
        finally:
            out.close()
        return self.path(name)

    def write_summary(self, summary: Mapping[str, Any]) -> str:
        """Write `summary.json`; its path."""
        document = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        return self.write_text("summary.json", document.decode() + "\n")

    def remove(self, *parts: str) -> None:
        """Remove a part of it."""
        self._files.delete(self._path(self.path(*parts)), True)  # noqa: FBT003  Java's signature

    def write_csv(self, rows: DataFrame, *parts: str, by: str | None = None) -> None:
        """Rows as CSV with a header; a directory for each value of `by`."""
        writer = rows.write.mode("append").option("header", "true").option("escape", '"')
        (writer.partitionBy(by) if by else writer).csv(self.path(*parts))
