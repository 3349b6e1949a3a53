"""What falls due, against what was handled in the best hour: where the two cross.

Hours are counted from the newest event of the archive, and an hour is the shortest time for which
a capacity is known: what was handled in one hour says nothing about one minute of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["DAYS", "HOURS", "MINUTES", "Crossing", "Demand", "crossing", "demands"]

MINUTES = 60
HOURS = 48
DAYS = 30
"""How far the three plots look ahead."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What of one topic is not settled, by when it falls due, counted from the newest event.

    minutes, hours: messages by number of the minute or hour; hours reach as far as DAYS.
    """

    overdue: int = 0
    later: int = 0
    minutes: Mapping[int, int] = field(default_factory=dict)
    hours: Mapping[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of it."""
        return self.overdue + self.later + sum(self.hours.values())

    def within(self, hours: int) -> int:
        """What falls due in the next hours, without what is overdue."""
        return sum(n for hour, n in self.hours.items() if hour < hours)

    def days(self) -> dict[int, int]:
        """By days of 24 hours."""
        found: dict[int, int] = {}
        for hour, n in self.hours.items():
            found[hour // 24] = found.get(hour // 24, 0) + n
        return found


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one topic's messages fall due faster than they were ever handled.

    Hours are numbers counted from now. hour, load: the first hour that cannot be done, and what
    there is to do in it, with what was left over; peak, peak_hour: the most that is left over, at
    the end of which hour; drained: hours until nothing is left over, None if not within DAYS.
    """

    topic: str
    capacity: int
    hour: int
    load: int
    peak: int
    peak_hour: int
    drained: float | None


def demands(cells: DataFrame, now_s: int) -> dict[str, Demand]:
    """Count what is due from the cells of tables.message_cells."""
    from pyspark.sql import functions as sf

    ahead = sf.col("minute") - now_s // 60
    due = cells.where("what = 'due'").withColumn("ahead", ahead)
    place = sf.when(ahead < 0, "overdue").when(ahead >= DAYS * 24 * 60, "later").otherwise("hours")
    number = sf.when((ahead >= 0) & (ahead < DAYS * 24 * 60), sf.floor(ahead / 60))
    by_hour = due.groupBy("topic", place.alias("place"), number.alias("number"))
    minutes = due.where((ahead >= 0) & (ahead < MINUTES))
    by_minute = minutes.groupBy("topic", sf.lit("minutes").alias("place"), ahead.alias("number"))
    rows = by_hour.agg(sf.sum("n").alias("n")).unionByName(by_minute.agg(sf.sum("n").alias("n")))
    counts: dict[str, dict[str, dict[int, int]]] = {}
    for topic, where, index, n in rows.collect():
        counts.setdefault(topic, {}).setdefault(where, {})[index or 0] = n
    return {
        topic: Demand(
            overdue=found.get("overdue", {}).get(0, 0), later=found.get("later", {}).get(0, 0),
            minutes=found.get("minutes", {}), hours=found.get("hours", {}),
        )
        for topic, found in sorted(counts.items())
    }  # fmt: skip


def crossing(topic: str, demand: Demand, capacity: int) -> Crossing | None:
    """Play it forward hour by hour: the worst stretch that is more than was ever handled, or None.

    `capacity`: messages an hour, above 0. A stretch ends when nothing is left over.
    """
    worst: Crossing | None = None
    hour = load = peak = peak_hour = 0
    left = demand.overdue
    behind = False
    for now in range(DAYS * 24):
        todo = left + demand.hours.get(now, 0)
        left = max(todo - capacity, 0)
        if left and not behind:
            behind, hour, load, peak = True, now, todo, 0
        if left > peak:
            peak, peak_hour = left, now
        if behind and not left:
            behind = False
            found = Crossing(topic, capacity, hour, load, peak, peak_hour, now + todo / capacity)
            worst = found if worst is None or found.peak > worst.peak else worst
    if behind:
        found = Crossing(topic, capacity, hour, load, peak, peak_hour, None)
        worst = found if worst is None or found.peak > worst.peak else worst
    return worst
