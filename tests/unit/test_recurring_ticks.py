"""Definitions of schedules, and what a manager does at a tick."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from lisa.core.model.clock import datetime_ms
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.define import ScheduleOptions, define
from lisa.core.model.recurring.definition import Record, body_of, check_name
from lisa.core.model.recurring.ticks import (
    LOOK_AGAIN_MS,
    ON_TIME_MS,
    TickStep,
    advance,
    begin,
    due_ms,
    fewer,
    next_tick,
    taken_back,
    tick_before,
)

MINUTE = 60_000
HOUR = 60 * MINUTE
START = 1_800_000_000_000


def made(options: ScheduleOptions, **state: Any) -> Record:
    """The record of a schedule created at START; every minute unless the options say otherwise."""
    if not options.get("cron"):
        options = {"every": "1m", **options}
    return Record(version=1, made_ms=START, definition=define("x", options), **state)


def created(step: TickStep) -> list[int]:
    """The ticks of the messages that a step creates, in minutes after START."""
    return [(tick - START) // MINUTE for tick, _, _ in step.creates]


def at(minutes: float) -> int:
    return START + int(minutes * MINUTE)


def started(options: ScheduleOptions) -> Record:
    """A record after its first step."""
    return begin(made(options), START, is_split=False).record


def test_an_interval_keeps_its_phase() -> None:
    record = made({"every": "10m", "start": datetime(2027, 1, 1, tzinfo=UTC)})
    start = 1_798_761_600_000
    ticks = [next_tick(record.definition, START, start + ms) for ms in (-1, 0, 1, 600_000)]
    assert ticks == [start, start + 600_000, start + 600_000, start + 1_200_000]
    last = next_tick(record.definition, START, 253_402_300_799_999 - 600_000)
    assert last is not None
    assert next_tick(record.definition, START, last) is None, "it ends with the year 9999"


def test_start_and_until_are_included() -> None:
    options: ScheduleOptions = {
        "cron": "0 9 * * *",
        "tz": "Europe/Berlin",
        "start": "2026-12-24T09:00",
        "until": "2026-12-25T09:00",
    }
    definition = define(None, options)
    first = next_tick(definition, 0, 0)
    assert first == int(datetime(2026, 12, 24, 8, tzinfo=UTC).timestamp()) * 1000
    second = next_tick(definition, 0, first)
    assert second == first + 24 * HOUR
    assert next_tick(definition, 0, second) is None


def test_each_tick_creates_the_next_occurrence() -> None:
    step = begin(made({}), START, is_split=False)
    assert (step.creates, step.score, step.record.made) == ([(at(1), 1, None)], at(1), 1)
    step = advance(step.record, at(1) + 5, is_split=False)
    assert (step.creates, step.score, step.drops) == ([(at(2), 2, at(1))], at(2), [])
    step = begin(made({}), START, is_split=True)  # a split topic creates each at its tick
    assert (created(step), step.score) == ([], at(1))
    step = advance(step.record, at(1), is_split=True)
    assert (created(step), step.score, step.record.is_made) == ([1], at(2), False)


@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_a_tick_that_has_not_come_is_left_alone(overlap: str) -> None:
    record = started({"overlap": overlap})
    step = advance(record, at(1) - 5, is_split=False)
    assert (step.record, step.score, created(step)) == (record, at(1), [])


def test_ticks_that_are_a_little_late_all_run() -> None:
    record = started({"every": "2s", "catch_up": "one"})
    step = advance(record, START + 2_000 + ON_TIME_MS, is_split=False)
    ticks = [tick - START for tick, _, _ in step.creates]
    assert ticks == [4_000, 6_000, 8_000, 10_000, 12_000, 14_000]


CAUGHT_UP = {
    "one: the newest replaces the pending one": ("one", [5, 6], [1], True),
    "all": ("all", [2, 3, 4, 5, 6], [], False),
    "the newest two": ("all(max=2)", [4, 5, 6], [1], True),
}


@pytest.mark.parametrize("case", CAUGHT_UP)
def test_catching_up_after_an_outage(case: str) -> None:
    policy, expected, drops, swaps = CAUGHT_UP[case]
    step = advance(started({"catch_up": policy}), at(5.5), is_split=False)
    assert created(step) == expected
    assert [(tick - START) // MINUTE for tick in step.drops] == drops
    assert step.swaps is swaps
    assert step.record.made == 1 + len(expected) - len(drops)
    assert step.score == at(6)


AT_THE_TICK = {
    "none": ({"catch_up": "none"}, 5.5, []),
    "none, on time": ({"catch_up": "none"}, 1.1, [1]),
    "max_late": ({"catch_up": "all", "max_late": "2m"}, 5.5, [4, 5]),
    "max_late, one": ({"catch_up": "one", "max_late": "2m"}, 5.5, [5]),
    "max_late, too late": ({"every": "1h", "max_late": "2m"}, 63, []),
}


@pytest.mark.parametrize("case", AT_THE_TICK)
def test_occurrences_that_are_created_at_their_tick(case: str) -> None:
    options, now, expected = AT_THE_TICK[case]
    record = started(options)  # type: ignore[arg-type]
    assert not record.is_made
    step = advance(record, at(now), is_split=False)
    assert created(step) == expected
    assert step.score is not None
    assert step.score > at(now)


def test_a_skipped_tick_is_not_made_up_for() -> None:
    step = advance(started({"overlap": "skip"}), at(1), is_split=False)
    assert created(step) == [1]
    assert step.record.earlier == (at(1),)
    assert step.held is not None
    assert (step.held.tick, step.held.earlier, step.held_score) == (at(2), (), at(2))


def test_a_queued_tick_is_looked_at_again_until_it_can_be_created() -> None:
    step = advance(started({"overlap": "queue_one"}), at(1), is_split=False)
    held = step.held
    assert held is not None
    assert (held.tick, held.is_queued, step.held_score) == (at(1), True, at(1) + LOOK_AGAIN_MS)
    assert held.fence != started({"overlap": "queue_one"}).fence
    # Ticks that come meanwhile are dropped: only one waits.
    step = advance(held, at(3.5), is_split=False)
    assert (created(step), step.score, step.record.is_queued) == ([1], at(4), False)
    step = advance(started({"overlap": "queue_one", "max_late": "2m"}), at(1), is_split=False)
    assert step.held is not None
    step = advance(step.held, at(3.5), is_split=False)  # it is given up after max_late
    assert (created(step), step.record.tick) == ([], at(4))


def test_missed_ticks_run_one_at_a_time_if_overlaps_matter() -> None:
    record = started({"overlap": "skip", "catch_up": "all"})
    found = []
    for _ in range(3):
        step = advance(record, at(3), is_split=False)
        found += created(step)
        record = step.record
    assert found == [1, 2, 3]
    assert record.tick == at(4)


def test_count_ends_a_schedule() -> None:
    record = started({"count": 2})
    step = advance(record, at(1), is_split=False)
    assert created(step) == [2]
    step = advance(step.record, at(2), is_split=False)
    assert (created(step), step.score, step.record.tick) == ([], None, None)


def test_pausing_drops_the_pending_occurrence_and_gives_its_number_back() -> None:
    record = msgspec.structs.replace(started({}), is_paused=True)
    step = begin(record, at(0.5), is_split=False)
    assert (step.drops, step.score, step.record.made) == ([at(1)], None, 0)
    resumed = begin(msgspec.structs.replace(step.record, is_paused=False), at(7.5), is_split=False)
    assert created(resumed) == [8]


def test_occurrences_that_are_removed_before_they_are_due_give_their_numbers_back() -> None:
    record = made({}, made=5, last=at(5), tick=at(6))
    fewer_made = taken_back(record, [at(4), at(5)])
    assert (fewer_made.made, fewer_made.last) == (3, at(3))
    assert taken_back(record, [at(4)]).last == at(5)
    assert taken_back(made({}, made=1, last=at(1)), [at(1)]).last is None


def test_an_edit_of_the_overlap_concerns_the_latest_occurrence() -> None:
    record = advance(started({}), at(1), is_split=False).record
    skip = msgspec.structs.replace(
        record, definition=define("x", {"every": "1m", "overlap": "skip"})
    )
    assert begin(skip, at(1.5), is_split=False).record.earlier == (at(1),)


def test_an_edit_keeps_a_tick_that_has_come() -> None:
    """An earlier occurrence, or a full topic, has prevented its occurrence so far."""
    queued = advance(started({"overlap": "queue_one"}), at(1), is_split=False).held
    assert queued is not None
    step = begin(msgspec.structs.replace(queued, version=2), at(1.5), is_split=False)
    assert (created(step), step.score, step.record.tick) == ([], at(1), at(1))
    late = begin(made({}), START, is_split=True).record
    step = begin(msgspec.structs.replace(late, version=2), at(3.5), is_split=True)
    assert (step.score, step.record.last) == (at(1), None)
    hourly = msgspec.structs.replace(late, definition=define("x", {"every": "1h"}))
    assert begin(hourly, at(3.5), is_split=True).score == at(60)
    ahead = begin(msgspec.structs.replace(started({}), version=2), at(1.5), is_split=True)
    assert (ahead.score, ahead.drops) == (at(2), [])
    assert (ahead.record.last, ahead.record.made) == (at(1), 1)


def test_an_interval_between_occurrences_is_covered_once() -> None:
    """An occurrence that is removed before its tick is not the previous one of any other."""
    record = advance(started({}), at(1), is_split=False).record
    assert (record.tick, record.last, record.latest) == (at(2), at(1), at(2))
    edited = begin(msgspec.structs.replace(record, version=2), at(1.5), is_split=False)
    assert edited.creates == [(at(2), 2, at(1))]
    paused = begin(msgspec.structs.replace(record, is_paused=True), at(1.5), is_split=False)
    assert (paused.record.last, paused.record.latest) == (at(1), at(1))
    resumed = begin(
        msgspec.structs.replace(paused.record, is_paused=False), at(7.5), is_split=False
    )
    assert resumed.creates == [(at(8), 2, at(1))]


@pytest.mark.parametrize(
    ("may_swap", "expected"),
    [(True, [(at(5), 1, None), (at(6), 2, at(5))]), (False, [(at(6), 2, at(1))])],
)
def test_the_occurrence_before_missed_ticks(
    expected: list[tuple[int, int, int | None]], *, may_swap: bool
) -> None:
    step = advance(started({}), at(5.5), is_split=False, may_swap=may_swap)
    assert step.creates == expected
    assert step.record.made == 2


@pytest.mark.parametrize("is_split", [False, True])
def test_a_topic_with_little_room_gets_the_missed_ticks_step_by_step(*, is_split: bool) -> None:
    now = at(6.5)
    record = begin(made({"catch_up": "all"}), START, is_split=is_split).record
    steps = []
    for most in (2, 1, 99):
        steps.append(advance(record, now, is_split=is_split, most=most))
        record = steps[-1].record
    ticks = [tick for step in steps for tick in created(step)]
    assert ticks == ([1, 2, 3, 4, 5, 6] if is_split else [2, 3, 4, 5, 6])
    assert steps[0].score == at(3) if is_split else at(4)
    assert (record.tick, record.is_made, record.last) == (at(7), False, at(6))


def test_how_many_occurrences_a_step_creates_on_a_full_topic() -> None:
    now, most = at(6.5), []
    step = advance(started({"catch_up": "all"}), now, is_split=False)
    while (few := fewer(step, now)) is not None:
        most.append(few)
        step = advance(started({"catch_up": "all"}), now, is_split=False, most=few)
    assert most == [5, 2, 1]
    step = advance(started({}), at(1), is_split=False)
    assert fewer(step, at(1)) == 0  # the occurrence ahead of its tick can wait


def test_the_newest_of_all_missed_ticks_follow_an_occurrence_that_began() -> None:
    record = started({"catch_up": "all(max=2)"})
    step = advance(record, at(5.5), is_split=False, may_swap=False)
    assert step.creates == [(at(4), 2, at(1)), (at(5), 3, at(4)), (at(6), 4, at(5))]
    assert (step.drops, step.swaps) == ([], False)


@pytest.mark.parametrize(
    ("cron", "tick", "before"),
    [
        ("0 9 * * *", datetime(2026, 3, 29, 7), datetime(2026, 3, 28, 8)),  # noqa: DTZ001
        ("0 0 29 2 *", datetime(2028, 2, 28, 23), datetime(2024, 2, 28, 23)),  # noqa: DTZ001
        ("0 0 0 1 1 ? 2027", datetime(2026, 12, 31, 23), None),  # noqa: DTZ001
    ],
)
def test_the_tick_before_another(cron: str, tick: datetime, before: datetime | None) -> None:
    record = made({"cron": cron, "tz": "Europe/Berlin"})
    found = tick_before(record, datetime_ms(tick, UTC))
    assert found == (None if before is None else datetime_ms(before, UTC))


def test_jitter_is_the_same_for_the_same_tick() -> None:
    definition = define(None, {"every": "1m", "jitter": "30s"})
    dues = [due_ms(definition, "a", at(minute)) - at(minute) for minute in range(50)]
    assert dues == [due_ms(definition, "a", at(minute)) - at(minute) for minute in range(50)]
    assert min(dues) >= 0
    assert max(dues) <= 30_000
    assert len(set(dues)) > 40
    assert due_ms(definition, "b", START) != due_ms(definition, "a", START)


def test_a_record_is_read_as_it_was_written() -> None:
    record = msgspec.structs.replace(
        started({"overlap": "queue_one", "headers": {"a": "b"}, "retry": "0,5s"}),
        is_queued=True,
        declared="abc",
    )
    assert Record.decode(record.encode()) == record
    assert record.encode().startswith(record.fence.encode() + b" ")
    with pytest.raises(InvalidMessage, match="cannot be read"):
        Record.decode(b"1.2 {}")


@pytest.mark.parametrize("body", [None, {"a": [1, "é"]}, "text", b"\x00\xff"])
def test_a_body_is_stored_as_it_was_given(body: Any) -> None:
    definition = define(body, {"every": "1m"})
    assert body_of(Record.decode(Record(definition=definition).encode()).definition) == body
    tail = definition.body_at("s", START, None, 1)
    envelope = decode_envelope(b"1AAAAAAAA-" + tail)
    assert envelope.headers == {"lisa-schedule": "s", "lisa-tick": str(START)}


def test_a_template_fills_texts_of_the_body() -> None:
    body = {"at": "${tick}", "since": "${previous}", "n": ["${count}", "no. $count"], "$$": "$$5"}
    definition = define(body, {"every": "1m", "template": True, "tz": "Europe/Berlin"})
    first = definition.body_at("s", START, None, 1)
    assert b'{"at":"2027-01-15T09:00:00+01:00","since":null,"n":[1,"no. 1"],"$$":"$5"}' in first
    second = definition.body_at("s", START + MINUTE, START, 2)
    assert b'"since":"2027-01-15T09:00:00+01:00","n":[2,"no. 2"]' in second
    text = define("$tick_ms after $previous_ms", {"every": "1m", "template": True})
    assert text.body_at("s", 60_000, 0, 1).endswith(b"60000 after 0")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "exactly one of cron and every"),
    "both": ({"cron": "@daily", "every": "1m"}, "exactly one of cron and every"),
    "cron": ({"cron": "61 * * * *"}, "cron field minute '61'"),
    "long cron": ({"cron": "0," * 500 + "0 * * * *"}, "at most 1,000 characters, not 1,009"),
    "short": ({"every": "500ms"}, "at least 1s"),
    "zone": ({"cron": "@daily", "tz": "Mars/Base"}, "unknown time zone"),
    "dst": ({"cron": "@daily", "dst": "x"}, "dst is one of vixie, skip"),
    "start": ({"cron": "@daily", "start": "tomorrow"}, "start='tomorrow' is not a time"),
    "until": ({"every": "1m", "start": "2026-02-01", "until": "2026-01-01"}, "before start"),
    "year 0": ({"cron": "@daily", "start": "0001-01-01", "tz": "Asia/Tokyo"}, "is out of range"),
    "year 10000": ({"every": "1m", "until": "9999-12-31T23:59Z", "tz": "Asia/Tokyo"}, "is out of"),
    "count": ({"every": "1m", "count": 0}, "less than 1"),
    "large count": ({"every": "1m", "count": 1 << 64}, "count is at most 1,000,000,000,000"),
    "count's type": ({"every": "1m", "count": "3"}, "count is a number"),
    "catch_up": ({"every": "1m", "catch_up": "some"}, "none, one, all or all"),
    "catch_up's max": ({"every": "1m", "catch_up": "all(500)"}, "1 to 100"),
    "jitter": (
        {"every": "1m", "jitter": "1m", "overlap": "replace_unstarted"},
        "jitter=1m is not shorter than every=1m",
    ),
    "max_late": ({"every": "1m", "max_late": "999ms"}, "max_late=999ms is too short"),
    "overlap": ({"every": "1m", "overlap": "x"}, "allow, skip, queue_one"),
    "ttl": ({"every": "1m", "ttl": "0s"}, "a ttl counts from the due time and must exceed 0"),
    "header": ({"every": "1m", "headers": {"lisa-tick": "1"}}, "'lisa-tick' is set"),
    "headers": ({"every": "1m", "headers": 5}, "a mapping of text to text, not 5"),
    "window": ({"every": "1m", "headers": {"lisa-window": "sat; not sat"}}, "within 400 days"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_option_is_named(case: str) -> None:
    options, reason = REFUSED[case]
    with pytest.raises(InvalidMessage, match=reason):
        define(None, options)  # type: ignore[arg-type]


def test_wrong_templates_options_and_names_are_refused() -> None:
    for body in ("$when", "costs 5$", {"a": ["${now}"]}):
        with pytest.raises(InvalidMessage, match="the template knows"):
            define(body, {"every": "1m", "template": True})
    with pytest.raises(TypeError, match="'evry'"):
        define(None, {"evry": "1m"})  # type: ignore[typeddict-unknown-key]
    for name in ("", " ", "a\nb", "x" * 201, 5):
        with pytest.raises(InvalidMessage):
            check_name(name)  # type: ignore[arg-type]


def test_zones_are_stored_by_name() -> None:
    zones = {
        "Asia/Tokyo": ZoneInfo("Asia/Tokyo"),
        "+05:30": timezone(timedelta(hours=5, minutes=30)),
        "-03:30": timezone(-timedelta(hours=3, minutes=30)),
    }
    for name, zone in zones.items():
        assert define(None, {"cron": "@daily", "tz": zone}).tz == name
    assert define(None, {"cron": "@daily"}, "Asia/Tokyo").tz == "Asia/Tokyo"
