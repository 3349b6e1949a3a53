"""Windows: on which days and at which hours messages may be handed over.

    mon-fri 9-17; sat 10:00-14:00; not holidays DE-BE; not 2026-12-24; tz=Europe/Berlin

Parts without `not` open the window; without any it is open except where a part with `not` closes
it. An hour range that ends at or before its start continues on the next day. Public holidays come
from the library `holidays`, the optional extra of the same name.

An instant is open if the wall clock shows an open time. So a window that opens inside a gap of the
clock opens right after the gap, and hours that occur twice are open both times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, timedelta, tzinfo
from functools import lru_cache
from typing import Any, NamedTuple

from lisa.core.model.clock import parse_zone, zone_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.extras import requires
from lisa.core.model.recurring.calendar import first_change, offset_s

_CALENDAR = re.compile(r"([A-Z]{2,3})(?:-([A-Z0-9]{1,6}))?")

DAY_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY = 24 * 60
LONGEST_TEXT = 500

_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_PERIOD = re.compile(rf"{_DATE}(\.\.{_DATE})?")
_TIME = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?")
_LONG_NAMES = {
    name: number
    for number, names in enumerate(
        ("mon monday", "tue tues tuesday", "wed wednesday", "thu thurs thursday", "fri friday",
         "sat saturday", "sun sunday")
    )
    for name in names.split()
}  # fmt: skip

Span = tuple[int, int]
"""From a minute of the day, included, to a later one, excluded."""

DAYS_AHEAD = 400
"""How far ahead a window must open."""

FAR_S = 8 * 86_400
"""How far ahead to look for the end of an opening. A longer one is looked up again."""

_DAY_S = 86_400
_LAST_S = 253_370_764_800  # the last days of year 9999 have no wall time in some zones
_EPOCH = date(1970, 1, 1)

_STEP_MS = 60_000  # windows open and close at whole minutes of the wall clock


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
    """The name of a date's holiday; "" for other dates. Raises what `parse_calendar` raises."""
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


@dataclass(frozen=True, slots=True)
class Rule:
    """Hours on some weekdays (0 is Monday). A span that ends after 1440 continues the next day."""

    days: frozenset[int]
    spans: tuple[Span, ...]
    text: str = field(compare=False)

    def on(self, day: date) -> Iterable[Span]:
        """The minutes of a date that the rule covers."""
        weekday = day.weekday()
        for start, end in self.spans:
            if weekday in self.days:
                yield start, min(end, DAY)
            if end > DAY and (weekday - 1) % 7 in self.days:
                yield 0, end - DAY


@dataclass(frozen=True, slots=True)
class HandOverWindow:
    """A parsed window. `str` gives its text, which `parse` reads again.

    opens, closes: hours that are open, and hours that are closed although `opens` has them.
    dates: first and last date of periods that are closed. calendars: holidays that are closed.
    tz: the zone; "" for none. With a field, `tz` applies to messages without that header.
    zone_header: the header of a message that names its zone; "" for none.
    """

    opens: tuple[Rule, ...] = ()
    closes: tuple[Rule, ...] = ()
    dates: tuple[tuple[date, date], ...] = ()
    calendars: tuple[Calendar, ...] = ()
    tz: str = ""
    zone_header: str = ""

    def __str__(self) -> str:
        parts = [rule.text for rule in self.opens]
        parts += [f"not {rule.text}" for rule in self.closes]
        parts += [f"not holidays {calendar}" for calendar in self.calendars]
        for first, last in self.dates:
            parts.append(f"not {first}" + (f"..{last}" if last != first else ""))
        if self.zone_header:
            parts.append(f"tz=@{self.zone_header}" + (f"|{self.tz}" if self.tz else ""))
        elif self.tz:
            parts.append(f"tz={self.tz}")
        return "; ".join(parts) or "always"

    def in_zone(self, tz: str) -> HandOverWindow:
        """The same window in a fixed zone."""
        return replace(self, tz=tz, zone_header="")

    def why_closed_on(self, day: date) -> str:
        """Why a whole date is closed, if a date or a holiday closes it; else ""."""
        for first, last in self.dates:
            if first <= day <= last:
                return f"not {first}" + (f"..{last}" if last != first else "")
        for calendar in self.calendars:
            name = holiday_name(calendar, day)
            if name:
                return f"holiday in {calendar}: {name}"
        return ""

    def why_closed(self, day: date, minute: int | None = None) -> str:
        """Why a minute of a date is closed, or without a minute, why the whole date is."""
        if why := self.why_closed_on(day):
            return why

        def covers(rule: Rule) -> bool:
            spans = rule.on(day)
            return any(minute is None or start <= minute < end for start, end in spans)

        if self.opens and not any(map(covers, self.opens)):
            return f"outside {'; '.join(rule.text for rule in self.opens)}"
        return ", ".join(f"not {rule.text}" for rule in self.closes if covers(rule))


def parse(text: object) -> HandOverWindow:
    """A window from its text. Raises InvalidMessage that names the part and the fix.

    Raises ConfigError if it names holidays, and the extra `holidays` is not installed.
    """
    if isinstance(text, HandOverWindow):
        return text
    if not isinstance(text, str) or not text.strip():
        raise InvalidMessage(
            f"a window is text, as in 'mon-fri 9-17; not 12:00-13:00', not {text!r}"
        )
    if len(text) > LONGEST_TEXT:
        raise InvalidMessage(f"a window has at most {LONGEST_TEXT} characters")
    return parse_stored(text)


def parse_stored(text: str) -> HandOverWindow:
    """A window from stored text, which may be longer than what was given: it names its zone."""
    return _parsed(" ".join(text.split()))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> HandOverWindow:
    window = HandOverWindow()
    for part in filter(None, map(str.strip, text.split(";"))):
        window = _with_part(window, part)
    return window


def _with_part(window: HandOverWindow, part: str) -> HandOverWindow:
    lowered = part.lower()
    if lowered == "always":
        return window
    if lowered.startswith("tz="):
        return _with_zone(window, part[3:].strip())
    if not lowered.startswith("not "):
        return replace(window, opens=(*window.opens, _rule(part)))
    what = part[4:].strip()
    if what.lower().startswith("holidays"):
        calendar = parse_calendar(what[len("holidays") :].strip())
        return replace(window, calendars=(*window.calendars, calendar))
    if re.match(r"[0-9]{4}-", what):
        return replace(window, dates=(*window.dates, _dates(what)))
    return replace(window, closes=(*window.closes, _rule(what)))


def _with_zone(window: HandOverWindow, given: str) -> HandOverWindow:
    if window.tz or window.zone_header:
        raise InvalidMessage("a window has one tz=")
    header, name = "", given
    if given.startswith("@"):
        header, _, name = given[1:].partition("|")
        if not header:
            raise InvalidMessage("tz=@ names a header, as in tz=@timezone|Europe/Berlin")
    if name or not header:
        parse_zone(name)
    return replace(window, tz=name, zone_header=header)


def _dates(text: str) -> tuple[date, date]:
    first, dots, last = text.partition("..")
    try:
        if not _PERIOD.fullmatch(text):  # such as a week, which `fromisoformat` takes for a Monday
            raise ValueError
        period = (date.fromisoformat(first), date.fromisoformat(last if dots else first))
    except ValueError:
        raise InvalidMessage(
            f"window: {text!r} is not a date; write 2026-12-24 or 2026-12-24..2027-01-02"
        ) from None
    if period[1] < period[0]:
        raise InvalidMessage(f"window: the period {text!r} ends before it begins")
    return period


def _rule(text: str) -> Rule:
    words = text.lower().split()
    days = words.pop(0) if words and words[0][0].isalpha() else ""
    if len(words) > 1 or not (days or words):
        raise InvalidMessage(
            f"window: cannot read {text!r}; write days and hours, as in 'mon-fri 9:00-17:30'"
        )
    spans = tuple(_span(span) for span in words[0].split(",")) if words else ((0, DAY),)
    shown = " ".join(filter(None, (days, *words)))
    return Rule(_days(days) if days else frozenset(range(7)), spans, shown)


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for item in text.split(","):
        if item == "daily":
            found.update(range(7))
            continue
        first, dash, last = item.partition("-")
        start, end = _day(first), _day(last if dash else first)
        found.update((start + i) % 7 for i in range((end - start) % 7 + 1))
    return frozenset(found)


def _day(name: str) -> int:
    try:
        return _LONG_NAMES[name]
    except KeyError:
        raise InvalidMessage(
            f"window: {name!r} is not a day; use {', '.join(DAY_NAMES)} or daily"
        ) from None


def _span(text: str) -> Span:
    first, dash, last = text.partition("-")
    start, end = _minute(first), _minute(last) if dash else -1
    if start < 0 or end < 0 or start == DAY:
        raise InvalidMessage(f"window: {text!r} are not hours; write 9-17 or 9:00-17:30")
    if start == end:
        raise InvalidMessage(f"window: {text!r} begins and ends at the same time")
    return start, end if end > start else end + DAY


def _minute(text: str) -> int:
    """The minute of the day; -1 for other text."""
    found = _TIME.fullmatch(text)
    minute = int(found[1]) * 60 + int(found[2] or 0) if found else -1
    return minute if minute <= DAY else -1


@lru_cache(maxsize=16_384)
def open_spans(window: HandOverWindow, day: date) -> tuple[Span, ...]:
    """The minutes of a date at which the window is open, in order and apart from each other."""
    if window.why_closed_on(day):
        return ()
    spans = [(0, DAY)]
    if window.opens:
        spans = _merged(span for rule in window.opens for span in rule.on(day))
    for start, end in _merged(span for rule in window.closes for span in rule.on(day)):
        spans = [
            piece
            for s, e in spans
            for piece in ((s, min(e, start)), (max(s, end), e))
            if piece[0] < piece[1]
        ]
    return tuple(spans)


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def business_day_after(window: HandOverWindow, day: date, count: int) -> date | None:
    """The date `count` open dates after `day`; with 0, `day` itself or the next open date.

    None if there is none within 400 days.
    """
    left = count
    for ahead in range(0 if count == 0 else 1, 401):
        try:
            found = day + timedelta(days=ahead)
        except OverflowError:
            return None
        if open_spans(window, found):
            left -= 1
            if left <= 0:
                return found
    return None


class OpenPeriod(NamedTuple):
    """From an instant, included, to a later one, excluded, in epoch milliseconds.

    opens_ms: the instant that was asked for if the window is open then.
    """

    opens_ms: int
    closes_ms: int


def opening_at(window: HandOverWindow, at_ms: int) -> OpenPeriod | None:
    """The opening at an instant, or else the next one; None if none begins within 400 days."""
    zone = zone_of(window.tz or "UTC")
    at_s, until_s = at_ms // 1000, at_ms // 1000 + DAYS_AHEAD * _DAY_S
    found: tuple[int, int] | None = None
    for start, end in _open_periods(window, zone, at_s, until_s):
        if found is not None and start > found[1]:
            break
        found = (start if found is None else found[0], end)
        if end - found[0] > FAR_S:
            break
    if found is None:
        return None
    return OpenPeriod(max(at_ms, found[0] * 1000), found[1] * 1000)


def require_opening(window: HandOverWindow, at_ms: int) -> OpenPeriod:
    """The opening at or after an instant. Raises InvalidMessage if the window does not open."""
    found = opening_at(window, at_ms)
    if found is None:
        raise InvalidMessage(f"the window {str(window)!r} does not open within {DAYS_AHEAD} days")
    return found


@lru_cache(maxsize=8192)
def _limits(window: HandOverWindow, step: int) -> tuple[OpenPeriod, int] | None:
    """The opening at or after a step of `_STEP_MS`, and when the one after it begins."""
    first = opening_at(window, step * _STEP_MS)
    if first is None:
        return None
    after = opening_at(window, first.closes_ms)
    return first, first.closes_ms if after is None else after.opens_ms


def limits_at(window: HandOverWindow, now_ms: int) -> tuple[int, int] | None:
    """For a hand-over now: when the window closes, 0 if it is closed; and when it opens next.

    None if it does not open within 400 days.

    Messages of a window share one computation per minute.
    """
    found = _limits(window, now_ms // _STEP_MS)
    if found is None:
        return None
    opening, after_ms = found
    if now_ms < opening.opens_ms:
        return 0, opening.opens_ms
    if now_ms < opening.closes_ms:
        return opening.closes_ms, after_ms
    return 0, after_ms


def _open_periods(
    window: HandOverWindow, zone: tzinfo, from_s: int, until_s: int
) -> Iterator[tuple[int, int]]:
    """The open periods of a span of time, in order, in epoch seconds; neighbours may touch."""
    until_s = min(until_s, _LAST_S)
    while from_s < until_s:
        end_s = min(from_s + _DAY_S, until_s)
        change = first_change(zone, from_s, end_s)
        end_s = end_s if change is None else change
        offset = offset_s(zone, from_s)
        first, last = from_s + offset, end_s + offset
        for number in range(first // _DAY_S, (last - 1) // _DAY_S + 1):
            midnight = number * _DAY_S
            for start, end in open_spans(window, _EPOCH + timedelta(days=number)):
                low, high = max(first, midnight + start * 60), min(last, midnight + end * 60)
                if low < high:
                    yield low - offset, high - offset
        from_s = end_s
