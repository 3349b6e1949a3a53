"""Compares the last seven days of a report with the seven days before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.pipeline.jobs.report.tables import Percentiles, percentiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WEEK_S = 7 * 86_400


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
    cells: DataFrame, hours: Sequence[tuple[str, int, Mapping[str, int]]], first_s: int, last_s: int
) -> Weeks | None:
    """The two weeks up to the end of the hour of the last event; None with less than two weeks.

    cells, hours: of the log, see `cells.log_cells` and `tables.EventTally`. first_s, last_s: epoch
    seconds of the first and the last event.
    """
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
