"""Turns options of `schedule(...)`, the command line and YAML into a `ScheduleDefinition`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from typing import TypedDict, TypeVar

from lisa.core.model.clock import (
    checked_ttl_ms,
    datetime_ms,
    duration_ms,
    ms_datetime,
    named_duration,
    parse_moment,
    parse_zone,
    zone_name,
)
from lisa.core.model.envelope import checked_headers
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import WINDOW_HEADER
from lisa.core.model.late import LatePolicy
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    CatchUp,
    Dst,
    Overlap,
    ScheduleDefinition,
    stored_body,
)
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.placing import check_window

E = TypeVar("E", bound=StrEnum)
LONGEST_CRON = 1_000
"""Characters of a pattern, which every look at its schedule parses."""

_ALL = re.compile(r"all\s*(?:\(\s*(?:max\s*=\s*)?([0-9]{1,4})\s*\))?")


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule; see `Producer.schedule`."""

    cron: str | None
    every: timedelta | str | None
    tz: tzinfo | str | None
    dst: Dst | str
    start: datetime | str | None
    until: datetime | str | None
    count: int | None
    jitter: timedelta | str | None
    catch_up: CatchUp | str
    max_late: timedelta | str | None
    overlap: Overlap | str
    template: bool
    headers: Mapping[str, str] | None
    ttl: timedelta | str | None
    retry: RetryPolicy | Sequence[timedelta | str] | str | None
    late: LatePolicy | Mapping[str, timedelta | str] | str | None


def define(
    body: object, options: ScheduleOptions, zone: tzinfo | str | None = None
) -> ScheduleDefinition:
    """The checked definition. Raises InvalidMessage, and TypeError for an unknown option.

    zone: the time zone if the options name none; None means UTC.
    """
    known = ScheduleOptions.__annotations__.keys()
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"a schedule got an unexpected option {unknown[0]!r}; its options are "
            f"{', '.join(known)}"
        )
    named_zone = options.get("tz")
    name = zone_name(named_zone if named_zone is not None else zone)
    catch_up, most = _catch_up(options.get("catch_up", CatchUp.ONE))
    kind, text = stored_body(body)
    retry, late = options.get("retry"), options.get("late")
    headers = checked_headers(options.get("headers"))
    if WINDOW_HEADER in headers:
        check_window(headers[WINDOW_HEADER], headers)
    every_ms = _ms("every", options.get("every"))
    if every_ms == 0 and options.get("cron") is None:  # 0 means none in a record
        raise InvalidMessage("every=0 is too short; it is at least 1s")
    return ScheduleDefinition(
        cron=_pattern(options.get("cron")),
        every_ms=every_ms or 0,
        tz=name,
        dst=_choice("dst", Dst, options.get("dst", Dst.VIXIE)),
        start_ms=_instant("start", options.get("start"), name),
        until_ms=_instant("until", options.get("until"), name),
        most=_count(options.get("count")),
        jitter_ms=_ms("jitter", options.get("jitter")) or 0,
        catch_up=catch_up,
        max_caught_up=most,
        max_late_ms=_ms("max_late", options.get("max_late")),
        overlap=_choice("overlap", Overlap, options.get("overlap", Overlap.ALLOW)),
        kind=kind,
        body=text,
        template=_flag("template", options.get("template", False)),
        headers=headers,
        ttl_ms=checked_ttl_ms(options.get("ttl")),
        policy=None if retry is None else RetryPolicy.parse(retry).encode(),
        late=None if late is None else LatePolicy.parse(late).encode(),
    ).check()


def _pattern(cron: object) -> str:
    if cron is None:
        return ""
    if not isinstance(cron, str) or not cron.strip():
        raise InvalidMessage(f"cron is text, as in '0 9 * * 1-5', not {cron!r}")
    if len(cron) > LONGEST_CRON:
        raise InvalidMessage(f"cron has at most {LONGEST_CRON:,} characters, not {len(cron):,}")
    return " ".join(cron.split())


def _count(count: object) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise InvalidMessage(f"count is a number, not {count!r}")
    return count


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessage(f"{name} is true or false, not {value!r}")
    return value


def _ms(name: str, value: timedelta | str | None) -> int | None:
    return None if value is None else duration_ms(named_duration(name, value))


def _instant(name: str, moment: datetime | str | None, zone: str) -> int | None:
    """Epoch ms of a moment; a naive one is in the schedule's zone. Raises InvalidMessage."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        try:
            moment = parse_moment(moment)
        except InvalidMessage as error:
            raise InvalidMessage(f"{name}: {error}") from None
    instant_ms = datetime_ms(moment, parse_zone(zone))
    try:
        ms_datetime(instant_ms).astimezone(parse_zone(zone))  # it is shown like this
    except OverflowError:
        raise InvalidMessage(f"{name}={moment.isoformat()} is out of range") from None
    return instant_ms


def _choice(name: str, kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidMessage(f"{name} is one of {', '.join(kind)}, not {value!r}") from None


def _catch_up(value: str) -> tuple[CatchUp, int]:
    """The policy and its maximum from `none`, `one`, `all` or `all(max=20)`."""
    found = _ALL.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if found:
        return CatchUp.ALL, int(found[1] or MOST_CAUGHT_UP)
    try:
        return CatchUp(value), MOST_CAUGHT_UP
    except ValueError:
        raise InvalidMessage(f"catch_up is none, one, all or all(max=n), not {value!r}") from None
