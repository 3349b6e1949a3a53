"""Counts a report's figures with Spark, which reads each table once and returns only counts.

Events and messages are aggregated into cells, from which everything is computed. Durations are
counted in buckets with a width of 2.2 % (32 per octave), so that percentiles of any part can be
computed from counts. Percentiles are within 1.1 % of the true value; maxima are exact.

A part of the archive is named by topic, unit and start: of one topic or of all (None), in the hour,
the step of the time axis, or the week that starts at an epoch second; of the unit `all`, at 0.

The forecast compares the messages that fall due with the most a topic ever handled in an hour. Its
hours are counted from the newest event of the archive. It has a resolution of one hour, because the
capacity is only known per hour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sf

from lisa.core.model.clock import EPOCH
from lisa.pipeline.archive.base import selected
from lisa.pipeline.archive.reading import day_of
from lisa.pipeline.archive.schemas import GAP_STATE
from lisa.pipeline.jobs.windows import JobScope, gap_windows
from lisa.pipeline.session import persisted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lisa.pipeline.archive import Archive

OCTAVE = 32
POSTPONED = "group is full"  # the reason for a retry without a failed attempt
MOST_OF_REASON = 120
NUMBER = r"(?<!\d)(?<!\d[.,:])\d+([.,:]\d+)*"
STATUS = r"(?<=(?i:http\w{0,20}|status|code)[ :=/]{0,2})[1-5]\d\d(?![\d\w]|[.,:]\d)"

HOUR_S = 3_600
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S

STEPS = (
    (2 * HOUR_S, 60, "minute"),
    (12 * HOUR_S, 300, "5 minutes"),
    (36 * HOUR_S, 900, "15 minutes"),
    (8 * DAY_S, HOUR_S, "hour"),
)
"""Steps below a day: the longest time that has such steps, their seconds, and their name."""

MOST_DAYS = 400

COUNTED = (
    *("sent", "handled", "retried", "garbage", "expired", "skipped", "cancelled", "purged"),
    "lost",
)
"""The counts of each part."""

ERROR = 2 ** (0.5 / OCTAVE) - 1
"""Maximum relative error of a percentile."""

QUANTILES = (0.5, 0.9, 0.99, 0.999)

PART = ("topic", "unit", "start")

Part = tuple[str | None, str, int]
"""Topic, unit and start."""

Counts = Mapping[str, int]
"""Counts by COUNTED."""

MINUTES = 60
HOURS = 48
DAYS = 30
"""Range of the forecast: minutes, hours and days shown by the three plots."""

OVERDUE, LATER = -1, DAYS * 24
"""The numbers of the hours that stand for all time before and after the forecast."""

REASONS = 200
"""Number of pairs of topic and reason that are counted separately; all others are combined."""


def log_cells(log: DataFrame, shift_s: int, slo_us: int, part_s: int) -> DataFrame:
    """Counts of events; covers all uses of the log. See `_cells`.

    what: one of COUNTED, late, or a state that is not counted. start: of a part of an hour that has
    `part_s` seconds. number: of late, the bucket; of handled, the attempt. text: of handled, the
    group; of garbage, the generalized reason. shift_s: see `full_hour_shift`.
    """
    state, late_us = sf.col("state"), sf.col("late_us")
    late, acked = (state == "in_flight") & late_us.isNotNull(), state == "acked"
    failed = (state == "retry") & ~sf.col("reason").eqNullSafe(POSTPONED)
    what = sf.when(late, "late").when(failed, "retried").when(acked, "handled")
    reason = general(sf.coalesce("reason", sf.lit("no reason given")))
    rows = log.select(
        "topic",
        what.when(state == "replaced", "sent").otherwise(state).alias("what"),
        start_of(sf.unix_seconds("at"), part_s, shift_s).alias("start"),
        sf.when(late, bucket(late_us)).when(acked, sf.col("attempt")).cast("int").alias("number"),
        sf.when(acked, sf.col("group")).when(state == "garbage", reason).alias("text"),
        sf.when(late, late_us).alias("value"),
        sf.unix_micros("at").alias("at_us"),
    )
    return _cells(rows, slo_us)


def message_cells(messages: DataFrame, asked: JobScope, slo_us: int) -> DataFrame:
    """Counts of messages; covers all uses of the messages. See `_cells`; last: newest change.

    what: due (not settled), handling (acked in the scope), or other. start: of the
    minute in which a due one falls due. number: of handling, the bucket of the time from the first
    delivery to the last ack.
    """
    due, settled_at = sf.unix_micros("due"), sf.col("settled_at")
    open_states = ("ready", "in_flight", "retry")
    owed = sf.filter("groups", lambda group: group["state"].isin(*open_states))
    next_due = sf.array_min(sf.transform(owed, lambda group: group["due"]))
    falls_due = sf.when(sf.col("state") == "waiting", due).when(
        sf.col("state").isin(*open_states), sf.coalesce(sf.unix_micros(next_due), due)
    )
    took = sf.unix_micros(settled_at) - due - sf.greatest("late_us", sf.lit(0))
    is_due = ~sf.col("settled") & falls_due.isNotNull()
    is_handled = (sf.col("state") == "acked") & took.isNotNull() & asked.includes(settled_at)
    took = sf.when(is_handled, sf.greatest(took, sf.lit(0)))
    rows = messages.select(
        "topic",
        sf.when(is_due, "due").when(is_handled, "handling").otherwise("other").alias("what"),
        sf.when(is_due, sf.floor(falls_due / 60_000_000) * 60).alias("start"),
        bucket(took).cast("int").alias("number"),
        sf.lit(None).cast("string").alias("text"),
        took.alias("value"),
        sf.unix_micros("updated_at").alias("at_us"),
    )
    return _cells(rows, slo_us)


def _cells(rows: DataFrame, slo_us: int) -> DataFrame:
    """Counts by topic, what, start (epoch seconds), number and text.

    n: rows. most: the largest value. early, within: negative values, and values up to `slo_us`.
    first, last: epoch microseconds.
    """
    return rows.groupBy("topic", "what", "start", "number", "text").agg(
        sf.count("*").alias("n"),
        sf.max("value").alias("most"),
        sf.count_if(sf.col("value") < 0).alias("early"),
        sf.count_if(sf.col("value") <= slo_us).alias("within"),
        sf.min("at_us").alias("first"),
        sf.max("at_us").alias("last"),
    )


def start_of(epoch_s: Column, size_s: int, shift_s: int) -> Column:
    """The start of the time of `size_s` seconds that contains a time, in epoch seconds."""
    return (sf.floor((epoch_s - shift_s) / size_s) * size_s + shift_s).cast("long")


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


class Span(NamedTuple):
    """Steps of a time axis. edges: epoch seconds; step i is between edges i and i + 1.

    step: the name of a step, as in STEPS, `day` or `30 days`. part_s: seconds of the parts of time
    that are counted for these steps: at most an hour.
    """

    edges: tuple[int, ...]
    step: str
    part_s: int = HOUR_S


def full_hour_shift(zone: tzinfo, epoch_s: int) -> int:
    """Seconds between full hours of UTC and of the zone: 1800 in India, 0 in most zones."""
    offset = datetime.fromtimestamp(epoch_s, UTC).astimezone(zone).utcoffset() or timedelta(0)
    return int(-offset.total_seconds()) % HOUR_S


def span_of(first_s: int, last_s: int, zone: tzinfo, shift_s: int) -> Span:
    """Steps that include both times, starting at a full step or at midnight in the zone."""
    for longest, size, name in STEPS:
        if last_s - first_s <= longest:
            begin = (first_s - shift_s) // size * size + shift_s
            return Span(tuple(range(begin, last_s + size + 1, size)), name, size)
    midnight = datetime.fromtimestamp(first_s, zone).replace(hour=0, minute=0, second=0, fold=0)
    # By calendar day: the days of a clock change have 23 or 25 hours.
    whole = range((last_s - first_s) // DAY_S + 4)
    days = [int((midnight + timedelta(days=number)).timestamp()) for number in whole]
    days = days[: bisect_right(days, last_s) + 1]
    if len(days) <= MOST_DAYS:
        return Span(tuple(days), "day")
    return Span(tuple(sorted({*days[::30], days[-1]})), "30 days")


def weeks_of(first_s: int, last_s: int, shift_s: int) -> tuple[int, int, int] | None:
    """Start, middle and end of the two weeks up to the end of the hour of the last event.

    None if the events span less time.
    """
    end = (last_s - shift_s) // HOUR_S * HOUR_S + shift_s + HOUR_S
    begin = end - 2 * WEEK_S
    return None if first_s >= begin + HOUR_S else (begin, end - WEEK_S, end)


def by_part(cells: DataFrame, starts: Mapping[str, Column]) -> DataFrame:
    """The cells of every part: each cell once for its topic and once for all, for each unit.

    starts: unit -> the start of the time that contains the cell's, null if the cell is in none.
    """
    units = chain.from_iterable((sf.lit(unit), at.cast("long")) for unit, at in starts.items())
    times = sf.explode(sf.create_map(*units)).alias("unit", "start")
    values = ("what", "number", "n", "most", "early", "within")
    timed = cells.select("topic", times, *values).where("start IS NOT NULL")
    return timed.withColumn("topic", sf.explode(sf.array("topic", sf.lit(None))))


def step_of(edges: Sequence[int], epoch_s: Column) -> Column:
    """The start of the step that contains a time; of the first step for an earlier time."""
    starts = sf.array(*map(sf.lit, edges[:-1]))
    behind = sf.array_max(sf.filter(starts, lambda edge: edge <= epoch_s))
    return sf.greatest(sf.lit(edges[0]), behind)


class Percentiles(NamedTuple):
    """Percentiles of one part in microseconds.

    total: number of values. early: number of negative values, which count as 0. within: number of
        values up to the report's SLO.
    """

    total: int
    early: int
    within: int
    p50: int
    p90: int
    p99: int
    p999: int
    max: int


def counts(parts: DataFrame) -> dict[Part, Counts]:
    """The counts of each part, ordered by start and topic; also of those with only deliveries."""
    found = parts.where(sf.col("what").isin(*COUNTED, "late")).groupBy(*PART)
    rows = found.pivot("what", [*COUNTED]).agg(sf.sum("n")).na.fill(0)
    return {
        (topic, unit, start): dict(zip(COUNTED, own, strict=True))
        for topic, unit, start, *own in rows.orderBy("start", "topic").collect()
    }


def percentiles(parts: DataFrame, what: str) -> dict[Part, Percentiles]:
    """The percentiles of each part's values, highest p99 first."""
    everything = Window.partitionBy(*PART)
    totals = [sf.sum(name).alias(name) for name in ("n", "early", "within")]
    rank, whole = sf.sum("n").over(everything.orderBy("number")), sf.sum("n").over(everything)
    values = parts.where(sf.col("what") == what).groupBy(*PART, "number")
    ranked = values.agg(*totals, sf.max("most").alias("most"))
    ranked = ranked.withColumns({"rank": rank, "all": whole})
    reached = (sf.col("rank") >= sf.ceil(sf.col("all") * quantile) for quantile in QUANTILES)
    numbers = sf.array(*(sf.min(sf.when(is_reached, sf.col("number"))) for is_reached in reached))
    rows = ranked.groupBy(*PART).agg(*totals, sf.greatest(sf.max("most"), sf.lit(0)), numbers)
    found = {
        (topic, unit, start): Percentiles._make((*own, *(middle(q, most) for q in numbers), most))
        for topic, unit, start, *own, most, numbers in rows.collect()
    }
    return dict(sorted(found.items(), key=lambda part: (-part[1].p99, part[0][0] or "")))


def sums(cells: DataFrame, what: str, *keys: str | Column) -> list[tuple[Any, ...]]:
    """The values of the keys and the number of rows, for each combination of values, in order."""
    found = cells.where(sf.col("what") == what).groupBy(*keys).agg(sf.sum("n"))
    return [tuple(row) for row in found.orderBy(*range(1, len(keys) + 1)).collect()]


def capacities(cells: DataFrame, hour: Column) -> dict[str, tuple[int, int, int]]:
    """Topic -> messages in its best hour, 95th percentile of busy hours, their number.

    Those of its slowest group, the one with the lowest best hour. hour: start of a cell's hour.
    """
    hours = cells.where("what = 'handled'").groupBy("topic", "text", hour)
    groups = hours.agg(sf.sum("n").alias("n")).groupBy("topic", "text")
    p95 = sf.expr("percentile_disc(0.95) WITHIN GROUP (ORDER BY n)").cast("long")
    own = groups.agg(sf.struct(sf.max("n"), p95, sf.count("*")).alias("own"))
    slowest = own.groupBy("topic").agg(sf.min("own"))
    return {topic: tuple(found) for topic, found in slowest.collect()}


def reasons(cells: DataFrame, most: int, garbage: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(topic, reason, messages): the `most` most frequent pairs over all topics.

    All other reasons of a topic are combined under the empty reason. garbage: topic -> messages.
    """
    found = cells.where("what = 'garbage'").groupBy("topic", "text").agg(sf.sum("n").alias("n"))
    ranked = found.orderBy(sf.desc("n"), "topic", "text").limit(most).collect()
    named, rest = [tuple(row) for row in ranked], Counter(garbage)
    for topic, _, n in named:
        rest[topic] -= n
    return named + [(topic, "", n) for topic, n in sorted((+rest).items())]


def by_topic(parts: Mapping[Part, Any]) -> dict[str, Any]:
    """The figures of each topic over the whole time, in their order."""
    return {topic: own for (topic, unit, _), own in parts.items() if topic and unit == "all"}


@dataclass(frozen=True, slots=True)
class Demand:
    """Unsettled messages by due time, counted from the newest event.

    minutes, hours: number of the minute or hour -> messages due in it; `hours` has all messages,
    including those of OVERDUE and LATER.
    """

    minutes: Mapping[int, int] = field(default_factory=dict)
    hours: Mapping[int, int] = field(default_factory=dict)

    @property
    def overdue(self) -> int:
        """The number of messages due before the newest event."""
        return self.hours.get(OVERDUE, 0)

    @property
    def total(self) -> int:
        """The number of all unsettled messages."""
        return sum(self.hours.values())

    def within(self, hours: int) -> int:
        """The number of messages due in the next hours, without overdue ones."""
        return sum(n for hour, n in self.hours.items() if 0 <= hour < hours)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A period in which more messages of a topic fall due than it ever handled.

    Hours are counted from now. capacity: messages per hour.
    hour, load: the first hour above capacity, and its messages, including the backlog.
    peak, peak_hour: the largest backlog, and the hour at whose end it is reached.
    drained: hours until the backlog is gone, None if not within DAYS.
    """

    topic: str
    capacity: int
    hour: int
    load: int
    peak: int
    peak_hour: int
    drained: float | None


def demands(cells: DataFrame, now_s: int) -> dict[str | None, Demand]:
    """Topic, or None for all -> demand, from the cells of `message_cells`. now_s: epoch seconds."""
    minute = sf.floor((sf.col("start") - now_s // 60 * 60) / 60)
    hour = sf.greatest(sf.lit(OVERDUE), sf.least(sf.lit(LATER), sf.floor(minute / 60)))
    shown = sf.when(minute.between(0, MINUTES - 1), minute)
    parts = by_part(cells, {"hours": hour, "minutes": shown})
    found: dict[str | None, Demand] = {}
    for topic, unit, at, n in sums(parts, "due", *PART):
        getattr(found.setdefault(topic, Demand()), unit)[at] = n
    return found


def backlog(demand: Demand, capacity: int, hours: int) -> list[int]:
    """The messages left over at the end of each hour. capacity: messages per hour."""
    left, found = demand.overdue, []
    for hour in range(hours):
        left = max(left + demand.hours.get(hour, 0) - capacity, 0)
        found.append(left)
    return found


def crossing(topic: str, demand: Demand, capacity: int) -> Crossing | None:
    """The period with the largest backlog, or None. capacity: messages per hour, above 0."""
    left = backlog(demand, capacity, DAYS * 24)
    peak = max(left)
    if not peak:
        return None
    peak_hour = left.index(peak)
    hour = next((at + 1 for at in range(peak_hour, -1, -1) if not left[at]), 0)
    load = (left[hour - 1] if hour else demand.overdue) + demand.hours.get(hour, 0)
    end = next((at for at in range(peak_hour, len(left)) if not left[at]), None)
    last = 0 if end is None else left[end - 1] + demand.hours.get(end, 0)
    drained = None if end is None else end + last / capacity
    return Crossing(topic, capacity, hour, load, peak, peak_hour, drained)


class Figures:
    """The figures of a report. Counts are of messages; from `handled` on, each group counts.

    asked: the scope. gaps: of the journal, in it.
    slo_us: the lateness in microseconds up to which a delivery is on time.
    events: number of events read; `first`, `last`: their times. now: time of the newest change in
        the archive; start of the forecast.
    span: the time axis, without edges if there are no events. weeks: see `weeks_of`.
    counts, lateness: of all parts; the unit `slot` is a step of the span. handling: percentiles
        from delivery to ack, of the unit `all`. reasons, capacities: see these functions.
    octaves: log2 of the lateness in microseconds -> deliveries; -1 counts those not late.
    attempts: topic, attempt that succeeded, messages; each group counts separately.
    demands: topic -> demand; `due`: of all topics. crossings: the next one first.
    unknown: topics with messages to come whose capacity is unknown.
    """

    def __init__(self, archive: Archive, asked: JobScope, zone: tzinfo, slo: timedelta) -> None:
        """Compute all figures; reads the log and the messages once each.

        A report of up to 36 hours has steps below an hour, for which it reads the log again.
        """
        self.asked, self.zone, self.slo_us = asked, zone, slo // timedelta(microseconds=1)
        self.span = Span((), "")
        self.weeks: tuple[int, int, int] | None = None
        known = archive.gaps()
        windows = zip(known, gap_windows(known, archive.log), strict=True)
        self.gaps = [gap for gap, window in windows if asked.reaches(window)]
        with ExitStack() as kept:
            self._count_events(_log_in(archive.log(), asked), kept)
            lives = archive.messages(asked.topics or None)
            self._count_messages(_cached(message_cells(lives, asked, self.slo_us), kept))

    def _count_events(self, log: DataFrame, kept: ExitStack) -> None:
        near = self.asked.start or self.asked.end or datetime.now(UTC)
        shift_s = full_hour_shift(self.zone, int(near.timestamp()))
        cells = _cached(log_cells(log, shift_s, self.slo_us, HOUR_S), kept)
        counted = cells.where(sf.col("what") != GAP_STATE)
        times = counted.agg(sf.coalesce(sf.sum("n"), sf.lit(0)), sf.min("first"), sf.max("last"))
        [(self.events, first_us, last_us)] = times.collect()
        self.first, self.last = _moment(first_us), _moment(last_us)
        hour = start_of(sf.col("start"), HOUR_S, shift_s)
        starts = {"all": sf.lit(0), "hour": hour}
        if self.events:
            range_s = first_us // 1_000_000, last_us // 1_000_000
            self.span = span_of(*range_s, self.zone, shift_s)
            self.weeks = weeks_of(*range_s, shift_s)
            if self.span.part_s < HOUR_S:
                cells = _cached(log_cells(log, shift_s, self.slo_us, self.span.part_s), kept)
            starts["slot"] = step_of(self.span.edges, sf.col("start"))
        if self.weeks:
            starts["week"] = sf.when(hour >= self.weeks[0], step_of(self.weeks, hour))
        parts = by_part(cells, starts)
        self.counts, self.lateness = counts(parts), percentiles(parts, "late")
        number = sf.col("number")
        self.octaves = dict(sums(cells, "late", sf.floor(number / OCTAVE)))
        self.attempts = sums(cells, "handled", "topic", sf.greatest(number, sf.lit(1)))
        garbage = {topic: own["garbage"] for topic, own in by_topic(self.counts).items()}
        self.reasons = reasons(cells, REASONS, garbage)
        self.capacities = capacities(cells, hour)

    def _count_messages(self, cells: DataFrame) -> None:
        [[changed_us]] = cells.agg(sf.max("last")).collect()
        changed = _moment(changed_us)
        self.now = max(filter(None, (changed, self.last)), default=None)
        self.handling = percentiles(by_part(cells, {"all": sf.lit(0)}), "handling")
        self.demands = demands(cells, int(self.now.timestamp())) if self.now else {}
        self.due = self.demands.pop(None, Demand())
        self.unknown = [topic for topic in self.demands if topic not in self.capacities]
        best = {topic: own[0] for topic, own in self.capacities.items() if topic in self.demands}
        behind = (crossing(topic, self.demands[topic], best[topic]) for topic in sorted(best))
        self.crossings = sorted(filter(None, behind), key=lambda found: (found.hour, -found.peak))

    @property
    def empty(self) -> bool:
        """Whether there are neither events nor unsettled messages."""
        return not self.events and not self.demands

    def ahead(self, hours: float | None) -> datetime | None:
        """The time that many hours after the newest change; None without either."""
        return None if self.now is None or hours is None else self.now + timedelta(hours=hours)

    def count(self, what: str, topic: str | None = None, unit: str = "all", start: int = 0) -> int:
        """One count of a part, 0 if the part has no events."""
        return self.counts.get((topic, unit, start), {}).get(what, 0)

    def late(
        self, topic: str | None = None, unit: str = "all", start: int = 0
    ) -> Percentiles | None:
        """Lateness in a part; None without deliveries."""
        return self.lateness.get((topic, unit, start))

    def topics(self) -> dict[str, Counts]:
        """Topic -> counts, ordered by total number of messages, descending."""
        found = by_topic(self.counts).items()
        return dict(sorted(found, key=lambda own: (-sum(own[1].values()), own[0])))

    def hours(self) -> list[tuple[str, int, Counts]]:
        """The counts of each topic and hour, ordered by hour and topic."""
        parts = self.counts.items()
        return [(topic, at, n) for (topic, unit, at), n in parts if topic and unit == "hour"]

    def steps(self, what: str, topic: str | None = None) -> list[int]:
        """The values of one count for each step of the time axis."""
        return [self.count(what, topic, "slot", edge) for edge in self.span.edges[:-1]]

    def garbage_by_reason(self, most: int) -> dict[str, int]:
        """Reason -> messages: the `most` most frequent ones, and the others under an empty one."""
        sums: Counter[str] = Counter()
        for _, reason, n in self.reasons:
            sums[reason] += n
        other = sums.pop("", 0)
        shown = dict(sums.most_common(most))
        other += sums.total() - sum(shown.values())
        return shown | ({"": other} if other else {})


def _log_in(log: DataFrame, asked: JobScope) -> DataFrame:
    """The events of the scope; partitions of other days are not read."""
    log = selected(log, asked.topics or None).where(asked.includes(sf.col("at")))
    if asked.start is not None:
        log = log.where(sf.col("day") >= day_of(sf.lit(asked.start)))
    return log if asked.end is None else log.where(sf.col("day") <= day_of(sf.lit(asked.end)))


def _cached(cells: DataFrame, kept: ExitStack) -> DataFrame:
    kept.callback(persisted(cells).unpersist)
    return cells


def _moment(micros: int | None) -> datetime | None:
    return EPOCH + timedelta(microseconds=micros) if micros else None
