"""The two tables of an archive, and the columns that a stream of the journal has.

Times are Spark timestamps, exact to the millisecond. Each place of a topic that is split writes a
journal of its own: (`topic`, `shard`, `number`) names an event. Those of one place are in order of
(`at`, `seq`); `number` begins anew when a server came back empty, so it tells gaps, not order.
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

from lisa.core.shards import MARK

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = [
    "EVENT_SCHEMA", "FINAL_STATES", "GAP_STATE", "LOG_SCHEMA", "MESSAGES_SCHEMA", "STATES",
    "journal_of",
]  # fmt: skip

STATES = (
    "sent", "replaced", "ready", "in_flight", "extended", "acked", "retry", "garbage", "requeued",
    "rescheduled", "cancelled", "expired", "purged", "mended", "lost", "restored",
)  # fmt: skip
"""What an event may say."""

GAP_STATE = "gap"
"""The state of a row that stands for events which are gone; its `reason` tells which."""

FINAL_STATES = ("acked", "cancelled", "expired", "purged", "lost")
"""The states in which a message ends."""

EVENT_SCHEMA = StructType([
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
    StructField("place", StringType()),  # of a restored message: retry or garbage
    StructField("late_us", LongType()),
    StructField("settled", BooleanType(), nullable=False),
    StructField("seq", LongType(), nullable=False),
    StructField("number", LongType(), nullable=False),
    StructField("shard", StringType()),  # as in 3of8; null for the topic's own place
])  # fmt: skip
"""One row per event: what `spark.readStream.format("lisa")` gives."""

LOG_SCHEMA = StructType(
    [
        *EVENT_SCHEMA.fields,
        StructField("host", StringType()),
        StructField("day", DateType(), nullable=False),  # of `at`, UTC
    ]
)
"""The table `message_log`: every transition."""

GROUP_SCHEMA = StructType([
    StructField("group", StringType(), nullable=False),
    # ready in_flight retry garbage; acked purged expired: it is through with the message
    StructField("state", StringType(), nullable=False),
    StructField("attempts", IntegerType(), nullable=False),  # failed ones
    StructField("due", TimestampType()),  # of the next attempt, where there is one
    StructField("reason", StringType()),
    StructField("at", TimestampType(), nullable=False),
])  # fmt: skip

MESSAGES_SCHEMA = StructType([
    StructField("topic", StringType(), nullable=False),
    StructField("id", StringType(), nullable=False),
    StructField("token", StringType()),  # of the call that sent it; null if that was not archived
    StructField("state", StringType(), nullable=False),  # as Producer.get tells it, or lost
    StructField("settled", BooleanType(), nullable=False),
    StructField("due", TimestampType()),
    StructField("expires", TimestampType()),
    StructField("policy", StringType()),
    StructField("attempts", IntegerType(), nullable=False),  # failed ones, the most of any group
    StructField("kind", StringType()),  # of the body: j, s or b; null for an unknown envelope
    StructField("headers", MapType(StringType(), StringType())),
    StructField("body", BinaryType()),  # the whole envelope where its version is unknown
    StructField("sent_at", TimestampType()),
    StructField("updated_at", TimestampType(), nullable=False),
    StructField("settled_at", TimestampType()),
    StructField("actor", StringType()),  # of the last event
    StructField("host", StringType()),
    StructField("reason", StringType()),
    StructField("late_us", LongType()),  # of the first hand-over
    StructField("groups", ArrayType(GROUP_SCHEMA), nullable=False),
])  # fmt: skip
"""The table `messages`: one row per message and life, its latest state."""


def journal_of() -> Column:
    """The place in which an event was written: its number counts there. '' is no shard, too."""
    return sf.concat_ws(MARK, "topic", sf.nullif(sf.col("shard"), sf.lit("")))
