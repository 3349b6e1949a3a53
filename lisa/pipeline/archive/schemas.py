"""Schemas of an archive's two tables, and of the stream of journal events.

Times are Spark timestamps with millisecond precision. Each shard of a sharded topic writes its own
journal. The events of one journal are ordered by (`at`, `seq`). `number` restarts at 1 when a
server comes back empty, so it reveals gaps but does not define the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lisa.core.model.sharding import MARK

if TYPE_CHECKING:
    from pyspark.sql import Column

GAP_STATE = "gap"
"""State of a row that represents missing events; its `reason` names them."""

EVENT_SCHEMA = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("group", StringType()),  # null where the event concerns the whole topic
        StructField("id", StringType()),  # null in a gap
        StructField("state", StringType(), nullable=False),
        StructField("at", TimestampType(), nullable=False),
        StructField("attempt", IntegerType(), nullable=False),
        StructField("actor", StringType()),
        StructField("envelope", BinaryType()),
        StructField("due", TimestampType()),
        StructField("expires", TimestampType()),
        StructField("policy", StringType()),
        StructField("reason", StringType()),
        # Of a restored message: retry or garbage. The journal and archives store this name.
        StructField("place", StringType()),
        StructField("late_us", LongType()),
        StructField("settled", BooleanType(), nullable=False),
        StructField("seq", LongType(), nullable=False),
        StructField("number", LongType(), nullable=False),
        StructField("shard", StringType()),  # as in 3of8; null for the topic's own journal
    ]
)
"""One row per event; also read by `spark.readStream.format("lisa")`."""

LOG_SCHEMA = StructType(
    [
        *EVENT_SCHEMA.fields,
        StructField("host", StringType()),
        StructField("day", DateType(), nullable=False),  # of `at`, UTC
    ]
)
"""The table `message_log`: every transition."""

GROUP_SCHEMA = StructType(
    [
        StructField("group", StringType(), nullable=False),
        # ready, in_flight, retry, garbage; or settled in this group: acked, purged, expired
        StructField("state", StringType(), nullable=False),
        StructField("attempts", IntegerType(), nullable=False),  # failed ones
        StructField("due", TimestampType()),  # of the next attempt, where there is one
        StructField("reason", StringType()),
        StructField("at", TimestampType(), nullable=False),
    ]
)

MESSAGES_SCHEMA = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("id", StringType(), nullable=False),
        StructField("token", StringType()),  # of its send; null if the send was not archived
        StructField("state", StringType(), nullable=False),  # as Producer.get returns it, or lost
        StructField("settled", BooleanType(), nullable=False),
        StructField("due", TimestampType()),
        StructField("expires", TimestampType()),
        StructField("policy", StringType()),
        StructField("attempts", IntegerType(), nullable=False),  # failed; maximum over groups
        StructField("kind", StringType()),  # of the body: j, s or b; null for an unknown envelope
        StructField("headers", MapType(StringType(), StringType())),
        StructField("body", BinaryType()),  # the whole envelope where its version is unknown
        StructField("sent_at", TimestampType()),
        StructField("updated_at", TimestampType(), nullable=False),
        StructField("settled_at", TimestampType()),
        StructField("actor", StringType()),  # of the last event
        StructField("host", StringType()),
        StructField("reason", StringType()),
        StructField("late_us", LongType()),  # of the first delivery
        StructField("groups", ArrayType(GROUP_SCHEMA), nullable=False),
    ]
)
"""The table `messages`: one row per message and life, with its latest state."""


def journal_of() -> Column:
    """The journal of an event, as in `orders` or `orders~3of8`. Shard '' is treated as null."""
    return sf.concat_ws(MARK, "topic", sf.nullif(sf.col("shard"), sf.lit("")))
