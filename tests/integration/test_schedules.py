"""Recurring messages with real producers and managers."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner

from lisa import AsyncProducer, Consumer, Manager, Message, Producer, ScheduleChanged
from lisa.admin import groups
from lisa.admin.fsck import check
from lisa.cli.main import main
from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.errors import ConfigError, InvalidMessage, LisaError, TopicFull
from lisa.core.model.keys import keyed_id
from lisa.core.model.options import BYTES_PER_CALL
from lisa.core.model.recurring import ticks
from lisa.core.model.recurring.definition import body_of
from lisa.core.settings import ManagerSettings
from lisa.core.store.inspection import FoundMessage
from lisa.core.store.schedules import ScheduleInfo, tick_all
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.schedule import ScheduleOutcome
from lisa.core.transitions.topic import Configure
from lisa.manager.plan import Plan
from lisa.manager.registry import Registry
from lisa.manager.server_clock import ServerClock
from lisa.manager.zone_data import ZoneData
from tests.roles import Cast
from tests.servers import wait_until
from tests.shards import Split

pytestmark = pytest.mark.timeout(120)

TOPIC = "orders"


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


@pytest.fixture
def registry(cast: Cast) -> Registry:
    """A manager's registry, whose file may declare schedules."""
    return Registry(cast.store, Plan(), lambda _: None)


def ids_waiting(cast: Cast) -> list[str]:
    return sorted(found.decode() for found in cast.ask("ZRANGE", cast.keys.waiting, 0, -1))


def schedule_of(producer: Producer, name: str) -> ScheduleInfo:
    found = producer.get_schedule(TOPIC, name)
    assert found is not None
    return found


def message_of(producer: Producer, message_id: str) -> FoundMessage:
    found = producer.get(TOPIC, message_id)
    assert found is not None
    return found


def ticks_of(ids: Iterable[str]) -> list[int]:
    return sorted(int(one.rpartition("@")[2]) for one in ids)


def assert_complete(ids: list[str]) -> None:
    """Each tick of a schedule that runs every second is there once."""
    ticks = ticks_of(ids)
    assert ticks == list(range(ticks[0], ticks[-1] + 1, 1000)), Counter(ticks).most_common(3)


def test_occurrences_are_handled_at_their_ticks(redis_url: str, producer: Producer) -> None:
    handled: list[tuple[Message, float]] = []
    consumer = Consumer(redis_url)
    consumer.on(TOPIC)(lambda message: handled.append((message, time.time() * 1000)))
    with Manager(redis_url), Manager(redis_url), consumer:
        body = {"n": "${count}"}
        assert producer.schedule("s", topic=TOPIC, body=body, every="1s", template=True)
        wait_until(lambda: len(handled) >= 3)
    assert [message.body for message, _ in handled[:3]] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert_complete([message.id for message, _ in handled])
    for message, at in handled:
        tick = message.id.removeprefix("s@")
        assert message.headers == {"lisa-schedule": "s", "lisa-tick": tick}
        assert at >= int(tick) - 5  # the clocks of this process and of the server


def test_a_running_occurrence_delays_the_next(cast: Cast, producer: Producer) -> None:
    """The tick was counted as overlapped, but is not lost."""
    with Manager(cast.url):
        producer.schedule("s", topic=TOPIC, body=None, every="1s", overlap="queue_one")
        (first,) = cast.await_entries()
        wait_until(lambda: cast.stats().get("overlapped"))
        assert cast.read() == []
        cast.ack(first)
        second = cast.await_entries()[0]
    assert ticks_of([second.id]) == [ticks_of([first.id])[0] + 1000]


def test_the_same_definition_changes_nothing_and_keeps_the_phase(
    cast: Cast, producer: Producer
) -> None:
    assert producer.schedule("s", topic=TOPIC, body=1, every="1h", tz="Asia/Tokyo")
    before = cast.ask("HGETALL", cast.keys.schedules), ids_waiting(cast)
    assert not producer.schedule("s", topic=TOPIC, body=1, every="60m", tz=ZoneInfo("Asia/Tokyo"))
    assert (cast.ask("HGETALL", cast.keys.schedules), ids_waiting(cast)) == before
    # The form of the keys is documented: others read it.
    tick = int(cast.ask("ZSCORE", "lisa:{orders}:ticks", "s"))
    assert cast.ask("HGET", "lisa:{orders}:schedules", "s").startswith(b"1.%d." % tick)
    assert cast.ask("EXISTS", f"lisa:{{orders}}:body:s@{tick}")


def test_an_edit_moves_the_pending_occurrence(cast: Cast, producer: Producer) -> None:
    producer.schedule("s", topic=TOPIC, body=1, cron="0 9 * * *")
    (first,) = ids_waiting(cast)
    assert producer.schedule("s", topic=TOPIC, body=2, cron="0 9 * * *")
    assert ids_waiting(cast) == [first]
    assert message_of(producer, first).body == 2
    assert producer.schedule("s", topic=TOPIC, body=2, cron="0 10 * * *")
    (second,) = ids_waiting(cast)
    assert second != first
    assert producer.get(TOPIC, first) is None
    # Back again: the same id is created anew.
    assert producer.schedule("s", topic=TOPIC, body=2, cron="0 9 * * *")
    assert ids_waiting(cast) == [first]


def test_an_edit_of_another_version_is_refused(producer: Producer) -> None:
    assert producer.schedule("s", topic=TOPIC, body=1, every="1h", if_version=0)
    with pytest.raises(ScheduleChanged, match="has version 1, not 0"):
        producer.schedule("s", topic=TOPIC, body=2, every="1h", if_version=0)
    assert producer.schedule("s", topic=TOPIC, body=2, every="1h", if_version=1)
    assert schedule_of(producer, "s").version == 2


def test_a_schedule_without_a_tick_left_is_refused(cast: Cast, producer: Producer) -> None:
    """When it is declared or changed; one that has ended in the meantime is not."""
    never: list[dict[str, Any]] = [
        {"every": "1h", "until": "2020-01-01"},
        {"cron": "0 0 0 1 1 ? 2020"},
        {"cron": "0 9 25 12 *", "start": "2031-01-01", "until": "2031-12-24"},
    ]
    for options in never:
        with pytest.raises(InvalidMessage, match="'s' would never tick"):
            producer.schedule("s", topic=TOPIC, body=1, **options)
    assert producer.schedules(TOPIC) == []
    until = datetime.now(UTC) + timedelta(seconds=2)
    assert producer.schedule("s", topic=TOPIC, body=1, every="1s", until=until)
    for options in never:
        with pytest.raises(InvalidMessage, match="'s' would never tick"):
            producer.schedule("s", topic=TOPIC, body=2, **options)
    with Manager(cast.url):
        wait_until(lambda: schedule_of(producer, "s").next is None)
    assert not producer.schedule("s", topic=TOPIC, body=1, every="1s", until=until)


def test_pause_resume_and_remove(cast: Cast, producer: Producer) -> None:
    producer.schedule("s", topic=TOPIC, body=1, every="1h")
    pending = ids_waiting(cast)
    assert producer.pause_schedule(TOPIC, "s")
    assert not producer.pause_schedule(TOPIC, "s")
    paused = schedule_of(producer, "s")
    assert (paused.is_paused, paused.next, ids_waiting(cast)) == (True, None, [])
    # An edit does not resume it.
    assert producer.schedule("s", topic=TOPIC, body=2, every="1h")
    assert ids_waiting(cast) == []
    assert producer.resume_schedule(TOPIC, "s")
    assert not producer.resume_schedule(TOPIC, "s")
    assert ids_waiting(cast) == pending
    assert producer.reschedule(TOPIC, pending[0], delay="2h") == "rescheduled"
    assert producer.cancel(TOPIC, pending[0]) == "cancelled"
    assert (ids_waiting(cast), schedule_of(producer, "s").is_paused) == ([], False)
    assert producer.remove_schedule(TOPIC, "s")
    assert not producer.remove_schedule(TOPIC, "s")
    assert (ids_waiting(cast), producer.schedules(TOPIC)) == ([], [])
    assert cast.ask("EXISTS", cast.keys.schedules, cast.keys.ticks) == 0
    for call in (producer.pause_schedule, producer.run_schedule, producer.next_ticks):
        with pytest.raises(InvalidMessage, match="no schedule 's'"):
            call(TOPIC, "s")


@pytest.mark.parametrize("method", ["pause_schedule", "remove_schedule"])
def test_an_occurrence_that_a_jitter_delays_is_removed(
    cast: Cast, producer: Producer, method: str
) -> None:
    body = ["${count}", "${previous}"]
    producer.schedule("s", topic=TOPIC, every="1s", body=body, template=True, jitter="30d")
    first = schedule_of(producer, "s").next_ms or 0
    wait_until(lambda: cast.now_ms() > first)
    cast.drive(tick_all(cast.store, TOPIC, ["s"], first))
    assert f"s@{first}" in ids_waiting(cast)
    assert getattr(producer, method)(TOPIC, "s")
    assert ids_waiting(cast) == []
    if method == "pause_schedule":
        producer.resume_schedule(TOPIC, "s")
        cast.drive(tick_all(cast.store, TOPIC, ["s"], cast.now_ms() + 1_000))
        message = message_of(producer, ids_waiting(cast)[0])
        assert message.body == [1, None]


def test_run_now_and_backfill(cast: Cast, producer: Producer) -> None:
    """Several now in a millisecond; a jitter delays none of them."""
    options: dict[str, Any] = {"cron": "0 9 * * *", "tz": "Europe/Berlin", "jitter": "1h"}
    producer.schedule("s", topic=TOPIC, body="b", **options)
    (pending,) = ids_waiting(cast)
    extra = {producer.run_schedule(TOPIC, "s") for _ in range(50)}
    assert len(extra) == 50
    start, end = datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC)
    assert producer.backfill_schedule(TOPIC, "s", start, end) == (4, 0)
    assert producer.backfill_schedule(TOPIC, "s", start, end + timedelta(days=1)) == (1, 4)
    with pytest.raises(InvalidMessage, match=r"a backfill from 20.* to 20.* ends before it begins"):
        producer.backfill_schedule(TOPIC, "s", end, start)
    with pytest.raises(InvalidMessage, match="start and end are datetimes, not '2030-01-01'"):
        producer.backfill_schedule(TOPIC, "s", "2030-01-01", "2030-01-02")  # type: ignore[arg-type]
    due = cast.ask("ZRANGE", cast.keys.waiting, "-inf", cast.now_ms(), "BYSCORE")
    past = {found.decode() for found in due} - extra
    assert {*past, *extra, pending} == set(ids_waiting(cast))
    hours = [ms_datetime(tick).hour for tick in ticks_of(past)]
    assert hours == [8, 8, 7, 7, 7]  # the clock was set forward on the 29th
    cast.configure(capacity="200")
    producer.schedule("s", topic=TOPIC, body="b", cron="* * * * *")
    with pytest.raises(TopicFull, match="created nothing more; 100 occurrences were"):
        producer.backfill_schedule(TOPIC, "s", start, start + timedelta(hours=5))


def test_next_ticks_and_the_list(redis_url: str, producer: Producer) -> None:
    producer.schedule("b", topic=TOPIC, body=1, cron="0 9 * * *", count=2)
    producer.schedule("a", topic=TOPIC, body=1, every="1h")
    assert [one.name for one in producer.schedules(TOPIC)] == ["a", "b"]
    first, second = producer.next_ticks(TOPIC, "b", 5)
    assert (first.hour, second - first) == (9, timedelta(days=1))
    assert len(producer.next_ticks(TOPIC, "a", 7)) == 7
    for wrong in (0, -1, 10_001, "3", True):
        with pytest.raises(InvalidMessage, match="count is a number from 1 to 10,000"):
            producer.next_ticks(TOPIC, "a", wrong)  # type: ignore[arg-type]

    async def main() -> None:
        async with AsyncProducer(redis_url) as other:
            assert not await other.schedule("a", topic=TOPIC, body=1, every="1h")
            assert [one.name for one in await other.schedules(TOPIC)] == ["a", "b"]
            assert await other.run_schedule(TOPIC, "a")
            assert len(await other.next_ticks(TOPIC, "a")) == 5
            assert await other.remove_schedule(TOPIC, "a")

    asyncio.run(main())


def test_a_schedule_of_a_full_topic_can_be_changed(cast: Cast, producer: Producer) -> None:
    cast.configure(capacity="1", max_body_bytes="100")
    with pytest.raises(InvalidMessage, match="its option max_body_bytes"):
        producer.schedule("s", topic=TOPIC, body="x" * 101, every="1h")
    cast.send()
    assert producer.schedule("s", topic=TOPIC, body=1, every="1s")
    assert len(ids_waiting(cast)) == 0
    tick = schedule_of(producer, "s").next_ms or 0
    wait_until(lambda: cast.now_ms() > tick)
    assert producer.schedule("s", topic=TOPIC, body=2, every="1s")
    assert schedule_of(producer, "s").next_ms == tick  # it comes once there is room
    assert producer.pause_schedule(TOPIC, "s")
    assert producer.resume_schedule(TOPIC, "s")
    with pytest.raises(TopicFull):
        producer.run_schedule(TOPIC, "s")


def test_one_call_creates_few_large_occurrences(cast: Cast, producer: Producer) -> None:
    body = "x" * (BYTES_PER_CALL // 4)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    producer.schedule("s", topic=TOPIC, body=body, cron="0 * * * *", catch_up="all")

    cast.ask("CONFIG", "RESETSTAT")
    assert producer.backfill_schedule(TOPIC, "s", start, start + timedelta(hours=9)) == (10, 0)
    assert b"cmdstat_evalsha:calls=3," in cast.ask("INFO", "commandstats")
    first, waiting = schedule_of(producer, "s").next_ms or 0, len(ids_waiting(cast))
    at_ms = first + 8 * 3_600_000 + 1_800_000
    while (schedule_of(producer, "s").next_ms or 0) <= at_ms:
        cast.drive(tick_all(cast.store, TOPIC, ["s"], at_ms))
        assert 0 < len(ids_waiting(cast)) - waiting <= 4
        waiting = len(ids_waiting(cast))
    late = [tick for tick in ticks_of(ids_waiting(cast)) if first <= tick <= at_ms]
    assert late == list(range(first, at_ms, 3_600_000))


def ids_of(cast: Cast) -> list[str]:
    found = cast.ask("KEYS", cast.keys.body("*"))
    return [key.decode().removeprefix(cast.keys.body("")) for key in found]


def test_schedules_of_a_topic_with_several_shards(split: Split) -> None:
    handled: list[str] = []
    consumer = Consumer(split.url)
    consumer.on(TOPIC)(lambda message: handled.append(message.id))
    with Producer(split.url) as producer, Manager(split.url):
        producer.schedule("s", topic=TOPIC, body=1, every="1s")
        split.store.call(Configure(TOPIC, {"shards": "4"}))
        with consumer:
            wait_until(lambda: len(handled) >= 3)
        assert producer.schedule("s", topic=TOPIC, body=2, every="2s")
        assert producer.remove_schedule(TOPIC, "s")
    assert len(set(handled)) == len(handled)
    assert_complete(handled)


def test_occurrences_that_were_created_before_shards_were_added(
    split_here: Split, producer: Producer
) -> None:
    """A change drops an occurrence, and it is created again at its tick."""
    start = datetime.now(UTC)
    for name in ("edited", "paused", "removed"):
        assert producer.schedule(name, topic=TOPIC, body=1, every="1h", start=start)
    first = producer.next_ticks(TOPIC, "edited")[0]
    split_here.into(4)
    assert producer.schedule("edited", topic=TOPIC, body=2, every="1h", start=start)
    assert producer.pause_schedule(TOPIC, "paused")
    assert producer.remove_schedule(TOPIC, "removed")
    for name in ("paused", "removed"):
        assert producer.get(TOPIC, f"{name}@{datetime_ms(first)}") is None
    assert producer.resume_schedule(TOPIC, "paused")
    assert producer.schedule("removed", topic=TOPIC, body=2, every="1h", start=start)
    for name, body in (("edited", 2), ("paused", 1), ("removed", 2)):
        assert tick(split_here.store, name, datetime_ms(first)).outcomes == "a"
        assert message_of(producer, f"{name}@{datetime_ms(first)}").body == body


def test_overlaps_of_occurrences_with_a_key(split: Split) -> None:
    """Once in one shard, where the script looks at them, and once in several."""
    with Producer(split.url) as producer:
        for shards in (1, 4):
            split.into(shards)
            name, queued = f"s{shards}", "queue_one"
            options: dict[str, Any] = {"every": "1h", "key": "k", "overlap": queued}
            assert producer.schedule(name, topic=TOPIC, body=1, **options)
            first, second = producer.next_ticks(TOPIC, name, 2)
            assert tick(split.store, name, datetime_ms(first)).outcomes == "a"
            assert tick(split.store, name, datetime_ms(second)).state == "held"
            assert [each.id for each in producer.list_key(TOPIC, "k")] == [
                keyed_id("k", f"{name}@{datetime_ms(first)}")
            ]
            options["overlap"] = "replace_unstarted"
            name = f"r{shards}"
            assert producer.schedule(name, topic=TOPIC, body=1, **options)
            first, second = producer.next_ticks(TOPIC, name, 2)
            for each in (first, second):
                assert tick(split.store, name, datetime_ms(each)).outcomes == "a"
            made = {each.id for each in producer.list_key(TOPIC, "k")}
            assert keyed_id("k", f"{name}@{datetime_ms(second)}") in made
            assert keyed_id("k", f"{name}@{datetime_ms(first)}") not in made
            producer.cancel_key(TOPIC, "k")


def tick(store: SyncStore, name: str, at_ms: int) -> ScheduleOutcome:
    """What a manager does for a schedule at an instant."""
    (done,) = store.drive(tick_all(store, TOPIC, [name], at_ms))
    assert isinstance(done, ScheduleOutcome)
    return done


def test_a_missed_tick_replaces_no_occurrence_that_has_become_ready_in_a_shard(
    split_here: Split, producer: Producer
) -> None:
    """The occurrence was created before shards were added, and no manager ran for hours."""
    split, store = split_here, split_here.store
    store.call(Declare(TOPIC, "lisa"))
    assert producer.schedule("s", topic=TOPIC, body=1, every="1h")
    first = datetime_ms(producer.next_ticks(TOPIC, "s")[0])
    split.into(4)
    producer.fire_now(TOPIC, f"s@{first}")
    assert store.call(Promote(TOPIC)).moved == 1
    done = tick(store, "s", first + 3 * 3_600_000 + 1_800_000)
    assert (done.state, done.outcomes) == ("done", "")
    assert split.copies() == []
    assert schedule_of(producer, "s").next_ms == first + 4 * 3_600_000


def test_a_topic_without_schedules_is_unlisted(
    cast: Cast, producer: Producer, registry: Registry
) -> None:
    producer.schedule("s", topic=TOPIC, body=1, every="1h")
    assert not list(cast.drive(check(cast.store, [TOPIC])).findings)
    listed = cast.store.keys.scheduled
    cast.ask("DEL", listed)
    registry.search()
    assert cast.ask("ZSCORE", listed, TOPIC), "a search lists it again"
    cast.drive(groups.delete(cast.store, TOPIC))
    assert cast.ask("EXISTS", cast.keys.schedules, cast.keys.ticks, cast.keys.waiting) == 0
    with Manager(cast.url):
        wait_until(lambda: not cast.ask("ZSCORE", listed, TOPIC))


def test_pending_occurrences_move_when_the_time_zone_data_changes(
    cast: Cast, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old data has no daylight saving time, and is an hour off all year."""
    daily: dict[str, Any] = {"topic": TOPIC, "body": 1, "cron": "0 9 * * *", "tz": "Asia/Tokyo"}
    monkeypatch.setattr(ticks, "zone_of", lambda _: timezone(timedelta(hours=-7)))
    producer.schedule("s", **daily)
    producer.schedule("late", **daily, overlap="skip")
    monkeypatch.undo()
    producer.schedule("right", **daily)
    (right,) = [found for found in ids_waiting(cast) if found.startswith("right@")]
    clock = ServerClock()
    clock.sample(cast.store)
    ZoneData(cast.store, clock, "2026a").step([TOPIC])
    assert cast.ask("HGET", cast.keys.options, "zones") == b"2026a"
    moved = [found for found in ids_waiting(cast) if found.startswith("s@")]
    assert ticks_of(moved) == ticks_of([right]) == [schedule_of(producer, "late").next_ms]
    # Older data, or the same, changes nothing.
    monkeypatch.setattr(ticks, "zone_of", lambda _: timezone(timedelta(hours=-7)))
    for version in ("2025b", "2026a", ""):
        ZoneData(cast.store, clock, version).step([TOPIC])
    assert right in ids_waiting(cast)


def test_a_full_topic_and_unreadable_schedules_cost_no_occurrence(
    cast: Cast, producer: Producer
) -> None:
    """There is a tick without a schedule, too."""
    cast.configure(capacity="1")
    cast.ask("HSET", cast.keys.schedules, "bad", "junk")
    cast.ask("ZADD", cast.keys.ticks, 5, "bad", 6, "other")
    producer.schedule("s", topic=TOPIC, body=1, every="1s")
    with Manager(cast.url):
        wait_until(lambda: (schedule_of(producer, "s").last_ms or cast.now_ms()) < cast.now_ms())
        wait_until(lambda: cast.ask("ZSCORE", cast.keys.ticks, "other") is None)
        assert len(ids_of(cast)) == 1
        (entry,) = cast.await_entries()
        cast.ack(entry)
        wait_until(cast.read)
    assert int(cast.ask("ZSCORE", cast.keys.ticks, "bad")) > cast.now_ms()


def test_occurrences_have_the_cost_and_the_slack_of_their_schedule(
    cast: Cast, producer: Producer, registry: Registry
) -> None:
    schedule: dict[str, Any] = {"topic": TOPIC, "every": "1h", "late": "run", "cost": 5}
    entry = schedule | {"name": "file", "slack": "30s"}
    registry.reconfigure(Plan.from_settings(ManagerSettings.load(schedules=[entry])))
    registry.step()
    assert registry.topic_errors.of(TOPIC) is None
    producer.schedule("code", body=None, **schedule)
    policies = {text(value) for value in cast.ask("HVALS", cast.keys.policy)}
    assert policies == {"*;0,run;5,30000", "*;0,run;5,"}
    command = ["schedules", "set", TOPIC, "code", "--every", "1h", "--slack", "0s"]
    done = CliRunner().invoke(main, [*command, "--redis", cast.url])
    assert done.exit_code == 0, done.output
    policies = {text(value) for value in cast.ask("HVALS", cast.keys.policy)}
    assert policies == {"*;0,run;5,30000", "*;;,0"}
    for wrong in ({"cost": 0}, {"slack": "31d"}, {"cost": "5"}):
        with pytest.raises(InvalidMessage):
            producer.schedule("code", body=None, **(schedule | wrong))


def test_an_unreadable_schedule_can_be_removed(cast: Cast, producer: Producer) -> None:
    for record in (b"", b"1.5.2 {]", b"\xff\0 {}"):
        cast.ask("HSET", cast.keys.schedules, "bad", record)
        cast.ask("ZADD", cast.keys.ticks, 5, "bad")
        assert producer.remove_schedule(TOPIC, "bad")
        assert cast.ask("EXISTS", cast.keys.schedules, cast.keys.ticks) == 0
        assert not producer.remove_schedule(TOPIC, "bad")


def declare_in_file(registry: Registry, bodies: Mapping[str, object]) -> None:
    """Let a manager read a file with hourly schedules, which may not name the topic any more."""
    entries = [
        {"name": name, "topic": TOPIC, "every": "1h", "body": body, "key": "file"}
        for name, body in bodies.items()
    ]
    registry.reconfigure(Plan.from_settings(ManagerSettings.load(schedules=entries)))
    registry.step()


def test_a_managers_file_defines_schedules_and_respects_an_operators_changes(
    cast: Cast, producer: Producer, registry: Registry
) -> None:
    def declare(**bodies: str) -> None:
        declare_in_file(registry, {name: {"nestedKey": body} for name, body in bodies.items()})
        assert registry.topic_errors.of(TOPIC) is None

    def bodies() -> dict[str, object]:
        return {found.name: body_of(found.definition) for found in producer.schedules(TOPIC)}

    producer.schedule("mine", topic=TOPIC, body="mine", every="1h")
    declare(a="1", b="1", mine="theirs")
    assert bodies() == {"a": {"nestedKey": "1"}, "b": {"nestedKey": "1"}, "mine": "mine"}
    before = cast.ask("HGETALL", cast.keys.schedules)
    declare(a="1", b="1", mine="theirs")
    assert cast.ask("HGETALL", cast.keys.schedules) == before
    assert producer.count_key(TOPIC, "file") == 2
    producer.schedule("b", topic=TOPIC, body="changed", every="1h")
    producer.pause_schedule(TOPIC, "a")
    declare(a="2", b="2")
    assert bodies() == {"a": {"nestedKey": "2"}, "b": "changed", "mine": "mine"}
    assert schedule_of(producer, "a").is_paused
    declare()
    assert bodies() == {"b": "changed", "mine": "mine"}
    assert cast.ask("HGET", cast.keys.options, "schedules") is None


def test_a_declared_schedule_that_fails_does_not_stop_the_others(
    cast: Cast, producer: Producer, registry: Registry
) -> None:
    cast.configure(max_body_bytes="100")
    declare_in_file(registry, {"a": "x" * 101, "b": "1", "c": "1"})
    assert [found.name for found in producer.schedules(TOPIC)] == ["b", "c"]
    assert "schedule a: the body" in str(registry.topic_errors.of(TOPIC))
    cast.ask("HSET", cast.keys.schedules, "b", "junk")
    declare_in_file(registry, {"a": "1"})
    assert [found.name for found in producer.schedules(TOPIC)] == ["a"]
    assert "schedule b: the record" in str(registry.topic_errors.of(TOPIC))
    cast.ask("HDEL", cast.keys.schedules, "b")
    registry.step()
    assert registry.topic_errors.of(TOPIC) is None


def test_a_manager_in_code_declares_schedules(
    cast: Cast, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose topic is no longer named stays, as it may be another manager's; the log says so."""
    caplog.set_level(logging.INFO)
    daily = {"name": "daily", "topic": TOPIC, "body": 1, "cron": "0 9 * * *", "tz": "Asia/Tokyo"}
    sync = {"name": "sync", "topic": "syncs", "every": timedelta(minutes=10)}

    def declared(*schedules: dict[str, Any]) -> None:
        names = {schedule["name"] for schedule in schedules} - {"sync"}
        with Manager(cast.url, topics=[TOPIC], schedules=schedules):
            wait_until(lambda: {found.name for found in producer.schedules(TOPIC)} == names)
            wait_until(lambda: sync not in schedules or producer.get_schedule("syncs", "sync"))

    declared(daily, sync)
    found = schedule_of(producer, "daily")
    assert found.definition.tz == "Asia/Tokyo"
    declared(daily)
    assert producer.get_schedule(TOPIC, "daily") == found
    declared()
    assert ids_waiting(cast) == []
    with Manager(cast.url):
        wait_until(lambda: "not by this one: the schedules syncs/sync;" in caplog.text)
    assert producer.get_schedule("syncs", "sync")


def test_wrong_schedules_of_a_manager_are_refused() -> None:
    entry = {"name": "s", "topic": TOPIC, "every": "1h"}
    for wrong, said in (
        ([{**entry, "every": "1ms"}], "too short"),
        ([{"name": "s", "every": "1h"}], "needs a topic"),
        ([{"topic": TOPIC, "every": "1h"}], "needs a name"),
        ([entry, entry], "listed twice"),
    ):
        with pytest.raises(LisaError, match=said):
            Manager(schedules=wrong)
    with pytest.raises(TypeError, match="'crom'"):
        Manager(schedules=[{**entry, "crom": "@daily"}])
    with pytest.raises(ConfigError, match="cron field minute '61'"):
        ManagerSettings.load(schedules=[{"name": "s", "topic": TOPIC, "cron": "61 * * * *"}])
    with pytest.raises(ConfigError, match="listed twice"):
        ManagerSettings.load(schedules=[entry, entry])
