"""The instants of a cron pattern in a time zone, across daylight saving changes as in Vixie cron.

A pattern whose minute and hour are fixed follows the wall clock: a time that a change of the clock
skips fires right after the gap (or not at all, with `dst="skip"`), and a time that occurs twice
fires the first time. A pattern with `*` as minute or hour follows elapsed time: it fires whenever
the wall clock matches.
"""

from __future__ import annotations

import calendar
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import product

from lisa.core.model.recurring.grammar import LAST, LAST_YEAR, CronPattern

YEARS_AHEAD = 50
"""How far to search. The rarest date, a given weekday on February 29, recurs within 40 years."""

NEAR_S = 26 * 3600
"""Longer than any change of a clock: Apia skipped a whole day."""

_END_S = int(datetime(LAST_YEAR + 1, 1, 2, tzinfo=UTC).timestamp())
"""After the last year, in every time zone."""


def next_instant(pattern: CronPattern, zone: tzinfo, after_s: int, *, skips: bool) -> int | None:
    """The pattern's first instant after `after_s`, in epoch seconds; None if none is left.

    skips: whether times within a gap of the wall clock do not fire. The search covers the years
    1970 to 2199: near the years 1 and 9999, a wall time may lie outside datetime's range.
    """
    if after_s >= _END_S:
        return None
    after_s = max(after_s, -1)
    if pattern.is_wildcard:
        return _next_elapsed(pattern, zone, after_s)
    wall = wall_time(zone, after_s)
    for local in _local_times(pattern, wall):
        instant, is_real = _instant(zone, local)
        if instant > after_s and (is_real or not skips):
            return instant
    return None


def first_instant(pattern: CronPattern, zone: tzinfo, *, skips: bool) -> int | None:
    """The pattern's first instant of all; None if it names days that its years do not have."""
    if not pattern.years:
        return next_instant(pattern, zone, -1, skips=skips)
    begin = datetime(min(pattern.years), 1, 1, tzinfo=UTC)
    return next_instant(pattern, zone, int(begin.timestamp()) - NEAR_S, skips=skips)


def wall_instant(zone: tzinfo, local: datetime, fold: int = 0) -> int:
    """The instant at which the wall clock shows `local`, in epoch seconds.

    A time in a gap gives the end of the gap. Of a time that occurs twice, `fold` chooses one.
    """
    if fold:
        second = _epoch(local) - _offset_at(zone, local, 1)
        if wall_time(zone, second) == local:
            return second
    return _instant(zone, local)[0]


def _next_elapsed(pattern: CronPattern, zone: tzinfo, after_s: int) -> int | None:
    """The first instant after `after_s` at which the wall clock matches."""
    seen_s, offset = after_s, offset_s(zone, after_s)  # the offset holds at seen_s
    while True:
        wall = wall_time(UTC, after_s + offset)
        local = next(_local_times(pattern, wall), None)
        if local is None:
            return None
        instant = _epoch(local) - offset
        change = first_change(zone, seen_s, min(instant, seen_s + NEAR_S))
        if change is not None:
            # The wall clock changes first: look again from there, with the new offset.
            after_s, seen_s = change - 1, change
        elif instant - seen_s <= NEAR_S:
            return instant
        else:
            # Nothing matches before, whatever the clock's changes: continue shortly before it.
            after_s = seen_s = max(seen_s + 1, instant - NEAR_S)
        offset = offset_s(zone, seen_s)


def first_change(zone: tzinfo, after_s: int, until_s: int) -> int | None:
    """The first instant after `after_s`, at most `until_s`, with another offset; None if none."""
    before = offset_s(zone, after_s)
    if offset_s(zone, until_s) == before:
        return None
    low, high = after_s, until_s
    while high - low > 1:
        middle = (low + high) // 2
        if offset_s(zone, middle) == before:
            low = middle
        else:
            high = middle
    return high


def _instant(zone: tzinfo, local: datetime) -> tuple[int, bool]:
    """The first instant at which the wall clock shows `local` or later, and whether it shows it."""
    first = _epoch(local) - _offset_at(zone, local, 0)
    if wall_time(zone, first) == local:
        return first, True
    # In a gap, fold=1 gives an instant before the change.
    earlier = _epoch(local) - _offset_at(zone, local, 1)
    change = first_change(zone, earlier - 1, first)
    return (first if change is None else change), False


def wall_time(zone: tzinfo, instant_s: int) -> datetime:
    """What the wall clock shows at an instant in epoch seconds, without the zone."""
    return datetime.fromtimestamp(instant_s, zone).replace(tzinfo=None, fold=0)


def offset_s(zone: tzinfo, instant_s: int) -> int:
    """The offset of a zone from UTC at an instant, in seconds."""
    return _seconds(datetime.fromtimestamp(instant_s, zone).utcoffset())


def _offset_at(zone: tzinfo, local: datetime, fold: int) -> int:
    return _seconds(local.replace(tzinfo=zone, fold=fold).utcoffset())


def _seconds(offset: timedelta | None) -> int:
    return 0 if offset is None else offset.days * 86_400 + offset.seconds


def _epoch(local: datetime) -> int:
    """Epoch seconds of a wall time, as if it were UTC."""
    return calendar.timegm(local.timetuple())


def _local_times(pattern: CronPattern, after: datetime) -> Iterator[datetime]:
    """All wall times of the pattern after `after`, in order."""
    at = after.time().replace(microsecond=0)
    for day in _dates(pattern, after.date()):
        for moment in _times(pattern, at if day == after.date() else None):
            yield datetime.combine(day, moment)


def _times(pattern: CronPattern, after: time | None) -> Iterator[time]:
    """The times of day of the pattern, in order; if a time is given, only those after it."""
    hours = pattern.hours
    if after is not None:
        hours = hours[bisect_left(hours, after.hour) :]
    for hour, minute in product(hours, pattern.minutes):
        if after is not None and (hour, minute) < (after.hour, after.minute):
            continue
        for second in pattern.seconds:
            moment = time(hour, minute, second)
            if after is None or moment > after:
                yield moment


def _dates(pattern: CronPattern, first: date) -> Iterator[date]:
    """The dates of the pattern from `first` on, in order."""
    year, month = first.year, first.month
    while year <= min(first.year + YEARS_AHEAD, LAST_YEAR):
        if month in pattern.months and (pattern.years is None or year in pattern.years):
            days = days_of(pattern, year, month)
            is_first = (year, month) == (first.year, first.month)
            for day in days[bisect_left(days, first.day) if is_first else 0 :]:
                yield date(year, month, day)
        year, month = (year + 1, 1) if month == 12 else (year, month + 1)


@lru_cache(maxsize=4096)
def days_of(pattern: CronPattern, year: int, month: int) -> tuple[int, ...]:
    """The days of a month on which the pattern fires."""
    first_weekday, length = calendar.monthrange(year, month)
    special = {_nearest_working_day(first_weekday, length, day) for day in pattern.nearest}
    if pattern.has_last_day:
        special.add(length)
    if pattern.has_last_working_day:
        special.add(_nearest_working_day(first_weekday, length, length))

    def matches(day: int) -> bool:
        weekday = (first_weekday + day) % 7  # 0 is Sunday
        number = (day + 6) // 7
        by_day = day in pattern.days or day in special
        by_week = (
            weekday in pattern.weekdays
            or (weekday, number) in pattern.nth_weekdays
            or (day + 7 > length and (weekday, LAST) in pattern.nth_weekdays)
        )
        return (by_day and by_week) if pattern.needs_both else (by_day or by_week)

    return tuple(day for day in range(1, length + 1) if matches(day))


def _nearest_working_day(first_weekday: int, length: int, day: int) -> int:
    """The working day nearest to a day, within its month; 0 if the month has no such day."""
    if day > length:
        return 0
    weekday = (first_weekday + day - 1) % 7  # 5 is Saturday
    if weekday == 5:
        return day - 1 if day > 1 else day + 2
    if weekday == 6:
        return day + 1 if day < length else day - 2
    return day
