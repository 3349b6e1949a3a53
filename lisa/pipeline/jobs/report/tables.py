"""Counts the report's figures with Spark, which reads each table once and returns only counts.

Durations are counted in buckets with a width of 2.2 % (32 per octave), so that percentiles of any
part can be computed from counts. Percentiles are within 1.1 % of the true value; maxima are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.pipeline.jobs.report.cells import OCTAVE, middle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from lisa.pipeline.jobs.report.slots import Span

COUNTED = (
    "sent",
    "handled",
    "retried",
    "garbage",
    "expired",
    "skipped",
    "cancelled",
    "purged",
    "lost",
)
"""The counts for each topic and hour."""

ERROR = 2 ** (0.5 / OCTAVE) - 1
"""Maximum relative error of a percentile."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)

_SHOWN = {*COUNTED, "late"}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one part in microseconds.

    count: number of values. early: number of negative values, which count as 0. within: number of
        values up to the report's SLO.
    """

    count: int
    early: int
    within: int
    p50: int
    p90: int
    p99: int
    p999: int
    max: int


@dataclass(frozen=True, slots=True)
class EventTally:
    """Counts of events.

    events: number of all events. first_us, last_us: epoch microseconds, None without events.
    hours: (topic, epoch seconds of the hour, counts by COUNTED), ordered by hour and topic.
    parts: the same for parts of an hour, see `cells.log_cells`.
    attempts: (topic, attempt that succeeded, messages); each group counts separately.
    capacities: topic -> messages handled in the best hour, 95th percentile of busy hours, number
        of busy hours; of the topic's slowest group.
    """

    events: int
    first_us: int | None
    last_us: int | None
    hours: list[tuple[str, int, dict[str, int]]]
    parts: list[tuple[str, int, dict[str, int]]]
    attempts: list[tuple[str, int, int]]
    capacities: dict[str, tuple[int, int, int]]


@contextmanager
def cached(frame: DataFrame) -> Iterator[DataFrame]:
    """Cache a small result while several queries use it."""
    frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield frame
    finally:
        frame.unpersist()


def tally(cells: DataFrame) -> EventTally:
    """Everything except percentiles and reasons, with one query."""
    plain = cells.where("what != 'gap'").groupBy(
        "topic",
        "hour",
        "part",
        "what",
        "group",
        sf.when(sf.col("what") == "handled", sf.col("number")).alias("attempt"),
    )
    found = plain.agg(sf.sum("n"), sf.min("first"), sf.max("last")).toArrow()
    hours: dict[tuple[int, str], dict[str, int]] = {}
    parts: dict[tuple[int, str], dict[str, int]] = {}
    attempts: dict[tuple[str, int], int] = {}
    groups: dict[tuple[str, str | None], dict[int, int]] = {}
    events, first_us, last_us = 0, None, None
    for batch in found.to_batches(max_chunksize=10_000):
        for topic, hour, part, what, group, attempt, n, first, last in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            events += n
            first_us = first if first_us is None else min(first, first_us)
            last_us = last if last_us is None else max(last, last_us)
            if what not in _SHOWN:
                continue
            for found_in, at in ((hours, hour), (parts, part)):
                counts = found_in.setdefault((at, topic), dict.fromkeys(COUNTED, 0))
                if what in counts:
                    counts[what] += n
            if what == "handled":
                key = (topic, attempt or 1)
                attempts[key] = attempts.get(key, 0) + n
                by_hour = groups.setdefault((topic, group), {})
                by_hour[hour] = by_hour.get(hour, 0) + n
    return EventTally(
        events=events,
        first_us=first_us,
        last_us=last_us,
        hours=[(topic, hour, counts) for (hour, topic), counts in sorted(hours.items())],
        parts=[(topic, part, counts) for (part, topic), counts in sorted(parts.items())],
        attempts=[(*key, n) for key, n in sorted(attempts.items())],
        capacities=_capacities(groups),
    )


def _capacities(
    groups: Mapping[tuple[str, str | None], Mapping[int, int]],
) -> dict[str, tuple[int, int, int]]:
    """Topic -> capacity of its slowest group, the one with the lowest best hour."""
    found: dict[str, tuple[int, int, int]] = {}
    for (topic, _), by_hour in groups.items():
        ranked = sorted(by_hour.values())
        p95 = ranked[-(-95 * len(ranked) // 100) - 1]
        now = (ranked[-1], p95, len(ranked))
        found[topic] = min(found.get(topic, now), now)
    return found


def reasons(cells: DataFrame, most: int, totals: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(topic, reason, messages): the `most` most frequent pairs over all topics.

    All other reasons of a topic are combined under the empty reason. totals: topic -> its garbage.
    """
    garbage = cells.where("what = 'garbage'").groupBy("topic", "text").agg(sf.sum("n").alias("n"))
    ranked = garbage.orderBy(sf.desc("n"), "topic", "text").limit(most).collect()
    named = [(row["topic"], row["text"], row["n"]) for row in ranked]
    rest = dict(totals)
    for topic, _, n in named:
        rest[topic] -= n
    return named + [(topic, "", n) for topic, n in sorted(rest.items()) if n > 0]


def histogram(cells: DataFrame) -> dict[int, int]:
    """Octave (log2 of the lateness in microseconds) -> deliveries; -1 counts those not late."""
    octave = sf.floor(sf.col("number") / OCTAVE).cast("int").alias("octave")
    found = cells.where("what = 'late'").groupBy(octave).agg(sf.sum("n"))
    return {row[0]: row[1] for row in found.orderBy("octave").collect()}


def percentiles(
    cells: DataFrame, what: str, sets: Sequence[tuple[str, ...]], span: Span | None = None
) -> dict[tuple[Any, ...], Percentiles]:
    """Percentiles for each combination of values of each set of columns.

    A key consists of the set's columns and their values, as in
    `(("topic", "hour"), "orders", 1700000000)`. `(("slot",), 3)` is step 3 of the span, and
    `((),)` is the total.
    """
    names = sorted({name for one in sets for name in one})
    hist = cells.where(sf.col("what") == what)
    if span is not None:
        hist = hist.withColumn("slot", span.column(sf.col("part")))
    parts = hist.groupingSets(
        [[hist[name] for name in (*one, "number")] for one in sets],
        *(hist[name] for name in (*names, "number")),
    )
    union = parts.agg(
        sf.grouping_id().alias("part"),
        sf.sum("n").alias("n"),
        sf.max("most").alias("most"),
        sf.sum("early").alias("early"),
        sf.sum("within").alias("within"),
    )
    # grouping_id has one bit per column of `names` and number, 1 if the column is aggregated.
    shapes = {
        sum(2 ** (len(names) - index) for index, name in enumerate(names) if name not in one): one
        for one in sets
    }
    return {
        (shapes[row["part"]], *(row[name] for name in shapes[row["part"]])): _row(row)
        for row in _quantiles(union, ["part", *names]).collect()
    }


def _quantiles(union: DataFrame, key: Sequence[str]) -> DataFrame:
    """Histograms by key -> one row per key, with the bucket of each quantile."""
    from pyspark.sql import Window

    everything = Window.partitionBy(*key)
    up_to = everything.orderBy("number").rowsBetween(Window.unboundedPreceding, 0)
    ranked = union.withColumn("up_to", sf.sum("n").over(up_to)).withColumn(
        "all", sf.sum("n").over(everything)
    )
    return ranked.groupBy(*key).agg(
        *(
            sf.min(sf.when(sf.col("up_to") >= sf.ceil(sf.col("all") * q), sf.col("number"))).alias(
                f"q{i}"
            )
            for i, q in enumerate(QUANTILES)
        ),
        sf.first("all").alias("all"),
        sf.sum("early").alias("early"),
        sf.sum("within").alias("within"),
        sf.max("most").alias("most"),
    )


def _row(row: Any) -> Percentiles:
    most = max(row["most"], 0)
    p50, p90, p99, p999 = (middle(row[f"q{i}"], most) for i in range(len(QUANTILES)))
    return Percentiles(row["all"], row["early"], row["within"], p50, p90, p99, p999, most)
