"""Computes all figures of a report once; plots, page and files only present them.

The forecast compares the messages that fall due with the most a topic ever handled in an hour. Its
hours are counted from the newest event of the archive. It has a resolution of one hour, because the
capacity is only known per hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.core.model.clock import EPOCH, datetime_ms
from lisa.pipeline.jobs.message_history import selected
from lisa.pipeline.jobs.report.counts import (
    HOUR_S,
    Percentiles,
    Span,
    TimeCounts,
    Weeks,
    attempts,
    by_time,
    cached,
    capacities,
    full_hour_shift,
    histogram,
    log_cells,
    message_cells,
    percentiles,
    reasons,
    span_of,
    weeks_of,
)
from lisa.pipeline.jobs.windows import JobScope

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


MINUTES = 60
HOURS = 48
DAYS = 30
"""Range of the forecast: minutes, hours and days shown by the three plots."""


REASONS = 200
"""Number of pairs of topic and reason that are counted separately; all others are combined."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The unsettled messages of one topic by due time, counted from the newest event.

    overdue: messages due before that event. minutes, hours: number of the minute or hour ->
    messages due in it; `hours` covers DAYS. later: messages due after DAYS.
    """

    overdue: int = 0
    later: int = 0
    minutes: Mapping[int, int] = field(default_factory=dict)
    hours: Mapping[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of all unsettled messages."""
        return self.overdue + self.later + sum(self.hours.values())

    def within(self, hours: int) -> int:
        """The number of messages due in the next hours, without overdue ones."""
        return sum(n for hour, n in self.hours.items() if hour < hours)

    def days(self) -> dict[int, int]:
        """Number of the day (of 24 hours) -> messages due in it."""
        found: dict[int, int] = {}
        for hour, n in self.hours.items():
            found[hour // 24] = found.get(hour // 24, 0) + n
        return found


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


def demands(cells: DataFrame, now_s: int) -> dict[str, Demand]:
    """Topic -> demand, from the cells of `message_cells`. now_s: epoch seconds."""
    ahead = sf.col("minute") - now_s // 60
    due = cells.where("what = 'due'").withColumn("ahead", ahead)
    period = sf.when(ahead < 0, "overdue").when(ahead >= DAYS * 24 * 60, "later").otherwise("hours")
    number = sf.when((ahead >= 0) & (ahead < DAYS * 24 * 60), sf.floor(ahead / 60))
    by_hour = due.groupBy("topic", period.alias("period"), number.alias("number"))
    minutes = due.where((ahead >= 0) & (ahead < MINUTES))
    by_minute = minutes.groupBy("topic", sf.lit("minutes").alias("period"), ahead.alias("number"))
    rows = by_hour.agg(sf.sum("n").alias("n")).unionByName(by_minute.agg(sf.sum("n").alias("n")))
    counts: dict[str, dict[str, dict[int, int]]] = {}
    for topic, where, index, n in rows.collect():
        counts.setdefault(topic, {}).setdefault(where, {})[index or 0] = n
    return {
        topic: Demand(
            overdue=found.get("overdue", {}).get(0, 0),
            later=found.get("later", {}).get(0, 0),
            minutes=found.get("minutes", {}),
            hours=found.get("hours", {}),
        )
        for topic, found in sorted(counts.items())
    }


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
    drained = None
    if end is not None:
        drained = end + (left[end - 1] + demand.hours.get(end, 0)) / capacity
    return Crossing(topic, capacity, hour, load, peak, peak_hour, drained)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a report. Counts are of messages; from `handled` on, each group counts.

    asked: the scope. events: number of events read; `first`, `last`: their times.
    now: time of the newest change in the archive; start of the forecast.
    slo_us: the lateness in microseconds up to which a delivery is on time.
    hours: (topic, epoch seconds of the hour, counts by COUNTED). parts: the same for parts of an
        hour, if the report is short.
    weeks: the last seven days and the seven days before; None if the events span less time.
    lateness, handling: percentiles by part, see counts.percentiles.
    capacities: topic -> messages in its best hour, 95th percentile of busy hours, their number.
    unknown: topics with unsettled messages but without a known capacity.
    """

    asked: JobScope
    zone: tzinfo
    slo_us: int
    events: int
    first: datetime | None
    last: datetime | None
    now: datetime | None
    span: Span | None
    hours: Sequence[TimeCounts]
    parts: Sequence[TimeCounts]
    weeks: Weeks | None
    lateness: Mapping[tuple[Any, ...], Percentiles]
    histogram: Mapping[int, int]
    handling: Mapping[tuple[Any, ...], Percentiles]
    attempts: Sequence[tuple[str, int, int]]
    reasons: Sequence[tuple[str, str, int]]
    capacities: Mapping[str, tuple[int, int, int]]
    demands: Mapping[str, Demand]
    crossings: Sequence[Crossing]
    unknown: Sequence[str]
    gaps: Sequence[Any]

    @property
    def empty(self) -> bool:
        """Whether there are neither events nor unsettled messages."""
        return self.events == 0 and not self.demands

    @property
    def step(self) -> str:
        """The name of a step of the time axis."""
        return self.span.step if self.span else "hour"

    def ahead(self, hours: float | None) -> datetime | None:
        """The time that many hours after the newest change; None without either."""
        if self.now is None or hours is None:
            return None
        return self.now + timedelta(hours=hours)

    def total(self, what: str) -> int:
        """The sum of one count over all topics."""
        return sum(counts[what] for _, _, counts in self.hours)

    def totals(self) -> dict[str, Counter[str]]:
        """Topic -> counts, ordered by total number of messages, descending."""
        found: dict[str, Counter[str]] = {}
        for topic, _, counts in self.hours:
            found.setdefault(topic, Counter()).update(counts)
        return dict(sorted(found.items(), key=lambda one: (-one[1].total(), one[0])))

    def steps(self, what: str, topic: str | None = None) -> list[int]:
        """The values of one count for each step of the time axis."""
        if self.span is None:
            return []
        sums = [0] * (len(self.span.edges) - 1)
        for name, at, counts in self.parts:
            if topic in (None, name):
                sums[self.span.index(at)] += counts[what]
        return sums

    def garbage_by_reason(self, most: int) -> dict[str, int]:
        """Reason -> messages: the `most` most frequent ones, and the others under an empty one."""
        sums: Counter[str] = Counter()
        for _, reason, n in self.reasons:
            sums[reason] += n
        other = sums.pop("", 0)
        ranked = sums.most_common()
        other += sum(n for _, n in ranked[most:])
        return dict(ranked[:most]) | ({"": other} if other else {})

    def late(self, topic: str | None = None) -> Percentiles | None:
        """Lateness of one topic, or of all topics; None without deliveries."""
        return self.lateness.get(((),) if topic is None else (("topic",), topic))


def gather(
    log: DataFrame,
    messages: DataFrame,
    asked: JobScope,
    zone: tzinfo,
    gaps: Sequence[Any],
    *,
    slo: timedelta,
) -> Figures:
    """Compute all figures of a report; reads the log and the messages once each.

    A report of less than 36 hours has steps below an hour, for which it reads the log again.
    """
    slo_us = slo // timedelta(microseconds=1)
    with ExitStack() as kept:
        cells, (events, first_us, last_us), span = _counted(
            _log_in(log, asked), asked, zone, slo_us, kept
        )
        rows = message_cells(
            selected(messages, asked.topics or None), _micros(asked.start), _micros(asked.end)
        )
        lives = kept.enter_context(cached(rows))
        [[changed_us]] = lives.agg(sf.max("last")).collect()
        newest_us = max(changed_us or 0, last_us)
        sets = [("topic", "hour"), ("topic", "slot"), ("topic",), ("slot",), ()]
        wanted, hours = demands(lives, newest_us // 1_000_000), by_time(cells, "hour")
        known = capacities(cells)
        return Figures(
            asked=asked,
            zone=zone,
            slo_us=slo_us,
            events=events,
            first=_moment(first_us),
            last=_moment(last_us),
            now=_moment(newest_us),
            span=span,
            hours=hours,
            parts=by_time(cells, "part"),
            weeks=weeks_of(cells, hours, first_us // 1_000_000, last_us // 1_000_000),
            lateness={} if span is None else percentiles(cells, "late", sets, span),
            histogram=histogram(cells),
            handling=percentiles(lives, "handling", [("topic",), ()]),
            attempts=attempts(cells),
            reasons=reasons(cells, REASONS, hours),
            capacities=known,
            demands=wanted,
            crossings=_crossings(wanted, known),
            unknown=[
                topic for topic, demand in wanted.items() if topic not in known and demand.total
            ],
            gaps=gaps,
        )


def _log_in(log: DataFrame, asked: JobScope) -> DataFrame:
    """The events of the scope; partitions of other days are not read."""
    log = selected(log, asked.topics or None)
    if asked.start is not None:
        log = log.where(sf.col("day") >= sf.lit(asked.start.astimezone(UTC).date()))
        log = log.where(sf.col("at") >= sf.lit(asked.start))
    if asked.end is not None:
        log = log.where(sf.col("day") <= sf.lit(asked.end.astimezone(UTC).date()))
        log = log.where(sf.col("at") < sf.lit(asked.end))
    return log


def _counted(
    log: DataFrame, asked: JobScope, zone: tzinfo, slo_us: int, kept: ExitStack
) -> tuple[DataFrame, tuple[int, int, int], Span | None]:
    """The cells of the log; events, and the times of the first and last; the time axis's steps."""
    near = asked.start or asked.end or datetime.now(UTC)
    shift_s, part_s = full_hour_shift(zone, int(near.timestamp())), HOUR_S
    while True:
        cells = kept.enter_context(cached(log_cells(log, shift_s, slo_us, part_s)))
        counted = cells.where("what != 'gap'").agg(sf.sum("n"), sf.min("first"), sf.max("last"))
        [(events, first_us, last_us)] = counted.collect()
        if not events:
            return cells, (0, 0, 0), None
        span = span_of(first_us // 1_000_000, last_us // 1_000_000, zone, shift_s)
        if span.part_s >= part_s:
            return cells, (events, first_us, last_us), span
        part_s = span.part_s


def _crossings(
    wanted: Mapping[str, Demand], capacities: Mapping[str, tuple[int, int, int]]
) -> list[Crossing]:
    """The topics that will fall behind, the next one first."""
    found = [
        one
        for topic, demand in wanted.items()
        if topic in capacities
        if (one := crossing(topic, demand, capacities[topic][0])) is not None
    ]
    return sorted(found, key=lambda one: (one.hour, -one.peak))


def _micros(moment: datetime | None) -> int | None:
    return None if moment is None else datetime_ms(moment) * 1_000


def _moment(micros: int) -> datetime | None:
    return EPOCH + timedelta(microseconds=micros) if micros else None
