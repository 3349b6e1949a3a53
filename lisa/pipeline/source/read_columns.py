"""The columns of `format("lisa")` when reading live messages or the journal.

Spark asks a data source for its schema before it chooses between snapshot and stream, so both have
the same columns; columns that do not apply are null. With an explicit schema, as in
`.schema("topic string, id string")`, only these columns are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType

from lisa.core.model.clock import MAX_DUE_MS
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA

LIVE_SCHEMA = StructType(
    [
        EVENT_SCHEMA["topic"],
        EVENT_SCHEMA["group"],  # null in state waiting
        StructField("id", StringType(), nullable=False),
        StructField(
            "state", StringType(), nullable=False
        ),  # waiting ready in_flight parked retry garbage
        EVENT_SCHEMA["due"],  # of the present or next attempt; in garbage, the time of death
        StructField("attempts", IntegerType(), nullable=False),  # failed ones
        MESSAGES_SCHEMA["body"],  # the whole envelope where its version is unknown
        StructField("headers", MapType(StringType(), StringType())),
        MESSAGES_SCHEMA["kind"],
        StructField("consumer", StringType()),
        EVENT_SCHEMA["reason"],
        EVENT_SCHEMA["expires"],
        EVENT_SCHEMA["shard"],
    ]
)
"""A snapshot of live messages: one row per message and group, or per waiting message."""

_ALL = {field.name: field for field in (*LIVE_SCHEMA.fields, *EVENT_SCHEMA.fields)}

READ_SCHEMA = StructType(
    [
        StructField(name, field.dataType, nullable=name not in ("topic", "state"))
        for name, field in _ALL.items()
    ]
)
"""The schema of `load()` without an explicit schema."""


def checked(schema: StructType) -> StructType:
    """Return the schema. Raises ConfigError for an unknown column, or one of another type."""
    for field in schema.fields:
        known = _ALL.get(field.name)
        if known is None:
            raise ConfigError(
                f'format("lisa") has no column {field.name!r}; the columns are {", ".join(_ALL)}'
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
    """The Arrow schema of batches for a Spark schema."""
    return _arrow(schema.json())


def timestamps(milliseconds: pa.Array) -> pa.Array:
    """Epoch milliseconds as timestamps in microseconds, as in Spark; at most the end of 9999.

    A long ttl may end later, which Python's datetime cannot represent.
    """
    known = pc.min_element_wise(milliseconds, MAX_DUE_MS, skip_nulls=False)
    return known.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))


def to_batch(schema: pa.Schema, columns: Mapping[str, Any], rows: int) -> pa.RecordBatch:
    """A record batch with exactly the schema's columns; missing columns are null."""
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
