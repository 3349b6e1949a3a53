"""Forecast: compares the messages that fall due with the most a topic ever handled in an hour.

Hours are counted from the newest event of the archive. The forecast has a resolution of one hour,
because the capacity is only known per hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MINUTES = 60
HOURS = 48
DAYS = 30
"""Range of the forecast: minutes, hours and days shown by the three plots."""


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
    from pyspark.sql import functions as sf

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


def crossing(topic: str, demand: Demand, capacity: int) -> Crossing | None:
    """Simulate the backlog hour by hour. Returns the period with the largest backlog, or None.

    capacity: messages per hour, above 0.
    """
    found: list[Crossing] = []
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
            drained = now + todo / capacity
            found.append(Crossing(topic, capacity, hour, load, peak, peak_hour, drained))
    if behind:
        found.append(Crossing(topic, capacity, hour, load, peak, peak_hour, None))
    return max(found, key=lambda one: one.peak, default=None)
