"""Restore: a server that came back empty or older gets all unsettled messages back."""

import json
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lisa import Consumer, Manager, Message
from lisa.core.model.clock import ms_datetime
from lisa.core.model.envelope import decode_envelope, encode_envelope
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import LOCAL_HEADER
from lisa.core.model.windows.placing import LocalTime
from lisa.core.store.limits import read as limits_of
from lisa.core.transitions.topic import Configure, LimitKeys
from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs import message_history
from lisa.pipeline.jobs.archive import JournalRecord
from lisa.pipeline.jobs.restore import PLAN_SCHEMA, Restoration, rebuild, restoring
from lisa.pipeline.source.read_columns import arrow_schema
from tests.servers import wait_until
from tests.spark.jobs import KEYS, TOPIC, Jobs
from tests.spark.worlds import World, counted, wait_past

HOUR = timedelta(hours=1)


def names(letter: str, start: int, stop: int) -> list[str]:
    return [f"{letter}{number:05d}" for number in range(start, stop)]


def listed(result: Restoration) -> dict[str, dict[str, str]]:
    """The stored lists: outcome -> id -> reason."""
    found: dict[str, dict[str, str]] = {}
    for row in pq.read_table(f"{result.where}/lists").to_pylist():
        found.setdefault(row["outcome"], {})[row["id"]] = row["reason"]
    return found


def told(seen: Any) -> dict[str, Any]:
    """An inspection in comparable form."""
    states = {
        one.group: (one.state, one.due_ms, one.failed_attempts, one.reason)
        for one in seen.group_states
    }
    whole = {"waiting": seen.waiting_due_ms, "expires": seen.expires_ms, "group_states": states}
    return whole | {"envelope": decode_envelope(seen.envelope)}


def expected(was: Any) -> dict[str, Any]:
    """The expected state of a restored message, given its state before."""
    found = told(was)
    mark = "+" if found["envelope"].mark in "+R" else "-"
    found["envelope"] = found["envelope"]._replace(mark=mark)
    found["group_states"] = {
        name: ("retry" if state in ("ready", "in_flight") else state, due, attempts, reason)
        for name, (state, due, attempts, reason) in found["group_states"].items()
    }
    return found


def handle_all(jobs: Jobs, groups: tuple[tuple[str, str], ...]) -> Counter[tuple[str, str]]:
    """Make all messages due, and run a manager and consumers until a later one is handled.

    Returns (group, id) -> number of deliveries.
    """
    handled: Counter[tuple[str, str]] = Counter()
    lock, client = threading.Lock(), jobs.client
    now = int(time.time() * 1000)
    waiting = [
        key
        for topic, group in groups
        for key in (f"lisa:{{{topic}}}:waiting", f"lisa:{{{topic}}}:g:{group}:retry")
    ]
    for key in waiting:
        ids: Any = client.zrange(key, 0, -1)
        if ids:
            client.zadd(key, dict.fromkeys(ids, now))
    with ExitStack() as running:
        running.enter_context(Manager(jobs.url))
        for topic, group in groups:
            consumer = Consumer(jobs.url, group=group)

            def note(message: Message, group: str = group) -> None:
                with lock:
                    handled[group, message.id] += 1

            consumer.on(topic)(note)
            running.enter_context(consumer)
        # Nothing is left but garbage and what is in flight for an hour.
        wait_until(lambda: not any(map(client.zcard, waiting)))
        for topic in dict(groups):
            jobs.producer.send(topic, "last", id=f"last-{topic}")
        wait_until(lambda: all(handled[group, f"last-{topic}"] for topic, group in groups))
    return Counter({key: n for key, n in handled.items() if not key[1].startswith("last-")})


def make_orders(world: World) -> tuple[tuple[World, set[str]], set[tuple[str, str]]]:
    """One group. Returns the ids to restore, and (group, id) of the messages to handle."""
    world.send(names("o", 0, 200), delay=HOUR, headers={"shop": "ä"}, ttl=HOUR)
    world.producer.cancel(world.topic, "o00007")
    replaced: dict[str, Any] = {"id": "o00007", "retry": "5s,5s", "on_duplicate": "replace"}
    world.producer.send(world.topic, {"order": "o00007"}, delay=HOUR, **replaced)
    world.send(names("o", 200, 500))
    world.promote()
    world.take("lisa", 300)  # 300 to 349 stay in flight
    world.fail("lisa", world.entries(names("o", 350, 400)), 3_600_000)
    world.fail("lisa", world.entries(names("o", 400, 450)), "discard")
    world.ack("lisa", world.entries(names("o", 450, 500)))
    world.release("lisa", world.entries(names("o", 200, 300)))
    world.send(names("o", 500, 550), delay=HOUR)
    world.cancel(names("o", 500, 550))
    second, short = timedelta(seconds=1), timedelta(milliseconds=1)
    world.send(names("o", 550, 600), delay=second, ttl=short)
    wait_past(int(time.time() * 1000) + 1100)
    world.expire(names("o", 550, 590))
    return (world, set(names("o", 0, 450))), {("lisa", one) for one in names("o", 0, 400)}


def make_invoices(world: World) -> tuple[tuple[World, set[str]], set[tuple[str, str]]]:
    """Two groups with different states."""
    world.send(names("i", 0, 80), delay=HOUR)
    world.send(names("i", 80, 350))
    world.promote()
    left = {one.id: one for one in world.take("left", 270)}
    right = {one.id: one for one in world.take("right", 270)}
    # 260 to 349 stay in flight for both; of these the first ten are acked twice.
    world.ack("left", [left[one] for one in names("i", 80, 180) + names("i", 260, 270)])
    world.fail("left", [left[one] for one in names("i", 180, 230)], 3_600_000)
    world.fail("left", [left[one] for one in names("i", 230, 260)], "discard")
    world.ack("right", [right[one] for one in names("i", 230, 270)])
    world.send(names("i", 350, 400), delay=HOUR)
    for one in names("i", 350, 360):
        world.producer.reschedule(world.topic, one, delay=2 * HOUR)
    world.cancel(names("i", 360, 370))
    for one in names("i", 370, 400):
        world.producer.fire_now(world.topic, one)
    both = names("i", 0, 80) + names("i", 270, 360) + names("i", 370, 400)
    owed = {("right", one) for one in names("i", 80, 180)}
    for group in ("left", "right"):
        owed |= {(group, one) for one in both + names("i", 180, 230)}
    return (world, {*names("i", 80, 260), *both}), owed


def test_after_a_flush_exactly_the_unsettled_messages_are_handled_once(jobs: Jobs) -> None:
    """Messages in every state, two topics, three groups."""
    orders, owed = make_orders(jobs.world())
    invoices, owed_too = make_invoices(jobs.world("invoices", "left", "right"))
    before = {one.topic: one.look(sorted(ids)) for one, ids in (orders, invoices)}
    archive = jobs.frozen("orders", "invoices")
    jobs.client.flushall()

    result = jobs.restore(archive)

    assert counted(result) == {"restored": 830, "expired": 10}
    assert set(listed(result)["restored"]) == orders[1] | invoices[1]
    assert set(listed(result)["expired"]) == set(names("o", 590, 600))
    for one, ids in (orders, invoices):
        for name, was, now in zip(
            sorted(ids), before[one.topic], one.look(sorted(ids)), strict=True
        ):
            assert told(now) == expected(was), name
    assert jobs.client.hget(KEYS.options, "retry_delays") == b"3600000,3600000,3600000"
    assert jobs.client.hgetall(KEYS.policy) == {b"o00007": b"5000,5000"}
    assert [one.topic for one in result.possibly_lost] == ["invoices", "orders"]
    assert all(one.after_ms is not None for one in result.possibly_lost)
    handled = handle_all(jobs, (("orders", "lisa"), ("invoices", "left"), ("invoices", "right")))
    assert set(handled) == owed | owed_too
    assert set(handled.values()) == {1}


@pytest.fixture
def small(jobs: Jobs) -> World:
    """Forty messages: ten wait, ten are in flight, ten in garbage, ten acked."""
    one = jobs.world()
    one.send(names("w", 0, 10), delay=HOUR)
    one.send(names("m", 0, 30))
    one.promote()
    entries = one.take("lisa", 30)
    one.fail("lisa", entries[10:20], "discard")
    one.ack("lisa", entries[20:])
    return one


WAITING, IN_FLIGHT = names("w", 0, 10), names("m", 0, 10)
UNSETTLED = set(WAITING + IN_FLIGHT + names("m", 10, 20))


def test_a_dry_run_then_parts_then_all_then_nothing(jobs: Jobs, small: World) -> None:
    """Options and groups are restored, too, but not a pause; what the server knows is kept."""
    jobs.world("other").send(["x"], delay=HOUR)
    small.configure(paused=True, capacity=70)
    archive = jobs.frozen("orders", "other")
    jobs.client.flushall()
    dry = jobs.restore(archive, dry_run=True)
    assert jobs.client.dbsize() == 0
    assert dry.dry_run
    assert counted(dry) == {"restored": 31}
    assert set(listed(dry)["restored"]) == {*UNSETTLED, "x"}
    # What a manager declared meanwhile is kept.
    small.configure(ack_timeout="5s")
    one = jobs.restore(archive, ids=["w00003"])
    assert listed(one) == {"restored": {"w00003": None}}
    options = small.store.drive(small.store.options("orders"))
    assert (options.paused, options.capacity, options.journal) == (False, 70, True)
    assert options.ack_timeout == timedelta(seconds=5)
    assert small.store.drive(small.store.groups("orders")) == ("lisa",)
    topic = jobs.restore(archive, topics=["other"])
    assert listed(topic) == {"restored": {"x": None}}
    with pytest.raises(ConfigError, match="has no topic nothing; its topics are orders, other"):
        jobs.restore(archive, topics=["nothing"])
    with pytest.raises(ConfigError, match="is not empty"):
        jobs.restore(archive, topic.where)

    rest = jobs.restore(archive)
    assert counted(rest) == {"restored": 29, "live": 2}
    before = [told(one) for one in small.look(sorted(UNSETTLED))]
    again = jobs.restore(archive)
    assert counted(again) == {"live": 31}
    assert [told(one) for one in small.look(sorted(UNSETTLED))] == before
    summary = json.loads(Path(again.where, "summary.json").read_text("utf-8"))
    assert summary["counts"]["live"] == 31
    assert [path.name for path in Path(again.where, "csv").glob("outcome=*")] == ["outcome=live"]
    assert not Path(again.where, "work").exists()


def test_on_an_older_copy_live_messages_stay_lost_ones_return_revived_ones_are_listed(
    jobs: Jobs, small: World
) -> None:
    client = jobs.client
    keys: Any = client.keys("*")
    dump: dict[Any, Any] = {key: client.dump(key) for key in keys if b"events" not in key}
    small.send(["late"], delay=HOUR)  # after the dump
    small.ack("lisa", small.entries(IN_FLIGHT[:3]))  # settled after it
    small.cancel(WAITING[:2])
    archive = jobs.frozen()
    client.flushall()
    for key, value in dump.items():
        client.restore(key, 0, value)
    small.promote()

    result = jobs.restore(archive, settle_revived=True)

    lists = listed(result)
    assert set(lists["restored"]) == {"late"}
    assert lists["revived"] == {
        **dict.fromkeys(WAITING[:2], "archived as cancelled; now cancelled"),
        **dict.fromkeys(IN_FLIGHT[:3], "archived as acked; now in_flight"),
    }
    assert set(lists["live"]) == UNSETTLED - set(lists["revived"])
    assert [one.topic for one in result.possibly_lost] == ["orders"]
    assert client.zscore(KEYS.waiting, WAITING[0]) is None


def test_messages_settled_after_the_archive_are_not_restored(jobs: Jobs, small: World) -> None:
    """The server is intact, but some messages were deleted by hand."""
    archive, ask = jobs.frozen(), small.store.ask
    small.cancel(WAITING[:2])
    small.ack("lisa", small.entries(IN_FLIGHT[:3]))
    ask("DEL", KEYS.body(WAITING[5]), *map(KEYS.done, WAITING[:2]))
    ask("ZREM", KEYS.waiting, WAITING[5])
    result = jobs.restore(archive)
    lists = listed(result)
    assert set(lists["restored"]) == {WAITING[5]}
    assert lists["settled"] == {
        **dict.fromkeys(WAITING[:2], "journal: cancelled"),
        **dict.fromkeys(IN_FLIGHT[:3], "journal: acked"),
    }
    assert result.possibly_lost == []
    # A tombstone shows it if the journal does not.
    ask("DEL", KEYS.events)
    second = listed(jobs.restore(archive))
    assert second["settled"] == dict.fromkeys(IN_FLIGHT[:3], "tombstone: acked")
    assert set(second["restored"]) == set(WAITING[:2])


def test_messages_that_end_during_the_restore_are_not_restored(jobs: Jobs, small: World) -> None:
    """Planning may outlast tombstones, while an archive job runs concurrently."""
    archive = newer = jobs.frozen()

    def end(message_id: str) -> None:
        small.cancel([message_id])
        small.store.ask("DEL", KEYS.done(message_id))

    def meanwhile(stage: str) -> None:
        nonlocal newer
        if stage.startswith("comparing"):
            small.store.ask("DEL", KEYS.body(WAITING[5]))
            end(WAITING[0])
            newer = jobs.frozen()
            small.store.ask("XTRIM", KEYS.events, "MAXLEN", 1)
            end(WAITING[1])

    result = jobs.restore(archive, reopen=lambda: newer, stage=meanwhile)
    assert set(listed(result)["restored"]) == {WAITING[5]}
    assert listed(result)["settled"] == dict.fromkeys(WAITING[:2], "settled while the job ran")
    assert counted(result) == {"restored": 1, "settled": 2, "live": 27}


def test_a_journal_that_is_trimmed_during_the_read_or_off_is_refused(
    jobs: Jobs, small: World
) -> None:
    ask = small.store.ask
    entries = [entry for entry, _ in ask("XRANGE", KEYS.events, "-", "+")]
    ask("XDEL", KEYS.events, entries[20])
    ahead = [small.store.drive(message_history.find_remainder(small.store, "orders", None))]
    found = message_history.read_remainders(jobs.spark, jobs.server, ahead)
    assert found is not None
    assert found.count() == len(entries) - 1  # the earlier hole is no new gap
    ask("XTRIM", KEYS.events, "MINID", entries[40])
    with pytest.raises(LisaError, match="trimmed while it was read"), unwrapped():
        found.count()
    archive = jobs.frozen()
    small.configure(journal=False)
    with pytest.raises(ConfigError, match="but its journal is off"):
        jobs.restore(archive)


def plan(message_id: str, **changes: Any) -> dict[str, Any]:
    """A missing message, as a task of the job gets it."""
    data = b"1abcdefgh-s0000hello"
    row = {"topic": "orders", "token": "abcdefgh", "outcome": "missing", "group_states": []}
    return row | {"id": message_id, "due_ms": 1, "attempts": 0, "envelope": data} | changes


def batch_of(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=arrow_schema(PLAN_SCHEMA))


def test_a_task_repeated_after_tombstones_expired_raises(
    jobs: Jobs, small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may repeat a failed task long after the first attempt restored messages."""
    small.configure(retention=timedelta(minutes=1))
    now = small.store.drive(small.store.server_time_ms())
    for late_ms in (0, 61_000):
        batch, task = batch_of(plan(f"x{late_ms}")), restoring(jobs.server, now - late_ms)
        with monkeypatch.context() as patched:
            (first,) = task(iter([batch]))
            assert first["outcome"].to_pylist() == ["restored"]
            patched.setattr("lisa.pipeline.jobs.restore._attempt", lambda: 1)
            again = task(iter([batch]))
            if late_ms:
                with pytest.raises(LisaError, match="run restore again"):
                    list(again)
            else:
                assert [one["outcome"].to_pylist() for one in again] == [["restored"]]


def test_restored_messages_follow_their_wall_times_again(jobs: Jobs, small: World) -> None:
    wall = {LOCAL_HEADER: "2030-12-24T09:00 Asia/Tokyo"}
    at = LocalTime.of_headers(wall)
    assert at is not None
    data = encode_envelope("abcdefgh", "hello", wall)
    dues = {"waits": at.due_ms, "rescheduled": at.due_ms + 1}
    batch = batch_of(*(plan(name, due_ms=due, envelope=data) for name, due in dues.items()))
    list(restoring(jobs.server, small.store.drive(small.store.server_time_ms()))(iter([batch])))
    assert jobs.scores(KEYS.local) == {"waits": at.due_ms}
    assert small.store.ask("ZSCORE", small.store.keys.scheduled, "orders")
    assert small.look(["rescheduled"])[0].waiting_due_ms == at.due_ms + 1


def test_messages_with_keys_are_archived_found_restored_and_erased(jobs: Jobs) -> None:
    world = jobs.world()
    for key in ("k/1", "k/10"):
        for own_id in ("a", "b"):
            world.producer.send(TOPIC, key, key=key, id=own_id, delay=HOUR)
    world.producer.cancel_key(TOPIC, "k/10")
    world.producer.send(TOPIC, "x", key="k/1", id="dead")
    world.promote()
    (entry,) = world.take("lisa", 1)
    world.fail("lisa", [entry], "discard")
    jobs.archive()
    archived = ("--archive", jobs.where, "--redis", jobs.url)
    mine = {f"k/1\x1f{own_id}" for own_id in ("a", "b", "dead")}
    for words in (("--no-live",), ()):
        found = jobs.command("search", *archived, *words, "--key", "k/1", "--json")
        rows = json.loads(found.stdout)["messages"]
        assert {(one["id"], one["key"]) for one in rows} == {(one, "k/1") for one in mine}
    assert "k/1 / dead" in jobs.command("search", *archived, "--key", "k/1", "--id", "dead").output
    jobs.client.flushall()
    assert jobs.command("restore", *archived, "--key", "k/1", code=2).output
    one = jobs.command(
        "restore", *archived, "--key", "k/1", "--id", "a", "--report", jobs.new_path()
    )
    assert re.search(r"restored +1 ", one.output), one.output
    jobs.command("restore", *archived, "--report", jobs.new_path())
    assert {found.id for found in jobs.producer.list_key(TOPIC, "k/1")} == mine
    assert jobs.producer.count_key(TOPIC, "k/10") == 0
    jobs.command("erase", *archived, "--offline", "--key", "k/1", "--id", "a")
    left = jobs.command("search", *archived, "--no-live", "--key", "k/1", "--json")
    assert {row["id"] for row in json.loads(left.stdout)["messages"]} == mine - {"k/1\x1fa"}


def test_a_restored_topic_uses_lanes_as_before(jobs: Jobs) -> None:
    world, client = jobs.world(), jobs.client
    jobs.store.call(Configure(TOPIC, {"order": "continue", "key_rate@lisa": "2,1000,1"}))
    limits = {"k": "rate=1,1000,1", "\u03bb:k": "weight=2", "lisa\x1fk": "concurrency=1"}
    jobs.store.call(LimitKeys(TOPIC, "set", limits))
    own: dict[str, dict[str, Any]] = {"b": {"cost": 5}, "a": {"slack": "3s"}, "c": {}}
    for own_id, given in own.items():
        world.producer.send(TOPIC, 1, key="k", id=own_id, delay=HOUR, **given)
    policies = client.hgetall(KEYS.policy)
    assert policies == {
        b"k\x1fb": b"*;;5,,1",
        b"k\x1fa": b"*;;,3000,2",
        b"k\x1fc": b"*;;,,3",
    }
    archive = jobs.frozen()
    client.flushall()
    assert jobs.restore(archive).counts["restored"] == 3
    assert client.hgetall(KEYS.policy) == policies
    options = client.hgetall(KEYS.options)
    flags = {b"lanes": b"1", b"ordered": b"1", b"ordered_after": b"3"}
    assert (flags | {b"key_rate@lisa": b"2,1000,1"}).items() <= options.items()
    assert jobs.store.drive(limits_of(jobs.store, TOPIC)) == limits
    assert {name for name in options if b"limits" in name} == {b"limits"}
    for own_id in "abc":
        client.zadd(KEYS.waiting, {f"k\x1f{own_id}": 1})
    world.promote()
    (entry,) = world.take("lisa", 1)
    assert entry.id == "k\x1fb"
    assert client.xlen(KEYS.group("lisa").ready) == 1


def test_messages_past_their_ttl_are_restored_only_with_expire(jobs: Jobs) -> None:
    one = jobs.world()
    one.send(["short", "dead"], ttl=timedelta(milliseconds=50))
    one.promote()
    entries = {entry.id: entry for entry in one.take("lisa", 2)}
    one.fail("lisa", [entries["dead"]], "discard")
    archive = jobs.frozen()
    wait_past(int(time.time() * 1000) + 100)
    jobs.client.flushall()
    first = jobs.restore(archive)
    # The ttl does not apply to garbage.
    assert listed(first) == {"expired": {"short": "past its ttl"}, "restored": {"dead": None}}
    second = jobs.restore(archive, expire=True)
    assert set(listed(second)["restored"]) == {"short"}
    (seen,) = one.look(["short"])
    assert seen.expires_ms is None
    assert [one.state for one in seen.group_states] == ["retry"]


def test_gaps_of_the_archive_are_possibly_lost(jobs: Jobs, small: World) -> None:
    archive = jobs.frozen()
    span = ("1700000000000-0", 7, "1700000005000-3", 12)
    gap = ArchiveGap("orders", *span, "trimmed: 4 events", ms_datetime(1700000005000))
    archive.named_gaps.append(gap)
    jobs.client.flushall()
    result = jobs.restore(archive)
    assert counted(result) == {"restored": 30}
    windows = [(one.after_ms, one.until_ms, one.reason) for one in result.possibly_lost]
    assert (1700000000000, 1700000005000, "trimmed: 4 events") in windows
    assert len(windows) == 2


def test_messages_that_the_server_has_need_no_envelope_and_no_ttl(jobs: Jobs) -> None:
    one = jobs.world()
    one.configure(journal=False)
    one.send(["live", "ended", "lost"], delay=HOUR)
    one.configure(journal=True)
    for name in ("live", "ended", "lost"):
        one.producer.reschedule("orders", name, delay=2 * HOUR)
    one.send(["short"], ttl=timedelta(milliseconds=1))
    archive = jobs.frozen()
    one.configure(journal=False)
    one.cancel(["ended", "short"])
    one.configure(journal=True)
    one.store.ask("DEL", KEYS.body("lost"))
    wait_past(int(time.time() * 1000) + 10)
    assert listed(jobs.restore(archive, dry_run=True)) == {
        "live": {"live": None},
        "settled": {"ended": "tombstone: cancelled", "short": "tombstone: cancelled"},
        "unrestorable": {"lost": "its envelope was never archived"},
    }


def test_restore_under_traffic(jobs: Jobs) -> None:
    """Manager, consumer and producer run before and during the restore."""
    one, producer = jobs.world(), jobs.producer
    one.send(names("t", 0, 400))
    one.promote()
    one.ack("lisa", one.take("lisa", 100))
    archive = jobs.frozen()
    jobs.client.flushall()
    handled: Counter[str] = Counter()
    consumer = Consumer(jobs.url, group="lisa", concurrency=4)

    @consumer.on("orders")
    def note(message: Message) -> None:
        handled[message.id] += 1

    with Manager(jobs.url, topics={"orders": {"groups": ["lisa"]}}), consumer:
        for number in range(50):
            producer.send("orders", {"new": number}, id=f"n{number}")
        # Sent again by a producer that noticed the loss: the new message wins.
        producer.send("orders", {"order": "again"}, id="t00399", delay=HOUR)
        result = jobs.restore(archive)
        for number in range(50, 100):
            producer.send("orders", {"new": number}, id=f"n{number}")
        wait_until(lambda: len(handled) >= 299 + 100)
    assert counted(result) == {"restored": 299, "live": 1}
    assert listed(result)["live"] == {"t00399": "its id was sent again"}
    assert set(handled.values()) == {1}
    assert set(handled) == set(names("t", 100, 399)) | {f"n{number}" for number in range(100)}


def test_the_command(jobs: Jobs, small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.folder)
    jobs.archive()
    jobs.client.flushall()
    command = ("restore", "--archive", jobs.where, "--redis", jobs.url)
    dry = jobs.command(*command, "--dry-run", "--json", "--report", jobs.new_path())
    (line,) = [one for one in dry.output.splitlines() if one.startswith("{")]
    document = json.loads(line)
    assert document["dry_run"] is True
    assert document["counts"]["restored"] == 30
    (window,) = document["possibly_lost"]
    assert window["topic"] == "orders"
    assert window["after"] < window["until"]
    assert jobs.client.dbsize() == 0
    real = jobs.command(*command)
    assert re.search(r"restored +30 ", real.output), real.output
    assert "possibly lost" in real.output
    assert "lists: " in real.output
    assert len(list(jobs.folder.glob("restore-*/summary.json"))) == 1
    assert jobs.client.zcard(KEYS.waiting) == 10
    without_archive = jobs.command("restore", "--archive", jobs.new_path(), code=2)
    assert "Traceback" not in without_archive.output
    assert "--archive" in jobs.command("restore", code=2).output


def test_the_limits_of_keys_are_archived_as_they_are(jobs: Jobs) -> None:
    keeper, store = JournalRecord(jobs.server, "one"), jobs.store
    wanted: dict[str, str] = {}
    for number in (1, 2):
        many = {f"key-{n}": f"weight={number}" for n in range(1_500)}
        store.call(LimitKeys("orders", "set", many))
        wanted = {f"limits:{key}": value for key, value in many.items()}
        for _ in range(2):
            options = keeper.topics(["orders"])["orders"].options
            found = {name: value for name, value in options.items() if name.startswith("limits:")}
            assert found == wanted
    keeper.close()
    # A server that has other limits keeps them, and gets those that it lacks.
    store.call(LimitKeys("other", "set", {"key-1": "weight=9"}))
    store.drive(rebuild(store, "other", ["lisa"], wanted))
    restored = store.drive(limits_of(store, "other"))
    assert restored == many | {"key-1": "weight=9"}


def test_the_marker_of_a_group_removal_is_neither_archived_nor_restored(jobs: Jobs) -> None:
    options = {"ack_timeout": "30000", "removing:lisa": "1700000000000"}
    keeper, store = JournalRecord(jobs.server, "one"), jobs.store
    store.call(Configure("orders", options))
    assert keeper.topics(["orders"])["orders"].options == {"ack_timeout": "30000"}
    store.drive(rebuild(store, "other", ["lisa"], options))  # from an earlier archive
    assert store.ask("HKEYS", store.keys.topic("other").options) == [b"ack_timeout"]
    keeper.close()
