"""`spark.read.format("lisa")`: live messages and their states."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from lisa.admin.reading import sorted_page
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.stream import Entry
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Command, drive
from lisa.core.transitions.retry import Fail, Failure
from lisa.pipeline.source.read_columns import LIVE_SCHEMA
from lisa.producer import Producer
from tests.roles import Cast, Services
from tests.spark.journals import slow_commands

WAITING = 100_000
FAR_MS = 4_000_000_000_000


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url).declare(retry_delays="600000")


def live(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.read.format("lisa").option("url", url).options(**given).schema(LIVE_SCHEMA).load()


def at(milliseconds: int) -> Any:
    return f.lit(datetime.fromtimestamp(milliseconds / 1000, UTC))


def fill(client: redis.Redis, cast: Cast, count: int, body: object = "x") -> None:
    """Many waiting messages, a thousand per due time."""
    envelope = encode_envelope("tokentok", body)
    for start in range(0, count, 10_000):
        names = range(start, min(start + 10_000, count))
        client.zadd(cast.keys.waiting, {f"m{n:07d}": FAR_MS + n // 1000 for n in names})
        client.mset({cast.keys.body(f"m{n:07d}"): envelope for n in names})
    cast.store.drive(cast.store.register([cast.topic]))


def test_rows_of_every_state(cast: Cast, spark: SparkSession, redis_url: str) -> None:
    with Producer(redis_url) as producer:
        for name in ("w", "r", "f", "t", "g"):
            later = 600_000 if name == "w" else 0
            cast.send({"is": name}, delay_ms=later, message_id=name, ttl_ms=700_000)
        text = producer.send("orders", "héllo", headers={"a": "b"}, delay=None, id="text")
    due = {entry.id: entry.due_ms for entry in cast.take(2)}  # w waits, so r and f come first
    assert set(due) == {"r", "f"}
    entries: dict[str, Entry] = {entry.id: entry for entry in cast.take(3)}
    failures = [
        Failure("t", entries["t"].entry, "broken — ü", 600_000),
        Failure("g", entries["g"].entry, "no", "discard"),
    ]
    cast.store.call(Fail("orders", "g", failures))
    ready = cast.send(b"\x00\xff", message_id="last")
    rows = {row.id: row for row in live(spark, redis_url).collect()}
    assert {name: row.state for name, row in rows.items()} == {
        "w": "waiting",
        "r": "in_flight",
        "f": "in_flight",
        "t": "retry",
        "g": "garbage",
        text: "in_flight",
        ready: "ready",
    }
    assert rows["w"].group is None
    assert {row.group for name, row in rows.items() if name != "w"} == {"g"}
    assert bytes(rows["w"].body) == b'{"is":"w"}'
    assert (rows[text].headers, rows[text].kind) == ({"a": "b"}, "s")
    assert bytes(rows[text].body).decode() == "héllo"
    assert (bytes(rows[ready].body), rows[ready].kind, rows[ready].headers) == (b"\0\xff", "b", {})
    assert (rows["r"].consumer, rows["r"].attempts, rows["w"].consumer) == ("c1", 0, None)
    assert (rows["t"].reason, rows["t"].attempts) == ("broken — ü", 1)
    assert (rows["g"].reason, rows["g"].attempts) == ("no", 1)
    assert rows["w"].expires - rows["w"].due == rows["f"].expires - rows["f"].due
    assert rows["g"].expires is None
    epoch_ms = {
        row.id: row.at
        for row in live(spark, redis_url).select("id", f.unix_millis("due").alias("at")).collect()
    }
    assert epoch_ms["f"] == due["f"]
    assert epoch_ms["w"] == cast.look("w").waiting_due_ms
    assert epoch_ms["t"] == cast.look("t").group_states[0].due_ms


def test_groups_topics_and_states(
    cast: Cast, client: redis.Redis, spark: SparkSession, redis_url: str
) -> None:
    """Each group has its own row."""
    other, second = cast.on("other").declare(), cast.on("orders", "h").declare()
    for one in (cast, other):
        one.send(message_id="now")
        one.send(message_id="later", delay_ms=600_000)
    second.take()
    rows = live(spark, redis_url, topic="orders").where("id = 'now'").collect()
    assert {(row.group, row.state) for row in rows} == {("g", "ready"), ("h", "in_flight")}
    found = live(spark, redis_url, topic="other, none", state="waiting, garbage").collect()
    assert [(row.topic, row.id) for row in found] == [("other", "later")]
    assert live(spark, redis_url).count() == 5
    client.set(other.keys.body("later"), b"2 from the future")
    (row,) = live(spark, redis_url, topic="other", state="waiting").collect()
    assert (row.kind, row.headers, bytes(row.body)) == (None, None, b"2 from the future")
    for name, value, named in (
        ("state", "lost", "'lost' is not one of waiting, ready"),
        ("topic", "a b", "topic 'a b' is not allowed"),
        ("stat", "ready", "no option 'stat' for read: did you mean 'state'"),
        ("partitions", "-1", "'-1' is not a"),
        ("url", "redis://127.0.0.1:1/0", "does not answer"),
    ):
        with pytest.raises(Exception, match=named):
            spark.read.format("lisa").options(**{"url": redis_url, name: value}).load().collect()


def test_pushed_down_filters_are_evaluated_by_the_server(
    cast: Cast, client: redis.Redis, spark: SparkSession, redis_url: str
) -> None:
    fill(client, cast, 30_000)
    for name in ("a", "b"):
        cast.send(message_id=name)
    frame, waiting, due = (
        live(spark, redis_url),
        live(spark, redis_url, state="waiting"),
        f.col("due"),
    )

    def asked(rows: DataFrame) -> tuple[set[str], int]:
        """The ids of the result, and the numbers of pages and bodies read from the server."""
        client.config_resetstat()
        ids = {row.id for row in rows.select("id").collect()}
        stats: Any = client.info("commandstats")
        given = [stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("zrange", "mget")]
        return ids, sum(given)

    few: list[tuple[Any, set[str], int]] = [
        (f.col("id") == "m0000017", {"m0000017"}, 2),
        (f.col("id").isin("m0000018", "a", "none"), {"m0000018", "a"}, 4),
        ((f.col("id") == "a") & (f.col("id") == "b"), set(), 4),
        (f.expr("state = 'ready' and topic = 'orders'"), {"a", "b"}, 3),
    ]
    for condition, wanted, most in few:
        ids, pages = asked(frame.where(condition))
        assert ids == wanted
        assert pages <= most
    inside = waiting.where((due >= at(FAR_MS + 3)) & (due < at(FAR_MS + 5)))
    ids, pages = asked(inside)
    assert ids == {f"m{n:07d}" for n in range(3_000, 5_000)}
    assert pages < 40  # of 150 pages in total
    exact = waiting.where((due > at(FAR_MS + 28)) & (due <= at(FAR_MS + 29)))
    counts: list[tuple[DataFrame, int]] = [
        (exact, 1_000),
        (waiting.where(due == at(FAR_MS + 7)), 1_000),
        (frame.where("group in ('g', 'h')"), 2),
        (frame.where("topic = 'no topic'"), 0),
        (frame.where("state = 'nowhere'"), 0),
        (frame.where("state <> 'waiting'"), 2),
    ]
    for rows, wanted_rows in counts:
        assert rows.count() == wanted_rows
    client.config_resetstat()
    reading = spark.read.format("lisa").option("url", redis_url).schema("id string, group string")
    assert reading.load().where("group is null").count() == 30_000
    assert "cmdstat_mget" not in client.info("commandstats"), "a count needs no bodies"


def test_unmoved_messages_are_read_once_while_others_move(
    cast: Cast, client: redis.Redis, spark: SparkSession, redis_url: str
) -> None:
    fill(client, cast, 20_000)
    stop = threading.Event()
    moved = {f"m{n:07d}" for n in range(0, 20_000, 3)}

    def move() -> None:
        """Remove messages before and after those being read, and add others."""
        mover = Cast(redis_url)
        names = iter(sorted(moved))
        for number, name in enumerate(names):
            if stop.is_set():
                return
            score = FAR_MS + (number * 7) % 40
            with mover.store.connection._redis.pipeline(transaction=True) as pipe:
                pipe.execute_command("ZADD", mover.keys.waiting, score, name)
                pipe.execute()

    thread = threading.Thread(target=move)
    thread.start()
    try:
        rows = [row.id for row in live(spark, redis_url, partitions=3).select("id").collect()]
    finally:
        stop.set()
        thread.join()
    still = [one for one in rows if one not in moved]
    assert sorted(still) == sorted({f"m{n:07d}" for n in range(20_000)} - moved)


def test_pages_are_complete_while_earlier_members_change(cast: Cast, client: redis.Redis) -> None:
    """Changes between the query for a position and the query for the following page."""
    fill(client, cast, 2_000)
    rest = [f"m{n:07d}".encode() for n in range(1_000, 2_000)]

    class Meddling(Connection):
        """Removes and adds the head of the set before a page is read."""

        turn = 0

        def execute(self, command: Command) -> Any:
            if command[0] == "ZRANGE":
                self.turn += 1
                if self.turn == 2:
                    client.zremrangebyrank(cast.keys.waiting, 0, 299)
                if self.turn == 4:
                    client.zadd(cast.keys.waiting, {f"early{n}": 5 for n in range(350)})
                if self.turn == 6:
                    client.zremrangebyrank(cast.keys.waiting, 0, 899)
            return super().execute(command)

    link = Meddling(cast.store.connection.address)
    found: list[bytes] = []
    after = None
    while page := drive(sorted_page(cast.store, cast.keys.waiting, after, 300), link):
        found += [one.member for one in page]
        after = page[-1]
    link.close()
    assert link.turn > 6
    assert [one for one in found if one in set(rest)] == rest
    assert len(found) == len(set(found))


def test_messages_promoted_during_the_read(cast: Cast, spark: SparkSession, redis_url: str) -> None:
    """The head of the set leaves continuously; messages after it must not be missed."""
    for number in range(3_000):
        cast.send(delay_ms=600_000 + number, message_id=f"later{number}")
    services = Services(cast)
    stop = threading.Event()

    def promote() -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            cast.on("orders").send_due(message_id=f"now{number}")
            services.promoter.step(["orders"])

    thread = threading.Thread(target=promote)
    thread.start()
    try:
        rows = [row.id for row in live(spark, redis_url, state="waiting").collect()]
    finally:
        stop.set()
        thread.join()
    assert sorted(one for one in rows if one.startswith("later")) == sorted(
        f"later{number}" for number in range(3_000)
    )


def test_every_command_runs_in_bounded_time(
    cast: Cast, client: redis.Redis, spark: SparkSession, redis_url: str
) -> None:
    fill(client, cast, WAITING)
    big = encode_envelope("tokentok", b"x" * (1 << 20))
    client.mset({cast.keys.body(f"m{n:07d}"): big for n in range(50_000, 50_030)})
    for number in range(2_000):
        cast.send(message_id=f"ready{number}")
    cast.take(500)
    reading = live(spark, redis_url).select(
        f.count("id"), f.count_distinct("id"), f.sum(f.length("body"))
    )

    def read() -> None:
        (row,) = reading.collect()
        assert row[0] == row[1] == WAITING + 2_000
        assert row[2] == WAITING - 30 + 2_000 + 30 * (1 << 20)

    assert slow_commands(client, read) == []
