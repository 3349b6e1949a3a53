from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
import pytz
from dateutil import tz
from hypothesis import assume, given
from hypothesis import strategies as st

from lisa.core.model.clock import (
    MAX_DUE_MS,
    OLDEST_DUE_MS,
    check_due_ms,
    checked_shift_ms,
    datetime_ms,
    duration_ms,
    human,
    ms_datetime,
    parse_duration,
    parse_moment,
    parse_zone,
    zone_name,
)
from lisa.core.model.errors import InvalidMessage

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2024, 1, 1, 12)  # noqa: DTZ001 - without a zone


def test_durations_are_read() -> None:
    read: dict[object, timedelta] = {
        "500ms": timedelta(milliseconds=500),
        "1.5s": timedelta(milliseconds=1500),
        " 1H 30M ": timedelta(minutes=90),
        "2d": timedelta(days=2),
        "0": timedelta(0),
        0: timedelta(0),
        timedelta(seconds=3): timedelta(seconds=3),
    }
    assert {value: parse_duration(value) for value in read} == read
    for value in (10_000, "10000", "10s"):
        assert parse_duration(value, bare_ms=True) == timedelta(seconds=10)
    for bad in (
        *("", "10", 10, "ten", "10x", "-5s", "1s2", "5 10s", "9" * 30, "99999999999d", b"10s"),
        *("9" * 5000 + "s", "\u0665s", "1.\u0665s"),  # an Arabic digit
        *(timedelta(-1), True, 1.5, float("nan"), None),
    ):
        with pytest.raises(InvalidMessage):
            parse_duration(bad)
    for bad in (-1, 10**18, "9" * 18):
        with pytest.raises(InvalidMessage):
            parse_duration(bad, bare_ms=True)


def test_milliseconds_for_people() -> None:
    texts = {0: "0ms", 1_500: "1.5s", 59_999: "59.999s", 90_000: "1m 30s", 120_000: "2m"}
    texts |= {3_601_000: "1h", 90_000_000: "1d 1h", -90_000: "-1m 30s"}
    assert {ms: human(ms) for ms in texts} == texts


def test_shifts_go_both_ways() -> None:
    read: dict[object, int] = {"1h": 3_600_000, "-1.5s": -1_500, " +2m ": 120_000, "0": 0, "-0": 0}
    read |= {timedelta(seconds=-3): -3_000, timedelta(microseconds=1): 1}
    assert {value: checked_shift_ms(value) for value in read} == read
    for bad in ("", "-", "--1s", "5", "-5", 5, None, "+-1s"):
        with pytest.raises(InvalidMessage, match="shift"):
            checked_shift_ms(bad)


@given(st.timedeltas(min_value=timedelta(-(10**6)), max_value=timedelta(10**6)))
def test_durations_are_rounded_up_by_less_than_a_millisecond(value: timedelta) -> None:
    ms = timedelta(milliseconds=duration_ms(value))
    assert timedelta(0) <= ms - value < timedelta(milliseconds=1)


@given(
    st.datetimes(
        max_value=datetime(9999, 12, 30),  # noqa: DTZ001 - hypothesis wants a naive bound
        timezones=st.sampled_from([UTC, BERLIN, timezone(timedelta(hours=8))]),
    )
)
def test_no_instant_is_ever_early(moment: datetime) -> None:
    wall = moment.astimezone(UTC).astimezone(moment.tzinfo)
    assume(wall.replace(tzinfo=None) == moment.replace(tzinfo=None))  # not inside a gap
    late = ms_datetime(datetime_ms(moment)) - moment.astimezone(UTC)
    assert timedelta(0) <= late < timedelta(milliseconds=1)


def test_fractions_of_a_millisecond_are_rounded_up() -> None:
    assert datetime_ms(datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)) == 1
    assert datetime_ms(datetime(1970, 1, 1, microsecond=1000, tzinfo=UTC)) == 1
    assert datetime_ms(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)) == 0


def test_times_without_a_zone_of_their_own() -> None:
    with pytest.raises(InvalidMessage, match="names no time zone"):
        datetime_ms(NOON)
    assert datetime_ms(NOON, BERLIN) == datetime_ms(datetime(2024, 1, 1, 11, tzinfo=UTC))
    aware = NOON.replace(tzinfo=UTC)
    assert datetime_ms(aware, BERLIN) == datetime_ms(aware)
    twice = datetime(2024, 10, 27, 2, 30)  # noqa: DTZ001
    first = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)
    assert ms_datetime(datetime_ms(twice, BERLIN)) == first
    assert ms_datetime(datetime_ms(twice.replace(fold=1), BERLIN)) == first + timedelta(hours=1)
    for fold in (0, 1):  # a time that does not exist moves by the gap
        gap = datetime(2024, 3, 31, 2, 30, fold=fold)  # noqa: DTZ001
        after = datetime(2024, 3, 31, 3, 30, tzinfo=BERLIN)
        assert datetime_ms(gap, BERLIN) == datetime_ms(after)


def test_zones_by_name_and_by_offset() -> None:
    four = datetime_ms(datetime(2024, 1, 1, 4, tzinfo=UTC))
    assert datetime_ms(NOON, parse_zone("Asia/Shanghai")) == four
    assert datetime_ms(NOON, parse_zone("+08:00")) == four
    assert parse_zone("-0330").utcoffset(None) == -timedelta(hours=3, minutes=30)
    assert parse_zone(BERLIN) is BERLIN
    files = ("../etc/passwd", "localtime", "right/UTC")
    for bad in ("Mars/Olympus", "", *files, "+99:00", "+\u0660\u0665:00"):
        with pytest.raises(InvalidMessage, match="time zone"):
            parse_zone(bad)


class Summer(tzinfo):
    """As the documentation of `datetime` has them: answers None with an offset, or an error."""

    def __init__(self, winter: int | None) -> None:
        self.winter = winter

    def utcoffset(self, dt: datetime | None) -> timedelta:
        if dt is None and self.winter is not None:
            return timedelta(hours=self.winter)
        assert dt is not None
        return timedelta(hours=4 <= dt.month <= 10)

    def dst(self, dt: datetime | None) -> timedelta:
        return self.utcoffset(dt)

    def tzname(self, dt: datetime | None) -> str:
        return f"summer {dt}"


def test_zones_of_other_libraries() -> None:
    """As those of the standard library, or refused: never local mean time."""
    new_york, other = ZoneInfo("America/New_York"), pytz.timezone("America/New_York")
    assert parse_zone(other) == new_york
    assert parse_zone(pytz.utc) == ZoneInfo("UTC")
    assert zone_name(pytz.FixedOffset(90)) == zone_name(tz.tzoffset(None, 5400)) == "+01:30"
    with pytest.raises(InvalidMessage, match="whole number of minutes"):
        zone_name(timezone(timedelta(hours=5, seconds=7)))
    for unknown in (tz.gettz("Europe/Berlin"), tz.tzstr("EST5EDT"), Summer(0), Summer(None)):
        with pytest.raises(InvalidMessage, match="pass its name, as in 'Europe/Berlin'"):
            parse_zone(unknown)
    for wall in (datetime(2030, 1, 1, 9), datetime(2030, 7, 1, 9), datetime(2024, 11, 3, 1, 30)):  # noqa: DTZ001
        for fold, is_dst in ((0, True), (1, False)):
            given, expected = other.localize(wall, is_dst), wall.replace(tzinfo=new_york, fold=fold)
            assert datetime_ms(given) == datetime_ms(expected)
        local_mean = wall.replace(tzinfo=other)
        with pytest.raises(InvalidMessage, match="use zoneinfo, or pytz with localize"):
            datetime_ms(local_mean)
    with pytest.raises(InvalidMessage, match="is not a time: "):  # nor is NaT of pandas
        datetime_ms(datetime(2030, 1, 1, tzinfo=tzinfo()))  # type: ignore[abstract]
    dateutil = datetime(2024, 11, 3, 1, 30, fold=1, tzinfo=tz.gettz("America/New_York"))
    assert datetime_ms(dateutil) == datetime_ms(dateutil.replace(tzinfo=new_york))


def test_texts_of_times_have_a_whole_date() -> None:
    for text, read in {
        "2026-12-24T09:00": datetime(2026, 12, 24, 9),  # noqa: DTZ001
        " 2026-12-24 09:00:30.5Z": datetime(2026, 12, 24, 9, 0, 30, 500_000, tzinfo=UTC),
        "20261224T0900+0100": datetime(2026, 12, 24, 9, tzinfo=timezone(timedelta(hours=1))),
        "2026-12-24": datetime(2026, 12, 24),  # noqa: DTZ001
    }.items():
        assert parse_moment(text) == read
    wrong: object
    for wrong in (
        *("09:00", "T09:00", "2026-12", "2026", "2026-W52", "2026W521", "2026-06-31", "12-24"),
        *("2026-12-24x09:00", "2026-12-24T", "2026-12-24T9", "", "tomorrow", "20271231120000"),
        *(20271231, 2027, True, None, 1.5),
    ):
        with pytest.raises(InvalidMessage, match="write ISO 8601, as in '2026-12-24T09:00'"):
            parse_moment(wrong)


def test_the_bounds_of_a_due_time() -> None:
    assert check_due_ms(MAX_DUE_MS) == MAX_DUE_MS
    assert ms_datetime(MAX_DUE_MS) == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    assert check_due_ms(OLDEST_DUE_MS) == OLDEST_DUE_MS
    for bad in (MAX_DUE_MS + 1, 10**400, 1.0, float("nan"), True, "1", None):
        with pytest.raises(InvalidMessage):
            check_due_ms(bad)
    with pytest.raises(InvalidMessage, match="9999"):  # once it is rounded up
        check_due_ms(datetime_ms(datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))))
    for due_ms, why in {
        OLDEST_DUE_MS - 1: "ten years ago",
        -1: "ten years ago",
        1_795_474_465: "looks like seconds",
        20_261_224: "looks like a date;",
        20_261_224_090_000: "looks like a date and time;",
        19_000_101_000_000: "looks like a date and time;",
        29_991_231_235_959: "looks like a date and time;",
    }.items():
        with pytest.raises(InvalidMessage, match=why):
            check_due_ms(due_ms)
    for due_ms in (20_261_324_090_000, 20_261_224_096_000, 32_503_593_600_000, 5 * 10**13):
        assert check_due_ms(due_ms) == due_ms
