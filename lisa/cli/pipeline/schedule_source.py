"""The rows of `lisa pipeline schedule`: reads their source, and makes columns of messages of them.

Options, names and headers are checked first.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from lisa.core.model.clock import duration_ms, parse_duration, parse_zone
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.late import own_late
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.window import parse as parse_window
from lisa.pipeline.arrow_files import arrow_rows
from lisa.pipeline.delta_files import check_not_delta, delta_rows, is_delta
from lisa.pipeline.errors import one_line
from lisa.pipeline.jobs.horizon import is_cancelled
from lisa.pipeline.json_objects import (
    BODY,
    KIND,
    TIME,
    JsonRows,
    as_declared,
    form_of,
    json_rows,
)
from lisa.pipeline.paths import (
    ENDINGS,
    LOCAL_FILES,
    PACKED,
    check_contents,
    format_of,
    partitions,
    readable,
    shown,
    with_partitions,
)
from lisa.pipeline.source.columns import CORRUPT
from lisa.pipeline.source.rows import read_cost

_FILES = (
    "pathGlobFilter recursiveFileLookup modifiedBefore modifiedAfter ignoreCorruptFiles "
    "ignoreMissingFiles basePath"
)
_TEXT = "encoding charset lineSep multiLine"
_OPTIONS = {
    "csv": f"{_FILES} {_TEXT} sep delimiter quote escape charToEscapeQuoteEscaping comment header "
    "ignoreLeadingWhiteSpace ignoreTrailingWhiteSpace nullValue emptyValue maxColumns mode "
    "maxCharsPerColumn unescapedQuoteHandling enforceSchema inferSchema",
    "json": f"{_FILES} {_TEXT}",
    "parquet": f"{_FILES} mergeSchema datetimeRebaseMode int96RebaseMode",
    "orc": f"{_FILES} mergeSchema",
    "delta": "",
    "table": "",
}
_OPTIONS["tsv"] = _OPTIONS["csv"]
"""Format -> the options of Spark's reader that have an effect."""

_FORMATS: Mapping[str, type[DataType]] = {
    "dateFormat": DateType,
    "timestampFormat": TimestampType,
    "timestampNTZFormat": TimestampNTZType,
}
"""Options that have an effect with --schema, if a column has this type."""

_INFERRING = "locale timeZone nanValue positiveInf negativeInf samplingRatio preferDate"
"""Options that have an effect if Spark finds the types of a CSV."""


TIMES = frozenset({"due", "delay", "at_local"})

NAMED_ONLY = frozenset({"key", "at_local", "tz", "window", "late", "cost", "slack", "cancelled"})
"""Parts of a message that a column becomes only if an option names it."""

_LIKE_TIMES = re.compile(r"due(at|on|date|time|ms)?|delay(ms)?")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a source. are_texts: the values are a CSV's, whose types are not declared."""

    table: DataFrame
    are_texts: bool = False

    @property
    def names(self) -> list[str]:
        """The columns, without the one that marks unusable rows."""
        return _names(self.table)


def read(
    spark: SparkSession,
    source: str,
    kind: str | None,
    options: dict[str, str],
    schema: str | None = None,
) -> Rows | JsonRows:
    """Read a file, directory, URL or table; kind: its format; None to find it, see `format_of`.

    schema: types as DDL, as in "order long, paid boolean". A CSV's other columns are text; of JSON
    lines, only these fields are read. Raises ConfigError for other formats, for options that have
    no effect, and for files that cannot be what they are read as.
    """
    if kind is None and is_delta(source):
        kind = "delta"
    if kind in ("delta", "table"):
        _declared(schema, kind)
        _check_options(source, kind, options)
        return Rows(spark.table(source) if kind == "table" else delta_rows(spark, source))
    given = {name.lower(): value for name, value in options.items()}
    endings = [ending for ending, mark in ENDINGS.items() if kind in (None, mark)]
    zipped = [ending + packed for ending in endings for packed in PACKED]
    path = readable(source, (*endings, *zipped))
    load = _loader(spark, source, path)
    of_files = {name: given[name] for name in _FILES.lower().split() if name in given}
    files = load("binaryFile", of_files).inputFiles()
    if not files:
        raise ConfigError(f"{source}: there is no file")
    kind = kind or format_of(source, files)
    check_contents(files, kind)
    found = {}
    if given.get("recursivefilelookup", "").lower() != "true":
        found = partitions(source, path, files, given.get("basepath"))
    if kind == "tsv":
        options = {"sep": r"\t", **options}
    declared = _declared(schema, kind)
    types = () if declared is None else tuple(field.dataType for field in declared.fields)
    _check_options(source, kind, options, types)
    if kind == "json":
        formats = {name.lower() for name in _FORMATS}
        rest = {name: value for name, value in options.items() if name.lower() not in formats}
        rows = json_rows(source, partial(load, "text"), rest, found)
        return rows if declared is None else _declared_json(rows, declared, options)
    if kind in ("csv", "tsv"):
        return _read_csv(load, source, options, declared, found)
    if kind == "parquet":
        check_not_delta(spark, path, files)
    return Rows(arrow_rows(load, kind, options, of_files, found))


def _declared(schema: str | None, kind: str) -> StructType | None:
    if schema is None:
        return None
    if kind not in ("csv", "tsv", "json"):
        raise ConfigError(f"--schema is for CSV and JSON lines; {kind} has types of its own")
    return _parsed(schema)


def _parsed(schema: str) -> StructType:
    parsed = StructType.fromDDL(schema)
    if not isinstance(parsed, StructType):
        raise ConfigError(f"--schema {schema!r} is not of the form 'order long, paid boolean'")
    return parsed


def _loader(spark: SparkSession, source: str, path: str) -> Callable[..., DataFrame]:
    """A function that loads `source`, with a format, options and perhaps a schema.

    Spark itself knows no partitions then, see `partitions`.
    """

    def load(kind: str, options: Mapping[str, str], schema: StructType | None = None) -> DataFrame:
        reader = spark.read.format(kind).options(**LOCAL_FILES).options(**options)
        reader = reader.option("recursiveFileLookup", "true")
        try:
            return (reader if schema is None else reader.schema(schema)).load(path)
        except (AnalysisException, IllegalArgumentException) as error:
            raise ConfigError(f"{source}: {one_line(error).rstrip('.')}") from error

    return load


def _check_options(
    source: str, kind: str, options: Mapping[str, str], declared: Collection[DataType] = ()
) -> None:
    """Raises ConfigError for an option of Spark's reader that would have no effect."""
    given = {name.lower(): value.lower() for name, value in options.items()}
    is_csv = kind in ("csv", "tsv")
    is_inferred = is_csv and given.get("inferschema") == "true"
    known = dict.fromkeys(_OPTIONS[kind].split(), True)
    if is_csv:
        known |= dict.fromkeys(_INFERRING.split(), is_inferred)
    if is_csv or kind == "json":
        for name, of_type in _FORMATS.items():
            known[name] = is_inferred or any(isinstance(kind, of_type) for kind in declared)
    plain = {name.lower(): name for name in known}
    for name in options:
        found = plain.get(name.lower())
        if found and known[found]:
            continue
        if found is not None and found in _FORMATS:
            why = f"declare a column of its type, --schema 'COLUMN {_FORMATS[found].typeName()}'"
        elif found is not None:
            why = "it is for values that Spark converts; add --read-option inferSchema=true"
        else:
            close = difflib.get_close_matches(name.lower(), plain, 1, 0.7)
            why = f"did you mean {plain[close[0]]}?" if close else f"{kind} has no such option"
        raise ConfigError(f"{source}: --read-option {name} has no effect: {why}")


def _declared_json(rows: JsonRows, schema: StructType, options: Mapping[str, str]) -> Rows:
    declared = {field.name: field.dataType for field in schema.fields}
    table = rows.table(dict.fromkeys(declared, ""), None, rows.names)
    given = {name.lower(): value for name, value in options.items()}
    return Rows(_typed(table.select(*map(col, declared), CORRUPT), declared, given))


def _read_csv(
    load: Callable[..., DataFrame],
    source: str,
    options: Mapping[str, str],
    schema: StructType | None,
    found: Mapping[str, Column],
) -> Rows:
    given = {name.lower(): value for name, value in options.items()}
    # Spark's own inference would read 007 as 7. It expects \" for a quote within
    # quotes by default, and splits values with the usual "" at their commas.
    # It takes "" for null unless another value is null, here one that no file has.
    options = {"header": "true", "escape": '"', "nullValue": "\1", **options}
    encoding = given.get("encoding", given.get("charset", ""))
    if encoding.lower().startswith(("utf-16", "utf-32")) and "linesep" not in given:
        options["multiLine"] = "true"  # Spark finds the ends of lines by single bytes
    if "header" not in given:
        plain = {name: value for name, value in options.items() if name.lower() != "inferschema"}
        first = load("csv", plain | {"header": "false"})
        _check_header(first.select("*", "_metadata.file_path").first(), source, given)
        options["enforceSchema"] = "false"  # each file's header is compared with the first one
    table = load("csv", options)
    fields = [
        # Spark would take 09:00 for today.
        StructField(field.name, StringType())
        if isinstance(field.dataType, TimestampType) and "timestampformat" not in given
        else field
        for field in table.schema.fields
    ]
    # With pruning, Spark does not see that a line has more or fewer values than the header.
    options |= {"columnPruning": "false", "columnNameOfCorruptRecord": CORRUPT}
    table = load("csv", options, StructType([*fields, StructField(CORRUPT, StringType())]))
    _check_same_headers(load, options)
    _check_quotes(load, options, table.schema)
    table = with_partitions(table, found)
    if not given.keys() & {"encoding", "charset"}:
        table = _without_undecoded(table)
    if schema is None:
        return Rows(table, are_texts=given.get("inferschema", "").lower() != "true")
    return Rows(_typed(table, {field.name: field.dataType for field in schema.fields}, given))


def _check_same_headers(load: Callable[..., DataFrame], options: Mapping[str, str]) -> None:
    """Raises ConfigError if files differ in their headers, before a row of the first is sent."""
    given = {name.lower(): value for name, value in options.items()}
    if given["header"].lower() != "true" or given.get("enforceschema", "").lower() == "true":
        return
    lines = _lines(load, given).where("start = 0").where(sf.trim("value") != "")
    numbered = lines.withColumn("number", sf.monotonically_increasing_id())
    first = numbered.groupBy("file").agg(sf.min_by("value", "number").alias("value"))
    headers = first.groupBy("value").agg(sf.min("file").alias("file"))
    found = headers.orderBy("file").take(_MOST_HEADERS)
    if len(found) < 2:
        return
    most = max(row.value.count(_separator(given)) for row in found) + 1
    schema = ", ".join(f"_c{number} string" for number in range(most))
    form = {name: given[name] for name in _VALUES if name in given}
    values = sf.from_csv(sf.regexp_replace("value", "^\ufeff", ""), schema, form)
    names = (
        headers.orderBy("file").limit(_MOST_HEADERS).select("file", "value", values.alias("names"))
    )
    one, *others = names.collect()
    for other in others:
        if [str(n).lower() for n in one.names] != [str(n).lower() for n in other.names]:
            raise ConfigError(
                f"{shown(one.file)} and {shown(other.file)} have different headers "
                f"({one.value[:80]!r} and {other.value[:80]!r}): make them the same, or load the "
                "files one by one"
            )


_VALUES = (
    (
        "sep delimiter quote escape charToEscapeQuoteEscaping ignoreLeadingWhiteSpace "
        "ignoreTrailingWhiteSpace"
    )
    .lower()
    .split()
)
"""Options that say how a line is split into values."""

_MOST_HEADERS = 100


def _check_quotes(
    load: Callable[..., DataFrame], options: Mapping[str, str], schema: StructType
) -> None:
    """Raises ConfigError if a value begins with a quote and does not end with one.

    Spark would take the rest of the line or file for the value, or keep quotes and backslashes.
    """
    given = {name.lower(): value for name, value in options.items()}
    quote, escape = given.get("quote", '"'), given["escape"]
    if not quote:
        return
    mark, nothing = re.escape(quote), sf.lit("")
    lines = _lines(load, given).where(sf.contains("value", sf.lit(quote)))
    value = sf.replace("value", sf.lit(quote * 2), nothing)
    if escape != quote:
        value = sf.regexp_replace("value", f"{re.escape(escape)}.", "")
    if given.get("multiline", "").lower() == "true":  # a value may end in another line
        quotes = sf.length(value) - sf.length(sf.replace(value, sf.lit(quote), nothing))
        counts = lines.groupBy("file").agg(sf.sum(quotes).alias("quotes"))
        odd = counts.where("quotes % 2 = 1").first()
        file = _stray_quote(load, given, schema) if odd is None else odd.file
        if file is None:
            return
        what, cure = "", "quote= if quotes have no meaning"
    else:
        separator = re.escape(_separator(given))
        start = f"(^|{separator})"
        if given.get("ignoreleadingwhitespace", "").lower() == "true":
            start += r"\s*"
        end = "" if _HANDLING in given else rf"(?=\s*($|{separator}))"
        rest = sf.regexp_replace(value, f"{start}{mark}[^{mark}]*+{mark}{end}", "$1")
        found = lines.where(rest.rlike(f"{start}{mark}")).first()
        if found is None:
            return
        file, what = found.file, f": {found.value[:80]!r}"
        cure = "multiLine=true if values have line breaks, quote= if quotes have no meaning"
        if f"\\{quote}" in found.value and escape == quote:
            cure = "escape=\\ if quotes follow backslashes"
    raise ConfigError(
        f"{shown(file)}: a quote is not closed, or is not the end of a value{what}; add "
        f"--read-option {cure}"
    )


_HANDLING = "unescapedquotehandling"


def _stray_quote(
    load: Callable[..., DataFrame], given: Mapping[str, str], schema: StructType
) -> str | None:
    """A file in which a quote within a value is not escaped, and no option says what it means."""
    try:
        load("csv", {_HANDLING: "RAISE_ERROR", **given}, schema).count()
    except Exception as error:
        found = re.search(r"reading file (\S+)\.\s[\s\S]*Unescaped quote", str(error))
        if found is None:
            raise
        return found[1]
    return None


def _lines(load: Callable[..., DataFrame], given: Mapping[str, str]) -> DataFrame:
    """The lines of a CSV, without comments: columns `file`, `value`, and `start` of their split."""
    options = {name: given[name] for name in _FILES.lower().split() if name in given}
    encoding = given.get("encoding", given.get("charset", "UTF-8")).upper()
    value = sf.col("value")
    if encoding.startswith(("UTF-16", "UTF-32")):
        options["wholetext"] = "true"
        value = sf.explode(sf.split(sf.decode(value.cast("binary"), encoding), "[\r\n]+"))
    elif "linesep" in given:
        options["lineSep"] = given["linesep"]
    file, start = sf.col("_metadata.file_path"), sf.col("_metadata.file_block_start")
    lines = load("text", options).select(file.alias("file"), "value", start.alias("start"))
    lines = lines.withColumn("value", value)
    comment = given.get("comment")
    return lines.where(~sf.startswith("value", sf.lit(comment))) if comment else lines


def _separator(given: Mapping[str, str]) -> str:
    return given.get("sep", given.get("delimiter", ",")).replace(r"\t", "\t")


_DATA = re.compile(rf"[-+]?[\d.,]+([eE][-+]?\d+)?|true|false|null|{TIME}.*")
_UNDECODED = re.compile("[\x00-\x08\ufeff\ufffd]")


def _check_header(header: Row | None, source: str, given: Mapping[str, str]) -> None:
    """Raises ConfigError unless the first line of a CSV can be the names of its columns."""
    if header is None:
        raise ConfigError(f"{source}: the CSV is empty; its first line must name the columns")
    *names, file = header
    first = names[0] or ""
    file = shown(file)
    believe = "if it is right, add --read-option header=true"
    if any(_UNDECODED.search(name or "") for name in names):
        raise ConfigError(
            f"{file}: the header is not {given.get('encoding', 'UTF-8')}; name the encoding, as in "
            "--read-option encoding=UTF-16"
        )
    if first.lower().startswith("sep="):
        raise ConfigError(
            f"{file}: the first line, {first!r}, is for Excel only: delete it, and name the "
            f"separator with --read-option sep='{first[4:] or given.get('sep', ';')}'"
        )
    separator = given.get("sep", given.get("delimiter", ","))
    for mark in ";", r"\t", "|", ",":
        if len(names) == 1 and mark != separator and mark.replace(r"\t", "\t") in first:
            raise ConfigError(
                f"{file}: the CSV has one column, {first!r}: name its separator, --read-option "
                f"sep='{mark}'; {believe}"
            )
    for name in names:
        if not (name or "").strip():
            number = names.index(name) + 1
            raise ConfigError(f"{file}: column {number} of the CSV has no name; {believe}")
        if [(other or "").lower() for other in names].count(name.lower()) > 1:
            raise ConfigError(f"{file}: the CSV has several columns {name!r}: rename all but one")
        if _DATA.fullmatch(name.strip()):
            raise ConfigError(
                f"{file}: the first line must name the columns, but {name!r} is not a name; "
                f"{believe}; if there is no header, add --read-option header=false, and use the "
                "names _c0, _c1, ..."
            )


def _without_undecoded(table: DataFrame) -> DataFrame:
    """Mark rows with bytes that are not UTF-8, which Spark replaces by U+FFFD."""
    undecoded = sf.coalesce(
        *(
            sf.when(col(name).contains("\ufffd"), sf.concat(sf.lit(f"{name}="), col(name)))
            for name in _names(table)
            if is_text(table, name)
        ),
        sf.lit(None),
    )
    hint = sf.lit(" is not UTF-8; name the encoding, as in --read-option encoding=iso-8859-1")
    return table.withColumn(CORRUPT, sf.coalesce(sf.col(CORRUPT), sf.concat(undecoded, hint)))


def _typed(
    table: DataFrame, declared: Mapping[str, DataType], given: Mapping[str, str]
) -> DataFrame:
    """Convert text columns to declared types; mark rows with a value that does not fit.

    given: options, by their names in lower case, which may have formats of times.
    """
    for name in declared:
        if name not in table.columns:
            raise ConfigError(
                f"--schema: no column {name!r}; the columns are {', '.join(_names(table))}"
            )
    made, misfits = [], []
    for name in _names(table):
        column = col(name)
        if name not in declared:
            made.append(column)
            continue
        if declared[name] != StringType():
            column = given_text(column)
        converted = _converted(column, declared[name], given)
        misfits.append(misfit(name, column, converted))
        made.append(converted.alias(name))
    return table.select(*made, _unread(table, misfits).alias(CORRUPT))


def _converted(column: Column, kind: DataType, given: Mapping[str, str]) -> Column:
    """The values of texts in a type; null if it cannot hold them unchanged, apart from floats."""
    for option, of_type in _FORMATS.items():
        if not isinstance(kind, of_type):
            continue
        if form := given.get(option.lower()):
            return sf.try_to_timestamp(column, sf.lit(form)).try_cast(kind)
    if isinstance(kind, (ArrayType, MapType, StructType)):
        # Spark tells that it could not read a value only for the fields of an object.
        text = sf.udf(partial(as_declared, kind), useArrow=False)(column)
        whole = StructType([StructField("value", kind), StructField(CORRUPT, StringType())])
        json_text = sf.concat(sf.lit('{"value":'), text, sf.lit("}"))
        read = sf.from_json(json_text, whole, {"columnNameOfCorruptRecord": CORRUPT})
        return sf.when(read[CORRUPT].isNull(), read["value"])
    text = column
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        seconds = r"^(\s*[\d-]{10}[T ]\d\d:\d\d)(?![:\d])"
        text = sf.regexp_replace(column, seconds, "$1:00")
    return sf.when(column.rlike(form_of(kind)), text.try_cast(kind))


def given_text(column: Column) -> Column:
    """A text, or null if it is empty."""
    return sf.nullif(column, sf.lit(""))


def misfit(name: str, text: Column, converted: Column) -> Column:
    """`name=text` where a text could not be converted, else null."""
    return sf.when(text.isNotNull() & converted.isNull(), sf.concat(sf.lit(f"{name}="), text))


def _unread(table: DataFrame, misfits: Collection[Column]) -> Column:
    """What could not be read of a row: its text, or all its misfits; null if it could be read."""
    found = sf.nullif(sf.concat_ws(", ", *misfits), sf.lit(""))
    return sf.coalesce(sf.col(CORRUPT), found) if CORRUPT in table.columns else found


def col(name: str) -> Column:
    """A column by its name, which may contain dots."""
    quoted = name.replace("`", "``")
    return sf.col(f"`{quoted}`")


def is_text(table: DataFrame, name: str) -> bool:
    """Whether a column has text."""
    return table.schema[name].dataType == StringType()


def _names(table: DataFrame) -> list[str]:
    """The columns of a table, without the one that marks unusable rows."""
    return [name for name in table.columns if name != CORRUPT]


def as_messages(
    rows: Rows | JsonRows, named: dict[str, str | None], *, all_to: str | None
) -> DataFrame:
    """Select the message columns: those named by options, else those with the standard names.

    A column named like a part in NAMED_ONLY remains part of the body, unless an option names it.
    Without --body and a column `body`, the body is the row without the columns that became other
    parts of the message. Values of a CSV are numbers or Booleans in such a body if they look the
    same when printed, and otherwise text.
    """
    names = rows.names
    parts = {
        name: name if wanted is None else wanted
        for name, wanted in named.items()
        if name != "body"
        and (wanted is not None or (name in names and _is_implied(name, named, all_to)))
    }
    if TIMES.isdisjoint(parts):
        _check_times(names)
    body = named["body"] or ("body" if "body" in names else None)
    used = set() if body == "*" else set(parts.values())
    if body == "*":
        body = None
    if body is None and used.issuperset(names):
        raise ConfigError(
            f"no column is left for the body ({', '.join(names)}): name one with --body, or give "
            "--body '*' for all of them"
        )
    if body is not None and body not in names:
        raise _missing("body", body, names)
    table, content, kind = _content(rows, parts, body, used)
    made: list[Column] = []
    zone = _zone_of_due(table, names, parts)
    if zone is not None and "window" not in parts:
        del parts["tz"]
    misfits: list[Column] = []
    for part, wanted in parts.items():
        column = _part(table, names, part, wanted, zone)
        if part in _CONVERTED and wanted in names and is_text(table, wanted):
            misfits.append(misfit(wanted, given_text(col(wanted)), column))
        made.append(column.alias(part))
    if kind is not None:
        made.append(kind.alias("kind"))
    if misfits or CORRUPT in table.columns:
        made.append(_unread(table, misfits).alias(CORRUPT))
    return table.select(*made, content.alias("body"))


def overlooked(names: Collection[str], named: Mapping[str, str | None]) -> dict[str, str]:
    """Columns that stay in the body, and the parts of a message that they are named after."""
    found = {name: name.strip().lower() for name in names if name not in named.values()}
    return {
        name: part
        for name, part in found.items()
        if part in _IMPLIED and part not in names and named[part] is None
    }


_IMPLIED = frozenset({"id", "ttl", "retry", "headers", "body"})

_CONVERTED = frozenset({"due", "headers"})
"""Parts that text is converted to, here."""


def _check_times(names: Collection[str]) -> None:
    """Raises ConfigError for a column that is probably meant to be a time."""
    for name in names:
        if _LIKE_TIMES.fullmatch(re.sub("[^a-z]", "", name.lower())):
            part = "delay" if name.strip().lower().startswith("delay") else "due"
            raise ConfigError(
                f"the column {name!r} is not used as {part!r}, so all rows would be due now: "
                f"add --{part} {name!r}; or --delay 0 if they are due now"
            )


def _content(
    rows: Rows | JsonRows, parts: Mapping[str, str], body: str | None, used: Collection[str]
) -> tuple[DataFrame, Column, Column | None]:
    """A table with the columns of all parts; body and, unless it follows from its type, its kind.

    body: the column of the body; None for the row without the columns `used`.
    """
    if isinstance(rows, JsonRows):
        columns = {name: part for part, name in parts.items() if name in rows.names}
        table = rows.table(columns, body, used)
        return table, sf.col(BODY), sf.col(KIND)
    table, rest = rows.table, [name for name in rows.names if name not in used]
    if body is not None:
        return table, col(body), None
    if rows.are_texts:
        values = (sf.concat(sf.lit(f"{_quoted(name)}:"), _json_value(col(name))) for name in rest)
        return table, sf.concat(sf.lit("{"), sf.concat_ws(",", *values), sf.lit("}")), sf.lit("j")
    return table, sf.struct(*map(col, rest)), None


def _is_implied(name: str, named: dict[str, str | None], all_to: str | None) -> bool:
    """Whether a column with a part's name becomes this part although no option names it."""
    if name == "topic":
        return all_to is None
    if name in NAMED_ONLY:
        return False
    return name not in TIMES or all(named[other] is None for other in TIMES)


_PRINTED_AS_READ = (
    r"^(0|-?[1-9][0-9]{0,17}"
    # At most 15 digits, which a double holds exactly; it prints smaller ones with an exponent.
    r"|(?=.{1,16}\z)(?!-?0[.]0000)-?(0|[1-9][0-9]*)[.](0|[0-9]*[1-9])"
    r"|true|false)\z"
)
"""Numbers and Booleans that look the same after they were read and printed: not 007, not 1.10."""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_value(column: Column) -> Column:
    """The JSON of a CSV's value; it does not depend on other rows."""
    array = sf.to_json(sf.array(column))
    text = sf.substring(array, sf.lit(2), sf.length(array) - 2)
    return (
        sf.when(column.isNull(), "null")
        .when(column.rlike(_PRINTED_AS_READ), column)
        .otherwise(text)
    )


def _missing(part: str, wanted: str, names: Collection[str]) -> ConfigError:
    option = part.replace("_", "-")
    return ConfigError(f"--{option}: no column {wanted!r}; the columns are {', '.join(names)}")


def _part(
    table: DataFrame, names: Collection[str], part: str, wanted: str, zone: str | None
) -> Column:
    if wanted not in names:
        if part in ("delay", "ttl", "slack", *_CONSTANTS):
            return _constant(part, wanted, names)
        raise _missing(part, wanted, names)
    if part == "cancelled":
        return is_cancelled(table, wanted)
    column, kind = col(wanted), table.schema[wanted].dataType
    if isinstance(kind, DecimalType) and kind.scale == 0:  # such as Parquet's uint64
        return column.try_cast("string" if part in ("id", "key") else "bigint")
    if part == "due" and zone is not None:
        return _instant(column, zone)
    if not is_text(table, wanted):
        return column
    column = given_text(column)
    if part == "headers":
        return _converted(column, MapType(StringType(), StringType()), {})
    if part == "due":
        # Epoch milliseconds, or a time; microseconds are rounded up, so that no message is early.
        micros = sf.unix_micros(_converted(column, TimestampType(), {}))
        up = ((micros + sf.pmod(-micros, sf.lit(1000))) / 1000).cast("bigint")
        return sf.coalesce(column.try_cast("bigint"), up)
    return column


def _zone_of_due(table: DataFrame, names: Collection[str], parts: Mapping[str, str]) -> str | None:
    """The zone of the column `due`, if its type has none: that of --tz."""
    due, zone = parts.get("due"), parts.get("tz")
    if due is None or due not in names:
        return None
    if not isinstance(table.schema[due].dataType, TimestampNTZType):
        return None
    if zone is None:
        raise ConfigError(
            f"--due: the times in column {due!r} have no zone: name it, as in --due {due} --tz UTC"
        )
    if zone in names:
        raise ConfigError(
            f"--due: the times in column {due!r} have no zone; with a zone for each row, give "
            f"--at-local {due} --tz {zone}"
        )
    _constant("tz", zone, names)  # raises ConfigError
    return zone


def _instant(wall: Column, zone: str) -> Column:
    """The instant of a timestamp without zone, whatever the zone of the session."""
    in_utc = sf.convert_timezone(sf.lit(zone), sf.lit("UTC"), wall)
    return sf.concat(in_utc.cast("string"), sf.lit("Z")).cast("timestamp")


_CONSTANTS: dict[str, Callable[[str], object]] = {
    "retry": RetryPolicy.parse,
    "late": own_late,
    "cost": read_cost,
    "tz": parse_zone,
    "window": parse_window,
}
"""Options that take one text for all rows -> the check of that text."""


def _constant(name: str, value: str, columns: Collection[str]) -> Column:
    try:
        if check := _CONSTANTS.get(name):
            check(value)
            return sf.lit(value)
        return sf.lit(duration_ms(parse_duration(value))).cast("bigint")
    except InvalidMessage as error:
        raise ConfigError(
            f"--{name}: {value!r} is neither a column ({', '.join(columns)}) nor a value: {error}"
        ) from None
