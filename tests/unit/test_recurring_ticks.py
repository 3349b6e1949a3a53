"""Definitions of schedules, and what a manager does at a tick."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from lisa.core.model.clock import datetime_ms
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.definition import (
    Record,
    ScheduleOptions,
    body_of,
    check_name,
    define,
)
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


def advanced(record: Record | ScheduleOptions, minutes: float, **more: Any) -> TickStep:
    """What a manager does so many minutes after START; the topic is not split."""
    record = record if isinstance(record, Record) else started(record)
    return advance(record, at(minutes), is_split=False, **more)


def begun(record: Record, minutes: float, *, is_split: bool = False, **changes: Any) -> TickStep:
    """What a change of the record does so many minutes after START."""
    return begin(replace(record, **changes), at(minutes), is_split=is_split)


def test_an_interval_keeps_its_phase() -> None:
    definition = made({"every": "10m", "start": datetime(2027, 1, 1, tzinfo=UTC)}).definition
    start = 1_798_761_600_000
    ticks = [next_tick(definition, START, start + ms) for ms in (-1, 0, 1, 600_000)]
    assert ticks == [start, start + 600_000, start + 600_000, start + 1_200_000]
    last = next_tick(definition, START, 253_402_300_799_999 - 600_000)
    assert last is not None
    assert next_tick(definition, START, last) is None, "it ends with the year 9999"


def test_start_and_until_are_included() -> None:
    options: ScheduleOptions = {"cron": "0 9 * * *", "tz": "Europe/Berlin"}
    definition = define(None, {**options, "start": "2026-12-24T09:00", "until": "2026-12-25T09:00"})
    first = datetime_ms(datetime(2026, 12, 24, 8, tzinfo=UTC))
    ticks = [next_tick(definition, 0, after) for after in (0, first, first + 24 * HOUR)]
    assert ticks == [first, first + 24 * HOUR, None]


@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_a_tick_that_has_not_come_is_left_alone(overlap: str) -> None:
    record = started({"overlap": overlap})
    step = advanced(record, 0.99)
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
    step = advanced({"catch_up": policy}, 5.5)
    assert created(step) == expected
    assert [(tick - START) // MINUTE for tick in step.drops] == drops
    assert step.swaps is swaps
    assert step.record.made == 1 + len(expected) - len(drops)
    assert step.score == at(6)


AT_THE_TICK: dict[str, tuple[ScheduleOptions, float, list[int]]] = {
    "none": ({"catch_up": "none"}, 5.5, []),
    "none, on time": ({"catch_up": "none"}, 1.1, [1]),
    "max_late": ({"catch_up": "all", "max_late": "2m"}, 5.5, [4, 5]),
    "max_late, one": ({"catch_up": "one", "max_late": "2m"}, 5.5, [5]),
    "max_late, too late": ({"every": "1h", "max_late": "2m"}, 63, []),
}


@pytest.mark.parametrize("case", AT_THE_TICK)
def test_occurrences_that_are_created_at_their_tick(case: str) -> None:
    options, now, expected = AT_THE_TICK[case]
    assert not started(options).is_made
    step = advanced(options, now)
    assert created(step) == expected
    assert step.score is not None
    assert step.score > at(now)


def test_ticks_of_which_one_runs_at_a_time() -> None:
    """A tick that is skipped is not made up for."""
    step = advanced({"overlap": "skip"}, 1)
    assert created(step) == [1]
    assert step.record.earlier == (at(1),)
    assert step.held is not None
    assert (step.held.tick, step.held.earlier, step.held_score) == (at(2), (), at(2))
    record, found = started({"overlap": "skip", "catch_up": "all"}), list[int]()
    for _ in range(3):
        step = advanced(record, 3)
        found += created(step)
        record = step.record
    assert (found, record.tick) == ([1, 2, 3], at(4))
    record = replace(
        advanced({}, 1).record, definition=define("x", {"every": "1m", "overlap": "skip"})
    )
    assert begun(record, 1.5).record.earlier == (at(1),), "an edit concerns the latest occurrence"


def test_a_queued_tick_is_looked_at_again_until_it_can_be_created() -> None:
    step = advanced({"overlap": "queue_one"}, 1)
    held = step.held
    assert held is not None
    assert (held.tick, held.is_queued, step.held_score) == (at(1), True, at(1) + LOOK_AGAIN_MS)
    assert held.fence != started({"overlap": "queue_one"}).fence
    # Ticks that come meanwhile are dropped: only one waits.
    step = advanced(held, 3.5)
    assert (created(step), step.score, step.record.is_queued) == ([1], at(4), False)
    held = advanced({"overlap": "queue_one", "max_late": "2m"}, 1).held
    assert held is not None
    step = advanced(held, 3.5)  # it is given up after max_late
    assert (created(step), step.record.tick) == ([], at(4))


def test_count_ends_a_schedule() -> None:
    step = advanced({"count": 2}, 1)
    assert created(step) == [2]
    step = advanced(step.record, 2)
    assert (created(step), step.score, step.record.tick) == ([], None, None)


def test_occurrences_that_are_removed_before_they_are_due_give_their_numbers_back() -> None:
    step = begun(started({}), 0.5, is_paused=True)
    assert (step.drops, step.score, step.record.made) == ([at(1)], None, 0)
    assert created(begun(step.record, 7.5, is_paused=False)) == [8]
    record = made({}, made=5, last=at(5), tick=at(6))
    fewer_made = taken_back(record, [at(4), at(5)])
    assert (fewer_made.made, fewer_made.last) == (3, at(3))
    assert taken_back(record, [at(4)]).last == at(5)
    assert taken_back(made({}, made=1, last=at(1)), [at(1)]).last is None


def test_an_edit_keeps_a_tick_that_has_come() -> None:
    """An earlier occurrence, or a full topic, has prevented its occurrence so far."""
    queued = advanced({"overlap": "queue_one"}, 1).held
    assert queued is not None
    step = begun(queued, 1.5, version=2)
    assert (created(step), step.score, step.record.tick) == ([], at(1), at(1))
    late = begin(made({}), START, is_split=True).record
    step = begun(late, 3.5, is_split=True, version=2)
    assert (step.score, step.record.last) == (at(1), None)
    hourly = define("x", {"every": "1h"})
    assert begun(late, 3.5, is_split=True, definition=hourly).score == at(60)
    ahead = begun(started({}), 1.5, is_split=True, version=2)
    assert (ahead.score, ahead.drops) == (at(2), [])
    assert (ahead.record.last, ahead.record.made) == (at(1), 1)


def test_an_interval_between_occurrences_is_covered_once() -> None:
    """An occurrence that is removed before its tick is not the previous one of any other."""
    record = advanced({}, 1).record
    assert (record.tick, record.last, record.latest) == (at(2), at(1), at(2))
    assert begun(record, 1.5, version=2).creates == [(at(2), 2, at(1))]
    paused = begun(record, 1.5, is_paused=True).record
    assert (paused.last, paused.latest) == (at(1), at(1))
    assert begun(paused, 7.5, is_paused=False).creates == [(at(8), 2, at(1))]
    for may_swap, expected in (
        (True, [(at(5), 1, None), (at(6), 2, at(5))]),
        (False, [(at(6), 2, at(1))]),
    ):
        step = advanced({}, 5.5, may_swap=may_swap)
        assert (step.creates, step.record.made) == (expected, 2)
    # The newest of all missed ticks follow an occurrence that began.
    step = advanced({"catch_up": "all(max=2)"}, 5.5, may_swap=False)
    assert step.creates == [(at(4), 2, at(1)), (at(5), 3, at(4)), (at(6), 4, at(5))]
    assert (step.drops, step.swaps) == ([], False)


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
    most = []
    step = advanced({"catch_up": "all"}, 6.5)
    while (few := fewer(step, at(6.5))) is not None:
        most.append(few)
        step = advanced({"catch_up": "all"}, 6.5, most=few)
    assert most == [5, 2, 1]
    assert fewer(advanced({}, 1), at(1)) == 0  # the occurrence ahead of its tick can wait


def test_the_tick_before_another() -> None:
    for cron, tick, before in (
        ("0 9 * * *", "2026-03-29 07:00Z", "2026-03-28 08:00Z"),
        ("0 0 29 2 *", "2028-02-28 23:00Z", "2024-02-28 23:00Z"),
        ("0 0 0 1 1 ? 2027", "2026-12-31 23:00Z", None),
    ):
        record = made({"cron": cron, "tz": "Europe/Berlin"})
        found = tick_before(record, datetime_ms(datetime.fromisoformat(tick)))
        assert found == (before and datetime_ms(datetime.fromisoformat(before)))


def test_jitter_is_the_same_for_the_same_tick() -> None:
    definition = define(None, {"every": "1m", "jitter": "30s"})
    dues = [due_ms(definition, "a", at(minute)) - at(minute) for minute in range(50)]
    assert dues == [due_ms(definition, "a", at(minute)) - at(minute) for minute in range(50)]
    assert 0 <= min(dues) <= max(dues) <= 30_000
    assert len(set(dues)) > 40
    assert due_ms(definition, "b", START) != due_ms(definition, "a", START)


def test_a_record_is_read_as_it_was_written() -> None:
    options: ScheduleOptions = {"overlap": "queue_one", "headers": {"a": "b"}, "retry": "0,5s"}
    record = replace(started(options), is_queued=True, declared="abc")
    assert Record.decode(record.encode()) == record
    assert record.encode().startswith(record.fence.encode() + b" ")
    with pytest.raises(InvalidMessage, match="cannot be read"):
        Record.decode(b"1.2 {}")
    for body in (None, {"a": [1, "é"]}, "text", b"\x00\xff"):
        definition = define(body, {"every": "1m"})
        assert body_of(Record.decode(Record(definition=definition).encode()).definition) == body
        envelope = decode_envelope(b"1AAAAAAAA-" + definition.body_at("s", START, None, 1))
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


REFUSED: dict[str, dict[str, Any]] = {
    "exactly one of cron and every": {"cron": "@daily", "every": "1m"},
    "cron field minute '61'": {"cron": "61 * * * *"},
    "at most 1,000 characters, not 1,009": {"cron": "0," * 500 + "0 * * * *"},
    "at least 1s": {"every": "500ms"},
    "unknown time zone": {"cron": "@daily", "tz": "Mars/Base"},
    "dst is one of vixie, skip": {"cron": "@daily", "dst": "x"},
    "start: 'tomorrow' is not a date": {"cron": "@daily", "start": "tomorrow"},
    "until: 20271231 is not a date": {"cron": "@daily", "until": 20271231},
    "never ticks": {"cron": "0 0 0 29 2 ? 2027"},
    "template is true or false": {"every": "1m", "template": "no"},
    "before start": {"every": "1m", "start": "2026-02-01", "until": "2026-01-01"},
    "start=.* is out of range": {"cron": "@daily", "start": "0001-01-01", "tz": "Asia/Tokyo"},
    "until=.* is out of range": {"every": "1m", "until": "9999-12-31T23:59Z", "tz": "Asia/Tokyo"},
    "less than 1": {"every": "1m", "count": 0},
    "count is at most 1,000,000,000,000": {"every": "1m", "count": 1 << 64},
    "count is a number": {"every": "1m", "count": "3"},
    "none, one, all or all": {"every": "1m", "catch_up": "some"},
    "1 to 100": {"every": "1m", "catch_up": "all(500)"},
    "is not shorter than every=1m": {"every": "1m", "jitter": "1m", "overlap": "replace_unstarted"},
    "max_late=999ms is too short": {"every": "1m", "max_late": "999ms"},
    "allow, skip, queue_one": {"every": "1m", "overlap": "x"},
    "a ttl counts from the due time and must exceed 0": {"every": "1m", "ttl": "0s"},
    "'lisa-tick' is set": {"every": "1m", "headers": {"lisa-tick": "1"}},
    "a mapping of text to text, not 5": {"every": "1m", "headers": 5},
    "within 400 days": {"every": "1m", "headers": {"lisa-window": "sat; not sat"}},
}


def test_wrong_options_templates_and_names_are_refused() -> None:
    for reason, options in (*REFUSED.items(), ("exactly one of cron and every", {})):
        with pytest.raises(InvalidMessage, match=reason):
            define(None, options)  # type: ignore[arg-type]
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
