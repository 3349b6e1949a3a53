"""A Delta table: Spark writes its Parquet files, and delta-rs commits them to its log.

Each commit is one file in `_delta_log`, created only if it does not exist yet. A process that is
killed before the commit leaves files that no reader sees and that `vacuum` deletes. Commits carry
application transactions: a name and a number that the table keeps, so that a process finds out
after a kill whether its commit took place. Before any commit, `write_files` proves that the driver
sees all rows that the executors wrote.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import (
    BloomFilterProperties,
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    Schema,
    Transaction,
    WriterProperties,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from lisa.core.model.clock import utc_text
from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.archive.folder import Stored
from lisa.pipeline.paths import literal
from lisa.pipeline.session import changed, observation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive.folder import Folder

STATE = "lisa.state"
"""Name of the application transaction that changes with every commit of Lisa."""

LOG_FOLDER = "_delta_log"

DAY = "day"
FULL_BYTES = 128 * 1024 * 1024
MANY = 64
"""Number of small files of the current day that are worth a compaction."""

LOG_RETENTION = "interval 1 days"
"""How long old commits are kept: at a batch every five seconds, 17,000 a day."""

_TRIES = 5
_WRITER = WriterProperties(
    compression="ZSTD",
    column_properties={
        "id": ColumnProperties(bloom_filter_properties=BloomFilterProperties(True, fpp=0.01))  # noqa: FBT003
    },
)


COMPRESSION = "zstd"

NO_DAY = "__HIVE_DEFAULT_PARTITION__"
"""Name of the directory of rows without a day."""

_OPTIONS = {
    "compression": COMPRESSION,
    # INT96, the default, has no statistics: a search by time would read every file.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "parquet.bloom.filter.enabled#id": "true",
    # Otherwise each file, however small, has a filter of a megabyte.
    "parquet.bloom.filter.adaptive.enabled": "true",
}


class ArchiveTable:
    """A table of an archive, partitioned by day, as of its last `refresh`.

    schema: with the column `day`; columns that an older table lacks are read as null, and added
    by `adapt`.
    """

    def __init__(self, spark: SparkSession, folder: Folder, name: str, schema: StructType) -> None:
        self._spark, self._folder, self.name, self.schema = spark, folder, name, schema
        self._uri, self._options = folder.delta_address(name)
        self._delta: DeltaTable | None = None
        self.refresh()

    @property
    def delta(self) -> DeltaTable:
        """The table as delta-rs sees it. Raises ConfigError if it does not exist."""
        if self._delta is None:
            raise ConfigError(f"there is no table in {self._folder.url(self.name)}")
        return self._delta

    def refresh(self) -> None:
        """Read the current version.

        Raises LisaError if the table is opened, and its log is damaged.
        """
        self._files: list[dict[str, Any]] | None = None
        if self._delta is not None:
            self._delta.update_incremental()
            return
        try:
            self._delta = DeltaTable(self._uri, storage_options=self._options)
        except TableNotFoundError:
            if any(name.startswith(f"{DAY}=") for name in self._folder.names(self.name)):
                raise LisaError(
                    f"{self._folder.url(self.name)} has files but no {LOG_FOLDER} that lists them: "
                    "restore that directory from a copy, or begin an archive in another place"
                ) from None
            return
        except DeltaError:
            self._refuse_damage()
            raise
        if self._lacks_commits():
            self._refuse_damage()

    def _lacks_commits(self) -> bool:
        """Whether a commit since the last checkpoint may be empty or cut off.

        delta-rs ignores an empty file, and actions that a file lacks.
        """
        try:
            hint = self._folder.read(f"{self.name}/{LOG_FOLDER}/_last_checkpoint")
            since = int(json.loads(hint or "{}").get("version", -1))
        except ValueError:
            since = -1
        wanted = self.delta.version() - since
        commits = self.delta.history(max(1, wanted))
        numbers = [commit[STATE] for commit in commits if STATE in commit]
        is_cut = bool(numbers) and int(numbers[0]) != self.transaction(STATE)
        return not commits or len(commits) < wanted or is_cut

    def _refuse_damage(self) -> None:
        """Raises LisaError if a file of the log is empty or cut off, from the newest on."""
        log = f"{self.name}/{LOG_FOLDER}"
        names = [name for name in self._folder.names(log) if name[:1].isdigit()]
        for name in reversed(names):
            kind = name.partition(".")[2]
            if kind == "json" and not _is_whole(self._folder.read(f"{log}/{name}") or ""):
                is_last = all(other <= name or "checkpoint" in other for other in names)
                cure = "restore it from a copy"
                if is_last:
                    cure = (
                        "delete it, and `lisa pipeline archive` continues after the commit before "
                        "it, from the journal"
                    )
            elif kind == "checkpoint.parquet":
                if self._is_parquet(f"{log}/{name}"):
                    return
                cure = (
                    "delete it and _last_checkpoint if the commits before it are still there; "
                    "otherwise restore it from a copy"
                )
            else:
                continue
            raise LisaError(
                f"{self._folder.url(log)}/{name} is empty or cut off, as after a crash or a full "
                f"disk: {cure}"
            )

    def _is_parquet(self, path: str) -> bool:
        try:
            footer(self._folder, path)
        except (OSError, pa.ArrowInvalid):
            return False
        return True

    def adapt(self) -> None:
        """Create the table, or add the columns that it lacks."""
        wanted = _schema(self.schema)
        if self._delta is None:
            settings = {"delta.logRetentionDuration": LOG_RETENTION}
            self._delta = DeltaTable.create(
                self._uri,
                wanted,
                mode="ignore",
                partition_by=[DAY],
                configuration=settings,
                storage_options=self._options,
            )
        known = {field.name for field in self.delta.schema().fields}
        if missing := [field for field in wanted.fields if field.name not in known]:
            self.delta.alter.add_columns(missing)
        self.refresh()

    def transaction(self, name: str) -> int | None:
        """The last committed number of an application transaction."""
        found: int | None = None if self._delta is None else self.delta.transaction_version(name)
        return found

    def files(self) -> list[dict[str, Any]]:
        """The files: `path` below the table, `size_bytes`, `num_records`, `day` (date or None)."""
        if self._delta is None:
            return []
        if self._files is None:
            self._files = self._listed()
        return self._files

    def _listed(self) -> list[dict[str, Any]]:
        names = ("path", "size_bytes", "num_records", f"partition.{DAY}")
        found = self.delta.get_add_actions(flatten=True)
        columns = [found.column(name).to_pylist() for name in names]
        keys = (*names[:3], DAY)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def row_count(self) -> int:
        """Number of rows, from the log of the table."""
        return sum(file["num_records"] for file in self.files())

    def _may_have(self, column: str, values: Collection[str]) -> set[str]:
        """The files that may have one of these texts in a column, by the statistics in the log."""
        found = self.delta.get_add_actions(flatten=True)
        paths = found.column("path").to_pylist()
        if f"min.{column}" not in found.column_names:
            return set(paths)
        ends = (found.column(f"{end}.{column}").to_pylist() for end in ("min", "max"))
        wanted = sorted(values)
        return {
            path
            for path, least, most in zip(paths, *ends, strict=True)
            if least is None
            or most is None
            or bisect_left(wanted, least) < bisect_right(wanted, most)
        }

    def rows(
        self,
        *,
        dated: bool | None = None,
        only: Collection[str] | None = None,
        having: Mapping[str, Collection[str] | None] = MappingProxyType({}),
    ) -> DataFrame:
        """The rows of all files.

        dated: only of files with a day, or only of those without. only: only of these files.
        having: column -> texts; leaves out files that have none of these texts in the column.

        Raises LisaError if a file on a local disk is missing or cut off.
        """
        chosen = [set(only)] if only is not None else []
        for column, values in having.items() if self.files() else ():
            if values is not None:
                chosen.append(self._may_have(column, values))
        files = [
            Stored(f"{self.name}/{file['path']}", file["size_bytes"])
            for file in self.files()
            if (dated is None or (file[DAY] is not None) == dated)
            and all(file["path"] in paths for paths in chosen)
        ]
        self._folder.check(files)
        paths = [self._folder.url(file.path) for file in files]
        if not paths:
            return self._spark.createDataFrame([], self.schema)
        # By default Spark lists more than 32 files with a job that has a task for each file.
        local = self._folder.where.startswith("file:")
        listing = "spark.sql.sources.parallelPartitionDiscovery"
        settings = {f"{listing}.parallelism": "64"}
        settings |= {f"{listing}.threshold": "100000"} if local else {}
        reader = self._spark.read.schema(self.schema)
        reader = reader.option("basePath", self._folder.url(self.name))
        with changed(self._spark, settings):
            return reader.parquet(*map(literal, paths))

    def commit(
        self,
        files: Sequence[WrittenFile],
        transactions: Mapping[str, int],
        *,
        replace_undated: bool = False,
        remove: Collection[str] = (),
    ) -> None:
        """Add files, and with `replace_undated` remove all present files without a day.

        transactions: name -> number, committed together with the files; `STATE` is one of them.
        remove: files to remove.

        Raises ConfigError if another process has committed since the last `refresh`.
        """
        before = self.transaction(STATE)
        now = int(time.time() * 1000)
        for left in reversed(range(_TRIES)):
            actions: list[AddAction | RemoveAction] = [file.action(now) for file in files]
            present = {file["path"]: file[DAY] for file in self.files()}
            if not present.keys() >= set(remove):  # another program has compacted the table
                raise ConfigError(another_writer(self._folder.where))
            olds = [path for path, day in present.items() if replace_undated and day is None]
            actions += [RemoveAction(path, True, now) for path in (*olds, *remove)]  # noqa: FBT003
            try:
                self.delta.create_write_transaction(
                    actions,
                    "append",
                    self.delta.schema(),
                    [DAY],
                    commit_properties=CommitProperties(
                        max_commit_retries=0,
                        custom_metadata={STATE: str(transactions[STATE])},
                        app_transactions=[Transaction(*item) for item in transactions.items()],
                    ),
                )
            except CommitFailedError:
                self.refresh()
                if self.transaction(STATE) == transactions[STATE]:
                    break  # written, but the answer was lost, and the repetition was refused
                if self.transaction(STATE) != before:
                    raise ConfigError(another_writer(self._folder.where)) from None
                if not left:
                    raise
            else:
                break  # otherwise another program has compacted the table, for example
        self.refresh()
        self._sync_commit()

    def _sync_commit(self) -> None:
        log = f"{self.name}/{LOG_FOLDER}"
        self._folder.sync(f"{log}/{self.delta.version():020}.json")
        self._folder.sync(log)

    def compact(self, today: str, *, everything: bool = False) -> int:
        """Merge small files of the same day; returns the number of merged files.

        today: the current day; its files are merged only if there are many, or for `everything`.
        """
        small = Counter(
            file[DAY].isoformat()
            for file in self.files()
            if file[DAY] is not None and file["size_bytes"] < FULL_BYTES // 2
        )
        merged, before = 0, {file["path"] for file in self.files()}
        for day, count in sorted(small.items()):
            if count >= (2 if everything or day < today else MANY):
                done = self.delta.optimize.compact(
                    partition_filters=[(DAY, "=", day)],
                    target_size=FULL_BYTES,
                    writer_properties=_WRITER,
                )
                merged += int(done["numFilesRemoved"])
        self.refresh()
        if merged:
            for path in {file["path"] for file in self.files()} - before:
                self._folder.sync(f"{self.name}/{path}")
            self._sync_commit()
        return merged

    def forget(self) -> None:
        """Delete all earlier versions, and what their commits say about the content of files.

        Commits remain, without their statistics: a process that has the table open still finds
        later commits, and is refused when it writes.
        """
        self.vacuum(timedelta(0))
        self.delta.create_checkpoint()
        log, last = f"{self.name}/{LOG_FOLDER}", self.delta.version()
        for name in self._folder.names(log):
            version, _, kind = name.partition(".")
            if not version.isdigit() or int(version) >= last:
                continue
            if kind != "json":
                self._folder.delete(f"{log}/{name}")
            elif (text := self._folder.read(f"{log}/{name}")) and '"stats"' in text:
                self._folder.write(f"{log}/{name}", _without_statistics(text))

    def vacuum(self, keep: timedelta) -> None:
        """Delete files that have not been part of the table for `keep`, in whole hours."""
        self.delta.vacuum(
            math.ceil(keep / timedelta(hours=1)),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
        )
        self.refresh()


def another_writer(where: str) -> str:
    """The error message of a process that is not the only one to write to an archive."""
    return (
        f"another process has written to {where} meanwhile, and only one may write at a time: "
        "`lisa pipeline retain` and `erase` need `lisa pipeline archive` stopped. Run "
        "this again when the other process has ended"
    )


def _is_whole(commit: str) -> bool:
    """Whether the text of a commit has all of its actions; Lisa's names its number at both ends."""
    try:
        actions = [json.loads(line) for line in commit.splitlines()]
    except ValueError:
        return False
    number = actions[0].get("commitInfo", {}).get(STATE) if actions else None
    ends = [str(action["txn"]["version"]) for action in actions if "txn" in action]
    return bool(actions) and (number is None or number in ends)


def _without_statistics(commit: str) -> str:
    actions = [json.loads(line) for line in commit.splitlines() if line]
    for action in actions:
        for name in ("add", "remove"):
            action.get(name, {}).pop("stats", None)
    return "".join(json.dumps(action) + "\n" for action in actions)


def _schema(schema: StructType) -> Schema:
    """The schema for delta-rs. All columns may be null, so that columns can be added later."""
    return Schema.from_arrow(to_arrow_schema(schema.toNullable(), timezone="UTC"))


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

    Raises ConfigError if the files lack rows: the executors write to another file system, such as
    the disks of their own machines.
    """
    counted = observation(rows)
    writer = rows.observe(counted, sf.count(sf.lit(1)).alias("rows")).write.options(**_OPTIONS)
    (writer.partitionBy("day") if by_day else writer).parquet(folder.url(path))
    files = [_staged(folder, file) for file in folder.files(path)]
    seen = sum(file.rows for file in files)
    if seen != counted.get["rows"]:
        raise ConfigError(
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
    return StagedFile(one.path, one.size, statistics_of(footer(folder, one.path)))


def footer(folder: Folder, path: str) -> pq.FileMetaData:
    """Read a file's footer in the driver itself and not in an executor."""
    with folder.open(path) as file:
        return pq.read_metadata(file)


def statistics_of(footer: pq.FileMetaData) -> dict[str, Any]:
    """Statistics as Delta stores them: the range of each column for which the file knows it."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number in range(footer.num_columns):
        name = footer.schema.column(number).path
        groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
        found = [group.column(number).statistics for group in groups]
        if "." in name or any(column is None or not column.has_null_count for column in found):
            continue  # a part of a list or a map
        nulls[name] = sum(column.null_count for column in found)
        known = [column for column in found if column.has_min_max]
        whole = all(column.has_min_max or column.num_values == 0 for column in found)
        if known and whole and not isinstance(known[0].min, bytes | bool):
            least[name] = _as_json(min(column.min for column in known))
            most[name] = _as_json(max(column.max for column in known))
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
