"""Counts a report's figures with Spark, which reads each table once and returns only counts.

Events and messages are aggregated into cells, from which everything is computed. Durations are
counted in buckets with a width of 2.2 % (32 per octave), so that percentiles of any part can be
computed from counts. Percentiles are within 1.1 % of the true value; maxima are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import GAP_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

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


SHORT = ((2 * 3_600, 60, "minute"), (12 * 3_600, 300, "5 minutes"), (36 * 3_600, 900, "15 minutes"))
"""Steps below an hour: the longest time that has such steps, their seconds, and their name."""

HOUR_S = 3_600

MOST_HOURS = 8 * 24

MOST_DAYS = 400

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

TimeCounts = tuple[str, int, dict[str, int]]
"""Topic, epoch seconds of the start of a time, and counts by COUNTED."""

WEEK_S = 7 * 86_400


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


@dataclass(frozen=True, slots=True)
class Span:
    """Steps of a time axis. edges: epoch seconds; step i is between edges i and i + 1."""

    edges: tuple[int, ...]
    step: str  # "minute", "5 minutes", "15 minutes", "hour", "day" or "30 days"

    @property
    def part_s(self) -> int:
        """Seconds of the parts of time that are counted for these steps: at most an hour."""
        return next((seconds for _, seconds, name in SHORT if name == self.step), HOUR_S)

    def index(self, epoch_s: int) -> int:
        """The number of the step that contains a time."""
        from bisect import bisect_right

        return min(max(bisect_right(self.edges, epoch_s) - 1, 0), len(self.edges) - 2)

    def column(self, epoch_s: Column) -> Column:
        """Like `index`, for a Spark column."""
        from pyspark.sql import functions as sf

        edges = sf.array(*(sf.lit(edge) for edge in self.edges[:-1]))
        behind = sf.size(sf.filter(edges, lambda edge: edge <= epoch_s))
        return sf.greatest(behind - 1, sf.lit(0)).cast("long")


def full_hour_shift(zone: tzinfo, epoch_s: int) -> int:
    """Seconds between full hours of UTC and of the zone: 1800 in India, 0 in most zones."""
    offset = datetime.fromtimestamp(epoch_s, UTC).astimezone(zone).utcoffset() or timedelta(0)
    return int(-offset.total_seconds()) % 3_600


def span_of(first_s: int, last_s: int, zone: tzinfo, shift_s: int) -> Span:
    """Steps that include both times, starting at a full step or at midnight in the zone."""
    for longest, size, name in SHORT:
        if last_s - first_s <= longest:
            begin = (first_s - shift_s) // size * size + shift_s
            count = (last_s - begin) // size + 1
            return Span(tuple(begin + size * i for i in range(count + 1)), name)
    begin = (first_s - shift_s) // 3_600 * 3_600 + shift_s
    hours = (last_s - begin) // 3_600 + 1
    if hours <= MOST_HOURS:
        return Span(tuple(begin + 3_600 * i for i in range(hours + 1)), "hour")
    days = _midnights(first_s, last_s, zone)
    if len(days) <= MOST_DAYS:
        return Span(tuple(days), "day")
    months = days[::30]
    return Span((*months, days[-1]) if months[-1] != days[-1] else tuple(months), "30 days")


def _midnights(first_s: int, last_s: int, zone: tzinfo) -> list[int]:
    day = (
        datetime.fromtimestamp(first_s, UTC)
        .astimezone(zone)
        .replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    )
    found = [int(day.timestamp())]
    while found[-1] <= last_s:
        # By calendar day: the days of a clock change have 23 or 25 hours.
        day = (day.replace(tzinfo=None) + timedelta(days=1)).replace(tzinfo=zone)
        found.append(int(day.timestamp()))
    return found


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


def by_p99(parts: Mapping[tuple[Any, ...], Percentiles]) -> list[tuple[str, Percentiles]]:
    """The topics of `percentiles` with theirs, highest p99 first."""
    found = [(str(part[1]), one) for part, one in parts.items() if part[0] == ("topic",)]
    return sorted(found, key=lambda one: (-one[1].p99, one[0]))


@contextmanager
def cached(frame: DataFrame) -> Iterator[DataFrame]:
    """Cache a small result while several queries use it."""
    frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield frame
    finally:
        frame.unpersist()


def by_time(cells: DataFrame, time: str) -> list[TimeCounts]:
    """The counts of each topic and `hour` or `part`, ordered by time and topic."""
    shown = cells.where(sf.col("what").isin(*COUNTED, "late")).groupBy(time, "topic")
    counts = shown.pivot("what", [*COUNTED]).agg(sf.sum("n")).na.fill(0)
    return [
        (topic, at, dict(zip(COUNTED, own, strict=True)))
        for at, topic, *own in counts.orderBy(time, "topic").collect()
    ]


def attempts(cells: DataFrame) -> list[tuple[str, int, int]]:
    """(topic, attempt that succeeded, messages); each group counts separately."""
    attempt = sf.greatest("number", sf.lit(1)).alias("attempt")
    handled = cells.where("what = 'handled'").groupBy("topic", attempt).agg(sf.sum("n"))
    return [tuple(row) for row in handled.orderBy("topic", "attempt").collect()]


def capacities(cells: DataFrame) -> dict[str, tuple[int, int, int]]:
    """Topic -> messages in its best hour, 95th percentile of busy hours, their number.

    Those of its slowest group, the one with the lowest best hour.
    """
    hours = cells.where("what = 'handled'").groupBy("topic", "group", "hour")
    groups = hours.agg(sf.sum("n").alias("n")).groupBy("topic", "group")
    p95 = sf.expr("percentile_disc(0.95) WITHIN GROUP (ORDER BY n)").cast("long")
    own = groups.agg(sf.struct(sf.max("n"), p95, sf.count("*")).alias("own"))
    slowest = own.groupBy("topic").agg(sf.min("own"))
    return {topic: tuple(found) for topic, found in slowest.collect()}


def reasons(cells: DataFrame, most: int, hours: Sequence[TimeCounts]) -> list[tuple[str, str, int]]:
    """(topic, reason, messages): the `most` most frequent pairs over all topics.

    All other reasons of a topic are combined under the empty reason.
    """
    rest: dict[str, int] = {}
    for topic, _, counts in hours:
        rest[topic] = rest.get(topic, 0) + counts["garbage"]
    if not any(rest.values()):
        return []
    garbage = cells.where("what = 'garbage'").groupBy("topic", "text").agg(sf.sum("n").alias("n"))
    ranked = garbage.orderBy(sf.desc("n"), "topic", "text").limit(most).collect()
    named = [(row["topic"], row["text"], row["n"]) for row in ranked]
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
    names = sorted({name for columns in sets for name in columns})
    hist = cells.where(sf.col("what") == what)
    if span is not None:
        hist = hist.withColumn("slot", span.column(sf.col("part")))
    parts = hist.groupingSets(
        [[hist[name] for name in (*columns, "number")] for columns in sets],
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


@dataclass(frozen=True, slots=True)
class Weeks:
    """Counts and lateness of two weeks: 0 is the earlier one, 1 the later one.

    begin, end: epoch seconds of the start of week 0 and the end of week 1.
    counts: (topic, week) -> counts by COUNTED. lateness: percentiles, with keys
        `(("week",), week)` and `(("topic", "week"), topic, week)`.
    """

    begin: int
    end: int
    counts: Mapping[tuple[str, int], Mapping[str, int]]
    lateness: Mapping[tuple[Any, ...], Percentiles]

    def count(self, what: str, week: int, topic: str | None = None) -> int:
        """One count of a week, of one topic or of all."""
        found = self.counts.items()
        return sum(own[what] for (name, of), own in found if of == week and topic in (None, name))

    def late(self, week: int, topic: str | None = None) -> Percentiles | None:
        """Lateness in a week, of one topic or of all; None without deliveries."""
        key = (("week",), week) if topic is None else (("topic", "week"), topic, week)
        return self.lateness.get(key)


def weeks_of(
    cells: DataFrame, hours: Sequence[TimeCounts], first_s: int, last_s: int
) -> Weeks | None:
    """The two weeks up to the end of the hour of the last event; None with less than two weeks."""
    if not hours:
        return None
    shift = hours[0][1] % 3_600
    end = (last_s - shift) // 3_600 * 3_600 + shift + 3_600
    begin, middle = end - 2 * WEEK_S, end - WEEK_S
    if first_s >= begin + 3_600:
        return None
    counts: dict[tuple[str, int], Counter[str]] = {}
    for topic, hour, own in hours:
        if hour >= begin:
            counts.setdefault((topic, int(hour >= middle)), Counter()).update(own)
    both = cells.where(sf.col("hour") >= begin)
    both = both.withColumn("week", (sf.col("hour") >= middle).cast("int"))
    lateness = percentiles(both, "late", [("topic", "week"), ("week",)])
    return Weeks(begin, end, counts, lateness)
