"""Windows and local due times: parsing, instants in all zones, and explanations."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time
from threading import Event
from typing import Any
from unittest.mock import Mock
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER
from lisa.core.model.options import encode
from lisa.core.model.windows import window as window_module
from lisa.core.model.windows.placing import (
    LocalTime,
    due_again,
    explain,
    local_time,
    moved,
    place,
    window_of,
)
from lisa.core.model.windows.window import (
    LONGEST_TEXT,
    limits_at,
    open_spans,
    opening_at,
    parse,
    parse_stored,
)
from lisa.core.redis.flow import Flow, drive
from lisa.core.store.placing import enqueue_placed
from lisa.core.transitions.enqueue import Enqueue, Sent, WindowChanged
from lisa.producer.plan import Outgoing, SendPlan
from lisa.testing.recording import RecordingProducer
from tests.zones import changes, distinct

ZONES = sorted(available_timezones() - {"localtime", "Factory"})
MINUTE = 60_000
DAY = 86_400_000


def at(text: str) -> int:
    return datetime_ms(datetime.fromisoformat(text).replace(tzinfo=UTC))


def shown(ms: int) -> str:
    return f"{ms_datetime(ms):%a %Y-%m-%d %H:%M}"


WRITTEN = {
    "Mon-Fri  9-17": "mon-fri 9-17",
    "always": "always",
    "tz=Asia/Tokyo": "tz=Asia/Tokyo",
    "not sun;not 12:00-13:30 ; 22-6": "22-6; not sun; not 12:00-13:30",
    "not 2026-12-24..2027-01-02; tz=@z|UTC": "not 2026-12-24..2027-01-02; tz=@z|UTC",
}
WRONG = [
    "", "  ", "9", "9-9", "24-3", "25-26", "9:60-10", "mon-xyz", "noon-17", "mon fri 9-17",
    "9-1\u0665", "9:1\u0665-10", "not 2026-13-01", "not 2026-12-24..2026-12-01", "not holidays ?",
    "tz=Mars", "tz=@", "tz=UTC; tz=UTC", "x" * 501, 5, None,
]  # fmt: skip


def test_a_window_is_read_and_written_and_a_wrong_one_refused() -> None:
    for text, again in WRITTEN.items():
        assert str(parse(text)) == again
        assert parse(again) == parse(text)
    for wrong in WRONG:
        with pytest.raises(InvalidMessage):
            parse(wrong)


def test_a_window_applies_though_it_is_stored_longer_than_it_was_given() -> None:
    given = ";".join(f"not 2030-{month:02}-{day:02}" for month in (1, 2, 3) for day in range(1, 11))
    stored = str(parse(given).in_zone("America/Argentina/ComodRivadavia"))
    assert len(given) <= LONGEST_TEXT < len(stored)
    assert window_of({WINDOW_HEADER: stored}, "") == window_of({}, stored) == parse_stored(stored)


def test_hours_are_combined_per_date() -> None:
    window = parse("mon-fri 22-6; sat 10-12,11-14; not 23:30-24; not 2026-12-24")
    monday, saturday = date(2026, 12, 21), date(2026, 12, 26)
    assert open_spans(window, monday) == ((22 * 60, 23 * 60 + 30),)
    assert open_spans(window, date(2026, 12, 22)) == ((0, 360), (22 * 60, 23 * 60 + 30))
    assert open_spans(window, date(2026, 12, 24)) == ()
    assert open_spans(window, saturday) == ((0, 360), (600, 840))
    assert open_spans(parse("sun-tue 9-10"), monday) == ((540, 600),)


@pytest.mark.parametrize(
    ("text", "start", "opens", "closes"),
    [
        ("9-17", "2026-06-01T10:00", "2026-06-01T10:00", "2026-06-01T17:00"),
        ("9-17", "2026-06-01T17:00", "2026-06-02T09:00", "2026-06-02T17:00"),
        ("not sun", "2026-06-07T10:00", "2026-06-08T00:00", "2026-06-14T00:00"),
        # The clock skips 02:00 to 03:00: the window opens right after the gap.
        ("2:15-5; tz=Europe/Berlin", "2026-03-28T23:00", "2026-03-29T01:00", "2026-03-29T03:00"),
        # 02:00 to 03:00 occurs twice: the hours are open both times.
        ("2-2:30; tz=Europe/Berlin", "2026-10-24T23:00", "2026-10-25T00:00", "2026-10-25T00:30"),
        ("2-2:30; tz=Europe/Berlin", "2026-10-25T00:30", "2026-10-25T01:00", "2026-10-25T01:30"),
        # Apia had no December 30, 2011.
        ("9-10; tz=Pacific/Apia", "2011-12-30T00:00", "2011-12-30T19:00", "2011-12-30T20:00"),
    ],
)  # fmt: skip
def test_openings(text: str, start: str, opens: str, closes: str) -> None:
    assert opening_at(parse(text), at(start)) == (at(opens), at(closes))


def test_a_window_without_an_opening_within_400_days_is_refused() -> None:
    window = parse("not daily")
    assert opening_at(window, at("2026-06-01T00:00")) is None
    with pytest.raises(InvalidMessage, match="does not open within 400 days"):
        moved("+0", window, at("2026-06-01T00:00"))
    with pytest.raises(ConfigError, match="does not open within 400 days"):
        encode({"window": "not 2020-01-01..2099-12-31"})
    far = parse("not 2026-06-01..2027-06-30")
    found = opening_at(far, at("2026-06-01T00:00"))
    assert found is not None
    assert found.opens_ms == at("2027-07-01T00:00")


TEXTS = [
    "9-17",
    "mon-fri 9-17:30; not 12-13",
    "22-6",
    "not sun; not 22-8",
    "0-0:30,2-3",
    "sat,sun 23-4",
]


def check_openings(zone: str, text: str, start_ms: int) -> None:
    """Every minute up to the end of an opening agrees with the wall clock."""
    window, info = parse(text), ZoneInfo(zone)
    found = opening_at(window.in_zone(zone), start_ms)
    assert found is not None
    opens_ms, closes_ms = found

    def wall_is_open(ms: int) -> bool:
        wall = ms_datetime(ms).astimezone(info)
        minute = wall.hour * 60 + wall.minute
        return any(s <= minute < e for s, e in open_spans(window, wall.date()))

    assert wall_is_open(opens_ms)
    assert opens_ms == start_ms or not wall_is_open(opens_ms - 1)
    assert wall_is_open(closes_ms - 1)
    assert closes_ms - start_ms > 8 * DAY or not wall_is_open(closes_ms)
    for ms in range(start_ms, closes_ms, 17 * MINUTE):
        assert wall_is_open(ms) == (ms >= opens_ms), shown(ms)
    limits = limits_at(window.in_zone(zone), start_ms)
    assert limits is not None
    assert (limits[0] > start_ms) == wall_is_open(start_ms)
    assert limits[1] >= limits[0]


@settings(max_examples=150)
@given(
    st.sampled_from(ZONES),
    st.sampled_from(TEXTS),
    st.integers(at("1975-01-01T00:00"), at("2037-12-01T00:00")),
)
def test_openings_agree_with_the_wall_clock(zone: str, text: str, start_ms: int) -> None:
    check_openings(zone, text, start_ms)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", TEXTS)
def test_openings_agree_with_the_wall_clock_in_all_zones(text: str) -> None:
    """Around each change of a clock, and in between: each zone with offsets of its own."""
    for zone in distinct():
        for second, _ in changes(zone):
            for before_ms in (DAY + 7_654_321, 50 * MINUTE + 1, -1):
                check_openings(zone, text, second * 1000 - before_ms)
        for day in range(1, 366, 11):
            check_openings(zone, text, at("2025-01-01T00:00") + day * DAY + 7_654_321)


@settings(max_examples=300)
@given(
    st.sampled_from(ZONES),
    st.datetimes(datetime(2018, 1, 2), datetime(2037, 12, 1)),  # noqa: DTZ001 - wall times
    st.sampled_from([0, 1]),
)
def test_a_wall_time_is_shown_or_skipped(zone: str, wall: datetime, fold: int) -> None:
    wall = wall.replace(microsecond=0)
    due_ms = LocalTime(wall, zone, fold).due_ms
    seen = ms_datetime(due_ms).astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)
    before = ms_datetime(due_ms - 1).astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0)
    exact = wall.replace(tzinfo=ZoneInfo(zone), fold=fold)
    if seen == wall:
        assert due_ms == datetime_ms(exact)
    else:  # in a gap: the clock shows an earlier time right before, and a later one from then on
        assert before < wall < seen


def test_gaps_and_overlaps_of_local_times() -> None:
    def due(text: str, **options: Any) -> str:
        return shown(local_time(text, "Europe/Berlin", **options).due_ms)

    assert due("2026-12-24T09:00") == "Thu 2026-12-24 08:00"
    assert due("2026-03-29T02:30") == "Sun 2026-03-29 01:00"
    assert due("2026-10-25T02:30") == "Sun 2026-10-25 00:30"
    assert due("2026-10-25T02:30", fold=1) == "Sun 2026-10-25 01:30"
    assert due("2026-12-24T09:00", fold=1) == "Thu 2026-12-24 08:00"


def test_in_three_business_days_at_ten() -> None:
    thursday = at("2026-06-04T20:00")  # Friday in Tokyo

    def due(window: str | None = None, days: int = 3) -> str:
        options = {"at_local": "10:00", "business_days": days, "window": window}
        return shown(int(place(options, None, "Asia/Tokyo", thursday).due))

    assert due() == "Wed 2026-06-10 01:00"
    assert due(days=0) == "Fri 2026-06-05 01:00"
    assert due("mon-fri 9-17; not 2026-06-09") == "Thu 2026-06-11 01:00"
    assert due("mon-fri 12-17") == "Wed 2026-06-10 03:00"  # moved to the opening
    local = local_time(time(10), "UTC", business_days=1, now_ms=thursday)
    assert str(local) == "2026-06-05T10:00 UTC"


CHRISTMAS: dict[str, Any] = {"at_local": "2026-12-24T09:00", "tz": "UTC"}
TEN: dict[str, Any] = {"at_local": "10:00", "tz": "UTC"}
REFUSED: list[tuple[Any, str]] = [
    ({"at_local": "2026-12-24T09:00"}, "needs tz"),
    ({"at_local": "09:00", "tz": "UTC"}, "has no date"),
    ({"at_local": "2026-12-24T09:00+01:00", "tz": "UTC"}, "has an offset"),
    ({"at_local": "tomorrow", "tz": "UTC"}, "not a local time"),
    ({"at_local": 5, "tz": "UTC"}, "is text"),
    ({"at_local": "1999-12-24T09:00", "tz": "UTC"}, "ten years ago"),
    ({**CHRISTMAS, "fold": 2}, "fold=2"),
    ({**CHRISTMAS, "delay": "5m"}, "give one of"),
    ({**CHRISTMAS, "business_days": 3}, "without a date"),
    ({**TEN, "business_days": 251}, "business_days is 0 to 250"),
    ({**TEN, "business_days": 3, "window": "not daily"}, "400 days"),
    ({"business_days": 0}, "need at_local"),
    ({"fold": 1}, "need at_local"),
    ({"window": ""}, "a window is text"),
    ({"window": "whenever"}, "not a day"),
    ({"headers": {WINDOW_HEADER: "nonsense"}}, "not a day"),
    ({"headers": {WINDOW_HEADER: "not daily"}}, "400 days"),
    ({"headers": {WINDOW_HEADER: 5}}, "headers are text"),
    ({"headers": [("a", "b")], "window": "always"}, "mapping"),
]


def test_contradictory_options_are_refused() -> None:
    for options, why in REFUSED:
        with pytest.raises(InvalidMessage, match=why):
            SendPlan.of(options, None)


def test_messages_of_one_call_differ() -> None:
    producer = RecordingProducer()
    own: list[dict[str, Any]] = [{}, {"window": "always"}, {"tz": "UTC"}, {"delay": "5m"}]
    bodies = [Outgoing(1, **options) for options in own]
    producer.send_many("t", bodies, at_local="2030-12-22T09:00", tz="Asia/Tokyo", window="not sun")
    *at_local, delayed = producer.sent
    dues = [shown(datetime_ms(one.due)) for one in at_local if one.due]
    assert dues == ["Sun 2030-12-22 15:00", "Sun 2030-12-22 00:00", "Mon 2030-12-23 00:00"]
    tokyo, utc = "not sun; tz=Asia/Tokyo", "not sun; tz=UTC"
    assert [one.headers[WINDOW_HEADER] for one in at_local] == [tokyo, "tz=Asia/Tokyo", utc]
    assert delayed.headers == {WINDOW_HEADER: tokyo}


def test_headers_of_another_message_give_the_window_but_no_wall_time() -> None:
    producer = RecordingProducer()
    sunday = datetime(2030, 12, 22, 9, tzinfo=UTC)
    old = {LOCAL_HEADER: "2026-06-07T09:00 Asia/Tokyo", WINDOW_HEADER: "not sun", "a": "b"}
    producer.send("t", 1, at=sunday, headers=old, tz="Asia/Tokyo")
    producer.send("t", 2, at=sunday, headers=old, window="always", tz="UTC")
    producer.send("t", 3, at_local="2030-12-23T09:00", headers=old, tz="Asia/Tokyo")
    producer.send_many("t", [Outgoing(4, headers=old), Outgoing(5, headers={})], at=sunday)
    moved, always, later, one, none = producer.sent
    assert moved.headers == {WINDOW_HEADER: "not sun; tz=Asia/Tokyo", "a": "b"}
    assert moved.due is not None
    assert shown(datetime_ms(moved.due)) == "Sun 2030-12-22 15:00"
    assert (always.due, always.headers) == (sunday, {WINDOW_HEADER: "tz=UTC", "a": "b"})
    assert later.headers[LOCAL_HEADER] == "2030-12-23T09:00 Asia/Tokyo"
    assert one.headers == {WINDOW_HEADER: "not sun; tz=UTC", "a": "b"}
    assert (none.due, none.headers) == (sunday, {})


def test_the_zone_of_a_topics_window_may_be_in_a_header() -> None:
    topic = "9-17; tz=@zone|Europe/Berlin"
    assert str(window_of({"zone": "Asia/Tokyo"}, topic)) == "9-17; tz=Asia/Tokyo"
    assert str(window_of({"zone": "nowhere"}, topic)) == "9-17; tz=Europe/Berlin"
    assert str(window_of({}, topic)) == "9-17; tz=Europe/Berlin"
    assert str(window_of({WINDOW_HEADER: "10-11"}, topic)) == "10-11; tz=UTC"
    assert window_of({WINDOW_HEADER: "unreadable"}, topic) is None
    assert window_of({}, "") is None


@pytest.mark.parametrize(
    "name", ["CEST", "W. Europe Standard Time", "europe/berlin", "UTC+2", " ", "", None]
)
def test_a_send_needs_a_zone_where_a_header_has_to_name_it(name: str | None) -> None:
    producer, headers = RecordingProducer(), {} if name is None else {"zone": name}
    with pytest.raises(InvalidMessage, match=r"'zone'.*; or state a default: tz=@zone\|Europe"):
        producer.send("t", 1, window="9-17; tz=@zone", headers=headers)
    own = headers | {WINDOW_HEADER: "9-17; tz=@zone"}
    with pytest.raises(InvalidMessage, match="'zone'"):
        producer.schedule("s", topic="t", body=1, every="1h", headers=own)
    producer.send("t", 1, window="9-17; tz=@zone", headers=headers, tz="Asia/Tokyo")
    producer.send("t", 1, window="9-17; tz=@zone|Asia/Tokyo", headers=headers)
    assert {one.headers[WINDOW_HEADER] for one in producer.sent} == {"9-17; tz=Asia/Tokyo"}
    steps = explain("+0", headers, "0-24; tz=@zone", at("2026-03-01T00:00"))
    assert any("'zone'" in step and step.endswith("; UTC applies") for step in steps)


def test_a_due_time_is_computed_again_from_its_headers() -> None:
    now = at("2026-06-01T00:00")
    headers = {LOCAL_HEADER: "2026-06-07T09:00 Asia/Tokyo"}
    assert due_again({}, "", now) is None
    assert due_again({LOCAL_HEADER: "soon Asia/Tokyo"}, "", now) is None
    assert due_again(headers, "", now) == at("2026-06-07T00:00")
    assert due_again(headers, "not sun; tz=Asia/Tokyo", now) == at("2026-06-07T15:00")


def test_an_explanation_names_each_step() -> None:
    headers = {
        LOCAL_HEADER: "2026-03-29T02:30 Europe/Berlin",
        WINDOW_HEADER: "mon-fri 9-17; not 2026-03-30; tz=Europe/Berlin",
    }
    assert explain("+0", headers, "", at("2026-03-01T00:00")) == [
        "2026-03-29T02:30 Europe/Berlin: 2026-03-29T01:00:00Z",
        "that time is skipped by a change of the clock; the gap ends at 2026-03-29 03:00:00",
        "the message's window: mon-fri 9-17; not 2026-03-30; tz=Europe/Berlin",
        "closed at Sun 2026-03-29 03:00: outside mon-fri 9-17",
        "closed on Mon 2026-03-30: not 2026-03-30",
        "opens at Tue 2026-03-31 09:00 Europe/Berlin: 2026-03-31T07:00:00Z",
    ]
    assert explain("+0", {}, "", at("2026-03-01T00:00"))[-1] == "no window applies"
    assert explain("+0", {}, "0-4", at("2026-03-01T00:00"))[-1] == "open at Sun 2026-03-01 00:00"


def test_holidays_close_a_window() -> None:
    pytest.importorskip("holidays", reason="needs the extra holidays")
    window = parse("mon-fri 9-17; not holidays de-be; tz=Europe/Berlin")
    assert str(window) == "mon-fri 9-17; not holidays DE-BE; tz=Europe/Berlin"
    # March 8 is a holiday in Berlin, but not in Bavaria.
    assert shown(moved_ms(window, "2027-03-08T09:00")) == "Tue 2027-03-09 08:00"
    bavarian = parse("not holidays DE-BY")
    assert shown(moved_ms(bavarian, "2027-03-08T09:00")) == "Mon 2027-03-08 09:00"
    why = explain("+0", {}, str(window), at("2027-03-08T09:00"))
    assert "holiday in DE-BE" in why[2]
    with pytest.raises(InvalidMessage, match="no country or subdivision QQ"):
        parse("not holidays QQ")


def test_threads_that_look_up_a_holiday_first_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library knows a year as soon as one thread begins to compute it."""
    library = pytest.importorskip("holidays", reason="needs the extra holidays")
    compute, begun, seen = library.countries.UnitedStates._populate, Event(), Event()

    def slowly(calendar: Any, year: int) -> None:
        if not begun.is_set():
            begun.set()
            seen.wait(30)
        compute(calendar, year)

    monkeypatch.setattr(library.countries.UnitedStates, "_populate", slowly)
    calendar, day = window_module.parse_calendar("US"), date(2093, 12, 25)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(window_module.holiday_name, calendar, day)
        begun.wait(30)
        second = window_module.holiday_name(calendar, day)
        seen.set()
        assert first.result() == second == "Christmas Day"


def moved_ms(window: Any, text: str) -> int:
    return int(moved(str(at(text)), window, at(text) - DAY))


def test_holidays_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "holidays", None)
    window_module._names_of.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'lisa-delay-queue\[holidays\]'"):
        parse("not holidays FR")


def test_two_threads_may_find_at_the_same_time_that_a_topic_has_no_window_any_more() -> None:
    class Shared(dict[str, str]):
        def __delitem__(self, topic: str) -> None:
            super().__delitem__(topic)  # by the other thread
            super().__delitem__(topic)

    tries: list[str | None] = []

    def write(call: Enqueue) -> Flow[list[Sent]]:
        tries.append(call.window)
        if len(tries) == 1:
            raise WindowChanged("")
        yield from ()
        return [Sent.ACCEPTED]

    windows = Shared(orders="always")
    call = Enqueue("orders", ["a"], ["5"], [encode_envelope("token", 1)], window="")
    assert drive(enqueue_placed(Mock(), call, windows, write), None) == [Sent.ACCEPTED]
    assert tries == ["always", ""]
    assert not windows
