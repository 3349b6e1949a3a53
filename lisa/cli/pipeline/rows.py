"""Reads rows for `lisa pipeline schedule`, and selects the columns of messages."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, StructField, StructType

from lisa.core.model.clock import duration_ms, parse_duration, parse_zone
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.late import own_late
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.window import parse as parse_window
from lisa.pipeline.paths import absolute
from lisa.pipeline.source.columns import CORRUPT

ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
TIMES = frozenset({"due", "delay", "at_local"})
NAMED_ONLY = frozenset({"at_local", "tz", "window", "late"})
"""Parts of a message that a column becomes only if an option names it."""


def format_of(source: str, kind: str | None) -> str:
    """The format of a source: `kind`, else from its name, else parquet."""
    name = source.lower().removesuffix(".gz")
    found = (mark for ending, mark in ENDINGS.items() if name.endswith(ending))
    return kind or next(found, "parquet")


def read(
    spark: SparkSession,
    source: str,
    kind: str | None,
    options: dict[str, str],
    schema: str | None = None,
) -> DataFrame:
    """Read a file, directory, URL or table; kind: see `format_of`.

    schema: types as DDL, as in "order long, paid boolean". A CSV's other columns are text; of JSON
    lines, only these fields are read. Raises ConfigError for other formats, and for a column that
    the CSV lacks.
    """
    kind = format_of(source, kind)
    if schema is not None and kind not in ("csv", "json"):
        raise ConfigError(f"--schema is for CSV and JSON lines; {kind} has types of its own")
    if kind == "table":
        return spark.table(source)
    reader = spark.read.format(kind)
    if kind == "csv":
        # Spark's own inference would read 007 as 7. It expects \" for a quote within
        # quotes by default, and splits values with the usual "" at their commas.
        reader = reader.options(header="true", escape='"')
    elif schema is not None:
        reader = reader.schema(f"{schema}, {CORRUPT} string")
    reader = reader.options(**options)
    table = reader.load(absolute(source))
    if kind == "json" and CORRUPT in table.columns:
        return table.withColumn(CORRUPT, sf.make_valid_utf8(CORRUPT))  # Python could not read it
    if kind != "csv":
        return table
    given = {name.lower() for name in options}
    if not given & {"sep", "delimiter"}:
        _check_header(table.columns)
    if "header" not in given and _may_be_renamed(table.columns):
        head = spark.read.format(kind).options(escape='"').options(**options)
        _check_different(head.load(absolute(source)).first())
    columns = StructType([*table.schema.fields, StructField(CORRUPT, StringType())])
    # With pruning, Spark does not see that a line has more or fewer values than the header.
    reader = reader.options(columnPruning="false", columnNameOfCorruptRecord=CORRUPT)
    table = reader.schema(columns).load(absolute(source))
    if not given & {"encoding", "charset"}:
        table = _without_undecoded(table)
    return table if schema is None else _typed(table, schema)


def _check_header(names: list[str]) -> None:
    """Raises ConfigError if a CSV has no column, or if its only one looks like several."""
    if not names:
        raise ConfigError("the CSV is empty; its first line must name the columns")
    for mark, written in ((";", ";"), ("\t", "\\t"), ("|", "|")):
        if len(names) == 1 and mark in names[0]:
            raise ConfigError(
                f"the CSV has one column, {names[0]!r}: name its separator, --read-option "
                f"sep='{written}' (or sep=, if it is one column)"
            )


def _may_be_renamed(names: list[str]) -> bool:
    """Whether two columns may have the same name in the file: Spark then adds their positions."""
    renamed = [name for at, name in enumerate(names) if name.endswith(str(at))]
    bases = [name.rstrip("0123456789").lower() for name in renamed]
    return len(set(bases)) < len(bases)


def _check_different(header: Row | None) -> None:
    """Raises ConfigError if two columns of a CSV have the same name, apart from upper case."""
    names = [name for name in header or () if name]
    for name in names:
        if [one.lower() for one in names].count(name.lower()) > 1:
            raise ConfigError(f"the CSV has several columns {name!r}: rename all but one")


def _without_undecoded(table: DataFrame) -> DataFrame:
    """Mark rows with bytes that are not UTF-8, which Spark replaces by U+FFFD."""
    undecoded = sf.coalesce(
        *(
            sf.when(_col(name).contains("\ufffd"), sf.concat(sf.lit(f"{name}="), _col(name)))
            for name in _names(table)
            if _is_text(table, name)
        ),
        sf.lit(None),
    )
    hint = sf.lit(" is not UTF-8; name the encoding, as in --read-option encoding=iso-8859-1")
    return table.withColumn(CORRUPT, sf.coalesce(sf.col(CORRUPT), sf.concat(undecoded, hint)))


def _typed(table: DataFrame, schema: str) -> DataFrame:
    """Convert text columns to declared types; mark rows with a value that does not fit."""
    declared = {one.name: one.dataType for one in _parsed(schema).fields}
    for name in declared:
        _existing(table, "schema", name)
    columns, misfit = [], sf.col(CORRUPT)
    for name in _names(table):
        column = _col(name)
        if name not in declared:
            columns.append(column)
            continue
        converted = column.try_cast(declared[name])
        misfit = sf.coalesce(misfit, _misfit(name, column, converted))
        columns.append(converted.alias(name))
    return table.select(*columns, misfit.alias(CORRUPT))


def _misfit(name: str, text: Column, converted: Column) -> Column:
    """`name=text` where a text could not be converted, else null."""
    return sf.when(text.isNotNull() & converted.isNull(), sf.concat(sf.lit(f"{name}="), text))


def _names(table: DataFrame) -> list[str]:
    """The columns of a table, without the one that marks unusable rows."""
    return [name for name in table.columns if name != CORRUPT]


def _parsed(schema: str) -> StructType:
    parsed = StructType.fromDDL(schema)
    if not isinstance(parsed, StructType):
        raise ConfigError(f"--schema {schema!r} is not of the form 'order long, paid boolean'")
    return parsed


def as_messages(
    table: DataFrame, named: dict[str, str | None], *, all_to: str | None, infer: bool = False
) -> DataFrame:
    """Select the message columns: those named by options, else those with the standard names.

    A column named like a part in NAMED_ONLY remains part of the body, unless an option names it.
    Without --body and a column `body`, the body is the row without the columns that became other
    parts of the message. infer: find the types of the body's text columns, which reads the table
    once more.
    """
    made: list[Column] = []
    used: set[str] = {CORRUPT}
    misfits: list[Column] = []
    for name, wanted in named.items():
        if name == "body":
            continue
        if wanted is None:
            if name not in table.columns or not _is_implied(name, named, all_to):
                continue
            wanted = name  # noqa: PLW2901
        column = _column(table, name, wanted)
        if name == "due" and _is_text(table, wanted):
            misfits.append(_misfit(name, _col(wanted), column))
        made.append(column.alias(name))
        used.add(wanted)
    body = named["body"] or ("body" if "body" in table.columns else None)
    if body is None or body == "*":
        content = _whole_row(table, used if body is None else {CORRUPT}, infer=infer)
    else:
        content = _existing(table, "body", body)
    if CORRUPT in table.columns:
        content = sf.when(sf.col(CORRUPT).isNull(), content)  # its values may not be of their types
        misfits = [sf.col(CORRUPT), *misfits]
    if misfits:
        made.append(sf.coalesce(*misfits).alias(CORRUPT))
    return table.select(*made, content.alias("body"))


def _is_implied(name: str, named: dict[str, str | None], all_to: str | None) -> bool:
    """Whether a column with a part's name becomes this part although no option names it."""
    if name == "topic":
        return all_to is None
    if name in NAMED_ONLY:
        return False
    return name not in TIMES or all(named[other] is None for other in TIMES)


def _whole_row(table: DataFrame, without: set[str], *, infer: bool) -> Column:
    names = [name for name in table.columns if name not in without]
    if not names:
        raise ConfigError(
            f"no column is left for the body ({', '.join(_names(table))}): name one with --body, "
            "or give --body '*' for all of them"
        )
    kinds = _inferred(table, names) if infer else {}
    columns = (
        _col(name).cast(kinds[name]).alias(name) if name in kinds else _col(name) for name in names
    )
    return sf.struct(*columns)


_FORMS = {
    "bigint": "^-?(0|[1-9][0-9]{0,17})$",
    # At most 15 digits, which a double holds exactly.
    "double": "^(?=.{1,16}$)-?(0|[1-9][0-9]*)([.][0-9]+)?$",
    "boolean": "^(true|false)$",
}
"""Type -> the form that all values of a text column must have; the first type that fits is used.
Leading zeros are part of an identifier, and not of a number."""


def _inferred(table: DataFrame, names: list[str]) -> dict[str, str]:
    """Column -> its type, for text columns whose values are all numbers or all Booleans."""
    texts = [name for name in names if _is_text(table, name)]
    tests = [sf.bool_and(_col(name).rlike(form)) for name in texts for form in _FORMS.values()]
    rows = table.where(sf.col(CORRUPT).isNull())
    row = rows.agg(*tests).first() if tests else None
    kinds: dict[str, str] = {}
    if row is None:
        return kinds
    for index, name in enumerate(texts):
        answers = row[index * len(_FORMS) : (index + 1) * len(_FORMS)]
        fitting = [kind for kind, fits in zip(_FORMS, answers, strict=True) if fits]
        if fitting:
            kinds[name] = fitting[0]
    return kinds


def _col(name: str) -> Column:
    quoted = name.replace("`", "``")
    return sf.col(f"`{quoted}`")


def _existing(table: DataFrame, name: str, wanted: str) -> Column:
    if wanted not in table.columns:
        option, columns = name.replace("_", "-"), ", ".join(_names(table))
        raise ConfigError(f"--{option}: no column {wanted!r}; the columns are {columns}")
    return _col(wanted)


def _is_text(table: DataFrame, name: str) -> bool:
    return table.schema[name].dataType == StringType()


def _column(table: DataFrame, name: str, wanted: str) -> Column:
    if wanted not in table.columns and name in ("delay", "ttl", *_CONSTANTS):
        return _constant(name, wanted, _names(table))
    column = _existing(table, name, wanted)
    if not _is_text(table, wanted):
        return column
    if name == "due":
        # Epoch milliseconds, or a time; microseconds are rounded up, so that no message is early.
        micros = sf.unix_micros(column.try_cast("timestamp"))
        up = ((micros + sf.pmod(-micros, sf.lit(1000))) / 1000).cast("bigint")
        return sf.coalesce(column.try_cast("bigint"), up)
    return column


_CONSTANTS: dict[str, Callable[[str], object]] = {
    "retry": RetryPolicy.parse,
    "late": own_late,
    "tz": parse_zone,
    "window": parse_window,
}
"""Options that take one text for all rows -> the check of that text."""


def _constant(name: str, value: str, columns: list[str]) -> Column:
    try:
        if check := _CONSTANTS.get(name):
            check(value)
            return sf.lit(value)
        return sf.lit(duration_ms(parse_duration(value))).cast("bigint")
    except InvalidMessage as error:
        raise ConfigError(
            f"--{name}: {value!r} is neither a column ({', '.join(columns)}) nor a value: {error}"
        ) from None
