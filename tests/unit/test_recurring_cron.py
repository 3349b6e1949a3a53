"""Cron patterns in the grammar of OCPS 1.4, across changes of the clock, and for jobs."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
import time_machine

from lisa.core.model.errors import ConfigError
from lisa.core.model.recurring.calendar import next_instant, parse_cron
from lisa.manager.jobs import parse_trigger
from tests.zones import BEGIN, END, changes, distinct


def ticks(cron: str, zone: str, after: str, count: int, *, skips: bool = False) -> list[str]:
    """The next wall times after a wall time, with offset where it is not UTC."""
    tz = ZoneInfo(zone)
    at = int(datetime.fromisoformat(after).replace(tzinfo=tz).timestamp())
    found = []
    for _ in range(count):
        following = next_instant(parse_cron(cron), tz, at, skips=skips)
        assert following is not None
        at = following
        moment = datetime.fromtimestamp(at, tz)
        found.append(moment.strftime("%Y-%m-%d %H:%M:%S" + ("" if zone == "UTC" else "%z")))
    return found


OCPS = [
    # 1.0: fields, lists, ranges, steps, names; Sunday is 0 and 7.
    ("15 10 1 10 *", ["2025-10-01 10:15:00", "2026-10-01 10:15:00"]),
    ("*/15 0-4,8-12 * JAN-MAR,DEC MON-FRI", ["2025-12-01 00:00:00", "2025-12-01 00:15:00"]),
    ("0 0 * * sun", ["2025-07-06 00:00:00", "2025-07-13 00:00:00"]),
    ("0 0 * * 7", ["2025-07-06 00:00:00", "2025-07-13 00:00:00"]),
    ("0 0 * * 5-7", ["2025-07-04 00:00:00", "2025-07-05 00:00:00", "2025-07-06 00:00:00"]),
    ("0 0 29 2 *", ["2028-02-29 00:00:00", "2032-02-29 00:00:00"]),
    ("0 0 * * SAT-SUN", ["2025-07-05 00:00:00", "2025-07-06 00:00:00"]),
    # Day of month and day of week: either suffices if both are restricted.
    ("0 12 1 * MON", ["2025-07-01 12:00:00", "2025-07-07 12:00:00", "2025-07-14 12:00:00"]),
    ("0 12 */10 * MON", ["2025-07-21 12:00:00", "2025-08-11 12:00:00"]),
    # 1.1: nicknames.
    ("@yearly", ["2026-01-01 00:00:00"]),
    ("@HOURLY", ["2025-07-01 01:00:00"]),
    # 1.2: seconds and years.
    ("30 15 10 1 10 *", ["2025-10-01 10:15:30"]),
    ("*/20 * * * * *", ["2025-07-01 00:00:20", "2025-07-01 00:00:40", "2025-07-01 00:01:00"]),
    ("0 0 12 1 1 * 2027-2199/2", ["2027-01-01 12:00:00", "2029-01-01 12:00:00"]),
    # 1.3: last days, nearest working days, ordinal weekdays.
    ("0 0 L * *", ["2025-07-31 00:00:00", "2025-08-31 00:00:00"]),
    ("0 0 15,L * *", ["2025-07-15 00:00:00", "2025-07-31 00:00:00"]),
    ("0 0 * * 5L", ["2025-07-25 00:00:00", "2025-08-29 00:00:00"]),
    ("0 0 * * 5#L", ["2025-07-25 00:00:00", "2025-08-29 00:00:00"]),
    ("0 0 * * 2#2", ["2025-07-08 00:00:00", "2025-08-12 00:00:00"]),
    ("0 0 * * FRI#5", ["2025-08-29 00:00:00", "2025-10-31 00:00:00"]),
    ("0 0 * * MON#1,FRI#3", ["2025-07-07 00:00:00", "2025-07-18 00:00:00"]),
    ("0 0 1W 11 *", ["2025-11-03 00:00:00", "2026-11-02 00:00:00"]),
    ("0 0 LW * *", ["2025-07-31 00:00:00", "2025-08-29 00:00:00", "2025-09-30 00:00:00"]),
    ("0 0 31W * *", ["2025-07-31 00:00:00", "2025-08-29 00:00:00", "2025-10-31 00:00:00"]),
    # 1.4: `?` in five fields, and `+` for both.
    ("0 0 1 * ?", ["2025-08-01 00:00:00", "2025-09-01 00:00:00"]),
    ("0 12 1 * +MON", ["2025-09-01 12:00:00", "2025-12-01 12:00:00"]),
    # Quartz: six or seven fields with `?`; Sunday is 1.
    ("0 0 0 ? * 1", ["2025-07-06 00:00:00"]),
    ("0 0 0 ? * 2-6", ["2025-07-02 00:00:00", "2025-07-03 00:00:00"]),
    ("0 0/20 9 * * ?", ["2025-07-01 09:00:00", "2025-07-01 09:20:00", "2025-07-01 09:40:00"]),
    ("0 0 0 ? * 6#3", ["2025-07-18 00:00:00", "2025-08-15 00:00:00"]),
    ("0 0 0 ? * L", ["2025-07-05 00:00:00", "2025-07-12 00:00:00"]),
    ("0 0 12 LW * ? 2026", ["2026-01-30 12:00:00", "2026-02-27 12:00:00"]),
]


@pytest.mark.parametrize(("cron", "expected"), OCPS)
def test_the_ticks_of_a_pattern(cron: str, expected: list[str]) -> None:
    assert ticks(cron, "UTC", "2025-07-01 00:00:00", len(expected)) == expected


REFUSED = {
    "": "has 0 fields",
    "* * * *": "has 4 fields",
    "@reboot": "use one of @yearly",
    "60 * * * *": "minute '60': 60 is outside 0-59",
    "* * * * 8": "outside 0-7",
    "0 0 0 ? * 0": "day-of-week '0'.*outside 1-7",
    "* * * * FRU": "did you mean FRI",
    "1,,2 * * * * ?": "second '1,,2'",
    "0/10 * * * *": "write 0-59/10",
    "*/90 * * * *": "the step 90 exceeds the 60 values; use every='90m'",
    "0 0 */45 * *": "use every='45d'",
    "0 0 0/48 * * ?": "use every='48h'",
    "0 0 * * */8": "exceeds the 7 values",
    "0 0 1 1-6/13 *": "exceeds the 12 values",
    "*/0 * * * *": "not a positive number",
    "30-10 * * * *": "ends before it begins; write 30-59,0-10",
    "0 0 0 ? * FRI-MON": "FRI-MON ends before it begins; write FRI-7,1-MON",
    "0 0 +1 * *": "'\\+1' is not a value",
    "0 0 0 L-3 * ?": "'L' is not a value",
    "0 0 1,15W * *": "W follows a single day",
    "0 0 30 2 *": "no month of the pattern has that day",
    "? 0 * * *": "'\\?' is for days only",
    "0 0 * * 5#6": "write 1 to 5 or L after #",
    "0 0 0 1 1 * 1969": "outside 1970-2199",
}


def test_steps_as_long_as_their_field_are_accepted() -> None:
    for cron in ("*/60 * * * *", "0 */24 * * *", "0 0 */31 */12 *", "0/60 * * * * ?"):
        assert len(parse_cron(cron).seconds) == 1


def test_a_wrong_pattern_is_refused_with_its_fault() -> None:
    for cron, reason in REFUSED.items():
        with pytest.raises(ConfigError, match=reason):
            parse_cron(cron)


MANAGERS_OWN = {
    "0 0 0 1 * MON": "exclude each other",
    "0 0 1 * 1": "exclude each other",
    "61 * * * * ?": "second '61'.*outside 0-59",
    "0 */90 * * * ?": "or '90m' as a crontab setting",
    "": "not a schedule",
    "soon": "not a schedule",
    "1ms": "too short",
    "0 0 0 1 1 ? 2001": "never fires again",
}


def test_schedules_that_a_managers_jobs_cannot_have() -> None:
    for text, reason in MANAGERS_OWN.items():
        with pytest.raises(ConfigError, match=reason):
            parse_trigger(text, zone=UTC)


NOW = datetime(2026, 4, 15, 10, 20, 30, 500_000, tzinfo=UTC)  # a Wednesday
TRIGGERS = {
    # The original's.
    "0/1 * * * * ?": ["2026-04-15 10:20:31", "2026-04-15 10:20:32"],
    "0 */1 * * * ?": ["2026-04-15 10:21:00", "2026-04-15 10:22:00"],
    "0 10-40/15 12,18 * * ?": ["2026-04-15 12:10:00", "2026-04-15 12:25:00"],
    "0 0 0 1 JAN,jul ?": ["2026-07-01 00:00:00", "2027-01-01 00:00:00"],
    "0 0 0 1 1 ? 2030/2": ["2030-01-01 00:00:00", "2032-01-01 00:00:00"],
    # Weekdays: 1 is Sunday for Quartz, 0 and 7 for crontab.
    "0 0 0 ? * 1": ["2026-04-19 00:00:00", "2026-04-26 00:00:00"],
    "0 0 0 ? * MON-FRI": ["2026-04-16 00:00:00", "2026-04-17 00:00:00", "2026-04-20 00:00:00"],
    "0 0 * * 0": ["2026-04-19 00:00:00", "2026-04-26 00:00:00"],
    "0 0 * * 5-7": ["2026-04-17 00:00:00", "2026-04-18 00:00:00", "2026-04-19 00:00:00"],
    # Last and nth.
    "0 0 0 L * ?": ["2026-04-30 00:00:00", "2026-05-31 00:00:00"],
    "0 0 0 ? * FRIL": ["2026-04-24 00:00:00", "2026-05-29 00:00:00"],
    "0 0 0 ? * 2#1,6#3": ["2026-04-17 00:00:00", "2026-05-04 00:00:00"],
    "0 0 0 ? * WED,6#3": ["2026-04-17 00:00:00", "2026-04-22 00:00:00"],
    "0 0 0 15,L * ?": ["2026-04-30 00:00:00", "2026-05-15 00:00:00"],
    "0 0 0 16W * ?": ["2026-04-16 00:00:00", "2026-05-15 00:00:00"],
}


@time_machine.travel(NOW, tick=False)
def test_when_a_managers_jobs_run() -> None:
    for text, expected in TRIGGERS.items():
        trigger = parse_trigger(text, zone=UTC)
        fired, previous, now = [], None, NOW
        for _ in expected:
            previous = trigger.get_next_fire_time(previous, now)
            fired.append(f"{previous:%Y-%m-%d %H:%M:%S}")
            now = previous + timedelta(microseconds=1)
        assert fired == expected, text
    for text, seconds in {"1s": 1, "500ms": 0.5, "5m": 300}.items():
        interval = timedelta(seconds=seconds)
        assert [parse_trigger(given).interval for given in (text, interval)] == [interval] * 2


def test_instants_at_the_ends_of_the_calendar() -> None:
    year_1, year_9999 = -62_135_596_800, 253_402_300_799
    for zone in map(ZoneInfo, ("Asia/Tokyo", "America/New_York")):
        for pattern in map(parse_cron, ("0 9 * * *", "*/5 * * * *")):
            first = next_instant(pattern, zone, year_1, skips=False)
            assert first is not None
            assert 0 <= first <= 86_400
            assert next_instant(pattern, zone, year_9999, skips=False) is None
    pattern = parse_cron("0 0 0 1 1 * 2024")
    assert next_instant(pattern, UTC, 1_800_000_000, skips=False) is None


CHANGES = {  # wildcard hours follow the elapsed time
    "in the gap: right after": ("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00:00",
        ["2026-03-29 03:00:00+0200", "2026-03-30 02:30:00+0200"]),
    "two times in the gap: once": ("0,30 2 * * *", "Europe/Berlin", "2026-03-28 12:00:00",
        ["2026-03-29 03:00:00+0200", "2026-03-30 02:00:00+0200"]),
    "one in the gap, one at its end: once": ("0 2,3 * * *", "Europe/Berlin", "2026-03-28 12:00:00",
        ["2026-03-29 03:00:00+0200", "2026-03-30 02:00:00+0200"]),
    "in the overlap: the first time": ("30 2 * * *", "Europe/Berlin", "2026-10-24 12:00:00",
        ["2026-10-25 02:30:00+0200", "2026-10-26 02:30:00+0100"]),
    "wildcard hours over a gap": ("30 * * * *", "Europe/Berlin", "2026-03-29 01:00:00",
        ["2026-03-29 01:30:00+0100", "2026-03-29 03:30:00+0200"]),
    "wildcard hours over an overlap": ("30 * * * *", "Europe/Berlin", "2026-10-25 01:45:00",
        ["2026-10-25 02:30:00+0200", "2026-10-25 02:30:00+0100", "2026-10-25 03:30:00+0100"]),
    "Lord Howe's gap of half an hour": ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00:00",
        ["2026-10-04 02:30:00+1100", "2026-10-05 02:15:00+1100"]),
    "Lord Howe's second pass": ("*/30 * * * *", "Australia/Lord_Howe", "2026-04-05 01:10:00",
        ["2026-04-05 01:30:00+1100", "2026-04-05 01:30:00+1030", "2026-04-05 02:00:00+1030"]),
    "even hours after a gap of three": ("30 */2 * * *", "Antarctica/Casey", "2020-10-03 22:00:00",
        ["2020-10-03 22:30:00+0800", "2020-10-04 04:30:00+1100", "2020-10-04 06:30:00+1100"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_the_clock(case: str) -> None:
    cron, zone, after, expected = CHANGES[case]
    assert ticks(cron, zone, after, len(expected)) == expected


def test_a_time_in_the_gap_can_be_skipped_and_an_overlap_fires_once() -> None:
    found = ticks("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00:00", 1, skips=True)
    assert found == ["2026-03-30 02:30:00+0200"]
    found = ticks("30 2 * * *", "Europe/Berlin", "2026-10-24 12:00:00", 2, skips=True)
    assert found == ["2026-10-25 02:30:00+0200", "2026-10-26 02:30:00+0100"]
    zone = ZoneInfo("Europe/Berlin")
    second_pass = datetime(2026, 10, 25, 2, 10, fold=1, tzinfo=zone).timestamp()
    following = next_instant(parse_cron("30 2 * * *"), zone, int(second_pass), skips=False)
    assert following == int(datetime(2026, 10, 26, 2, 30, tzinfo=zone).timestamp())


PATTERNS = (
    *("30 2 * * *", "0 * * * *", "15 1-3 * * *", "0 0 * * *", "30 1 * * SUN", "0 12 L * *"),
    *("0 9 * * MON-FRI", "30 */2 * * *", "0 0 1 * MON", "0 3 * * 5#2", "30 23 LW * *"),
    "0,30 0-4 * * *",
)
KNOWN = ("America/New_York", "Australia/Lord_Howe", "Asia/Tehran")


def compare(zone: str, patterns: tuple[str, ...], begin: datetime, end: datetime) -> None:
    """Compare all ticks of a period with those of cronsim."""
    cronsim = pytest.importorskip("cronsim")
    tz = ZoneInfo(zone)
    for cron in patterns:
        at, other = int(begin.timestamp()), cronsim.CronSim(cron, begin.astimezone(tz))
        while at < end.timestamp():
            found = next_instant(parse_cron(cron), tz, at, skips=False)
            assert found == int(next(other).timestamp()), f"{cron} in {zone} after {at}"
            at = found


@pytest.mark.parametrize("zone", [*KNOWN, "Pacific/Apia"])
def test_the_ticks_are_those_of_another_library(zone: str) -> None:
    begin = datetime(2026, 2, 20, tzinfo=UTC)
    if zone == "Pacific/Apia":  # it left out a day
        begin = datetime(2011, 12, 20, tzinfo=UTC)
    compare(zone, PATTERNS, begin, begin + timedelta(days=50))


OFTEN = ("0 * * * *", "30 */2 * * *", "0,30 0-4 * * *", "15 1-3 * * *")
"""Patterns that are compared around each change of the clock only: they have most of the ticks."""

WRONG_IN_CRONSIM = {("Antarctica/Casey", "30 */2 * * *")}
"""After a gap of three hours cronsim leaves out 04:30 and 06:30, which the wall clock shows."""


PARTS = 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_ticks_are_those_of_another_library_everywhere(part: int) -> None:
    seldom = tuple(set(PATTERNS) - set(OFTEN))
    for zone in distinct()[part::PARTS]:
        compare(zone, seldom, BEGIN, END)
        for at, _ in changes(zone):
            moment = datetime.fromtimestamp(at, UTC)
            often = tuple(one for one in OFTEN if (zone, one) not in WRONG_IN_CRONSIM)
            compare(zone, often, moment - timedelta(days=2), moment + timedelta(days=2))
