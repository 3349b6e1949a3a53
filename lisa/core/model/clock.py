"""Durations and instants as exact integers, rounded up so that nothing is early.

Lisa represents a duration as milliseconds and an instant as epoch milliseconds, UTC. Callers use
`timedelta`, aware `datetime`, or text with a unit (`"10s"`). This module converts between them with
integer arithmetic and rounds fractions of a millisecond up.

Every invalid value raises `InvalidMessage`, which is also a `ValueError`. The settings convert it
to a `ConfigError` that names the file and the key.
"""

import math
import operator
import re
import time
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import SupportsIndex

from lisa.core.model.errors import ConfigError, InvalidMessage

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_DUE_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last instant that a `datetime` can hold in whole milliseconds."""

MOST_BUSINESS_DAYS = 250

OLDEST_DUE_MS = time.time_ns() // 1_000_000 - 3_652 * 86_400_000
"""Ten years before this process started. An earlier due time is a mistake, often of the unit."""

_SECONDS_ERA = range(10**8, 10**11)
"""Epoch seconds from 1973 to 5138. Read as milliseconds, all of them are before April 1973."""

_DATES = range(1900_01_01, 10_000_00_00)
"""Dates as in 20261224. Read as milliseconds, all of them are in the first two days of 1970."""

COMPACT = (
    "(19|2[0-9])[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])([01][0-9]|2[0-3])([0-5][0-9]){2}"
)
"""Digits of a time as in 20261224090000."""

FIRST_COMPACT_MS, LAST_COMPACT_MS = 1900_01_01_00_00_00, 2999_12_31_23_59_59
"""The bounds of numbers like `COMPACT`. Read as milliseconds, they are in 2572 and 2920."""

_ZERO = timedelta(0)
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_PART = re.compile(r"([0-9]+)(?:\.([0-9]{1,6}))?(ms|[smhd])")
_DURATION = re.compile(rf"(?:{_PART.pattern}\s*)+")
_NO_ZONE = re.compile(r"right/|localtime$|posixrules$|Factory$")
"""Files among the time zone data: with leap seconds, or with what this machine is set to."""
_OFFSET = re.compile(r"([+-])([0-9]{2}):?([0-9]{2})")


def parse_duration(value: object, *, bare_ms: bool = False) -> timedelta:
    """Read a duration: a timedelta, `"500ms"`, `"10s"`, `"1.5s"`, `"1h30m"`, `"2d"` or a bare 0.

    A bare number other than 0 is refused because it has no unit; `bare_ms` accepts it as
    milliseconds. Raises InvalidMessage, also for a negative duration.
    """
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise InvalidMessage(f"a duration cannot be negative: {value!r}")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _bare(value, bare_ms)
    if not isinstance(value, str):
        raise InvalidMessage(f"not a duration: {value!r}; write a number with a unit, as in '10s'")
    text = value.strip().lower()
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return _bare(int(text), bare_ms)
    if not _DURATION.fullmatch(text):
        raise InvalidMessage(
            f"not a duration: {value!r}; write numbers with ms, s, m, h or d, as in '1h30m'"
        )
    try:
        us = 0
        for whole, fraction, unit in _PART.findall(text):
            us -= -int(whole + fraction) * 1_000 * _UNITS_MS[unit] // 10 ** len(fraction)
        return timedelta(microseconds=us)
    except (OverflowError, ValueError):  # int() refuses more than 4,300 digits
        raise InvalidMessage(f"a duration of {value!r} is too long") from None


def named_duration(name: str, value: object) -> timedelta:
    """Like `parse_duration`, for the parameter `name`, which errors begin with."""
    if type(value) is timedelta and value >= _ZERO:
        return value
    try:
        return parse_duration(value)
    except InvalidMessage as error:
        raise InvalidMessage(f"{name}: {error}") from None


def option_duration(name: str, value: object) -> timedelta:
    """Like `named_duration`, but raises ConfigError: for the options of a role."""
    try:
        return named_duration(name, value)
    except InvalidMessage as error:
        raise ConfigError(str(error)) from None


def checked_delay_ms(delay: timedelta | str, name: str = "delay") -> int:
    """A delay from now in milliseconds. Raises InvalidMessage, also for an end after 9999."""
    delay_ms = duration_ms(named_duration(name, delay))
    # The server's clock decides when a message is due; the local one suffices for this check.
    if delay_ms + time.time_ns() // 1_000_000 > MAX_DUE_MS:
        raise InvalidMessage(f"a {name} of {human(delay_ms)} ends beyond the year 9999")
    return delay_ms


def checked_shift_ms(shift: object) -> int:
    """How far a due time moves, in milliseconds: a timedelta or text, negative or with a sign.

    Raises InvalidMessage.
    """
    if isinstance(shift, timedelta):
        return duration_ms(shift)
    text = shift.strip() if isinstance(shift, str) else ""
    length = named_duration("shift", text[1:] if text[:1] in ("+", "-") else shift)
    return duration_ms(-length if text.startswith("-") else length)


def checked_ttl_ms(ttl: timedelta | str) -> int:
    """A ttl in milliseconds, at most `MAX_DUE_MS`. Raises InvalidMessage for 0."""
    ttl_ms = duration_ms(named_duration("ttl", ttl))
    if not ttl_ms:
        raise InvalidMessage("a ttl counts from the due time and must exceed 0")
    return min(ttl_ms, MAX_DUE_MS)


def _bare(number: int, bare_ms: bool) -> timedelta:  # noqa: FBT001 - private, one caller
    if number != 0 and not bare_ms:
        raise InvalidMessage(f"{number} has no unit; write '{number}ms' or '{number}s'")
    if number < 0:
        raise InvalidMessage(f"a duration cannot be negative: {number}")
    try:
        return timedelta(milliseconds=number)
    except OverflowError:
        raise InvalidMessage(f"a duration of {number} ms is too long") from None


def duration_ms(value: timedelta) -> int:
    """Whole milliseconds, rounded up; negative for a negative duration."""
    # Computed from the parts, because negating an extreme timedelta overflows.
    return value.days * 86_400_000 + value.seconds * 1_000 - (-value.microseconds // 1_000)


def datetime_ms(moment: datetime, zone: tzinfo | None = None) -> int:
    """Epoch milliseconds of a moment, rounded up.

    A naive moment is local time in `zone`. If the clock is set back and a local time occurs twice,
    `fold` selects one (0: the first). If the clock is set forward and a local time does not exist,
    the moment moves later by the length of the gap, as in java.time: 02:30 becomes 03:30.

    Raises InvalidMessage for a naive moment without a zone.
    """
    try:
        is_naive = moment.utcoffset() is None
    except Exception as error:  # noqa: BLE001  NaT of pandas, or any program's tzinfo
        raise InvalidMessage(f"{moment!r} is not a time: {error}") from None
    if is_naive:
        if zone is None:
            raise InvalidMessage(
                f"{moment.isoformat()} names no time zone; "
                "use an aware datetime, or give the producer a zone"
            )
        moment = moment.replace(tzinfo=zone)
    if hasattr(moment.tzinfo, "localize"):
        moment = _without_pytz(moment)
    first = moment.replace(fold=0)
    second = moment.replace(fold=1)
    before, after = first.utcoffset(), second.utcoffset()
    if before is None or after is None:
        raise InvalidMessage(f"the time zone of {moment!r} has no offset")
    chosen = first if before < after or not moment.fold else second
    return duration_ms(chosen - EPOCH)


def _without_pytz(moment: datetime) -> datetime:
    """The same moment in a zone that follows PEP 495.

    A zone of pytz has a fixed offset, which `localize` chooses; without, it is local mean time.
    Raises InvalidMessage if the zone does not have the offset at that time.
    """
    zone = parse_zone(moment.tzinfo)
    for fold in (0, 1):
        found = moment.replace(tzinfo=zone, fold=fold)
        if found.utcoffset() == moment.utcoffset():
            return found
    raise InvalidMessage(
        f"{moment.isoformat()}: {zone} has another offset then; use zoneinfo, or pytz with "
        "localize() and normalize()"
    )


_MOMENT = re.compile(
    r"\d{4}(-?)\d{2}\1\d{2}(?:[T ]\d{2}(?:(:?)\d{2}(?:\2\d{2}(?:[.,]\d+)?)?)?"
    r"(?:Z|[+-]\d{2}(?::?\d{2}(?::?\d{2})?)?)?)?",
    re.ASCII,
)


def parse_moment(text: object) -> datetime:
    """A time in ISO 8601, naive without an offset; a date alone is its midnight.

    The only parser of such texts. Refuses what is not a whole date: a time without a date, a month,
    a week. Raises InvalidMessage.
    """
    try:
        if isinstance(text, str) and _MOMENT.fullmatch(text.strip()):
            return datetime.fromisoformat(text.strip())
    except ValueError:  # such as the 31st of June
        pass
    raise InvalidMessage(
        f"{text!r} is not a date and time; write ISO 8601, as in '2026-12-24T09:00'"
    )


def ms_datetime(ms: int) -> datetime:
    """The aware UTC datetime of epoch milliseconds, exact."""
    return EPOCH + timedelta(milliseconds=ms)


def score_ms(score: bytes | str) -> int:
    """A score of a ZSET of due times, in epoch milliseconds.

    Infinite scores, which only other programs write, count as the last and the first instant.
    """
    number = float(score)
    if math.isinf(number):
        return MAX_DUE_MS if number > 0 else 0
    return int(number)


def utc_text(moment: datetime) -> str:
    """A UTC datetime in ISO 8601 with milliseconds: `2026-01-31T16:00:00.000Z`."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_due_ms(value: object) -> int:
    """Validate a due time in epoch milliseconds and return it, at most `MAX_DUE_MS`.

    Only integers (including numpy's) are accepted: a float may already have lost the millisecond.
    Raises InvalidMessage, also for instants more than ten years ago or after the year 9999, and for
    numbers like 20261224090000, which would be due in the year 2612.
    """
    # Fast path: the isinstance checks take ten times as long as the rest.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
        raise InvalidMessage(f"a due time is an integer of epoch milliseconds, not {value!r}")
    due_ms = operator.index(value)
    if due_ms >= FIRST_COMPACT_MS:
        _check_far(due_ms)
    if due_ms < OLDEST_DUE_MS:
        raise InvalidMessage(_why_so_old(due_ms))
    return due_ms


def _check_far(due_ms: int) -> None:
    if due_ms > MAX_DUE_MS:
        raise InvalidMessage(f"a due time of {due_ms} ms is beyond the year 9999")
    if re.fullmatch(COMPACT, str(due_ms)):
        raise InvalidMessage(
            f"a due time of {due_ms} looks like a date and time; epoch milliseconds are expected"
        )


def _why_so_old(due_ms: int) -> str:
    if due_ms in _SECONDS_ERA:
        return f"a due time of {due_ms} looks like seconds; epoch milliseconds are expected"
    if due_ms in _DATES:
        return f"a due time of {due_ms} looks like a date; epoch milliseconds are expected"
    return f"a due time of {due_ms} ms is more than ten years ago"


def parse_zone(value: object) -> tzinfo:
    """A time zone from its IANA name (`"Asia/Shanghai"`, `"UTC"`), offset (`"+08:00"`) or object.

    The zone follows PEP 495: zones of other libraries are replaced by name, or if they have a fixed
    offset. Raises InvalidMessage.
    """
    from zoneinfo import ZoneInfo  # late: few programs name a zone

    if isinstance(value, (ZoneInfo, timezone)):
        return value
    if isinstance(value, tzinfo):
        return _replaced(value)
    text = str(value).strip()
    if offset := _OFFSET.fullmatch(text):
        sign = -1 if offset[1] == "-" else 1
        distance = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        if distance < timedelta(days=1):
            return timezone(sign * distance)
    try:
        if _NO_ZONE.match(text):
            raise ValueError
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError):
        raise InvalidMessage(
            f"unknown time zone {text!r}; write a name like 'Asia/Shanghai' or an offset '+08:00'"
        ) from None


def _replaced(zone: tzinfo) -> tzinfo:
    """The zone of the standard library for one of pytz, dateutil, or another library."""
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    if isinstance(name, str):
        return parse_zone(name)
    offset = None
    try:
        offset = zone.utcoffset(None)
        # Zones with summer time may answer None with the offset of their winter.
        months = [datetime(2030, month, 1, tzinfo=zone) for month in range(1, 13)]
        is_fixed = offset is not None and {month.utcoffset() for month in months} == {offset}
    except Exception:  # noqa: BLE001  such a zone is any program's code
        is_fixed = False
    if offset is None or not is_fixed:
        raise InvalidMessage(
            f"the time zone {zone!r} is not supported; pass its name, as in 'Europe/Berlin'"
        )
    return timezone(offset)


@lru_cache(maxsize=1024)
def zone_of(name: str) -> tzinfo:
    """The time zone of a name, cached. Raises InvalidMessage."""
    return parse_zone(name)


def zone_name(zone: tzinfo | str | None) -> str:
    """The name under which a zone is stored, `UTC` for None. Raises InvalidMessage."""
    if zone is None:
        return "UTC"
    found = parse_zone(zone)
    if isinstance(zone, str):
        return zone.strip()
    key = getattr(found, "key", None)
    if key:
        return str(key)
    offset = found.utcoffset(None)
    if offset is None:
        raise InvalidMessage(f"tz={zone!r} has no name; pass text like 'Europe/Berlin'")
    minutes, rest = divmod(offset, timedelta(minutes=1))
    if rest:
        raise InvalidMessage(f"tz={zone!r} is not a whole number of minutes from UTC")
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


def human(ms: int, units: int = 2) -> str:
    """Format milliseconds in the largest units: `"250ms"`, `"1.5s"`, `"1m 30s"`, `"2d"`."""
    if ms < 0:
        return f"-{human(-ms, units)}"
    if ms < 1_000:
        return f"{ms}ms"
    if ms < 60_000:
        seconds, rest_ms = divmod(ms, 1_000)
        return f"{seconds}.{rest_ms:03d}".rstrip("0").rstrip(".") + "s"
    parts = []
    for unit, length in _UNITS_MS.items():
        count, ms = divmod(ms, length)
        parts.append((count, unit))
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + units] if count)


def exact(ms: int) -> str:
    """Milliseconds in all their units, as `parse_duration` reads them: `"1d 2h 3m"`."""
    return human(ms, len(_UNITS_MS))


def in_one_unit(ms: int) -> str:
    """A duration in the largest unit that divides it, such as `90s` or `2h`."""
    unit, length = next((unit, length) for unit, length in _UNITS_MS.items() if ms % length == 0)
    return f"{ms // length}{unit}" if ms else "0s"
