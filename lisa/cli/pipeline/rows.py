"""Reads rows for `lisa pipeline schedule`, and selects the columns of messages."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from lisa.core.model.clock import duration_ms, parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.retry_policy import RetryPolicy

ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
CORRUPT = "_corrupt_record"


def read(spark: SparkSession, source: str, kind: str | None, options: dict[str, str]) -> DataFrame:
    """Read a file, directory, URL or table; kind None derives the format from the name."""
    if kind is None:
        ends = (
            mark
            for ending, mark in ENDINGS.items()
            if source.lower().removesuffix(".gz").endswith(ending)
        )
        kind = next(ends, "parquet")
    if kind == "table":
        return spark.table(source)
    reader = spark.read.format(kind)
    if kind == "csv":
        # Types are not inferred: id 007 stays text. `_column` converts times and numbers.
        reader = reader.options(header="true")
    return reader.options(**options).load(source)


def as_messages(table: DataFrame, named: dict[str, str | None], *, all_to: str | None) -> DataFrame:
    """Select the message columns: those named by options, else those with the standard names."""
    made: list[Column] = []
    for name, wanted in named.items():
        if name == "body":
            continue
        other = {"due": "delay", "delay": "due"}.get(name)
        if wanted is None:
            if name not in table.columns or (name == "topic" and all_to is not None):
                continue
            if other is not None and named[other] is not None:
                continue
            wanted = name  # noqa: PLW2901
        made.append(_column(table, name, wanted).alias(name))
    body = named["body"] or ("body" if "body" in table.columns else "*")
    if body == "*":
        whole = [sf.col(f"`{name}`") for name in table.columns if name != CORRUPT]
        content = sf.struct(*whole)
    else:
        content = _existing(table, "body", body)
    if CORRUPT in table.columns:
        content = sf.when(sf.col(CORRUPT).isNull(), content)  # null bodies are refused
    return table.select(*made, content.alias("body"))


def _existing(table: DataFrame, name: str, wanted: str) -> Column:
    if wanted not in table.columns:
        raise ConfigError(
            f"--{name}: no column {wanted!r}; the columns are {', '.join(table.columns)}"
        )
    return sf.col(f"`{wanted}`")


def _column(table: DataFrame, name: str, wanted: str) -> Column:
    if wanted not in table.columns and name in ("delay", "ttl", "retry"):
        return _constant(name, wanted, table.columns)
    column = _existing(table, name, wanted)
    if table.schema[wanted].dataType.simpleString() != "string":
        return column
    if name == "due":
        # Epoch milliseconds, or a time; microseconds are rounded up, so that no message is early.
        micros = sf.unix_micros(column.try_cast("timestamp"))
        up = ((micros + sf.pmod(-micros, sf.lit(1000))) / 1000).cast("bigint")
        return sf.coalesce(column.try_cast("bigint"), up)
    if name in ("delay", "ttl"):
        return column.try_cast("bigint")
    return column


def _constant(name: str, value: str, columns: list[str]) -> Column:
    try:
        if name == "retry":
            RetryPolicy.parse(value)
            return sf.lit(value)
        return sf.lit(duration_ms(parse_duration(value))).cast("bigint")
    except InvalidMessage as error:
        raise ConfigError(
            f"--{name}: {value!r} is neither a column ({', '.join(columns)}) nor a value: {error}"
        ) from None
