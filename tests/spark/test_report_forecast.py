"""The forecast of backlogs, and the steps of a time axis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from lisa.pipeline.jobs.report.forecast import DAYS, Crossing, Demand, crossing
from lisa.pipeline.jobs.report.formatting import (
    change,
    count,
    kept,
    length,
)
from lisa.pipeline.jobs.report.slots import full_hour_shift, span_of


def test_no_crossing_while_load_is_below_capacity() -> None:
    assert crossing("orders", Demand(hours=dict.fromkeys(range(700), 100)), 100) is None


def test_one_hour_above_capacity() -> None:
    demand = Demand(hours={5: 350, 6: 20, 8: 90})
    # Hour 5 leaves 250 over, hour 6 170, hour 7 70; hour 8 has 160 to do, and leaves 60; hour 9
    # needs six tenths of itself.
    assert crossing("orders", demand, 100) == Crossing("orders", 100, 5, 350, 250, 5, 9.6)


def test_overdue_messages_are_part_of_the_first_hour() -> None:
    found = crossing("orders", Demand(overdue=150, hours={0: 100}), 100)
    assert found == Crossing("orders", 100, 0, 250, 150, 0, 2.5)


def test_the_worst_of_several_crossings_is_returned() -> None:
    found = crossing("orders", Demand(hours={1: 120, 50: 1_000}), 100)
    assert found is not None
    assert (found.hour, found.peak) == (50, 900)


def test_a_backlog_that_never_ends() -> None:
    found = crossing("orders", Demand(hours=dict.fromkeys(range(DAYS * 24), 101)), 100)
    assert found == Crossing("orders", 100, 0, 101, DAYS * 24, DAYS * 24 - 1, None)


def test_a_demand_is_summed_by_days_of_24_hours() -> None:
    demand = Demand(overdue=1, later=2, hours={0: 3, 23: 4, 24: 5})
    assert (demand.days(), demand.within(24), demand.total) == ({0: 7, 1: 5}, 7, 15)


def seconds(zone: ZoneInfo | timezone, *parts: int) -> int:
    return int(datetime(*parts, tzinfo=zone).timestamp())  # type: ignore[misc, arg-type]


def test_steps_are_short_for_short_ranges_and_long_for_long_ones() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first = seconds(berlin, 2026, 3, 28, 22, 40)
    for hours, step, part_s in (
        (0, "minute", 60),
        (2, "minute", 60),
        (3, "5 minutes", 300),
        (36, "15 minutes", 900),
        (37, "hour", 3_600),
        (20 * 24, "day", 3_600),
    ):
        found = span_of(first, first + hours * 3_600, berlin, 0)
        assert (found.step, found.part_s) == (step, part_s)
        assert found.edges[0] <= first < found.edges[1]
        assert found.edges[-2] <= first + hours * 3_600 < found.edges[-1]
        assert len(found.edges) <= 150
    by_hour = span_of(first, first + 40 * 3_600, berlin, 0)
    assert by_hour.edges[0] == seconds(berlin, 2026, 3, 28, 22)
    assert len(by_hour.edges) == 42
    days = span_of(first, first + 20 * 86_400, berlin, 0)
    assert days.step == "day"
    # The clock goes forward on the 29th: that day has 23 hours.
    assert [b - a for a, b in zip(days.edges, days.edges[1:3], strict=False)] == [86_400, 82_800]
    assert days.index(seconds(berlin, 2026, 3, 29, 0)) == 1
    assert days.index(seconds(berlin, 2026, 3, 29, 23)) == 1
    assert days.index(seconds(berlin, 2026, 3, 30, 0)) == 2
    years = span_of(first, first + 900 * 86_400, berlin, 0)
    assert years.step == "30 days"
    assert len(years.edges) < 40
    assert years.edges[-1] > first + 900 * 86_400


@pytest.mark.parametrize(
    ("zone", "shift"),
    [
        (UTC, 0),
        (ZoneInfo("Europe/Berlin"), 0),
        (ZoneInfo("Asia/Kolkata"), 1_800),
        (timezone(timedelta(hours=-3, minutes=-30)), 1_800),
        (timezone(timedelta(hours=5, minutes=45)), 900),
    ],
)
def test_hours_start_at_full_hours_of_the_zone(zone: ZoneInfo | timezone, shift: int) -> None:
    now = seconds(timezone.utc, 2026, 11, 21, 13, 17)  # noqa: UP017 - typed as the others are
    assert full_hour_shift(zone, now) == shift
    edge = span_of(now, now + 40 * 3_600, zone, shift).edges[0]
    assert datetime.fromtimestamp(edge, UTC).astimezone(zone).minute == 0
    assert edge <= now < edge + 3_600


def test_formatting_of_numbers_and_durations() -> None:
    pairs = [(1, 1), (9_999, 10_000), (99_999, 100_000), (0, 3), (0, 0)]
    assert [kept(*pair) for pair in pairs] == ["100 %", "99.99 %", "99.99 %", "0 %", ""]
    assert [change(*pair) for pair in [(4, 5), (5, 4), (3, 3), (0, 3)]] == [
        "+25 %",
        "-20 %",
        "+0 %",
        "",
    ]
    assert [length(n) for n in (0, 850, 1_250, 999_400, 3_400_000, 125_000_000)] == [
        "0 s",
        "850 µs",
        "1.25 ms",
        "999 ms",
        "3.4 s",
        "2m 5s",
    ]
    assert [count(n, short=True) for n in (0, 950, 1_200, 3_400_000)] == [
        "0",
        "950",
        "1.2k",
        "3.4M",
    ]
