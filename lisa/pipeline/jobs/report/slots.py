"""The steps of the plots' time axis: hours, or days where hours would be too many to see."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Span", "full_hour_shift", "span_of"]

MOST_HOURS = 8 * 24
MOST_DAYS = 400


@dataclass(frozen=True, slots=True)
class Span:
    """Steps of a time axis. `edges`: epoch seconds, one more than there are steps."""

    edges: tuple[int, ...]
    step: str  # "hour", "day" or "30 days"

    def index(self, epoch_s: int) -> int:
        """The step that an instant lies in."""
        from bisect import bisect_right

        return min(max(bisect_right(self.edges, epoch_s) - 1, 0), len(self.edges) - 2)

    def column(self, epoch_s: Column) -> Column:
        """The same of a column, for Spark."""
        from pyspark.sql import functions as sf

        edges = sf.array(*(sf.lit(edge) for edge in self.edges[:-1]))
        behind = sf.size(sf.filter(edges, lambda edge: edge <= epoch_s))
        return sf.greatest(behind - 1, sf.lit(0)).cast("long")


def full_hour_shift(zone: tzinfo, epoch_s: int) -> int:
    """Seconds from UTC's full hours to the zone's: 1800 in India, 0 nearly everywhere."""
    offset = datetime.fromtimestamp(epoch_s, UTC).astimezone(zone).utcoffset() or timedelta(0)
    return int(-offset.total_seconds()) % 3_600


def span_of(first_s: int, last_s: int, zone: tzinfo, shift_s: int) -> Span:
    """Steps that hold both instants, the first at a full hour, or at midnight of the zone."""
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
    day = datetime.fromtimestamp(first_s, UTC).astimezone(zone).replace(
        hour=0, minute=0, second=0, microsecond=0, fold=0)  # fmt: skip
    found = [int(day.timestamp())]
    while found[-1] <= last_s:
        # Midnight to midnight by the calendar: a day of a clock change has 23 or 25 hours.
        day = (day.replace(tzinfo=None) + timedelta(days=1)).replace(tzinfo=zone)
        found.append(int(day.timestamp()))
    return found
