"""Reads JSON objects from text one by one, so that no object changes how another one is read.

Spark finds one type for all values of a field: one large number would make every number of the
field text, and one fraction would add a fraction to every integer.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DecimalType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from lisa.core.model.envelope import without_repeats
from lisa.core.model.errors import ConfigError
from lisa.pipeline.paths import shown
from lisa.pipeline.source.columns import CORRUPT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

TIME = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?)?"
"""The beginning of a text with a date, and perhaps a time of day."""

_LITERAL = re.compile(r"-?(0|[1-9]\d*)([.]\d+)?([eE][-+]?\d+)?|true|false", re.ASCII)
_INTEGERS = range(-(1 << 63), 1 << 64)
_MOST_DIGITS = 17
"""The digits that identify a double."""

_SPACE = re.compile("[ \\t\\r\\n\ufeff]*")
_KEPT = 1 << 16
"""Characters that are kept of a line or file that cannot be read."""

_BATCH = 10_000


def _integer(text: str) -> int | msgspec.Raw | str:
    if text == "-0":
        return msgspec.Raw(b"-0")
    number = int(text) if len(text) <= 20 else None
    return number if number is not None and number in _INTEGERS and str(number) == text else text


def _fraction(text: str) -> msgspec.Raw | str:
    digits, number = text.lower().partition("e")[0].lstrip("-0.").replace(".", ""), float(text)
    is_double = len(digits) <= _MOST_DIGITS and math.isfinite(number) and bool(number or not digits)
    return msgspec.Raw(text.encode()) if is_double else text


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _sorted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are sorted, so that ids derived from it ignore their order."""
    made = without_repeats(sorted(pairs, key=itemgetter(0)))
    "".join(made).encode()  # raises ValueError for half of a surrogate pair
    return made


_decoder = json.JSONDecoder(
    parse_int=_integer,
    parse_float=_fraction,
    parse_constant=_constant,
    object_pairs_hook=_sorted,
)


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a text: one after the other, or in arrays. Raises ValueError.

    Numbers that a 64-bit integer or a double would change are text. Other fractions and
    -0 are `msgspec.Raw`, with the digits of the text.
    """
    made: list[dict[str, Any]] = []
    at = _after_space(text, 0)
    while at < len(text):
        value, at = _decoder.raw_decode(text, at)
        at = _after_space(text, at)
        for found in value if isinstance(value, list) else [value]:
            if not isinstance(found, dict):
                raise ValueError("not an object")  # noqa: TRY004 - the value is not the caller's
            made.append(found)
    return made


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _read(content: bytes, encoding: str) -> tuple[list[dict[str, Any]], str | None]:
    """The objects of a line or file; or none, and why it cannot be read."""
    try:
        return objects(content.decode(encoding)), None
    except UnicodeDecodeError:
        problem = f"not {encoding.upper()}; name the encoding, as in --read-option encoding=cp1252"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    text = content.decode(encoding, "replace").strip()
    return [], f"{text[:_KEPT]}: {problem}"


def _first_problem(content: bytes, encoding: str) -> str | None:
    """Why the file that begins with this line has no object per line; None if it may have."""
    if encoding == "utf-8" and content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "is UTF-16: add --read-option encoding=utf-16"
    try:
        text = content.decode(encoding, "replace").rstrip()
        objects(text)
    except json.JSONDecodeError as error:
        if error.pos >= len(text):
            return "has an array, or objects over several lines: add --read-option multiLine=true"
    except (ValueError, RecursionError):
        pass  # one row, which is refused
    return None


def form_of(kind: DataType) -> str:
    """A pattern for Python and Java: the texts that Spark converts to a type without loss."""
    if isinstance(kind, DateType):
        return r"^\s*\d{4}-\d\d-\d\d([T ]00:00(:00([.]0+)?)?)?\s*$"
    if isinstance(kind, TimestampNTZType):
        return rf"^\s*{TIME}\s*$"
    if isinstance(kind, TimestampType):  # Spark would take 09:00 for today
        return rf"^\s*{TIME}"
    if isinstance(kind, DecimalType):
        return rf"^\s*[-+]?(\d+[.]?|\d*[.]\d{{0,{kind.scale}}}0*)\s*$"
    return ""


def as_declared(kind: DataType, text: str | None) -> str | None:
    """The JSON of a text, written so that Spark reads each value of this type unchanged.

    Numbers and Booleans may be in texts, and any value may become a text. None if the text is not
    JSON, or has a value that does not fit.
    """
    try:
        return None if text is None else _encoded(_fitted(kind, _decoder.decode(text)))
    except (ValueError, RecursionError):
        return None


def _fitted(kind: DataType, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, StructType) and isinstance(value, dict):
        return {field.name: _fitted(field.dataType, value.get(field.name)) for field in kind}
    if isinstance(kind, MapType) and isinstance(value, dict):
        return {name: _fitted(kind.valueType, item) for name, item in value.items()}
    if isinstance(kind, ArrayType) and isinstance(value, list):
        return [_fitted(kind.elementType, item) for item in value]
    text = value if isinstance(value, str) else _encoded(value)
    if isinstance(kind, StringType):
        return text
    if not re.search(form_of(kind), text, re.ASCII):
        raise ValueError("not of this type")
    return msgspec.Raw(text.encode()) if _LITERAL.fullmatch(text) else text


@dataclass(frozen=True, slots=True)
class JsonRows:
    """The objects of files.

    lines: a binary column, one line or a whole file; and the text of each partition, which is added
    to objects without this key. names: the keys of all objects, sorted.
    """

    lines: DataFrame
    encoding: str
    names: Sequence[str]

    def table(
        self, parts: Mapping[str, str], body: str | None, without: Collection[str]
    ) -> DataFrame:
        """A text column for each key in `parts`, the columns BODY and KIND, and CORRUPT.

        parts: key -> the part of the message that it becomes, or empty. body: the key of the
        body; None for the whole object apart from the keys in `without`. The kind is null if the
        body is text.
        """
        from pyspark.sql.types import StringType, StructField, StructType

        names = [*parts, BODY, KIND, CORRUPT]
        schema = StructType([StructField(name, StringType()) for name in names])
        partitions = self.lines.columns[1:]
        return self.lines.mapInArrow(
            _Rows(self.encoding, partitions, dict(parts), body, frozenset(without)), schema
        )


BODY, KIND = "_lisa_body", "_lisa_kind"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Converts lines to rows, on the executors."""

    encoding: str
    partitions: Sequence[str]
    parts: Mapping[str, str]
    body: str | None
    without: frozenset[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = [*self.parts, BODY, KIND, CORRUPT]
        schema = pa.schema([(name, pa.string()) for name in names])
        for batch in batches:
            lines = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            rows = [row for line in lines for row in self._rows(*line)]
            for at in range(0, len(rows), _BATCH):
                columns = zip(*rows[at : at + _BATCH], strict=True)
                yield pa.record_batch([pa.array(column, pa.string()) for column in columns], schema)

    def _rows(self, content: bytes, *texts: str | None) -> Iterator[tuple[str | None, ...]]:
        found, problem = _read(content, self.encoding)
        partitions = dict(zip(self.partitions, texts, strict=True))
        for own in found:
            item = dict(sorted({**partitions, **own}.items())) if partitions else own
            try:
                values = (_text(part, item.get(name)) for name, part in self.parts.items())
                yield (*values, *self._body(item), None)
            except ValueError as error:  # a list as an id, a lone surrogate
                problem = f"{str(item)[:_KEPT]}: {error}".encode(errors="replace").decode()
                yield (*(None for _ in self.parts), None, None, problem)
        if problem is not None and not found:
            yield (*(None for _ in self.parts), None, None, problem)

    def _body(self, item: Mapping[str, Any]) -> tuple[str | None, str | None]:
        if self.body is None:
            return _encoded({name: item[name] for name in item if name not in self.without}), "j"
        value = item.get(self.body)
        return (value, None) if value is None or isinstance(value, str) else (_encoded(value), "j")


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _text(part: str, value: Any) -> str | None:
    """A value as a CSV would have it: text without quotes, headers as JSON, pauses with commas.

    part: the part of a message that it becomes; empty if its type is declared.
    """
    if isinstance(value, str):
        value.encode()  # may raise
        return value
    if isinstance(value, list) and part == "retry":
        return ",".join(f"{pause}ms" if isinstance(pause, int) else str(pause) for pause in value)
    if isinstance(value, (dict, list)) and part not in ("", "headers"):
        raise ValueError(f"{part} is neither text nor a number")
    return None if value is None else _encoded(value)


def json_rows(
    source: str,
    load: Callable[[Mapping[str, str]], DataFrame],
    options: Mapping[str, str],
    partitions: Mapping[str, Column],
) -> JsonRows:
    """The objects of files, whose text `load` reads with options of Spark's format `text`.

    options: `encoding` (or `charset`), `lineSep`, `multiLine`; others are passed on. Raises
    ConfigError for an unknown encoding, and for a file that has no object per line.
    """
    rest = {name.lower(): value for name, value in options.items()}
    named = rest.pop("encoding", rest.pop("charset", "utf-8"))
    try:
        encoding = codecs.lookup(named).name
    except LookupError:
        raise ConfigError(f"--read-option encoding={named}: no such encoding") from None
    is_whole = _flag(rest.pop("multiline", "false"))
    if is_whole or encoding.startswith(("utf-16", "utf-32")):
        rest = {name: value for name, value in rest.items() if name != "linesep"}
        rest["wholetext"] = "true"
    columns = ("CAST(value AS BINARY) AS value", "_metadata.file_path AS file")
    start = "_metadata.file_block_start = 0 AS is_start"
    lines = load(rest)
    found = lines.selectExpr(*columns, start).mapInArrow(
        _Names(encoding), "file string, name string, problem string"
    )
    names: set[str] = set()
    for row in found.distinct().collect():
        if row.problem is not None:
            raise ConfigError(f"{shown(row.file)} {row.problem}")
        names.add(row.name)
    if not names:
        raise ConfigError(f"{source}: no JSON object with a key was found")
    texts = (text.alias(name) for name, text in partitions.items())
    rows = lines.select(lines.value.cast("binary").alias("_lisa_line"), *texts)
    return JsonRows(rows, encoding, sorted({*names, *partitions}))


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"--read-option multiLine={text}: write true or false")
    return text.lower() == "true"


@dataclass(frozen=True, slots=True)
class _Names:
    """Finds the keys of all objects, and files that do not begin with an object."""

    encoding: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun: set[str] = set()
        names: set[str] = set()
        problems: dict[str, str] = {}
        for batch in batches:
            for row in batch.to_pylist():
                content, file = row["value"], row["file"]
                for item in _read(content, self.encoding)[0]:
                    names.update(item)
                if row["is_start"] and file not in begun and content.strip():
                    begun.add(file)
                    if problem := _first_problem(content, self.encoding):
                        problems[file] = problem
        rows = [{"name": name} for name in sorted(names)]
        rows += [{"file": file, "problem": problem} for file, problem in problems.items()]
        text = pa.string()
        schema = pa.schema([("file", text), ("name", text), ("problem", text)])
        yield pa.RecordBatch.from_pylist(rows, schema)
