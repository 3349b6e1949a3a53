"""Reads Parquet and ORC files with Arrow if they have types that Spark does not know.

Spark reads a duration as a bare integer, whose unit only Arrow's own schema has, and refuses times
of day, nanoseconds and a few more types. It shifts an ORC file's times without a zone by the offset
of Java's zone. Other files are left to Spark.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import orc
from pyarrow import parquet as pq
from pyarrow.fs import LocalFileSystem

from lisa.core.model.errors import ConfigError
from lisa.pipeline.paths import with_partitions
from lisa.pipeline.session import is_remote
from lisa.pipeline.source.files import found
from lisa.pipeline.source.rows import rounded_up

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_BATCH = 10_000
_MOST_TASKS = 10_000


def arrow_rows(
    load: Callable[..., DataFrame],
    form: str,
    options: Mapping[str, str],
    files: Mapping[str, str],
    partitions: Mapping[str, Column],
) -> DataFrame:
    """The rows of `parquet` or `orc` files, which `load` reads with a format and Spark's options.

    Durations are day-time intervals, other times have microseconds; both are rounded up. Times of
    day and UUIDs are text. files: those of the options that select files. Raises ConfigError if the
    files differ in their columns, unless `mergeSchema` is set, and if the unit of a duration or the
    times of an ORC file cannot be known.
    """
    given = {name.lower(): value.lower() for name, value in options.items()}
    paths = load("binaryFile", files)
    kinds, unread = _kinds(paths, skips_corrupt=given.get("ignorecorruptfiles") == "true")
    if given.get("mergeschema") != "true":
        _check_same_columns(kinds, unread)
    if form == "orc" and unread:
        _check_no_times(load(form, options), unread)
    for path, problem in unread.items() if form == "parquet" else ():
        _check_units(paths.sparkSession, path, problem)
    schema = _merged(kinds)
    types = {(field.name, field.type) for kind in kinds for field in kind.schema}
    if not any(kind.special for kind in kinds) and len(types) == len(schema):
        return with_partitions(load(form, options), partitions)
    own = {field.name.lower() for field in schema}
    texts = (partitions[name].alias(name) for name in partitions if name.lower() not in own)
    paths = paths.select(paths.path.alias(_PATH), *texts)
    return _read(paths, schema, sum(kind.groups for kind in kinds))


# ------------------------------------------------------------------ the columns of all files


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files with the same columns, of types that Spark knows.

    path: one of the files. special: the columns of other types in the files. groups: the number of
    all row groups.
    """

    path: str
    schema: pa.Schema
    special: frozenset[str]
    groups: int


def _kinds(paths: DataFrame, *, skips_corrupt: bool) -> tuple[list[_Kind], dict[str, str]]:
    """The files that Arrow opens, and path -> problem of those that perhaps only Hadoop opens."""
    columns = "path string, problem string, schema binary, special array<string>, groups bigint"
    kinds: dict[tuple[bytes, frozenset[str]], _Kind] = {}
    unread = {}
    for row in paths.select("path").mapInArrow(_look, columns).collect():
        if row.schema is not None and row.problem is not None:
            raise ConfigError(f"{_local(row.path)}: {row.problem}")
        if row.schema is None and row.path[:5] == "file:" and "encrypted" not in row.problem:
            if skips_corrupt:
                continue
            raise ConfigError(f"{_local(row.path)} {row.problem}")
        if row.schema is None:
            unread[row.path] = row.problem
            continue
        key = bytes(row.schema), frozenset(row.special)
        groups = row.groups + (kinds[key].groups if key in kinds else 0)
        schema = pa.ipc.read_schema(pa.py_buffer(key[0]))
        kinds[key] = _Kind(_local(row.path), schema, key[1], groups)
    return list(kinds.values()), unread


def _look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One row for all files of a task with the same columns, and one for each unreadable file."""
    rows: dict[Any, dict[str, Any]] = {}
    for batch in batches:
        for path in batch.column(0).to_pylist():
            try:
                with _opened(path) as file:
                    schema, special = _known(file)
                    groups = _groups(file)
                    doubt = _doubt(file.schema) if isinstance(file, orc.ORCFile) else None
            except (OSError, ValueError, NotImplementedError) as error:
                problem = f"cannot be read by pyarrow: {_line(error)}"
                rows[path] = {"path": path, "problem": problem}
                continue
            columns = schema.serialize().to_pybytes()
            row = rows.setdefault((columns, doubt, *special), {"groups": 0})
            row |= {"path": path, "problem": doubt, "schema": columns, "special": special}
            row["groups"] += groups
    text = pa.string()
    kinds = [text, text, pa.binary(), pa.list_(text), pa.int64()]
    names = ["path", "problem", "schema", "special", "groups"]
    made = [[row.get(name) for row in rows.values()] for name in names]
    arrays = [pa.array(values, kind) for values, kind in zip(made, kinds, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, names)


def _doubt(schema: pa.Schema) -> str | None:
    """Why Arrow may read the times of an ORC file as others."""
    for field in schema:
        if _has_wall_time(field.type) and b"org.apache.spark.version" in (schema.metadata or {}):
            return (
                f"Spark wrote {field.name!r} in the zone of its Java, which is not known here: "
                "write the file as Parquet"
            )
        if _is_special(field.type) and int(pa.__version__.partition(".")[0]) < _FIRST_CHECKED:
            return f"times of ORC need pyarrow {_FIRST_CHECKED} or later, not {pa.__version__}"
    return None


_FIRST_CHECKED = 25
"""Earlier versions read the year 9999 as 1816."""


def _local(path: str) -> str:
    """A path without the scheme of local files. Spark does not escape these paths."""
    return re.sub("^file:(//)?(?=/)", "", path)


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile | orc.ORCFile]:
    if path.startswith("file:"):
        system, name = LocalFileSystem(), _local(path)
    else:
        system, name = found(quote(path, safe="/:@"))
    with system.open_input_file(name) as stream:
        if stream.read_at(3, 0) == b"ORC":
            yield orc.ORCFile(stream)
            return
        # 96 bits are a time of Spark's own, without a zone in Arrow's schema.
        with pq.ParquetFile(stream, coerce_int96_timestamp_unit="us") as file:
            yield file


def _groups(file: pq.ParquetFile | orc.ORCFile) -> int:
    """The number of row groups, which ORC calls stripes."""
    return int(file.nstripes if isinstance(file, orc.ORCFile) else file.num_row_groups)


def _known(file: pq.ParquetFile | orc.ORCFile) -> tuple[pa.Schema, list[str]]:
    """The columns of a file with types that Spark knows, and those that have others in the file."""
    if isinstance(file, orc.ORCFile):
        schema, columns = file.schema, {}
    else:
        schema, leaves = file.schema_arrow, map(file.schema.column, range(len(file.schema)))
        columns = {column.path: column for column in leaves}
    fields, special = [], []
    for field in schema:
        kind, column = _plain(field), columns.get(field.name)
        is_interval = column is not None and column.converted_type == "INTERVAL"
        if is_interval:
            kind = pa.duration("us")
        elif column is not None and column.physical_type == "INT96":
            kind = pa.timestamp("us", "UTC")
        fields.append(pa.field(field.name, kind))
        if is_interval or _is_special(field.type):
            special.append(field.name)
    if special and any(
        column.physical_type == "INT96" and "." in name for name, column in columns.items()
    ):
        raise ValueError(f"times of 96 bits within values, beside {special[0]!r}; write 64 bits")
    return pa.schema(fields), special


def _check_no_times(rows: DataFrame, unread: Mapping[str, str]) -> None:
    """Raises ConfigError if ORC files that Arrow cannot open have times."""
    if 'ype":"timestamp"' in rows.schema.json():
        path, problem = next(iter(unread.items()))
        raise ConfigError(f"{path} {problem}, and Spark may shift its times: write it as Parquet")


def _check_units(spark: SparkSession, path: str, problem: str) -> None:
    """Raises ConfigError if a file that Arrow cannot open has durations."""
    if is_remote(spark):
        raise ConfigError(f"{path} {problem}; read it as a table, with --format table")
    jvm: Any = spark._jvm  # noqa: SLF001 - Hadoop opens what Arrow does not
    hadoop = spark._jsc.hadoopConfiguration()  # noqa: SLF001
    where = jvm.org.apache.hadoop.fs.Path(path)
    source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(where, hadoop)
    reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source)
    try:
        pairs = dict(reader.getFooter().getFileMetaData().getKeyValueMetaData())
    finally:
        reader.close()
    text = next((text for name, text in pairs.items() if name.startswith("ARROW")), None)
    for field in pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else ():
        if _has_duration(field.type):
            raise ConfigError(f"{path} {problem}; write {field.name!r} as text, as in '90s'")


def _check_same_columns(kinds: Collection[_Kind], unread: Mapping[str, str]) -> None:
    for path, problem in unread.items() if len(kinds) + len(unread) > 1 else ():
        raise ConfigError(
            f"{path} {problem}, so its columns are not compared with those of other files: add "
            "--read-option mergeSchema=true if columns that it lacks are empty there"
        )
    ordered = sorted(kinds, key=lambda kind: kind.path)
    names = [set(_names("", pa.struct(kind.schema))) for kind in ordered]
    for other in range(1, len(ordered)):
        for has, lacks in ((0, other), (other, 0)):
            for name in sorted(names[has] - names[lacks]):
                raise ConfigError(
                    f"{ordered[has].path} has a column {name!r}, {ordered[lacks].path} has none: "
                    "add --read-option mergeSchema=true if it is empty there"
                )


def _names(prefix: str, kind: pa.DataType) -> Iterator[str]:
    """The names of the fields within a type, with dots."""
    if isinstance(kind, pa.StructType):
        for field in kind:
            yield prefix + field.name
            yield from _names(f"{prefix}{field.name}.", field.type)
    else:
        for part in _parts(kind):
            yield from _names(prefix, part)


def _merged(kinds: Iterable[_Kind]) -> pa.Schema:
    """The columns of all files. Raises ConfigError if they have no common type, or equal names."""
    merged: dict[str, tuple[pa.DataType, _Kind]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.path):
        names = sorted(kind.schema.names, key=str.lower)
        for one, other in pairwise(names):
            if one.lower() == other.lower():
                raise ConfigError(
                    f"{kind.path} has columns {one!r} and {other!r}, which Spark takes for one: "
                    "rename one of them"
                )
        for field in kind.schema:
            before, first = merged.get(field.name, (pa.null(), kind))
            common = _common(before, field.type)
            if common is None:
                raise ConfigError(
                    f"{first.path} and {kind.path} differ: column {field.name!r} is {before} and "
                    f"{field.type}; write it with one type"
                )
            merged[field.name] = common, kind
    return pa.schema([(name, common) for name, (common, _) in merged.items()])


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that has all values of both types, as they are; None if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_signed_integer(one) and pa.types.is_signed_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    if _is_list(one) and _is_list(other):
        within = _common(one.value_type, other.value_type)
        return None if within is None else pa.list_(within)
    if isinstance(one, pa.StructType) and isinstance(other, pa.StructType):
        fields = {field.name: field.type for field in one}
        for field in other:
            common = _common(fields.get(field.name, pa.null()), field.type)
            if common is None:
                return None
            fields[field.name] = common
        return pa.struct(list(fields.items()))
    return None


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ------------------------------------------------------------------ rows


def _read(paths: DataFrame, schema: pa.Schema, groups: int) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import LongType, StructField, StructType

    split = StructType([*paths.schema.fields, StructField(_GROUP, LongType())])
    columns = StructType([*from_arrow_schema(schema).fields, *paths.schema.fields[1:]])
    tasks = max(1, min(groups, _MOST_TASKS))
    return paths.mapInArrow(_split, split).repartition(tasks).mapInArrow(_Reader(schema), columns)


_PATH, _GROUP = "_lisa_path", "_lisa_group"


def _split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A row for each row group of the files."""
    for batch in batches:
        counts = []
        for path in batch.column(_PATH).to_pylist():
            with _opened(path) as file:
                counts.append(_groups(file))
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        numbers = [number for count in counts for number in range(count)]
        taken = batch.take(pa.array(rows, pa.int64()))
        yield taken.append_column(_GROUP, pa.array(numbers, pa.int64()))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads row groups, on the executors."""

    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = {name: batch.column(name) for name in batch.schema.names}
            paths, groups = columns.pop(_PATH).to_pylist(), columns.pop(_GROUP).to_pylist()
            for row, (path, group) in enumerate(zip(paths, groups, strict=True)):
                for rows in _batches(path, group):
                    made = dict(self._columns(path, rows))
                    for name, values in columns.items():
                        made[name] = pa.repeat(values[row], rows.num_rows)
                    yield pa.RecordBatch.from_pydict(made)

    def _columns(self, path: str, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
        for field in self.schema:
            if field.name not in rows.schema.names:
                yield field.name, pa.nulls(rows.num_rows, field.type)
                continue
            try:
                yield field.name, _converted(rows.column(field.name), field.type)
            except (pa.ArrowException, OverflowError) as error:
                raise ConfigError(
                    f"{_local(path)}: column {field.name!r}: {_line(error)}"
                ) from None


def _batches(path: str, group: int) -> Iterator[pa.RecordBatch]:
    """The rows of a row group. Raises ConfigError for times beyond those that have nanoseconds."""
    with _opened(path) as file:
        if not isinstance(file, orc.ORCFile):
            yield from file.iter_batches(_BATCH, row_groups=[group])
            return
        try:
            stripe = file.read_stripe(group)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{_local(path)}: {_line(error)}: write it as Parquet") from None
        for start in range(0, stripe.num_rows, _BATCH):
            yield stripe.slice(start, _BATCH)


# ------------------------------------------------------------------ types

_BECOME: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_duration, pa.duration("us")),
    (pa.types.is_time, pa.string()),
    (lambda kind: kind == pa.uuid(), pa.string()),
    (pa.types.is_float16, pa.float32()),
    (pa.types.is_uint8, pa.int16()),
    (pa.types.is_uint16, pa.int32()),
    (pa.types.is_uint32, pa.int64()),
    (pa.types.is_uint64, pa.decimal128(20, 0)),
    (pa.types.is_date, pa.date32()),
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_fixed_size_binary, pa.binary()),
)
"""Tests of types -> the type that Spark has for their values."""

_SPECIAL = 4
"""So many of these, the first ones, Spark does not read, or not as what they are."""


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(
        kind,
        (
            pa.ListType,
            pa.LargeListType,
            pa.FixedSizeListType,
            pa.ListViewType,
            pa.LargeListViewType,
        ),
    )


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    """The types within a type."""
    if isinstance(kind, pa.DictionaryType):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]


def _has_duration(kind: pa.DataType) -> bool:
    return pa.types.is_duration(kind) or any(map(_has_duration, _parts(kind)))


def _has_wall_time(kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.tz is None
    return any(map(_has_wall_time, _parts(kind)))


def _is_special(kind: pa.DataType) -> bool:
    """Whether Spark reads a type wrongly, or does not read it."""
    return (
        any(test(kind) for test, _ in _BECOME[:_SPECIAL])
        or (pa.types.is_timestamp(kind) and kind.unit == "ns")
        or any(map(_is_special, _parts(kind)))
    )


def _plain(field: pa.Field) -> pa.DataType:
    """The type that Spark knows, for the values of a field."""
    kind, mark = field.type, (field.metadata or {}).get(_SPARK, b"")
    if mark == b"timestamp_ntz":
        return pa.timestamp("us")
    if mark.startswith(b"interval"):
        return pa.duration("us")
    for test, plain in _BECOME:
        if test(kind):
            return plain
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if isinstance(kind, pa.DictionaryType):
        return _plain(pa.field("", kind.value_type))
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(pa.field("", kind.storage_type))
    if isinstance(kind, pa.StructType):
        return pa.struct([(field.name, _plain(field)) for field in kind])
    if isinstance(kind, pa.MapType):
        return pa.map_(_plain(kind.key_field), _plain(kind.item_field))
    return pa.list_(_plain(kind.value_field)) if _is_list(kind) else kind


_SPARK = b"spark.sql.catalyst.type"
"""Names Spark's type of an integer in its ORC files."""


def _converted(values: pa.Array, to: pa.DataType) -> pa.Array:
    """Values as a type that `_plain` returned; times and durations are rounded up.

    Raises ArrowException or OverflowError for values beyond its range.
    """
    kind = values.type
    if pa.types.is_null(kind):
        return pa.nulls(len(values), to)
    if isinstance(kind, pa.DictionaryType):
        return _converted(values.cast(kind.value_type), to)
    if pa.types.is_time(kind) or kind == pa.uuid():
        return _text(values)
    if isinstance(kind, pa.BaseExtensionType):
        return _converted(values.storage, to)
    if pa.types.is_fixed_size_binary(kind) and pa.types.is_duration(to):
        return pa.array(map(_interval_us, values.to_pylist()), pa.int64()).cast(to)
    if (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":
        return rounded_up(values.cast(pa.int64())).cast(to)
    if isinstance(to, pa.StructType):
        return _converted_struct(values, to)
    if isinstance(to, pa.MapType):
        keys, items = _converted(values.keys, to.key_type), _converted(values.items, to.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, to, mask=values.is_null())
    if _is_list(to):
        lists = values.cast(pa.list_(kind.value_type))
        items = _converted(lists.values, to.value_type)
        return pa.ListArray.from_arrays(_offsets(lists), items, to, mask=lists.is_null())
    return values.cast(to)


def _text(values: pa.Array) -> pa.Array:
    """Times of day as in 09:00:00.5, and UUIDs."""
    if pa.types.is_time(values.type):
        texts = values.cast(pa.string())
        return pc.replace_substring_regex(texts, r"(\.\d*[1-9])0+$|\.0+$", r"\1")
    uuids = (value and str(UUID(bytes=value)) for value in values.storage.to_pylist())
    return pa.array(uuids, pa.string())


def _converted_struct(values: pa.StructArray, to: pa.StructType) -> pa.Array:
    parts = [
        _converted(pc.struct_field(values, field.name), field.type)
        if values.type.get_field_index(field.name) >= 0
        else pa.nulls(len(values), field.type)
        for field in to
    ]
    return pa.StructArray.from_arrays(parts, fields=list(to), mask=values.is_null())


def _offsets(lists: pa.Array) -> pa.Array:
    """Where the values of lists or maps begin and end, in an array that is not a slice."""
    return pc.add(lists.offsets, pa.scalar(0, pa.int32()))


def _interval_us(value: bytes | None) -> int | None:
    """Parquet's interval in microseconds. Raises OverflowError if it has months."""
    if value is None:
        return None
    months, days, ms = map(int, _INTERVAL.unpack(value))
    if months:
        raise OverflowError(f"{months} months are no duration")
    return 1000 * (days * _DAY_MS + ms)


_INTERVAL = Struct("<III")  # months, days and milliseconds
_DAY_MS = 86_400_000
