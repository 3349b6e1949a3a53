"""Public holidays from the library `holidays`, the optional extra of the same name."""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.extras import requires

_CALENDAR = re.compile(r"([A-Z]{2,3})(?:-([A-Z0-9]{1,6}))?")


class Calendar(NamedTuple):
    """A country, by its ISO code, and one of its subdivisions; "" for none."""

    country: str
    subdivision: str

    def __str__(self) -> str:
        return f"{self.country}-{self.subdivision}" if self.subdivision else self.country


def parse_calendar(text: str) -> Calendar:
    """A calendar from `DE` or `DE-BE`. Raises InvalidMessage, and MissingExtra without holidays."""
    found = _CALENDAR.fullmatch(text.upper())
    if not found:
        raise InvalidMessage(
            f"window: {text!r} is not a country; write an ISO code, perhaps with a subdivision, "
            "as in 'not holidays DE-BE'"
        )
    calendar = Calendar(found[1], found[2] or "")
    _new(calendar)
    return calendar


def holiday_name(calendar: Calendar, day: date) -> str:
    """The name of a date's holiday; "" if the date is none. Raises what `parse_calendar` raises."""
    return _names_of(calendar, day.year).get(day, "")


@lru_cache(maxsize=1_024)
def _names_of(calendar: Calendar, year: int) -> dict[date, str]:
    """Names of the holidays in a year, including those of an adjacent year observed in it.

    The library's mapping adds a year when one of its dates is read. Other threads that read at that
    moment see a part of the year, so each call makes its own mapping.
    """
    return dict(_new(calendar, (year - 1, year, year + 1)))


def _new(calendar: Calendar, years: tuple[int, ...] = ()) -> Any:
    with requires("holidays"):
        import holidays
    try:
        return holidays.country_holidays(
            calendar.country, subdiv=calendar.subdivision or None, years=years
        )
    except NotImplementedError:
        raise InvalidMessage(
            f"window: the library holidays has no country or subdivision {calendar}"
        ) from None
