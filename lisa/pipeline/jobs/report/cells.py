"""Aggregates events and messages into cells, from which all tables of a report are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import GAP_STATE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

OCTAVE = 32
POSTPONED = "group is full"  # the reason for a retry without a failed attempt
MOST_OF_REASON = 120
NUMBER = r"(?<!\d)(?<!\d[.,:])\d+([.,:]\d+)*"
STATUS = r"(?<=(?i:http\w{0,20}|status|code)[ :=/]{0,2})[1-5]\d\d(?![\d\w]|[.,:]\d)"
_STATES = {
    "sent": "sent",
    "replaced": "sent",
    "acked": "handled",
    "garbage": "garbage",
    "expired": "expired",
    "skipped": "skipped",
    "cancelled": "cancelled",
    "purged": "purged",
    "lost": "lost",
}


def log_cells(log: DataFrame, shift_s: int, slo_us: int, part_s: int) -> DataFrame:
    """Counts of events by topic, time, what, group, number and text; covers all uses of the log.

    Columns: topic, hour and part (epoch seconds of their starts), what (one of COUNTED, late, gap
    or other), group (for handled), number (for handled: the attempt; for late: the bucket), text
    (for garbage: the generalized reason), n, most, early and within (for late), first and last
    (epoch us).

    shift_s: seconds between full hours of UTC and of the zone. slo_us: `within` counts deliveries
    that were late by at most this many microseconds. part_s: seconds of the parts of an hour that
    are counted separately.
    """
    state, at_us = sf.col("state"), sf.unix_micros("at")

    def start_of(size_s: int) -> Column:
        size_us = size_s * 1_000_000
        return sf.floor((at_us - shift_s * 1_000_000) / size_us) * size_s + shift_s

    what = sf.when((state == "in_flight") & sf.col("late_us").isNotNull(), "late")
    for name, counted in _STATES.items():
        what = what.when(state == name, counted)
    parked = sf.coalesce(sf.col("reason") == POSTPONED, sf.lit(False))  # noqa: FBT003 - a literal
    what = what.when((state == "retry") & ~parked, "retried").when(state == GAP_STATE, "gap")
    what = what.otherwise("other")
    late = what == "late"
    number = sf.when(late, bucket(sf.col("late_us"))).when(state == "acked", sf.col("attempt"))
    text = sf.when(state == "garbage", general(sf.coalesce("reason", sf.lit("no reason given"))))
    rows = log.select(
        "topic",
        start_of(3_600).cast("long").alias("hour"),
        start_of(part_s).cast("long").alias("part"),
        what.alias("what"),
        sf.when(state == "acked", sf.col("group")).alias("group"),
        number.cast("int").alias("number"),
        text.alias("text"),
        sf.when(late, sf.col("late_us")).alias("value"),
        at_us.alias("at_us"),
    )
    return rows.groupBy("topic", "hour", "part", "what", "group", "number", "text").agg(
        sf.count("*").alias("n"),
        sf.max("value").alias("most"),
        sf.count_if(sf.col("value") < 0).alias("early"),
        sf.count_if(sf.col("value") <= slo_us).alias("within"),
        sf.min("at_us").alias("first"),
        sf.max("at_us").alias("last"),
    )


def message_cells(messages: DataFrame, start_us: int | None, end_us: int | None) -> DataFrame:
    """Counts of messages by topic, what, minute and number; covers all uses of the messages.

    Columns: topic, what (due: not settled; handling: acked within the range; other), minute (for
    due: epoch minute), number (for handling: the bucket of the time from the first delivery to the
    last ack), n, most, early and within (always 0), last (epoch us of the newest change).
    """
    due = sf.unix_micros("due")
    owed = sf.filter("groups", lambda one: one["state"].isin("ready", "in_flight", "retry"))
    next_due = sf.array_min(sf.transform(owed, lambda one: one["due"]))
    falls_due = sf.when(sf.col("state") == "waiting", due).when(
        sf.col("state").isin("ready", "in_flight", "retry"),
        sf.coalesce(sf.unix_micros(next_due), due),
    )
    settled = sf.unix_micros("settled_at")
    inside = settled.isNotNull()
    if start_us is not None:
        inside &= settled >= start_us
    if end_us is not None:
        inside &= settled < end_us
    took = sf.greatest(settled - due - sf.greatest("late_us", sf.lit(0)), sf.lit(0))
    is_due = ~sf.col("settled") & falls_due.isNotNull()
    is_handled = (sf.col("state") == "acked") & inside & took.isNotNull()
    what = sf.when(is_due, "due").when(is_handled, "handling").otherwise("other")
    rows = messages.select(
        "topic",
        what.alias("what"),
        sf.when(is_due, sf.floor(falls_due / 60_000_000)).cast("long").alias("minute"),
        sf.when(is_handled, bucket(took)).cast("int").alias("number"),
        sf.when(is_handled, took).alias("value"),
        sf.unix_micros("updated_at").alias("at_us"),
    )
    return rows.groupBy("topic", "what", "minute", "number").agg(
        sf.count("*").alias("n"),
        sf.max("value").alias("most"),
        sf.lit(0).cast("long").alias("early"),
        sf.lit(0).cast("long").alias("within"),
        sf.max("at_us").alias("last"),
    )


def bucket(micros: Column) -> Column:
    """The bucket of a duration in microseconds; -1 for zero and negative durations."""
    return sf.when(micros <= 0, -1).otherwise(sf.floor(sf.log2(micros.cast("double")) * OCTAVE))


def middle(number: int, most: int) -> int:
    """The microseconds that a bucket represents, at most `most`."""
    return 0 if number < 0 else min(round(2 ** ((number + 0.5) / OCTAVE)), most)


def general(reason: Column) -> Column:
    """Generalize a reason: numbers and long hex strings become #.

    HTTP statuses and codes are kept: 404 and 503 are different errors.
    """
    found = sf.regexp_replace(reason, r"[\s\p{Cntrl}]+", " ")
    found = sf.regexp_replace(found, r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "#")
    found = sf.regexp_replace(found, r"\b(0x)?(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b", "#")
    found = sf.regexp_replace(found, rf"(?!{STATUS}){NUMBER}", "#")
    return sf.substring(sf.trim(found), 1, MOST_OF_REASON)
