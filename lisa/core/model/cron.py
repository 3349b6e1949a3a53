"""Parses cron expressions into one normal form; does no I/O, so settings can be checked quickly.

Accepted are the six-field form of Quartz (seconds first, `?`, `L`, `6L`, `6#3`), optionally with a
seventh field for the year, the five-field form of crontab, and a plain interval (`"1s"`, `"5m"`).
Weekday numbers follow the dialect: Sunday is 1 with seconds, and 0 or 7 without. The result uses
weekday names, so every scheduler reads it the same way.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage

MIN_INTERVAL = timedelta(milliseconds=100)

_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
_FIELDS = ("second", "minute", "hour", "day-of-month", "month", "day-of-week", "year")
_LONGEST_MONTH = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class CronFields:
    """The fields, each a comma list or `*`: numbers, or `mon` to `sun` in `day_of_week`.

    `day` may also hold `last`, `last fri` or `3rd fri`.
    """

    second: str
    minute: str
    hour: str
    day: str
    month: str
    day_of_week: str
    year: str


@dataclass(frozen=True, slots=True)
class _Field:
    """The values that one field of an expression allows."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    names_from: int = 0

    def refuse(self, text: str, why: str) -> ConfigError:
        return ConfigError(f"cron field {self.name} {text!r}: {why}")

    def number(self, text: str, whole: str) -> int:
        if text.lower() in self.names:
            return self.names.index(text.lower()) + self.names_from
        if text.isascii() and text.isdigit() and len(text) <= 4:
            if self.low <= int(text) <= self.high:
                return int(text)
            raise self.refuse(whole, f"{text} is outside {self.low}-{self.high}")
        near = difflib.get_close_matches(text.lower(), self.names, n=1, cutoff=0.3)
        hint = f"did you mean {near[0].upper()}?" if near else f"use {self.low}-{self.high}"
        raise self.refuse(whole, f"{text!r} is not a value; {hint}")


def read_schedule(text: object) -> CronFields | timedelta:
    """Read a cron expression or a plain interval.

    Raises ConfigError that names the field, the value and the fix.
    """
    if isinstance(text, timedelta):
        return _interval(text)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"not a schedule: {text!r}; write cron fields or an interval like '5s'")
    parts = text.split()
    if len(parts) == 1:
        return _interval(text)
    if len(parts) not in (5, 6, 7):
        raise ConfigError(
            f"cron {text!r} has {len(parts)} fields; write 5 (crontab), 6 (seconds first) "
            "or 7 (with a year)"
        )
    crontab = len(parts) == 5
    if crontab:
        parts = ["0", *parts]
    return _fields([*parts, "*"][:7], crontab=crontab)


def _interval(text: str | timedelta) -> timedelta:
    try:
        every = parse_duration(text)
    except InvalidMessage as error:
        raise ConfigError(f"not a schedule: {text!r}; {error}") from None
    if every < MIN_INTERVAL:
        raise ConfigError(f"an interval of {text!r} is too short; it is at least 100ms")
    return every


def _fields(parts: list[str], *, crontab: bool) -> CronFields:
    second, minute, hour, day_text, month_text, week_text, year = parts
    for name, part in zip(_FIELDS, parts, strict=True):
        if "?" in part and (part != "?" or name not in ("day-of-month", "day-of-week")):
            raise ConfigError(
                f"cron field {name} {part!r}: '?' must be alone, in day-of-month or day-of-week"
            )
    if day_text not in ("*", "?") and week_text not in ("*", "?"):
        # Dialects disagree on whether both or either must match: refuse instead of guessing.
        raise ConfigError(
            f"cron day-of-month {day_text!r} and day-of-week {week_text!r} exclude each other; "
            "write '*' or '?' for one of them"
        )
    months = _values(month_text, _Field("month", 1, 12, _MONTHS, 1))
    day = _day(day_text, months)
    day_of_week = "*"
    if week_text not in ("*", "?"):
        nth, names = _weekdays(week_text, crontab=crontab)
        day, day_of_week = (nth or day), (names or "*")
    return CronFields(
        second=_plain(second, _Field("second", 0, 59)),
        minute=_plain(minute, _Field("minute", 0, 59)),
        hour=_plain(hour, _Field("hour", 0, 23)),
        day=day,
        month=_joined(months, 12),
        day_of_week=day_of_week,
        year=_plain(year, _Field("year", 1970, 2099)),
    )


def _day(text: str, months: list[int]) -> str:
    field = _Field("day-of-month", 1, 31)
    if text == "?":
        return "*"
    if "W" in text.upper():
        raise field.refuse(text, "W (nearest working day) is not supported; name the days")
    if text.upper() == "L":
        return "last"
    if "L" in text.upper():
        raise field.refuse(text, "L is supported only alone, as the last day of the month")
    days = _values(text, field)
    if min(days) > max(_LONGEST_MONTH.get(month, 31) for month in months):
        raise field.refuse(text, "no such day in the months given; it would never fire")
    return _joined(days, 31)


def _weekdays(text: str, *, crontab: bool) -> tuple[str, str]:
    """Ordinal days (`3rd fri`) and weekday names; one of the two is empty."""
    # Crontab writes Sunday as 0 or 7, Quartz as 1.
    field = (
        _Field("day-of-week", 0, 7, _WEEKDAYS)
        if crontab
        else _Field("day-of-week", 1, 7, _WEEKDAYS, 1)
    )
    if "W" in text.upper().replace("WED", ""):
        raise field.refuse(text, "W (nearest working day) is not supported; name the days")
    if text.upper() == "L":
        return "", "sat"
    items = text.split(",")
    ordinal = [item for item in items if "#" in item or item.upper().endswith("L")]
    if not ordinal:
        names = _week_values(text, field)
        return "", "*" if len(names) == 7 else ",".join(names)
    if len(ordinal) < len(items):
        raise field.refuse(text, "L and # cannot be mixed with plain weekdays in one expression")
    return ",".join(_ordinal(item, field) for item in items), ""


def _ordinal(item: str, field: _Field) -> str:
    if "#" not in item:
        return f"last {_weekday(field.number(item[:-1], item), field)}"
    day, _, ordinal = item.partition("#")
    if ordinal not in ("1", "2", "3", "4", "5"):
        raise field.refuse(item, "write 1 to 5 after #, the week of the month")
    return f"{_ORDINALS[int(ordinal) - 1]} {_weekday(field.number(day, item), field)}"


def _weekday(number: int, field: _Field) -> str:
    return _WEEKDAYS[(number - field.names_from) % 7]


def _week_values(text: str, field: _Field) -> list[str]:
    def sunday_last(number: int) -> int:
        return number + 7 if number == field.names_from else number

    numbers = _values(text, field, range_end=sunday_last)
    found = {_weekday(number, field) for number in numbers}
    return [name for name in _WEEKDAYS if name in found]


def _plain(text: str, field: _Field) -> str:
    return _joined(_values(text, field), field.high - field.low + 1)


def _joined(values: list[int], size: int) -> str:
    return "*" if len(values) == size else ",".join(map(str, values))


def _values(
    text: str, field: _Field, range_end: Callable[[int], int] = lambda last: last
) -> list[int]:
    """Every number in a comma list of `*`, `a` and `a-b`, each optionally with `/step`."""
    found: set[int] = set()
    for item in text.split(","):
        body, slash, step_text = item.partition("/")
        step = 1
        if slash:
            if not (step_text.isascii() and step_text.isdigit() and 0 < int(step_text) <= 9999):
                raise field.refuse(text, f"the step {step_text!r} is not a positive number")
            step = int(step_text)
        first_text, dash, last_text = body.partition("-")
        if body == "*":
            first, last = field.low, field.high
        else:
            first = field.number(first_text, text)
            last = field.high if slash else first
        if dash:
            last = field.number(last_text, text)
            # `SAT-SUN` is valid: Sunday ends the week here in either dialect.
            last = range_end(last) if last < first else last
            if last < first:
                raise field.refuse(
                    text,
                    f"the range {body} wraps around; "
                    f"write {first_text}-{field.high},{field.low}-{last_text}",
                )
        found.update(range(first, last + 1, step))
    return sorted(found)
