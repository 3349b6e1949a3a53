"""The report's figures, counted by Spark: each table is read once, only counts reach this process.

Times are put into buckets of 2.2 % of their length (32 to an octave), so percentiles of any part
can be added up from counts; each is within 1.1 % of the true value, and the maximum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import GAP_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

    from lisa.pipeline.jobs.report.slots import Span

__all__ = [
    "COUNTED", "ERROR", "Percentiles", "Tally", "cached", "histogram", "log_cells", "message_cells",
    "percentiles", "reasons", "tally",
]  # fmt: skip

COUNTED = (
    "sent", "handled", "retried", "garbage", "expired", "cancelled", "purged", "lost",
)  # fmt: skip
"""What is counted for each topic and hour."""

OCTAVE = 32
ERROR = 2 ** (0.5 / OCTAVE) - 1
"""How far a percentile may be from the true value, as a part of it."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)
PARKED = "group is full"  # promote's reason where it put off a message: no attempt failed
MOST_OF_REASON = 120
NUMBER = r"(?<!\d)(?<!\d[.,:])\d+([.,:]\d+)*"
STATUS = r"(?<=(?i:http\w{0,20}|status|code)[ :=/]{0,2})[1-5]\d\d(?![\d\w]|[.,:]\d)"

_SHOWN = {*COUNTED, "late"}
_STATES = {
    "sent": "sent", "replaced": "sent", "acked": "handled", "garbage": "garbage",
    "expired": "expired", "cancelled": "cancelled", "purged": "purged", "lost": "lost",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one part: microseconds; `count` values, of which `early` were below zero (taken as 0)."""

    count: int
    early: int
    p50: int
    p90: int
    p99: int
    p999: int
    max: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of events.

    events: all of them; `first_us` and `last_us`: epoch microseconds, None where there are none.
    hours: (topic, epoch seconds of the hour, counts by COUNTED), in order of hour and topic.
    attempts: (topic, attempt that succeeded, messages), each group's success for itself.
    capacities: by topic what was handled in the best hour, the 95th percentile of hours with any,
    and how many there were; of the topic's slowest group.
    """

    events: int
    first_us: int | None
    last_us: int | None
    hours: list[tuple[str, int, dict[str, int]]]
    attempts: list[tuple[str, int, int]]
    capacities: dict[str, tuple[int, int, int]]


@contextmanager
def cached(frame: DataFrame) -> Iterator[DataFrame]:
    """Keep a small result while several questions are asked about it."""
    frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield frame
    finally:
        frame.unpersist()


def log_cells(log: DataFrame, shift_s: int) -> DataFrame:
    """Counts of events by topic, hour, what, group, number and text: all that is asked of the log.

    Columns: topic, hour (epoch seconds of its begin), what (one of COUNTED, late, gap or other),
    group (of handled), number (of handled: the attempt; of late: the bucket), text (of garbage: the
    reason without its particulars), n, most and early (of late), first and last (epoch us).
    `shift_s`: what the zone's full hours are away from UTC's.
    """
    state, at_us = sf.col("state"), sf.unix_micros("at")
    hour = sf.floor((at_us - shift_s * 1_000_000) / 3_600_000_000) * 3_600 + shift_s
    what = sf.when((state == "in_flight") & sf.col("late_us").isNotNull(), "late")
    for name, counted in _STATES.items():
        what = what.when(state == name, counted)
    parked = sf.col("reason").eqNullSafe(PARKED)
    what = what.when((state == "retry") & ~parked, "retried").when(state == GAP_STATE, "gap")
    what = what.otherwise("other")
    late = what == "late"
    number = sf.when(late, bucket(sf.col("late_us"))).when(state == "acked", sf.col("attempt"))
    text = sf.when(state == "garbage", general(sf.coalesce("reason", sf.lit("no reason given"))))
    rows = log.select(
        "topic", hour.cast("long").alias("hour"), what.alias("what"),
        sf.when(state == "acked", sf.col("group")).alias("group"),
        number.cast("int").alias("number"), text.alias("text"),
        sf.when(late, sf.col("late_us")).alias("value"), at_us.alias("at_us"),
    )  # fmt: skip
    return rows.groupBy("topic", "hour", "what", "group", "number", "text").agg(
        sf.count("*").alias("n"), sf.max("value").alias("most"),
        sf.count_if(sf.col("value") < 0).alias("early"),
        sf.min("at_us").alias("first"), sf.max("at_us").alias("last"),
    )  # fmt: skip


def message_cells(messages: DataFrame, start_us: int | None, end_us: int | None) -> DataFrame:
    """Counts of messages by topic, what, minute and number: all that is asked of them.

    Columns: topic, what (due: not settled; handling: acked within the range; other), minute (of
    due: epoch minute), number (of handling: the bucket of the time from the first hand-over to the
    last ack), n, most, early (always 0), last (epoch us of the newest change).
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
        "topic", what.alias("what"),
        sf.when(is_due, sf.floor(falls_due / 60_000_000)).cast("long").alias("minute"),
        sf.when(is_handled, bucket(took)).cast("int").alias("number"),
        sf.when(is_handled, took).alias("value"), sf.unix_micros("updated_at").alias("at_us"),
    )  # fmt: skip
    return rows.groupBy("topic", "what", "minute", "number").agg(
        sf.count("*").alias("n"), sf.max("value").alias("most"),
        sf.lit(0).cast("long").alias("early"), sf.max("at_us").alias("last"),
    )  # fmt: skip


def bucket(micros: Column) -> Column:
    """The bucket of a length of time; -1 for none at all, and for less than that."""
    return sf.when(micros <= 0, -1).otherwise(sf.floor(sf.log2(micros.cast("double")) * OCTAVE))


def middle(number: int, most: int) -> int:
    """The microseconds that a bucket stands for."""
    return 0 if number < 0 else min(round(2 ** ((number + 0.5) / OCTAVE)), most)


def general(reason: Column) -> Column:
    """A reason without what differs from message to message: numbers and long hex become #.

    What is called an HTTP status or a code stays: 404 and 503 are different troubles.
    """
    found = sf.regexp_replace(reason, r"[\s\p{Cntrl}]+", " ")
    found = sf.regexp_replace(found, r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "#")
    found = sf.regexp_replace(found, r"\b(0x)?(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b", "#")
    found = sf.regexp_replace(found, rf"(?!{STATUS}){NUMBER}", "#")
    return sf.substring(sf.trim(found), 1, MOST_OF_REASON)


def tally(cells: DataFrame) -> Tally:
    """Everything but times and reasons, in one question."""
    plain = cells.where("what != 'gap'").groupBy(
        "topic", "hour", "what", "group",
        sf.when(sf.col("what") == "handled", sf.col("number")).alias("attempt"),
    )  # fmt: skip
    found = plain.agg(sf.sum("n"), sf.min("first"), sf.max("last")).toArrow()
    hours: dict[tuple[int, str], dict[str, int]] = {}
    attempts: dict[tuple[str, int], int] = {}
    groups: dict[tuple[str, str | None], dict[int, int]] = {}
    events, first_us, last_us = 0, None, None
    for batch in found.to_batches(max_chunksize=10_000):
        for topic, hour, what, group, attempt, n, first, last in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            events += n
            first_us = first if first_us is None else min(first, first_us)
            last_us = last if last_us is None else max(last, last_us)
            if what not in _SHOWN:
                continue
            counts = hours.setdefault((hour, topic), dict.fromkeys(COUNTED, 0))
            if what in counts:
                counts[what] += n
            if what == "handled":
                place = (topic, attempt or 1)
                attempts[place] = attempts.get(place, 0) + n
                by_hour = groups.setdefault((topic, group), {})
                by_hour[hour] = by_hour.get(hour, 0) + n
    return Tally(
        events=events, first_us=first_us, last_us=last_us,
        hours=[(topic, hour, counts) for (hour, topic), counts in sorted(hours.items())],
        attempts=[(*place, n) for place, n in sorted(attempts.items())],
        capacities=_capacities(groups),
    )  # fmt: skip


def _capacities(
    groups: Mapping[tuple[str, str | None], Mapping[int, int]],
) -> dict[str, tuple[int, int, int]]:
    """Of the group whose best hour was the least: a topic is as fast as its slowest group."""
    found: dict[str, tuple[int, int, int]] = {}
    for (topic, _), by_hour in groups.items():
        ranked = sorted(by_hour.values())
        p95 = ranked[-(-95 * len(ranked) // 100) - 1]
        now = (ranked[-1], p95, len(ranked))
        found[topic] = min(found.get(topic, now), now)
    return found


def reasons(cells: DataFrame, most: int, totals: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(topic, reason, messages): the `most` pairs found most often, of all topics together.

    The others are added up for each topic, whose garbage is `totals`, under the empty reason.
    """
    garbage = cells.where("what = 'garbage'").groupBy("topic", "text").agg(sf.sum("n").alias("n"))
    ranked = garbage.orderBy(sf.desc("n"), "topic", "text").limit(most).collect()
    named = [(row["topic"], row["text"], row["n"]) for row in ranked]
    rest = dict(totals)
    for topic, _, n in named:
        rest[topic] -= n
    return named + [(topic, "", n) for topic, n in sorted(rest.items()) if n > 0]


def histogram(cells: DataFrame, what: str) -> dict[int, int]:
    """How many values lie within each octave of microseconds, -1 being none at all."""
    octave = sf.floor(sf.col("number") / OCTAVE).cast("int").alias("octave")
    found = cells.where(sf.col("what") == what).groupBy(octave).agg(sf.sum("n"))
    return {row[0]: row[1] for row in found.orderBy("octave").collect()}


def percentiles(
    cells: DataFrame, what: str, sets: Sequence[tuple[str, ...]], span: Span | None = None
) -> dict[tuple[Any, ...], Percentiles]:
    """Percentiles of every part: for each set of columns a key (set's columns, their values).

    The keys are `(("topic", "hour"), "orders", 1700000000)`; `(("slot",), 3)` counts by the span's
    slots, and `((),)` is the whole.
    """
    from pyspark.sql import Window

    names = sorted({name for one in sets for name in one})
    hist = cells.where(sf.col("what") == what)
    if span is not None:
        hist = hist.withColumn("slot", span.column(sf.col("hour")))
    parts = hist.groupingSets(
        [[hist[name] for name in (*one, "number")] for one in sets],
        *(hist[name] for name in (*names, "number")),
    )  # fmt: skip
    union = parts.agg(
        sf.grouping_id().alias("part"), sf.sum("n").alias("n"), sf.max("most").alias("most"),
        sf.sum("early").alias("early"),
    )  # fmt: skip
    key = ["part", *names]
    everything = Window.partitionBy(*key)
    up_to = everything.orderBy("number").rowsBetween(Window.unboundedPreceding, 0)
    ranked = union.withColumn("up_to", sf.sum("n").over(up_to)).withColumn(
        "all", sf.sum("n").over(everything)
    )
    found = ranked.groupBy(*key).agg(
        *(sf.min(sf.when(sf.col("up_to") >= sf.ceil(sf.col("all") * q), sf.col("number")))
          .alias(f"q{i}") for i, q in enumerate(QUANTILES)),
        sf.first("all").alias("all"), sf.sum("early").alias("early"), sf.max("most").alias("most"),
    )  # fmt: skip
    # Bit by bit from the left: 1 for each column, of `names` and number, that was added up.
    shapes = {
        sum(2 ** (len(names) - place) for place, name in enumerate(names) if name not in one): one
        for one in sets
    }
    return {
        (shapes[row["part"]], *(row[name] for name in shapes[row["part"]])): _row(row)
        for row in found.collect()
    }


def _row(row: Any) -> Percentiles:
    most = max(row["most"], 0)
    p50, p90, p99, p999 = (middle(row[f"q{i}"], most) for i in range(len(QUANTILES)))
    return Percentiles(row["all"], row["early"], p50, p90, p99, p999, most)
