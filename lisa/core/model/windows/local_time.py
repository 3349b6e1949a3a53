"""Due times by a wall clock, which follow changes of the time zone data.

A message with one has the header `lisa-local`: `2026-12-24T09:00 Asia/Tokyo`, with ` fold=1` for
the second of two equal times. A manager with newer data computes its due time again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, tzinfo
from typing import NamedTuple

from lisa.core.model.clock import (
    MOST_BUSINESS_DAYS,
    check_due_ms,
    parse_moment,
    zone_name,
    zone_of,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER
from lisa.core.model.recurring.calendar import wall_instant, wall_time
from lisa.core.model.windows.window import HandOverWindow, business_day_after, parse

LISTED = "\0"
"""Separates the id of a listed message from its wall time, if a reschedule has changed that."""
WORKING_DAYS = "mon-fri"
BUSINESS_DAYS = range(MOST_BUSINESS_DAYS + 1)


class LocalTime(NamedTuple):
    """A wall time in a named zone."""

    wall: datetime
    tz: str
    fold: int = 0

    @property
    def due_ms(self) -> int:
        """The instant by this machine's time zone data. Raises InvalidMessage if out of range."""
        try:
            second = wall_instant(zone_of(self.tz), self.wall.replace(microsecond=0), self.fold)
        except (OverflowError, ValueError):
            raise InvalidMessage(f"at_local={self.wall.isoformat()} is out of range") from None
        return check_due_ms(second * 1000 + self.wall.microsecond // 1000)

    def __str__(self) -> str:
        wall = self.wall.isoformat(timespec="auto" if self.wall.second else "minutes")
        if self.wall.microsecond:
            wall = self.wall.isoformat(timespec="milliseconds")
        return f"{wall} {self.tz}" + (" fold=1" if self.fold else "")

    @staticmethod
    def of_headers(headers: Mapping[str, str]) -> LocalTime | None:
        """The wall time that a message's headers name; None without a readable one."""
        wall, _, rest = headers.get(LOCAL_HEADER, "").partition(" ")
        tz, _, fold = rest.partition(" ")
        if not tz:
            return None
        try:
            zone_of(tz)
            return LocalTime(parse_moment(wall), tz, 1 if fold == "fold=1" else 0)
        except (ValueError, InvalidMessage):
            return None


def local_time(
    at_local: object,
    zone: tzinfo | str | None,
    *,
    fold: object = None,
    business_days: object = None,
    window: HandOverWindow | None = None,
    now_ms: int = 0,
) -> LocalTime:
    """The wall time of the options `at_local`, `tz`, `fold` and `business_days`.

    window: its open dates are the business days, by default Monday to Friday. now_ms: business days
    count from the date at this instant. Raises InvalidMessage.
    """
    if zone is None:
        raise InvalidMessage("at_local needs tz, the time zone of that wall clock")
    if fold not in (None, 0, 1) or isinstance(fold, bool):
        raise InvalidMessage(
            f"fold={fold!r}: use 0 for the first of two equal times, 1 for the second"
        )
    tz, parsed = zone_name(zone), _parsed(at_local)
    if business_days is None:
        if isinstance(parsed, time):
            raise InvalidMessage(
                f"at_local={at_local!r} has no date; write 2026-12-24T09:00, or give business_days"
            )
        return LocalTime(parsed, tz, int(bool(fold)))
    if isinstance(parsed, datetime):
        raise InvalidMessage("with business_days, at_local is a time without a date, as in '10:00'")
    day = _business_day(business_days, tz, window, now_ms)
    return LocalTime(datetime.combine(day, parsed), tz, int(bool(fold)))


def _business_day(count: object, tz: str, window: HandOverWindow | None, now_ms: int) -> date:
    if isinstance(count, bool) or not isinstance(count, int) or count not in BUSINESS_DAYS:
        raise InvalidMessage(f"business_days is 0 to {BUSINESS_DAYS[-1]}, not {count!r}")
    today = wall_time(zone_of(tz), now_ms // 1000).date()
    day = business_day_after(window or parse(WORKING_DAYS), today, count)
    if day is None:
        raise InvalidMessage(f"there are no {count} business days within 400 days")
    return day


def _parsed(value: object) -> datetime | time:
    """A naive datetime, or a time of day. Raises InvalidMessage."""
    parsed = value
    if isinstance(value, str):
        text = value.strip()
        try:
            is_time = "-" not in text and ":" in text
            parsed = time.fromisoformat(text.zfill(5)) if is_time else parse_moment(text)
        except ValueError:
            raise InvalidMessage(
                f"at_local={value!r} is not a local time; write ISO 8601, as in 2026-12-24T09:00"
            ) from None
    if not isinstance(parsed, (datetime, time)):
        raise InvalidMessage(f"at_local is text such as '2026-12-24T09:00', not {value!r}")
    if parsed.tzinfo is not None:
        raise InvalidMessage(
            f"at_local={value!r} has an offset; leave it out, or give a fixed instant instead"
        )
    return parsed.replace(fold=0)
