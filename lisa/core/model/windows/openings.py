"""The instants at which a window opens and closes in a time zone.

An instant is open if the wall clock shows an open time. So a window that opens inside a gap of the
clock opens right after the gap, and hours that occur twice are open both times.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple

from lisa.core.model.clock import zone_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.calendar import first_change, offset_s
from lisa.core.model.windows.window import HandOverWindow, open_spans

DAYS_AHEAD = 400
"""How far ahead a window must open."""

FAR_S = 8 * 86_400
"""How far ahead to look for the end of an opening. A longer one is looked up again."""

_DAY_S = 86_400
_LAST_S = 253_370_764_800  # the last days of year 9999 have no wall time in some zones
_EPOCH = date(1970, 1, 1)


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


_STEP_MS = 60_000  # windows open and close at whole minutes of the wall clock


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
