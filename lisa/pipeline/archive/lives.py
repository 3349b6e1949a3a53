"""Divides the events of an id into lives (see `fold`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import EVENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BEGINNINGS = ("sent", "replaced", "restored")
"""Events that carry the envelope."""

LIFE_SCHEMA_FIELDS = ("life", "next_state", "next_at", "elsewhere")
"""Columns that `lives` adds to each event."""

_COLUMNS = [name for name in EVENT_SCHEMA.names if name != "number"]


def lives(events: DataFrame, *, sharded: bool = True) -> DataFrame:
    """Drop events after the end of their life, and add the columns LIFE_SCHEMA_FIELDS.

    sharded: whether events may have shards; without any, two of five windows are not needed.
    life: the token of the life; null before the first known envelope.
    next_state, next_at: state and time of the event that begins the next life; set in the last
        event of a life.
    elsewhere: whether the next life is in the journal of another shard, which may have been read
        further than this one.
    """
    tagged = _tagged(events, sharded=sharded)
    another = sf.col("next_begun").isNotNull() & ~sf.col("next_begun").eqNullSafe(sf.col("life"))
    newest, elsewhere = sf.col("newest"), sf.expr("false")
    if sharded:
        elsewhere = ~another & sf.coalesce(
            ~newest["shard"].eqNullSafe(sf.col("shard"))
            & ~newest["begun"].eqNullSafe(sf.col("life"))
            & (newest["at"] > sf.col("at")),
            sf.expr("false"),
        )
    return (
        # This may drop the last event of a life, but then the life is settled, and the event
        # that follows it is not needed.
        tagged.where(~sf.col("over") | sf.col("begun").isNotNull())
        .withColumns(
            {
                "next_state": sf.when(another, sf.col("next_state")).when(elsewhere, "sent"),
                "next_at": sf.when(another, sf.col("next_at")).when(elsewhere, newest["at"]),
                "elsewhere": elsewhere,
            }
        )
        .drop("begun", "ended", "over", "next_begun", "newest")
    )


def _tagged(events: DataFrame, *, sharded: bool) -> DataFrame:
    """Add to each event its life, the next event, and the newest life of the id."""
    # Spark needs only one sort for both windows.
    of_id = Window.partitionBy("topic", "id").orderBy("shard", "at", "seq")
    of_id = of_id.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    of_journal = ("topic", "id", "shard") if sharded else ("topic", "id")
    in_order = Window.partitionBy(*of_journal).orderBy("at", "seq")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    begins = sf.col("state").isin(*BEGINNINGS) & sf.col("envelope").isNotNull()
    token = sf.when(begins, sf.substring("envelope", 2, 8).cast("string"))
    begin = sf.when(begins, sf.struct("at", "seq", "shard", token.alias("begun")))
    newest = sf.max(begin).over(of_id) if sharded else sf.when(sf.expr("false"), begin)
    ends = sf.when(begins, sf.expr("false")).when(sf.col("settled"), sf.expr("true"))
    return (
        events.where(sf.col("id").isNotNull())
        .select(*_COLUMNS, token.alias("begun"), ends.alias("ended"))
        .withColumn("newest", newest)
        .withColumns(
            {
                "life": sf.last("begun", ignorenulls=True).over(so_far),
                "over": sf.coalesce(
                    sf.last("ended", ignorenulls=True).over(before), sf.expr("false")
                ),
                "next_begun": sf.lead("begun").over(in_order),
                "next_state": sf.lead("state").over(in_order),
                "next_at": sf.lead("at").over(in_order),
            }
        )
    )


def of_lives(events: DataFrame, keys: DataFrame) -> DataFrame:
    """Rows of `lives`, of unsharded events, that belong to given lives.

    keys: topic, id, life (null: the one without a known beginning); unique.
    """
    wanted = keys.select("topic", "id", sf.col("life").alias("wanted"))
    some = events.join(wanted.select("topic", "id"), ["topic", "id"], "left_semi")
    found = lives(some, sharded=False).join(wanted, ["topic", "id"])
    return found.where(sf.col("life").eqNullSafe(sf.col("wanted"))).drop("wanted")


def with_gone(events: DataFrame) -> DataFrame:
    """Rows of `lives` with a column `gone`: whether the life of the event has ended.

    If a life only counts as ended because its id was sent again in another shard, its real end may
    be in a later batch: then all events of that id are kept.
    """
    # The windows below and the aggregation in `fold_lives` can use this order; each would otherwise
    # sort again.
    events = events.sortWithinPartitions("topic", "id", "life", "group")
    life = Window.partitionBy("topic", "id", "life")
    last = sf.max_by(sf.struct("next_state", "elsewhere"), sf.struct("at", "seq")).over(life)
    marked = events.withColumns({"ended": sf.max("settled").over(life), "last": last})
    waits = sf.max(~sf.col("ended") & sf.col("last.elsewhere"))
    gone = sf.col("ended") | sf.col("last.next_state").isNotNull()
    gone &= ~waits.over(Window.partitionBy("topic", "id"))
    return marked.withColumn("gone", gone).drop("ended", "last")
