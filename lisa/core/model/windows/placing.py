"""Chooses the due time of a message from a wall time and a window, and explains the choice.

Due times by a wall clock follow changes of the time zone data. A message with one has the header
`lisa-local`: `2026-12-24T09:00 Asia/Tokyo`, with ` fold=1` for the second of two equal times. A
manager with newer data computes its due time again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from time import time_ns
from typing import Any, NamedTuple

from lisa.core.model.clock import (
    MOST_BUSINESS_DAYS,
    check_due_ms,
    parse_moment,
    parse_zone,
    zone_name,
    zone_of,
)
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER
from lisa.core.model.recurring.calendar import wall_instant, wall_time
from lisa.core.model.windows.window import (
    HandOverWindow,
    business_day_after,
    open_spans,
    parse,
    parse_stored,
    require_opening,
)

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


class Placed(NamedTuple):
    """A due time for a script ('+<ms>' or epoch ms), and the headers that record its origin."""

    due: str
    headers: dict[str, str]


def place(options: Mapping[str, Any], due: str | None, zone: Any, now_ms: int) -> Placed:
    """Resolve the options `at_local`, `fold`, `business_days` and `window` of a send.

    due: what the other options say, or None. zone: the option `tz`, or else the producer's zone.
    Headers may be those of another message: its window applies unless the options name one, its
    wall time does not. Raises InvalidMessage; ConfigError for holidays without their library.
    """
    given = dict(options.get("headers") or {})
    given.pop(LOCAL_HEADER, None)
    text = given.pop(WINDOW_HEADER, None)
    headers: dict[str, str] = {}
    window = own_window(text if options.get("window") is None else options["window"], zone, given)
    local = asked_local(options, due, zone, window, now_ms)
    if local is not None:
        headers[LOCAL_HEADER] = str(local)
        due = str(local.due_ms)
    due = due or "+0"
    if window is not None:
        headers = {WINDOW_HEADER: str(window), **headers}
        due = moved(due, window, now_ms)
    return Placed(due, {**headers, **given})


def place_again(
    options: Mapping[str, Any],
    due: str | None,
    zone: Any,
    *,
    headers: Mapping[str, str],
    topic_window: str,
    now_ms: int,
) -> tuple[str, LocalTime | None]:
    """The new due time of a stored message, in its window, and the wall time if there is one.

    options: `at_local`, `fold` and `business_days`; due, zone: as in `place`. headers: the stored
    ones. Raises InvalidMessage; ConfigError for holidays without their library.
    """
    window = window_of(headers, topic_window)
    own = window if WINDOW_HEADER in headers else None
    local = asked_local(options, due, zone, own, now_ms)
    if local is not None:
        due = str(local.due_ms)
    due = due or "+0"
    return due if window is None else moved(due, window, now_ms), local


def asked_local(
    options: Mapping[str, Any],
    due: str | None,
    zone: Any,
    window: HandOverWindow | None,
    now_ms: int,
) -> LocalTime | None:
    """The wall time that a call's options name; None for a call without. Raises InvalidMessage.

    window: the message's own: its open dates are the business days, and its zone is the default.
    """
    at_local, business_days = options.get("at_local"), options.get("business_days")
    if at_local is None:
        if business_days is not None or options.get("fold") is not None:
            raise InvalidMessage("business_days and fold need at_local, such as '10:00'")
        return None
    if due is not None:
        raise InvalidMessage("give one of delay, at, at_ms and at_local; they contradict")
    if zone is None and window is not None:
        zone = window.tz
    return local_time(
        at_local,
        zone,
        fold=options.get("fold"),
        business_days=business_days,
        window=window,
        now_ms=now_ms,
    )


def own_window(text: object, zone: Any, headers: Mapping[str, str]) -> HandOverWindow | None:
    """A message's own window with a fixed zone: its own, the header's, `zone`, or else UTC.

    Raises InvalidMessage also if a header has to name the zone and does not.
    """
    if text is None:
        return None
    window = parse(text)
    if window.tz and not window.zone_header:
        return window
    return for_send(window, headers, "" if zone is None else zone_name(zone))


def for_send(
    window: HandOverWindow, headers: Mapping[str, str], default: str = ""
) -> HandOverWindow:
    """The window in the zone of a message that is about to be sent.

    Raises InvalidMessage if its header names no zone, and neither the window nor `default` does.
    """
    default = window.tz or default
    try:
        return window.in_zone(_named_zone(window, headers) or default or "UTC")
    except InvalidMessage as error:
        if not default:
            raise InvalidMessage(
                f"{error}; or state a default: tz=@{window.zone_header}|Europe/Berlin"
            ) from None
        return window.in_zone(default)


def for_message(
    window: HandOverWindow,
    headers: Mapping[str, str],
    unknown: Callable[[str], None] = lambda _: None,
) -> HandOverWindow:
    """The window in the zone of a message that was sent, by default UTC.

    unknown: called with the error if the header names no zone.
    """
    try:
        return window.in_zone(_named_zone(window, headers) or window.tz or "UTC")
    except InvalidMessage as error:
        unknown(f"{error}; {window.tz or 'UTC'} applies")
        return window.in_zone(window.tz or "UTC")


def _named_zone(window: HandOverWindow, headers: Mapping[str, str]) -> str:
    """The zone in a message's header; "" if the window fixes one. Raises InvalidMessage."""
    if not window.zone_header:
        return ""
    named = headers.get(window.zone_header, "")
    if not named and window.tz:
        return ""
    if not named:
        raise InvalidMessage(f"the window needs the header {window.zone_header!r} with a time zone")
    try:
        parse_zone(named)
    except InvalidMessage as error:
        raise InvalidMessage(f"header {window.zone_header!r}: {error}") from None
    return named


def window_of(
    headers: Mapping[str, str],
    topic_window: str,
    unknown: Callable[[str], None] = lambda _: None,
) -> HandOverWindow | None:
    """The window of a stored message: its own or else the topic's; None without a readable one.

    unknown: see `for_message`. Raises ConfigError if it names holidays and the library is not
    installed.
    """
    text = headers.get(WINDOW_HEADER) or topic_window
    if not text:
        return None
    try:
        return for_message(parse_stored(text), headers, unknown)
    except ConfigError:
        raise
    except InvalidMessage:
        return None


def check_window(value: object, headers: Mapping[str, str] | None = None) -> str:
    """The text of a window that opens within 400 days. Raises InvalidMessage.

    headers: those of its messages, if known; one may have to name the zone.
    """
    window = parse(value)
    known = window.in_zone("UTC") if headers is None else for_send(window, headers)
    require_opening(known, clock_ms())
    return str(window)


def moved(due: str, window: HandOverWindow, now_ms: int) -> str:
    """A due time for a script, moved to the next opening if the window is closed then.

    A delay is taken from the caller's clock for this; the hand-over is checked by Redis's clock.
    """
    at_ms = now_ms + int(due[1:]) if due.startswith("+") else int(due)
    at_ms = max(at_ms, now_ms)
    opens_ms = require_opening(window, at_ms).opens_ms
    return due if opens_ms == at_ms else str(opens_ms)


def due_again(headers: Mapping[str, str], topic_window: str, now_ms: int) -> int | None:
    """The due time of a message with a wall time, by this machine's zone data; None without one."""
    local = LocalTime.of_headers(headers)
    if local is None:
        return None
    window = window_of(headers, topic_window)
    if window is None:
        return local.due_ms
    return int(moved(str(local.due_ms), window, now_ms))


def without_past_local(
    headers: Mapping[str, str], due_ms: int, topic_window: str, now_ms: int
) -> dict[str, str]:
    """The headers of a stored message without a wall time that a reschedule has replaced."""
    kept = dict(headers)
    if due_again(kept, topic_window, now_ms) not in (None, due_ms):
        del kept[LOCAL_HEADER]
    return kept


def explain(due: str, headers: Mapping[str, str], topic_window: str, now_ms: int) -> list[str]:
    """Why a message is due when it is: one line per step. Raises InvalidMessage."""
    local = LocalTime.of_headers(headers)
    at_ms = now_ms + int(due[1:]) if due.startswith("+") else int(due)
    lines = []
    if local is not None:
        at_ms = local.due_ms
        shown = wall_time(zone_of(local.tz), at_ms // 1000)
        lines.append(f"{local}: {_utc(at_ms)}")
        if shown != local.wall.replace(microsecond=0):
            lines.append(f"that time is skipped by a change of the clock; the gap ends at {shown}")
    else:
        lines.append(f"asked for: {_utc(at_ms)}")
    window = window_of(headers, topic_window, lines.append)
    if window is None:
        return [*lines, "no window applies"]
    whose = "the message's" if WINDOW_HEADER in headers else "the topic's"
    lines.append(f"{whose} window: {window}")
    return [*lines, *_why_closed(window, max(at_ms, now_ms))]


def _why_closed(window: HandOverWindow, at_ms: int) -> list[str]:
    zone, opening = zone_of(window.tz or "UTC"), require_opening(window, at_ms)
    wall, lines = wall_time(zone, at_ms // 1000), []
    if opening.opens_ms == at_ms:
        return [f"open at {wall:%a %Y-%m-%d %H:%M}"]
    why = window.why_closed(wall.date(), wall.hour * 60 + wall.minute)
    lines.append(f"closed at {wall:%a %Y-%m-%d %H:%M}: {why}")
    until = wall_time(zone, opening.opens_ms // 1000)
    day = wall.date() + timedelta(days=1)
    while day < until.date() and len(lines) < 20:
        if not open_spans(window, day):
            lines.append(f"closed on {day:%a %Y-%m-%d}: {window.why_closed(day)}")
        day += timedelta(days=1)
    shown = f"{until:%a %Y-%m-%d %H:%M} {window.tz or 'UTC'}"
    return [*lines, f"opens at {shown}: {_utc(opening.opens_ms)}"]


def _utc(at_ms: int) -> str:
    return f"{wall_time(UTC, at_ms // 1000).isoformat()}Z"


def machine_ms() -> int:
    """This machine's clock in epoch milliseconds."""
    return time_ns() // 1_000_000


_clocks = [machine_ms]


def clock_ms() -> int:
    """The clock of this process's sends, in epoch milliseconds: the machine's, or a test's."""
    return _clocks[-1]()


@contextmanager
def using_clock(clock: Callable[[], int]) -> Iterator[None]:
    """Choose due times by another clock while the block runs, in all threads."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)
