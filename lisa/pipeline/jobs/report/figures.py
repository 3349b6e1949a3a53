"""Computes all figures of a report once; plots, page and files only present them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.core.model.clock import EPOCH, datetime_ms
from lisa.pipeline.jobs.report import tables
from lisa.pipeline.jobs.report.cells import log_cells, message_cells
from lisa.pipeline.jobs.report.forecast import Crossing, Demand, crossing, demands
from lisa.pipeline.jobs.report.slots import HOUR_S, Span, full_hour_shift, span_of
from lisa.pipeline.jobs.report.tables import Percentiles
from lisa.pipeline.jobs.report.weeks import Weeks, weeks_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lisa.pipeline.jobs.windows import Window

REASONS = 200
"""Number of pairs of topic and reason that are counted separately; all others are combined."""


@dataclass(frozen=True, slots=True)
class Range:
    """The scope of a report: topics (empty: all), from `start` up to but not including `end`."""

    topics: tuple[str, ...] = ()
    start: datetime | None = None
    end: datetime | None = None

    def of_log(self, log: DataFrame) -> DataFrame:
        """The events in the range; partitions of other days are not read."""
        log = self.of_topics(log)
        if self.start is not None:
            log = log.where(sf.col("day") >= sf.lit(self.start.astimezone(UTC).date()))
            log = log.where(sf.col("at") >= sf.lit(self.start))
        if self.end is not None:
            log = log.where(sf.col("day") <= sf.lit(self.end.astimezone(UTC).date()))
            log = log.where(sf.col("at") < sf.lit(self.end))
        return log

    def of_topics(self, rows: DataFrame) -> DataFrame:
        """The rows of the range's topics."""
        return rows.where(sf.col("topic").isin(*self.topics)) if self.topics else rows

    def reaches(self, window: Window) -> bool:
        """Whether the range includes a part of a window, and its topic."""
        return (
            (not self.topics or window.topic in self.topics)
            and (self.start is None or window.until_ms >= datetime_ms(self.start))
            and (self.end is None or (window.after_ms or 0) < datetime_ms(self.end))
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a report. Counts are of messages; from `handled` on, each group counts.

    asked: the scope. events: number of events read; `first`, `last`: their times.
    now: time of the newest change in the archive; start of the forecast.
    slo_us: the lateness in microseconds up to which a delivery is on time.
    hours: (topic, epoch seconds of the hour, counts by COUNTED). parts: the same for parts of an
        hour, if the report is short.
    weeks: the last seven days and the seven days before; None if the events span less time.
    lateness, handling: percentiles by part, see tables.percentiles.
    capacities: topic -> messages in its best hour, 95th percentile of busy hours, their number.
    unknown: topics with unsettled messages but without a known capacity.
    """

    asked: Range
    zone: tzinfo
    slo_us: int
    events: int
    first: datetime | None
    last: datetime | None
    now: datetime | None
    span: Span | None
    hours: Sequence[tuple[str, int, Mapping[str, int]]]
    parts: Sequence[tuple[str, int, Mapping[str, int]]]
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

    def late(self, topic: str | None = None) -> Percentiles | None:
        """Lateness of one topic, or of all topics; None without deliveries."""
        return self.lateness.get(((),) if topic is None else (("topic",), topic))


def gather(
    log: DataFrame,
    messages: DataFrame,
    asked: Range,
    zone: tzinfo,
    gaps: Sequence[Any],
    *,
    slo: timedelta,
) -> Figures:
    """Compute all figures of a report; reads the log and the messages once each.

    A report of less than 36 hours has steps below an hour, for which it reads the log again.
    """
    slo_us = slo // timedelta(microseconds=1)
    near = asked.start or asked.end or datetime.now(UTC)
    shift_s = full_hour_shift(zone, int(near.timestamp()))
    with ExitStack() as kept:

        def counted(part_s: int) -> tuple[DataFrame, tables.EventTally]:
            rows = log_cells(asked.of_log(log), shift_s, slo_us, part_s)
            cells = kept.enter_context(tables.cached(rows))
            return cells, tables.tally(cells)

        cells, found = counted(HOUR_S)
        rows = message_cells(asked.of_topics(messages), _micros(asked.start), _micros(asked.end))
        lives = kept.enter_context(tables.cached(rows))
        [[changed_us]] = lives.agg(sf.max("last")).collect()
        newest_us = max(changed_us or 0, found.last_us or 0)
        span = weeks = None
        if found.first_us is not None and found.last_us is not None:
            first_s, last_s = found.first_us // 1_000_000, found.last_us // 1_000_000
            span = span_of(first_s, last_s, zone, shift_s)
            if span.part_s < HOUR_S:
                cells, found = counted(span.part_s)
            weeks = weeks_of(cells, found.hours, first_s, last_s)
        sets = [("topic", "hour"), ("topic", "slot"), ("topic",), ("slot",), ()]
        wanted = demands(lives, newest_us // 1_000_000)
        garbage: dict[str, int] = {}
        for topic, _, counts in found.hours:
            garbage[topic] = garbage.get(topic, 0) + counts["garbage"]
        return Figures(
            asked=asked,
            zone=zone,
            slo_us=slo_us,
            events=found.events,
            first=_moment(found.first_us),
            last=_moment(found.last_us),
            now=_moment(newest_us or None),
            span=span,
            hours=found.hours,
            parts=found.parts,
            weeks=weeks,
            lateness={} if span is None else tables.percentiles(cells, "late", sets, span),
            histogram=tables.histogram(cells),
            handling=tables.percentiles(lives, "handling", [("topic",), ()]),
            attempts=found.attempts,
            reasons=tables.reasons(cells, REASONS, garbage) if any(garbage.values()) else [],
            capacities=found.capacities,
            demands=wanted,
            crossings=_crossings(wanted, found.capacities),
            unknown=[
                topic
                for topic, demand in wanted.items()
                if topic not in found.capacities and demand.total
            ],
            gaps=gaps,
        )


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


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else EPOCH + timedelta(microseconds=micros)
