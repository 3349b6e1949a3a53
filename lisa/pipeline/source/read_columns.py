"""The columns of `format("lisa")`, read live and from the journal.

Spark asks a source for its columns before it says whether a snapshot or a stream is wanted, so
both have the same ones, and those that a face does not know are null. Whoever gives a schema of
their own (`.schema("topic string, id string")`) gets exactly these columns, and only they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType

from lisa.core.errors import ConfigError
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA

__all__ = ["LIVE_SCHEMA", "READ_SCHEMA", "arrow_schema", "checked", "to_batch"]

LIVE_SCHEMA = StructType([
    EVENT_SCHEMA["topic"],
    EVENT_SCHEMA["group"],  # null while it waits
    StructField("id", StringType(), nullable=False),
    StructField("state", StringType(), nullable=False),  # waiting ready in_flight retry garbage
    EVENT_SCHEMA["due"],  # of the present or next attempt; in garbage, the time of death
    StructField("attempts", IntegerType(), nullable=False),  # failed ones
    MESSAGES_SCHEMA["body"],  # the whole envelope where its version is unknown
    StructField("headers", MapType(StringType(), StringType())),
    MESSAGES_SCHEMA["kind"],
    StructField("consumer", StringType()),
    EVENT_SCHEMA["reason"],
    EVENT_SCHEMA["expires"],
    EVENT_SCHEMA["shard"],
])  # fmt: skip
"""What a snapshot of the live messages tells: one row per message and place."""

_ALL = {field.name: field for field in (*LIVE_SCHEMA.fields, *EVENT_SCHEMA.fields)}

READ_SCHEMA = StructType([
    StructField(name, field.dataType, nullable=name not in ("topic", "state"))
    for name, field in _ALL.items()
])  # fmt: skip
"""What `load()` gives where no schema was asked for."""


def checked(schema: StructType) -> StructType:
    """The schema itself. Raises ConfigError for a column that is not known, or of another type."""
    for field in schema.fields:
        known = _ALL.get(field.name)
        if known is None:
            raise ConfigError(
                f'format("lisa") reads no column {field.name!r}: there are {", ".join(_ALL)}'
            )
        wanted = field.dataType.simpleString()
        if known.dataType.simpleString() != wanted:
            raise ConfigError(
                f'format("lisa") reads column {field.name!r} as '
                f"{known.dataType.simpleString()}, not as {wanted}"
            )
    return schema


@cache
def _arrow(schema: str) -> Any:
    return to_arrow_schema(StructType.fromJson(json.loads(schema)), timezone="UTC")


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same in Arrow's terms, as Spark expects batches."""
    return _arrow(schema.json())


def to_batch(schema: pa.Schema, columns: Mapping[str, Any], rows: int) -> pa.RecordBatch:
    """A batch of exactly the schema's columns; those that were not given are null."""
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
        elif isinstance(values, pa.Array):
            arrays.append(values)
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
