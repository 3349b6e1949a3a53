from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from apscheduler.triggers.interval import IntervalTrigger

from lisa.core.model.cron import read_schedule
from lisa.core.model.errors import ConfigError
from lisa.manager.cron import parse_trigger

# A Wednesday.
NOW = datetime(2026, 4, 15, 10, 20, 30, 500_000, tzinfo=UTC)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The original's three.
        ("0/1 * * * * ?", ["2026-04-15 10:20:31", "2026-04-15 10:20:32"]),
        ("0 */1 * * * ?", ["2026-04-15 10:21:00", "2026-04-15 10:22:00"]),
        ("0/5 * * * * ?", ["2026-04-15 10:20:35", "2026-04-15 10:20:40"]),
        ("0 10-40/15 12,18 * * ?", ["2026-04-15 12:10:00", "2026-04-15 12:25:00"]),
        ("0 0 0 1 JAN,jul ?", ["2026-07-01 00:00:00", "2027-01-01 00:00:00"]),
        ("0 0 0 1 1 ? 2030/2", ["2030-01-01 00:00:00", "2032-01-01 00:00:00"]),
        # Weekdays of Quartz: 1 is Sunday.
        ("0 0 0 ? * 1", ["2026-04-19 00:00:00", "2026-04-26 00:00:00"]),
        (
            "0 0 0 ? * MON-FRI",
            ["2026-04-16 00:00:00", "2026-04-17 00:00:00", "2026-04-20 00:00:00"],
        ),
        # Weekdays of crontab: 0 and 7 are Sunday.
        ("0 0 * * 0", ["2026-04-19 00:00:00", "2026-04-26 00:00:00"]),
        ("0 0 * * 5-7", ["2026-04-17 00:00:00", "2026-04-18 00:00:00", "2026-04-19 00:00:00"]),
        ("*/30 * * * *", ["2026-04-15 10:30:00", "2026-04-15 11:00:00"]),
        # Last and nth.
        ("0 0 0 L * ?", ["2026-04-30 00:00:00", "2026-05-31 00:00:00"]),
        ("0 0 0 ? * FRIL", ["2026-04-24 00:00:00", "2026-05-29 00:00:00"]),
        ("0 0 0 ? * 2#1,6#3", ["2026-04-17 00:00:00", "2026-05-04 00:00:00"]),
    ],
)
@time_machine.travel(NOW, tick=False)
def test_fire_times(text: str, expected: list[str]) -> None:
    trigger = parse_trigger(text, zone=UTC)
    fired, previous, now = [], None, NOW
    for _ in expected:
        previous = trigger.get_next_fire_time(previous, now)
        fired.append(previous)
        now = previous + timedelta(microseconds=1)
    assert fired == [at(each) for each in expected]


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1), ("500ms", 0.5), ("5m", 300)])
def test_an_interval_is_a_schedule(text: str, seconds: float) -> None:
    trigger = parse_trigger(text, zone=UTC)
    assert isinstance(trigger, IntervalTrigger)
    first = trigger.get_next_fire_time(None, NOW)
    second = trigger.get_next_fire_time(first, first)
    assert second - first == timedelta(seconds=seconds)
    assert parse_trigger(timedelta(seconds=seconds)).interval == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("61 * * * * ?", "second '61'.*outside 0-59"),
        ("0 0 0 0 * ?", "day-of-month '0'"),
        ("0 0 0 ? * 0", "day-of-week '0'.*outside 1-7"),
        ("0 0 * * 8", "day-of-week '8'.*outside 0-7"),
        ("0 0 0 ? * FRY", "did you mean FRI"),
        ("0 0 0 15W * ?", "W .*not supported"),
        ("0 0 0 L-3 * ?", "'L' is not a value"),
        ("0 0 0 15,L * ?", "L is supported only alone"),
        ("0 0 0 ? * FRI-MON", "FRI-MON ends before it begins; write FRI-7,1-MON"),
        ("0 0 0 ? * 6#6", "write 1 to 5 or L after #"),
        ("0 0 0 ? * MON,6#3", "cannot be mixed"),
        ("0 ? * * * *", "'\\?' is for days only"),
        ("0 0 0 1 * MON", "exclude each other"),
        ("0 0 1 * 1", "exclude each other"),
        ("0 0 0 30 2 ?", "no month of the pattern has that day"),
        ("0/0 * * * * ?", "step '0'"),
        ("1,,2 * * * * ?", "second '1,,2'"),
        ("* * * *", "has 4 fields"),
        ("", "not a schedule"),
        ("soon", "not a schedule"),
        ("1ms", "too short"),
        ("0 0 0 1 1 ? 1969", "year '1969'"),
    ],
)
def test_a_bad_field_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_schedule(text)


def test_years_that_have_passed_never_fire() -> None:
    with pytest.raises(ConfigError, match="never fires again"):
        parse_trigger("0 0 0 1 1 ? 2001", zone=UTC)
