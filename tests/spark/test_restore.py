"""Restore: a server that came back empty or older gets all unsettled messages back."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from lisa import Consumer, Manager, Message, Producer
from lisa.admin.topics import set_options
from lisa.core.model.envelope import decode_envelope, encode_envelope
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import LOCAL_HEADER
from lisa.core.model.windows.local_time import LocalTime
from lisa.core.transitions.configure import Configure
from lisa.pipeline.archive.records import ArchiveGap
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs import journal_tail, restore_tasks
from lisa.pipeline.jobs.archive import archive as run_archive
from lisa.pipeline.jobs.journal_record import JournalRecord
from lisa.pipeline.jobs.restore import Restoration, restore
from lisa.pipeline.jobs.restore_tasks import PLAN_SCHEMA, restoring
from lisa.pipeline.jobs.restore_topics import rebuild
from lisa.pipeline.server import Server
from lisa.pipeline.source.read_columns import arrow_schema
from tests.servers import connect, flush, wait_until
from tests.spark.worlds import World, counted, frozen, wait_past

HOUR = timedelta(hours=1)


@pytest.fixture
def server(redis_url: str) -> Server:
    return Server(redis_url)


@pytest.fixture
def world(server: Server) -> Iterator[Callable[..., World]]:
    """Creates topics: world("orders", "lisa")."""
    made: list[World] = []
    with server.open() as store:

        def make(topic: str, *groups: str) -> World:
            made.append(World(store, server.url, topic, groups))
            return made[-1]

        yield make
        for one in made:
            one.close()


def names(letter: str, start: int, stop: int) -> list[str]:
    return [f"{letter}{number:05d}" for number in range(start, stop)]


def listed(result: Restoration) -> dict[str, dict[str, str]]:
    """The stored lists: outcome -> id -> reason."""
    import pyarrow.parquet as pq

    found: dict[str, dict[str, str]] = {}
    for row in pq.read_table(f"{result.where}/lists").to_pylist():
        found.setdefault(row["outcome"], {})[row["id"]] = row["reason"]
    return found


class TestAfterFlushAll:
    """Messages in every state, two topics, three groups."""

    def test_exactly_the_unsettled_messages_are_handled_once(
        self, spark: SparkSession, server: Server, world: Callable[..., World], tmp_path: Path
    ) -> None:
        orders, owed = self.orders(world("orders", "lisa"))
        invoices, owed_too = self.invoices(world("invoices", "left", "right"))
        before = {one.topic: one.look(sorted(ids)) for one, ids in (orders, invoices)}
        archive = frozen(spark, server, ["orders", "invoices"], f"{tmp_path}/log")
        flush(server.url)

        result = restore(spark, archive, server, f"{tmp_path}/report")

        assert counted(result) == {"restored": 830, "expired": 10}
        assert set(listed(result)["restored"]) == orders[1] | invoices[1]
        assert set(listed(result)["expired"]) == set(names("o", 590, 600))
        for one, ids in (orders, invoices):
            for name, was, now in zip(
                sorted(ids), before[one.topic], one.look(sorted(ids)), strict=True
            ):
                assert told(now) == expected(was), name
        with connect(server.url) as client:
            delays = client.hget("lisa:{orders}:options", "retry_delays")
            assert delays == b"3600000,3600000,3600000"
            assert client.hgetall("lisa:{orders}:policy") == {b"o00007": b"5000,5000"}
        assert [one.topic for one in result.possibly_lost] == ["invoices", "orders"]
        assert all(one.after_ms is not None for one in result.possibly_lost)
        groups = (("orders", "lisa"), ("invoices", "left"), ("invoices", "right"))
        handled = handle_all(server.url, groups)
        assert set(handled) == owed | owed_too
        assert set(handled.values()) == {1}

    @staticmethod
    def orders(world: World) -> tuple[tuple[World, set[str]], set[tuple[str, str]]]:
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

    @staticmethod
    def invoices(world: World) -> tuple[tuple[World, set[str]], set[tuple[str, str]]]:
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


@pytest.fixture
def small(world: Callable[..., World]) -> World:
    """Forty messages: ten wait, ten are in flight, ten in garbage, ten acked."""
    one = world("orders", "lisa")
    one.send(names("w", 0, 10), delay=timedelta(hours=1))
    one.send(names("m", 0, 30))
    one.promote()
    entries = one.take("lisa", 30)
    one.fail("lisa", entries[10:20], "discard")
    one.ack("lisa", entries[20:])
    return one


WAITING, IN_FLIGHT = names("w", 0, 10), names("m", 0, 10)
DEAD, ACKED = names("m", 10, 20), names("m", 20, 30)
UNSETTLED = set(WAITING + IN_FLIGHT + DEAD)


class TestRepeatedRestore:
    """Messages that the server knows are not changed."""

    def test_a_dry_run_then_parts_then_all_then_nothing(
        self,
        spark: SparkSession,
        server: Server,
        small: World,
        world: Callable[..., World],
        tmp_path: Path,
    ) -> None:
        """Options and groups are restored, too, but not a pause."""
        world("other", "lisa").send(["x"], delay=HOUR)
        small.store.drive(set_options(small.store, "orders", {"paused": True, "capacity": 70}))
        archive = frozen(spark, server, ["orders", "other"], f"{tmp_path}/log")
        flush(server.url)
        dry = restore(spark, archive, server, f"{tmp_path}/dry", dry_run=True)
        with connect(server.url) as client:
            assert client.dbsize() == 0
        assert dry.dry_run
        assert counted(dry) == {"restored": 31}
        assert set(listed(dry)["restored"]) == {*UNSETTLED, "x"}
        # What a manager declared meanwhile is kept.
        small.store.drive(set_options(small.store, "orders", {"ack_timeout": "5s"}))
        one = restore(spark, archive, server, f"{tmp_path}/one", ids=["w00003"])
        assert listed(one) == {"restored": {"w00003": None}}
        options = small.store.drive(small.store.options("orders"))
        assert (options.paused, options.capacity, options.journal) == (False, 70, True)
        assert options.ack_timeout == timedelta(seconds=5)
        assert small.store.drive(small.store.groups("orders")) == ("lisa",)
        topic = restore(spark, archive, server, f"{tmp_path}/topic", topics=["other"])
        assert listed(topic) == {"restored": {"x": None}}
        with pytest.raises(ConfigError, match="has no topic nothing; its topics are orders, other"):
            restore(spark, archive, server, f"{tmp_path}/no", topics=["nothing"])
        with pytest.raises(ConfigError, match="is not empty"):
            restore(spark, archive, server, f"{tmp_path}/topic")

        rest = restore(spark, archive, server, f"{tmp_path}/rest")
        assert counted(rest) == {"restored": 29, "live": 2}
        before = [told(one) for one in small.look(sorted(UNSETTLED))]
        again = restore(spark, archive, server, f"{tmp_path}/two")

        assert counted(again) == {"live": 31}
        assert [told(one) for one in small.look(sorted(UNSETTLED))] == before
        summary = json.loads(Path(again.where, "summary.json").read_text("utf-8"))
        assert summary["counts"]["live"] == 31
        assert [path.name for path in Path(again.where, "csv").glob("outcome=*")] == [
            "outcome=live"
        ]
        assert not Path(again.where, "work").exists()


class TestOlderServer:
    """The server came back from an old dump: messages are live, lost or revived."""

    def test_live_messages_stay_lost_ones_return_revived_ones_are_listed(
        self, spark: SparkSession, server: Server, small: World, tmp_path: Path
    ) -> None:
        with connect(server.url) as client:
            dump = {key: client.dump(key) for key in client.keys("*") if b"events" not in key}
            small.send(["late"], delay=timedelta(hours=1))  # after the dump
            small.ack("lisa", small.entries(IN_FLIGHT[:3]))  # settled after it
            small.cancel(WAITING[:2])
            archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
            client.flushall()
            for key, value in dump.items():
                client.restore(key, 0, value)
        small.promote()

        result = restore(spark, archive, server, f"{tmp_path}/out", settle_revived=True)

        lists = listed(result)
        assert set(lists["restored"]) == {"late"}
        assert set(lists["revived"]) == set(IN_FLIGHT[:3] + WAITING[:2])
        assert {lists["revived"][one] for one in WAITING[:2]} == {
            "archived as cancelled; now cancelled"
        }
        assert {lists["revived"][one] for one in IN_FLIGHT[:3]} == {
            "archived as acked; now in_flight"
        }
        assert set(lists["live"]) == UNSETTLED - set(lists["revived"])
        assert [one.topic for one in result.possibly_lost] == ["orders"]
        with connect(server.url) as client:
            assert client.zscore("lisa:{orders}:waiting", WAITING[0]) is None

    def test_messages_settled_after_the_archive_are_not_restored(
        self, spark: SparkSession, server: Server, small: World, tmp_path: Path
    ) -> None:
        """The server is intact, but some messages were deleted by hand."""
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        small.cancel(WAITING[:2])
        small.ack("lisa", small.entries(IN_FLIGHT[:3]))
        small.store.ask("DEL", *[f"lisa:{{orders}}:done:{one}" for one in WAITING[:2]])
        small.store.ask("DEL", f"lisa:{{orders}}:body:{WAITING[5]}")
        small.store.ask("ZREM", "lisa:{orders}:waiting", WAITING[5])

        result = restore(spark, archive, server, f"{tmp_path}/out")

        lists = listed(result)
        assert set(lists["restored"]) == {WAITING[5]}
        assert lists["settled"] == {
            **dict.fromkeys(WAITING[:2], "journal: cancelled"),
            **dict.fromkeys(IN_FLIGHT[:3], "journal: acked"),
        }
        assert result.possibly_lost == []
        # A tombstone shows it if the journal does not.
        small.store.ask("DEL", "lisa:{orders}:events")
        second = listed(restore(spark, archive, server, f"{tmp_path}/two"))
        assert second["settled"] == dict.fromkeys(IN_FLIGHT[:3], "tombstone: acked")
        assert set(second["restored"]) == set(WAITING[:2])

    def test_messages_that_end_during_the_restore_are_not_restored(
        self, spark: SparkSession, server: Server, small: World, tmp_path: Path
    ) -> None:
        """Planning may outlast tombstones, while an archive job runs concurrently."""
        archive = newer = frozen(spark, server, ["orders"], f"{tmp_path}/log")

        def end(*ids: str) -> None:
            small.cancel(ids)
            small.store.ask("DEL", *[f"lisa:{{orders}}:done:{one}" for one in ids])

        def meanwhile(stage: str) -> None:
            nonlocal newer
            if stage.startswith("comparing"):
                small.store.ask("DEL", f"lisa:{{orders}}:body:{WAITING[5]}")
                end(WAITING[0])
                newer = frozen(spark, server, ["orders"], f"{tmp_path}/newer")
                small.store.ask("XTRIM", "lisa:{orders}:events", "MAXLEN", 1)
                end(WAITING[1])

        result = restore(
            spark, archive, server, f"{tmp_path}/out", reopen=lambda: newer, stage=meanwhile
        )

        assert set(listed(result)["restored"]) == {WAITING[5]}
        assert listed(result)["settled"] == dict.fromkeys(WAITING[:2], "settled while the job ran")
        assert counted(result) == {"restored": 1, "settled": 2, "live": 27}

    def test_a_journal_that_is_trimmed_during_the_read_or_off_is_refused(
        self, spark: SparkSession, server: Server, small: World, tmp_path: Path
    ) -> None:
        key = "lisa:{orders}:events"
        entries = [entry for entry, _ in small.store.ask("XRANGE", key, "-", "+")]
        small.store.ask("XDEL", key, entries[20])
        ahead = [small.store.drive(journal_tail.find_remainder(small.store, "orders", None))]
        found = journal_tail.read(spark, server, ahead)
        assert found is not None
        assert found.count() == len(entries) - 1  # the earlier hole is no new gap
        small.store.ask("XTRIM", key, "MINID", entries[40])
        with pytest.raises(LisaError, match="trimmed while it was read"), unwrapped():
            found.count()
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        small.store.drive(set_options(small.store, "orders", {"journal": False}))
        with pytest.raises(ConfigError, match="but its journal is off"):
            restore(spark, archive, server, f"{tmp_path}/out")


def test_a_task_repeated_after_tombstones_expired_raises(
    server: Server, small: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may repeat a failed task long after the first attempt restored messages."""
    small.store.drive(set_options(small.store, "orders", {"retention": timedelta(minutes=1)}))
    row = {"topic": "orders", "token": "abcdefgh", "outcome": "missing", "due_ms": 1}
    row |= {"attempts": 0, "envelope": b"1abcdefgh-s0000hello", "group_states": []}
    now = small.store.drive(small.store.server_time_ms())
    for late_ms in (0, 61_000):
        one = [row | {"id": f"x{late_ms}"}]
        batch = pa.RecordBatch.from_pylist(one, schema=arrow_schema(PLAN_SCHEMA))
        task = restoring(server, now - late_ms)
        with monkeypatch.context() as patched:
            (first,) = task(iter([batch]))
            assert first["outcome"].to_pylist() == ["restored"]
            patched.setattr(restore_tasks, "_attempt", lambda: 1)
            again = task(iter([batch]))
            if late_ms:
                with pytest.raises(LisaError, match="run restore again"):
                    list(again)
            else:
                assert [one["outcome"].to_pylist() for one in again] == [["restored"]]


def test_restored_messages_follow_their_wall_times_again(server: Server, small: World) -> None:
    wall = {LOCAL_HEADER: "2030-12-24T09:00 Asia/Tokyo"}
    at = LocalTime.of_headers(wall)
    assert at is not None
    dues = {"waits": at.due_ms, "rescheduled": at.due_ms + 1}
    row = {"topic": "orders", "token": "abcdefgh", "outcome": "missing", "group_states": []}
    data = encode_envelope("abcdefgh", "hello", wall)
    rows = [
        row | {"id": name, "due_ms": due, "attempts": 0, "envelope": data}
        for name, due in dues.items()
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PLAN_SCHEMA))
    list(restoring(server, small.store.drive(small.store.server_time_ms()))(iter([batch])))
    keys = small.store.keys
    listed = small.store.ask("ZRANGE", keys.topic("orders").local, 0, -1, "WITHSCORES")
    assert listed == [b"waits", b"%d" % at.due_ms]
    assert small.store.ask("ZSCORE", keys.scheduled, "orders")
    assert small.look(["rescheduled"])[0].waiting_due_ms == at.due_ms + 1


class TestHardCases:
    """Ttls, gaps, and messages that cannot be restored."""

    def test_messages_past_their_ttl_are_restored_only_with_expire(
        self, spark: SparkSession, server: Server, world: Callable[..., World], tmp_path: Path
    ) -> None:
        one = world("orders", "lisa")
        one.send(["short", "dead"], ttl=timedelta(milliseconds=50))
        one.promote()
        entries = {entry.id: entry for entry in one.take("lisa", 2)}
        one.fail("lisa", [entries["dead"]], "discard")
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        wait_past(int(time.time() * 1000) + 100)
        flush(server.url)
        first = restore(spark, archive, server, f"{tmp_path}/one")
        # The ttl does not apply to garbage.
        assert listed(first) == {"expired": {"short": "past its ttl"}, "restored": {"dead": None}}
        second = restore(spark, archive, server, f"{tmp_path}/two", expire=True)
        assert set(listed(second)["restored"]) == {"short"}
        (seen,) = one.look(["short"])
        assert seen.expires_ms is None
        assert [one.state for one in seen.group_states] == ["retry"]

    def test_gaps_and_missing_envelopes(
        self, spark: SparkSession, server: Server, small: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        no_body = (archive.events.id == WAITING[0]) & (archive.events.state == "sent")
        archive.events = archive.events.where(~no_body)
        small.producer.reschedule("orders", WAITING[0], delay=timedelta(hours=2))
        late = frozen(spark, server, ["orders"], f"{tmp_path}/log2")
        rescheduled = late.events.where("state = 'rescheduled'")
        archive.events = archive.events.unionByName(rescheduled)
        archive.committed = late.committed
        span = ("1700000000000-0", 7, "1700000005000-3", 12)
        archive.named_gaps.append(
            ArchiveGap("orders", *span, "trimmed: 4 events", rescheduled.head().at)
        )
        flush(server.url)
        result = restore(spark, archive, server, f"{tmp_path}/out")
        lists = listed(result)
        assert lists["unrestorable"] == {WAITING[0]: "its envelope was never archived"}
        assert set(lists["restored"]) == UNSETTLED - {WAITING[0]}
        windows = [(one.after_ms, one.until_ms, one.reason) for one in result.possibly_lost]
        assert (1700000000000, 1700000005000, "trimmed: 4 events") in windows
        assert len(windows) == 2

    def test_messages_that_the_server_has_need_no_envelope_and_no_ttl(
        self, spark: SparkSession, server: Server, world: Callable[..., World], tmp_path: Path
    ) -> None:
        one = world("orders", "lisa")
        one.store.drive(set_options(one.store, "orders", {"journal": False}))
        one.send(["live", "ended", "lost"], delay=timedelta(hours=1))
        one.store.drive(set_options(one.store, "orders", {"journal": True}))
        for name in ("live", "ended", "lost"):
            one.producer.reschedule("orders", name, delay=timedelta(hours=2))
        one.send(["short"], ttl=timedelta(milliseconds=1))
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        one.store.drive(set_options(one.store, "orders", {"journal": False}))
        one.cancel(["ended", "short"])
        one.store.drive(set_options(one.store, "orders", {"journal": True}))
        one.store.ask("DEL", one.store.keys.topic("orders").body("lost"))
        wait_past(int(time.time() * 1000) + 10)
        result = restore(spark, archive, server, f"{tmp_path}/out", dry_run=True)
        assert listed(result) == {
            "live": {"live": None},
            "settled": {"ended": "tombstone: cancelled", "short": "tombstone: cancelled"},
            "unrestorable": {"lost": "its envelope was never archived"},
        }

    def test_restore_under_traffic(
        self, spark: SparkSession, server: Server, world: Callable[..., World], tmp_path: Path
    ) -> None:
        """Manager, consumer and producer run before and during the restore."""
        one = world("orders", "lisa")
        one.send(names("t", 0, 400))
        one.promote()
        one.ack("lisa", one.take("lisa", 100))
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        flush(server.url)
        handled: Counter[str] = Counter()
        consumer = Consumer(server.url, group="lisa", concurrency=4)

        @consumer.on("orders")
        def note(message: Message) -> None:
            handled[message.id] += 1

        with (
            Manager(server.url, topics={"orders": {"groups": ["lisa"]}}),
            Producer(server.url) as producer,
            consumer,
        ):
            for number in range(50):
                producer.send("orders", {"new": number}, id=f"n{number}")
            # Sent again by a producer that noticed the loss: the new message wins.
            producer.send("orders", {"order": "again"}, id="t00399", delay=HOUR)
            result = restore(spark, archive, server, f"{tmp_path}/out")
            for number in range(50, 100):
                producer.send("orders", {"new": number}, id=f"n{number}")
            wait_until(lambda: len(handled) >= 299 + 100)
        assert counted(result) == {"restored": 299, "live": 1}
        assert listed(result)["live"] == {"t00399": "its id was sent again"}
        assert set(handled.values()) == {1}
        assert set(handled) == set(names("t", 100, 399)) | {f"n{number}" for number in range(100)}


def test_the_command(  # noqa: PLR0917  its fixtures
    spark: SparkSession,
    server: Server,
    small: World,
    pipeline: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run_archive(spark, f"{tmp_path}/archive", url=server.url, once=True)
    flush(server.url)
    command = ("restore", "--archive", f"{tmp_path}/archive", "--redis", server.url)
    dry = pipeline(*command, "--dry-run", "--json", "--report", f"{tmp_path}/dry")
    assert dry.exit_code == 0, dry.output
    (line,) = [one for one in dry.output.splitlines() if one.startswith("{")]
    document = json.loads(line)
    assert document["dry_run"] is True
    assert document["counts"]["restored"] == 30
    (window,) = document["possibly_lost"]
    assert window["topic"] == "orders"
    assert window["after"] < window["until"]
    with connect(server.url) as client:
        assert client.dbsize() == 0
        real = pipeline(*command)
        assert real.exit_code == 0, real.output
        assert re.search(r"restored +30 ", real.output), real.output
        assert "possibly lost" in real.output
        assert "lists: " in real.output
        assert len(list(tmp_path.glob("restore-*/summary.json"))) == 1
        assert client.zcard("lisa:{orders}:waiting") == 10
    without_archive = pipeline("restore", "--archive", f"{tmp_path}/none")
    assert without_archive.exit_code == 2
    assert "Traceback" not in without_archive.output
    usage = pipeline("restore")
    assert usage.exit_code == 2
    assert "--archive" in usage.output


def told(seen: Any) -> dict[str, Any]:
    """An inspection in comparable form."""
    envelope = decode_envelope(seen.envelope)
    states = {
        one.group: (one.state, one.due_ms, one.failed_attempts, one.reason)
        for one in seen.group_states
    }
    return {
        "envelope": envelope,
        "waiting": seen.waiting_due_ms,
        "expires": seen.expires_ms,
        "group_states": states,
    }


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


def handle_all(url: str, groups: tuple[tuple[str, str], ...]) -> Counter[tuple[str, str]]:
    """Make all messages due, and run a manager and consumers until a later one is handled.

    Returns (group, id) -> number of deliveries.
    """
    handled: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()
    with connect(url) as client, Producer(url) as producer, ExitStack() as running:
        now = int(time.time() * 1000)
        for topic, group in groups:
            for key in (f"lisa:{{{topic}}}:waiting", f"lisa:{{{topic}}}:g:{group}:retry"):
                ids: Any = client.zrange(key, 0, -1)
                client.zadd(key, dict.fromkeys([*ids, "none"], now))
                client.zrem(key, "none")
        running.enter_context(Manager(url))
        for topic, group in groups:
            consumer = Consumer(url, group=group)

            def note(message: Message, group: str = group) -> None:
                with lock:
                    handled[group, message.id] += 1

            consumer.on(topic)(note)
            running.enter_context(consumer)

        def is_idle() -> bool:
            """Whether nothing is left but garbage and what is in flight for an hour."""
            return not any(
                client.zcard(f"lisa:{{{topic}}}:waiting")
                or client.zcard(f"lisa:{{{topic}}}:g:{group}:retry")
                for topic, group in groups
            )

        wait_until(is_idle)
        for topic in dict(groups):
            producer.send(topic, "last", id=f"last-{topic}")
        wait_until(lambda: all(handled[group, f"last-{topic}"] for topic, group in groups))
    return Counter({key: n for key, n in handled.items() if not key[1].startswith("last-")})


def test_the_marker_of_a_group_removal_is_neither_archived_nor_restored(server: Server) -> None:
    options = {"ack_timeout": "30000", "removing:lisa": "1700000000000"}
    keeper = JournalRecord(server, "one")
    with server.open() as store:
        store.call(Configure("orders", options))
        assert keeper.topics(["orders"])["orders"].options == {"ack_timeout": "30000"}
        store.drive(rebuild(store, "other", ["lisa"], options))  # from an earlier archive
        assert store.ask("HKEYS", store.keys.topic("other").options) == [b"ack_timeout"]
    keeper.close()
