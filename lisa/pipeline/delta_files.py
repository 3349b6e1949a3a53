"""Reads the present version of a Delta table: its log says which files of its folder count."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql.types import StructType

from lisa.core.model.errors import ConfigError
from lisa.pipeline.paths import LOCAL_FILES, absolute, literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_HARMLESS = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType"}
"""Features of tables that do not change what their files contain."""


def is_delta(source: str) -> bool:
    """Whether a local path is that of a Delta table."""
    return Path(_plain(source), "_delta_log").is_dir()


def delta_rows(spark: SparkSession, source: str) -> DataFrame:
    """The rows of the table's present version.

    Raises ConfigError if there is no table, or if its files alone do not tell its rows.
    """
    where = absolute(_plain(source)).replace("s3a://", "s3://", 1).rstrip("/")
    try:
        table = DeltaTable(where)
        unread = set(table.protocol().reader_features or ()) - _HARMLESS
        if not any(batch.num_rows for batch in table.deletion_vectors()):
            unread.discard("deletionVectors")
    except (DeltaError, OSError) as error:
        raise ConfigError(f"{source}: {error}") from error
    about = table.metadata()
    paths = [unquote(path) for path in table.get_add_actions().column("path").to_pylist()]
    if about.configuration.get("delta.columnMapping.mode", "none") != "none":
        unread.add("columnMapping")
    # Spark takes partitions from paths, in which it knows escapes of ASCII characters only.
    folders = "".join(f"{re.escape(name)}=[^/]*/" for name in about.partition_columns)
    if not all(re.search(f"^(?!.*%[89A-F]){folders}[^/]*$", path) for path in paths):
        unread.add("files outside the folders of their partitions")
    if unread:
        raise ConfigError(
            f"{source}: the table has {', '.join(sorted(unread))}, for which Spark needs "
            f"delta-spark; with it, name the table as --format table 'delta.`{source}`'"
        )
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    if not paths:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema).options(**LOCAL_FILES, basePath=where)
    return reader.parquet(*(literal(f"{where}/{path}") for path in paths))


def _plain(source: str) -> str:
    return re.sub("^file:(//)?(?=/)", "", source)
