"""Parses the schedules of settings into one normal form; does no I/O.

Accepted are the six-field form of Quartz (seconds first, `?`, `L`, `6L`, `6#3`), optionally with a
seventh field for the year, the five-field form of crontab, and a plain interval (`"1s"`, `"5m"`).
Weekday numbers follow the dialect: Sunday is 1 with seconds, and 0 or 7 without. The result uses
weekday names, so every scheduler reads it the same way.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.recurring.calendar import LAST, CronPattern, parse_fields

MIN_INTERVAL = timedelta(milliseconds=100)

_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd", 4: "4th", 5: "5th", LAST: "last"}


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
    pattern = parse_fields(parts, is_quartz=len(parts) > 5, has_quartz_forms=True)
    day, day_of_week = _days(pattern, " ".join(parts))
    return CronFields(
        second=_joined(pattern.seconds, 60),
        minute=_joined(pattern.minutes, 60),
        hour=_joined(pattern.hours, 24),
        day=day,
        month=_joined(pattern.months, 12),
        day_of_week=day_of_week,
        year="*" if pattern.years is None else _joined(pattern.years),
    )


def _interval(text: str | timedelta) -> timedelta:
    try:
        every = parse_duration(text)
    except InvalidMessage as error:
        raise ConfigError(f"not a schedule: {text!r}; {error}") from None
    if every < MIN_INTERVAL:
        raise ConfigError(f"an interval of {text!r} is too short; it is at least 100ms")
    return every


def _days(pattern: CronPattern, text: str) -> tuple[str, str]:
    """The fields `day` and `day_of_week`. Raises ConfigError for what they cannot express."""
    if pattern.nearest or pattern.has_last_working_day:
        raise ConfigError(f"cron {text!r}: W (nearest working day) is not supported; name the days")
    day = "last" if pattern.has_last_day else _joined(pattern.days, 31)
    if pattern.has_last_day and pattern.days:
        raise ConfigError(f"cron {text!r}: L is supported only alone, as the last day of the month")
    weekdays = ",".join(_WEEKDAYS[number] for number in sorted(pattern.weekdays))
    weekdays = "*" if len(pattern.weekdays) == len(_WEEKDAYS) else weekdays
    nth = sorted(pattern.nth_weekdays)
    if nth and weekdays:
        raise ConfigError(f"cron {text!r}: L and # cannot be mixed with plain weekdays")
    if not pattern.needs_both or (day != "*" and weekdays != "*"):
        # Dialects disagree on whether both or either must match: refuse instead of guessing.
        raise ConfigError(
            f"cron {text!r}: day of month and day of week exclude each other; write '*' or '?' for "
            "one of them"
        )
    if nth:
        return ",".join(f"{_ORDINALS[week]} {_WEEKDAYS[number]}" for number, week in nth), "*"
    return day, weekdays


def _joined(values: Collection[int], size: int = 0) -> str:
    """A comma list, or `*` for all values of a field of that size."""
    return "*" if len(values) == size else ",".join(map(str, sorted(values)))
