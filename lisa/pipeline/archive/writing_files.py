"""Writes Parquet files of a table and proves, before any commit, that the driver sees all rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction
from pyspark.sql import Observation
from pyspark.sql import functions as sf

from lisa.core.model.clock import utc_text
from lisa.core.model.errors import LisaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from lisa.pipeline.archive.folder import Folder, Stored

COMPRESSION = "zstd"
NO_DAY = "__HIVE_DEFAULT_PARTITION__"
"""Name of the directory of rows without a day."""
_OPTIONS = {
    "compression": COMPRESSION,
    "parquet.bloom.filter.enabled#id": "true",
    # Otherwise each file, however small, has a filter of a megabyte.
    "parquet.bloom.filter.adaptive.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that no table has yet: its path below the archive, bytes, and Delta's statistics."""

    path: str
    size: int
    stats: dict[str, Any]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.stats["numRecords"])


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of a table: its path below the table, size in bytes, day, and Delta's statistics."""

    path: str
    size: int
    day: str | None
    stats: dict[str, Any]

    def action(self, now_ms: int) -> AddAction:
        """The action that adds the file to the table."""
        stats = json.dumps(self.stats)
        return AddAction(self.path, self.size, {"day": self.day}, now_ms, True, stats)  # noqa: FBT003


def write_files(
    rows: DataFrame, folder: Folder, path: str, *, by_day: bool = False
) -> list[StagedFile]:
    """Write rows to a new directory of the archive; returns the files that the driver sees.

    Raises LisaError if the files lack rows: the executors write to another file system, such as
    the disks of their own machines.
    """
    counted = Observation()
    writer = rows.observe(counted, sf.count(sf.lit(1)).alias("rows")).write.options(**_OPTIONS)
    (writer.partitionBy("day") if by_day else writer).parquet(folder.url(path))
    files = [_staged(folder, one) for one in folder.files(path)]
    seen = sum(one.rows for one in files)
    if seen != counted.get["rows"]:
        raise LisaError(
            f"Spark's executors wrote {counted.get['rows']:,} rows to {folder.where}, and the "
            f"driver sees {seen:,} there. Nothing was committed. All machines must share this "
            "directory: use a network file system or an object store"
        )
    return files


def place_files(
    folder: Folder, staged: Sequence[StagedFile], root: str, table: str, number: int
) -> list[WrittenFile]:
    """Move files of `write_files` from `root` to a table's directory, with names from `number`.

    Each file keeps its directory `day=...`.
    """
    made = []
    for index, one in enumerate(staged):
        day = one.path.removeprefix(f"{root}/day=").partition("/")[0]
        path = f"day={day}/{number}-{index:04}.parquet"
        folder.rename(one.path, f"{table}/{path}")
        made.append(WrittenFile(path, one.size, None if day == NO_DAY else day, one.stats))
    return made


def _staged(folder: Folder, one: Stored) -> StagedFile:
    """Read a file's footer in the driver itself and not in an executor."""
    directory, _, name = one.path.rpartition("/")
    handler = DeltaStorageHandler(*folder.delta_address(directory))
    footer = pq.read_metadata(name, filesystem=pa_fs.PyFileSystem(handler))
    return StagedFile(one.path, one.size, _statistics(footer))


def _statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """Statistics as Delta stores them: the range of each column for which the file knows it."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number in range(footer.num_columns):
        name = footer.schema.column(number).path
        groups = [footer.row_group(one) for one in range(footer.num_row_groups)]
        found = [group.column(number).statistics for group in groups]
        if "." in name or any(one is None or not one.has_null_count for one in found):
            continue  # a part of a list or a map
        nulls[name] = sum(one.null_count for one in found)
        known = [one for one in found if one.has_min_max]
        whole = all(one.has_min_max or one.num_values == 0 for one in found)
        if known and whole and not isinstance(known[0].min, bytes | bool):
            least[name] = _as_json(min(one.min for one in known))
            most[name] = _as_json(max(one.max for one in known))
    return {
        "numRecords": footer.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": nulls,
    }


def _as_json(value: Any) -> Any:
    """Times are whole milliseconds in all tables, so that this does not round."""
    if isinstance(value, datetime):
        return utc_text(value)
    return value
