"""Cron patterns, and their instants in a time zone.

The grammar is that of the Open Cron Pattern Specification (OCPS) 1.4. Five fields are minute, hour,
day of month, month, day of week; six begin with seconds; seven end with a year. Sunday is 0 or 7.
Six or seven fields with a `?` are the form of Quartz instead: Sunday is 1, and a step may follow a
single number (`0/15`).

Across daylight saving changes, patterns follow Vixie cron. A pattern whose minute and hour are
fixed follows the wall clock: a time that a change of the clock skips fires right after the gap (or
not at all, with `dst="skip"`), and a time that occurs twice fires the first time. A pattern with
`*` as minute or hour follows elapsed time: it fires whenever the wall clock matches.
"""

from __future__ import annotations

import calendar
import difflib
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import product

from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage

LAST = -1
"""Instead of the number of a week: the last such weekday of the month."""

FIRST_YEAR, LAST_YEAR = 1970, 2199
MIN_INTERVAL = timedelta(milliseconds=100)
"""The shortest interval of a manager's own jobs."""

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_UNITS = {"second": "s", "minute": "m", "hour": "h", "day-of-month": "d", "day-of-week": "d"}
_LONGEST_MONTH = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}

YEARS_AHEAD = 50
"""How far to search. The rarest date, a given weekday on February 29, recurs within 40 years."""

NEAR_S = 26 * 3600
"""Longer than any change of a clock: Apia skipped a whole day."""

_END_S = int(datetime(LAST_YEAR + 1, 1, 2, tzinfo=UTC).timestamp())
"""After the last year, in every time zone."""


@dataclass(frozen=True, slots=True)
class CronPattern:
    """A parsed pattern; the fields hold the allowed values, sorted.

    days: days of the month. nearest: days replaced by their nearest weekday (`15W`).
    has_last_day, has_last_working_day: whether `L` and `LW` are among the days of the month.
    weekdays: 0 (Sunday) to 6. nth_weekdays: weekdays with their number in the month, or `LAST`.
    needs_both: whether day of month and day of week must both match; otherwise one suffices.
    is_wildcard: whether minute or hour begins with `*`, so that the pattern follows elapsed time
        across daylight saving changes.
    """

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    nearest: frozenset[int]
    has_last_day: bool
    has_last_working_day: bool
    months: frozenset[int]
    weekdays: frozenset[int]
    nth_weekdays: frozenset[tuple[int, int]]
    years: frozenset[int] | None
    needs_both: bool
    is_wildcard: bool


@dataclass(frozen=True, slots=True)
class _Field:
    """The values that one field allows.

    has_quartz_forms: see `parse_fields`.
    """

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    names_from: int = 0
    has_quartz_forms: bool = False

    def refuse(self, text: str, why: str) -> ConfigError:
        return ConfigError(f"cron field {self.name} {text!r}: {why}")

    def number(self, item: str, whole: str) -> int:
        if item in self.names:
            return self.names.index(item) + self.names_from
        if not re.fullmatch(r"[0-9]{1,4}", item):
            near = difflib.get_close_matches(item, self.names, n=1, cutoff=0.3)
            names = f" or {self.names[0]}-{self.names[-1]}" if self.names else ""
            hint = f"did you mean {near[0]}?" if near else f"use {self.low}-{self.high}{names}"
            raise self.refuse(whole, f"{item!r} is not a value; {hint}")
        if not self.low <= int(item) <= self.high:
            raise self.refuse(whole, f"{item} is outside {self.low}-{self.high}")
        return int(item)

    def values(self, text: str) -> list[int]:
        """The values of a comma list of `*`, `a` and `a-b`, each with an optional step."""
        return sorted({value for item in text.split(",") for value in self._of_item(item, text)})

    def _of_item(self, item: str, whole: str) -> range:
        body, slash, step_text = item.partition("/")
        step = 1
        if slash:
            if not re.fullmatch(r"[0-9]{1,4}", step_text) or not int(step_text):
                raise self.refuse(whole, f"the step {step_text!r} is not a positive number")
            step = int(step_text)
            most = len(_WEEKDAYS) if self.high == 7 else self.high - self.low + 1
            if step > most:  # it would fire as if there were no step
                every = f"{step}{_UNITS[self.name]}" if self.name in _UNITS else ""
                cure = f"; use every={every!r}, or {every!r} as a crontab setting" if every else ""
                raise self.refuse(whole, f"the step {step} exceeds the {most} values{cure}")
        if body == "*":
            return range(self.low, self.high + 1, step)
        first_text, dash, last_text = body.partition("-")
        first = last = self.number(first_text, whole)
        if dash:
            last = self.number(last_text, whole)
            if last < first and self.high == 7 and last == self.names_from:
                last += 7  # SAT-SUN
            if last < first:
                raise self.refuse(
                    whole,
                    f"the range {body} ends before it begins; write "
                    f"{first_text}-{self.high},{self.low}-{last_text}",
                )
        elif slash:
            if not self.has_quartz_forms:
                raise self.refuse(
                    whole, f"a step follows * or a range; write {first}-{self.high}/{step}"
                )
            last = self.high
        return range(first, last + 1, step)


@lru_cache(maxsize=4096)
def parse_cron(text: str) -> CronPattern:
    """Parse a pattern. Raises ConfigError that names the field, the value and the fix."""
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise ConfigError(f"cron {text!r} is not known; use one of {', '.join(NICKNAMES)}")
        text = NICKNAMES[text.lower()]
    parts = text.split()
    is_quartz = len(parts) > 5 and "?" in (parts[3], parts[5])
    return parse_fields(parts, is_quartz=is_quartz, has_quartz_forms=is_quartz)


def parse_fields(parts: Sequence[str], *, is_quartz: bool, has_quartz_forms: bool) -> CronPattern:
    """Parse the five, six or seven fields of a pattern. Raises ConfigError.

    is_quartz: whether Sunday is 1; otherwise it is 0 or 7.
    has_quartz_forms: whether a step may follow a single number, and `L` as the day of week is
        Saturday.
    """
    if len(parts) not in (5, 6, 7):
        raise ConfigError(
            f"cron {' '.join(parts)!r} has {len(parts)} fields; write 5 (crontab), 6 (seconds "
            "first) or 7 (with a year)"
        )
    parts = ["0", *parts, "*"] if len(parts) == 5 else [*parts, "*"][:7]
    second, minute, hour, day_text, month, week_text, year = map(str.upper, parts)
    for name, part in zip(("second", "minute", "hour", "month", "year"), (second, minute, hour,
                          month, year), strict=True):  # fmt: skip
        if "?" in part:
            raise ConfigError(f"cron field {name} {part!r}: use '*'; '?' is for days only")
    needs_both = week_text.startswith("+")
    day_text = "*" if day_text == "?" else day_text
    week_text = week_text.removeprefix("+")
    week_text = "*" if week_text == "?" else week_text

    def field(name: str, low: int, high: int, *names: str, names_from: int = 0) -> _Field:
        return _Field(name, low, high, names, names_from, has_quartz_forms)

    months = frozenset(field("month", 1, 12, *_MONTHS, names_from=1).values(month))
    days = _Days(field("day-of-month", 1, 31), day_text)
    week = (
        field("day-of-week", 1, 7, *_WEEKDAYS, names_from=1)
        if is_quartz
        else field("day-of-week", 0, 7, *_WEEKDAYS)
    )
    weekdays, nth = _weekdays(week, week_text)
    needs_both = needs_both or day_text.startswith("*") or week_text.startswith("*")
    days.check(months, is_alone=needs_both)
    years = field("year", FIRST_YEAR, LAST_YEAR).values(year)
    return CronPattern(
        seconds=tuple(field("second", 0, 59).values(second)),
        minutes=tuple(field("minute", 0, 59).values(minute)),
        hours=tuple(field("hour", 0, 23).values(hour)),
        days=frozenset(days.plain),
        nearest=frozenset(days.nearest),
        has_last_day=days.has_last,
        has_last_working_day=days.has_last_working,
        months=months,
        weekdays=weekdays,
        nth_weekdays=nth,
        years=None if year == "*" else frozenset(years),
        needs_both=needs_both,
        is_wildcard=minute.startswith("*") or hour.startswith("*"),
    )


def parse_job_schedule(text: str | timedelta) -> CronPattern | timedelta:
    """The schedule of a manager's own job, from a setting: a pattern or an interval (`5s`).

    Five fields are those of crontab, six or seven those of Quartz, also without a `?`. Raises
    ConfigError that names the field, the value and the fix.
    """
    parts = text.split() if isinstance(text, str) else [""]
    if len(parts) < 2:
        return _interval(text)
    pattern = parse_fields(parts, is_quartz=len(parts) > 5, has_quartz_forms=True)
    names_both = len(pattern.days) < 31 and len(pattern.weekdays) < 7
    if names_both or not pattern.needs_both:
        # Dialects disagree on whether both or either must match: refuse instead of guessing.
        raise ConfigError(
            f"cron {text!r}: day of month and day of week exclude each other; write '*' or '?' for "
            "one of them"
        )
    return pattern


def _interval(text: str | timedelta) -> timedelta:
    try:
        every = parse_duration(text)
    except InvalidMessage as error:
        raise ConfigError(
            f"not a schedule: {text!r}; write cron fields, or an interval such as '5s': {error}"
        ) from None
    if every < MIN_INTERVAL:
        raise ConfigError(f"an interval of {text!r} is too short; it is at least 100ms")
    return every


class _Days:
    """The day of month: numbers, `L`, `LW` and `15W`."""

    def __init__(self, field: _Field, text: str) -> None:
        self._field, self._text = field, text
        self.plain: set[int] = set()
        self.nearest: set[int] = set()
        items = text.split(",")
        self.has_last = "L" in items
        self.has_last_working = "LW" in items
        for item in items:
            if item in ("L", "LW"):
                continue
            if item.endswith("W"):
                if len(items) > 1 or not item[:-1].isdigit():
                    raise field.refuse(text, "W follows a single day, as in 15W or LW")
                self.nearest.add(field.number(item[:-1], text))
            else:
                self.plain.update(field.values(item))

    def check(self, months: frozenset[int], *, is_alone: bool) -> None:
        """Refuse days that no month has."""
        named = self.plain | self.nearest
        longest = max(_LONGEST_MONTH.get(month, 31) for month in months)
        has_other = not is_alone or self.has_last or self.has_last_working
        if named and min(named) > longest and not has_other:
            raise self._field.refuse(self._text, "no month of the pattern has that day")


def _weekdays(field: _Field, text: str) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """Weekdays from 0, and pairs of weekday and its number in the month."""
    plain: set[int] = set()
    nth: set[tuple[int, int]] = set()

    def weekday(number: int) -> int:
        return (number - field.names_from) % 7

    for item in text.split(","):
        day, mark, number = item.partition("#")
        if mark:
            if number not in ("1", "2", "3", "4", "5", "L"):
                raise field.refuse(text, "write 1 to 5 or L after #, the week of the month")
            nth.add((weekday(field.number(day, text)), LAST if number == "L" else int(number)))
        elif item == "L" and field.has_quartz_forms:
            plain.add(6)  # Quartz: the last day of the week, Saturday
        elif item.endswith("L"):
            nth.add((weekday(field.number(item[:-1], text)), LAST))
        else:
            plain.update(map(weekday, field.values(item)))
    return frozenset(plain), frozenset(nth)


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
