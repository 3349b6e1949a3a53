"""Checks that Spark's executors reach the same directory as the driver."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.state import new_number, staging
from lisa.pipeline.session import parallelism

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive.folder import Folder

_TASKS_PER_CORE = 4


def check_shared(spark: SparkSession, folder: Folder) -> None:
    """Raises ConfigError if executors on other machines do not see the driver's directory.

    Checks only local paths with a cluster: each task reads back a token that the driver wrote.
    Executors that start later are not covered; the number of rows of each batch is, see
    `writing_files`.
    """
    if is_local(spark) or not folder.where.startswith("file:"):
        return
    token, name = str(new_number()), staging(new_number())
    folder.write(name, token)
    try:
        blind = hosts_without(spark, folder.url(name).removeprefix("file:"), token)
    finally:
        folder.delete(name)
    if blind:
        raise ConfigError(
            f"the archive {folder.where} is a local path, and Spark's executors on "
            f"{', '.join(blind)} do not see the driver's files there; use a path that all machines "
            "share, such as an object store or a network file system"
        )


def is_local(spark: SparkSession) -> bool:
    """Whether Spark's tasks run in the driver's own process."""
    master = spark.conf.get("spark.master", "") or ""
    return master == "local" or master.startswith("local[")


def hosts_without(spark: SparkSession, path: str, token: str) -> list[str]:
    """The hosts whose executors do not find `token` in the file, sorted."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            try:
                found = Path(path).read_text("utf-8")
            except OSError:
                found = ""
            if found != token:
                yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()]})

    tasks = parallelism(spark) * _TASKS_PER_CORE
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(read, "host string")
    return sorted({row["host"] for row in rows.collect()})
