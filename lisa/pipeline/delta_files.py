"""Reads the present version of a Delta table: its log says which files of its folder count."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.errors import AnalysisException
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    BinaryType,
    DataType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lisa.core.model.errors import ConfigError
from lisa.pipeline.errors import one_line
from lisa.pipeline.paths import LOCAL_FILES, absolute, literal, root_of, split_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_HARMLESS = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType"}
"""Features of tables that do not change what their files contain."""


def is_delta(source: str) -> bool:
    """Whether a local path is that of a Delta table."""
    return Path(_plain(source), "_delta_log").is_dir()


def delta_rows(spark: SparkSession, source: str) -> DataFrame:
    """The rows of the table's present version.

    Raises ConfigError if there is no table, or if Spark alone cannot read its rows.
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
    added = pa.table(table.get_add_actions())
    paths = [unquote(path) for path in added.column("path").to_pylist()]
    if about.configuration.get("delta.columnMapping.mode", "none") != "none":
        unread.add("columnMapping")
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    partitions = {name: schema[name].dataType for name in about.partition_columns}
    unread.update(_unread_folders(added, partitions))
    if unread:
        raise ConfigError(
            f"{source}: the table has {', '.join(sorted(unread))}, for which Spark needs "
            f"delta-spark; with it, name the table as --format table 'delta.`{source}`'"
        )
    if not paths:
        return spark.createDataFrame([], schema)
    # Spark would read a time in the name of a folder in the session's zone.
    zoned = _zoned(partitions)
    read = [
        StructField(field.name, StringType()) if field.name in zoned else field for field in schema
    ]
    reader = spark.read.schema(StructType(read)).options(**LOCAL_FILES, basePath=where)
    try:
        rows = reader.parquet(*(literal(f"{where}/{path}") for path in paths))
        rows.schema  # noqa: B018 - a remote session looks for the files here
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise ConfigError(
            f"{source}: data files of the table's present version are missing "
            f"({one_line(error).rstrip('.')}): restore them, or remove them from the table's log "
            "with delta-rs, DeltaTable(...).repair()"
        ) from error
    return rows.withColumns({name: _utc(name) for name in zoned})


def check_not_delta(spark: SparkSession, path: str, files: Collection[str]) -> None:
    """Raises ConfigError if a file belongs to a Delta table: its log says which rows count.

    path: what the files were found by, perhaps a pattern. files: their URLs.
    """
    depth = len(split_path(root_of(path))[1])
    store, folders = "", set[str]()
    for file in files:
        store, (*names, _) = split_path(unquote(file))
        while (folder := "/".join(names)) not in folders:
            folders.add(folder)
            if not names or (len(names) <= depth and "=" not in names[-1]):
                break
            del names[-1]
    for folder in sorted(folders):
        table = f"{store}/{folder}"
        if _has_log(spark, table):
            raise ConfigError(
                f"{_plain(table)} is a Delta table, whose files may have removed rows: load the "
                "table itself, with --format delta"
            )


def _has_log(spark: SparkSession, folder: str) -> bool:
    """Whether a folder, given by an unescaped URL, has the log of a Delta table."""
    if folder.startswith("file:"):
        return is_delta(folder)
    try:
        spark.read.format("binaryFile").load(f"{literal(folder)}/_delta_log").inputFiles()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return False
    return True


def _zoned(partitions: Mapping[str, DataType]) -> list[str]:
    return [name for name, kind in partitions.items() if isinstance(kind, TimestampType)]


def _unread_folders(added: pa.Table, partitions: Mapping[str, DataType]) -> Iterator[str]:
    """Why Spark would not read the values of partitions from folders as the log has them."""
    paths = [unquote(path) for path in added.column("path").to_pylist()]
    # Spark knows escapes of ASCII characters only.
    folders = "".join(f"{re.escape(name)}=([^/]+)/" for name in partitions)
    found = [re.search(f"^(?!.*%[89A-F]){folders}[^/]*$", path) for path in paths]
    if any(isinstance(kind, BinaryType) for kind in partitions.values()):
        yield "bytes in the names of folders"
    if None in found:
        yield "files outside the folders of their partitions"
    elif zoned := _zoned(partitions):
        texts = [dict(zip(partitions, match.groups(), strict=True)) for match in found if match]
        logged = added.column("partition").to_pylist()
        pairs = zip(texts, logged, strict=True)
        if any(_time(text[name]) != values[name] for text, values in pairs for name in zoned):
            yield "times in the names of folders that are not in UTC"


def _time(folder: str) -> datetime | str | None:
    """The time that a folder's name has, in UTC unless it names a zone; text if it has none."""
    text = unquote(folder)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None if text == "__HIVE_DEFAULT_PARTITION__" else text
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _utc(name: str) -> Column:
    """The column of `_time`, from the texts of folders."""
    text = sf.col(f"`{name.replace('`', '``')}`")
    day = sf.when(text.rlike("^[^ T]*$"), sf.concat(text, sf.lit(" 00:00:00Z")))
    named = day.when(text.rlike(r"(Z|[+-]\d\d:?\d\d)$"), text)
    return named.otherwise(sf.concat(text, sf.lit("Z"))).cast("timestamp")


def _plain(source: str) -> str:
    return re.sub("^file:(//)?(?=/)", "", source)
