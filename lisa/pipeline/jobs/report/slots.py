"""The steps of the plots' time axis: from a minute to 30 days, depending on the length."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

SHORT = ((2 * 3_600, 60, "minute"), (12 * 3_600, 300, "5 minutes"), (36 * 3_600, 900, "15 minutes"))
"""Steps below an hour: the longest time that has such steps, their seconds, and their name."""

HOUR_S = 3_600
MOST_HOURS = 8 * 24
MOST_DAYS = 400


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
