"""`spark.read.format("lisa")`: live messages and their states."""

from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from lisa.admin.reading import sorted_page
from lisa.core.model.envelope import encode_envelope
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Command, drive
from lisa.core.transitions.retry import Fail, Failure
from lisa.pipeline.source.read_columns import LIVE_SCHEMA
from tests.roles import Cast
from tests.spark.jobs import Jobs
from tests.spark.journals import slow_commands

WAITING = 100_000
FAR_MS = 4_000_000_000_000


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url).declare(retry_delays="600000")


def live(jobs: Jobs, **options: str) -> DataFrame:
    reading = jobs.spark.read.format("lisa").option("url", jobs.url).options(**options)
    return reading.schema(LIVE_SCHEMA).load()


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


def test_rows_of_every_state(cast: Cast, jobs: Jobs) -> None:
    for name in ("w", "r", "f", "t", "g"):
        later = 600_000 if name == "w" else 0
        cast.send({"is": name}, delay_ms=later, message_id=name, ttl_ms=700_000)
    jobs.producer.send("orders", "héllo", headers={"a": "b"}, id="text")
    due = {entry.id: entry.due_ms for entry in cast.take(2)}  # w waits, so r and f come first
    assert set(due) == {"r", "f"}
    entries = {entry.id: entry for entry in cast.take(3)}
    failures = [
        Failure("t", entries["t"].entry, "broken — ü", 600_000),
        Failure("g", entries["g"].entry, "no", "discard"),
    ]
    cast.store.call(Fail("orders", "g", failures))
    cast.send(b"\x00\xff", message_id="last")
    rows = {row.id: row for row in live(jobs).collect()}
    assert {name: row.state for name, row in rows.items()} == {
        "w": "waiting",
        **dict.fromkeys(("r", "f", "text"), "in_flight"),
        "t": "retry",
        "g": "garbage",
        "last": "ready",
    }
    assert {name: row.group for name, row in rows.items()} == {
        **dict.fromkeys(rows, "g"),
        "w": None,
    }
    assert bytes(rows["w"].body) == b'{"is":"w"}'
    assert (rows["text"].headers, rows["text"].kind) == ({"a": "b"}, "s")
    assert bytes(rows["text"].body).decode() == "héllo"
    last = rows["last"]
    assert (bytes(last.body), last.kind, last.headers) == (b"\0\xff", "b", {})
    assert (rows["r"].consumer, rows["r"].attempts, rows["w"].consumer) == ("c1", 0, None)
    assert (rows["t"].reason, rows["t"].attempts) == ("broken — ü", 1)
    assert (rows["g"].reason, rows["g"].attempts) == ("no", 1)
    assert rows["w"].expires - rows["w"].due == rows["f"].expires - rows["f"].due
    assert rows["g"].expires is None
    dues = live(jobs).select("id", f.unix_millis("due").alias("at")).collect()
    epoch_ms = {row.id: row.at for row in dues}
    assert epoch_ms["f"] == due["f"]
    assert epoch_ms["w"] == cast.look("w").waiting_due_ms
    assert epoch_ms["t"] == cast.look("t").group_states[0].due_ms


def test_groups_topics_and_states(cast: Cast, jobs: Jobs) -> None:
    """Each group has its own row."""
    other, second = cast.on("other").declare(), cast.on("orders", "h").declare()
    for one in (cast, other):
        one.send(message_id="now")
        one.send(message_id="later", delay_ms=600_000)
    second.take()
    rows = live(jobs, topic="orders").where("id = 'now'").collect()
    assert {(row.group, row.state) for row in rows} == {("g", "ready"), ("h", "in_flight")}
    found = live(jobs, topic="other, none", state="waiting, garbage").collect()
    assert [(row.topic, row.id) for row in found] == [("other", "later")]
    assert live(jobs).count() == 5
    jobs.client.set(other.keys.body("later"), b"2 from the future")
    (row,) = live(jobs, topic="other", state="waiting").collect()
    assert (row.kind, row.headers, bytes(row.body)) == (None, None, b"2 from the future")
    for name, value, named in (
        ("state", "lost", "'lost' is not one of waiting, ready"),
        ("topic", "a b", "topic 'a b' is not allowed"),
        ("stat", "ready", "no option 'stat' for read: did you mean 'state'"),
        ("partitions", "-1", "'-1' is not a"),
        ("url", "redis://127.0.0.1:1/0", "does not answer"),
    ):
        with pytest.raises(Exception, match=named):
            live(jobs, **{name: value}).collect()


def test_pushed_down_filters_are_evaluated_by_the_server(cast: Cast, jobs: Jobs) -> None:
    client = jobs.client
    fill(client, cast, 30_000)
    for name in ("a", "b"):
        cast.send(message_id=name)
    frame, waiting, due = live(jobs), live(jobs, state="waiting"), f.col("due")

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
    reading = jobs.spark.read.format("lisa").option("url", jobs.url)
    ids_only = reading.schema("id string, group string").load()
    assert ids_only.where("group is null").count() == 30_000
    assert "cmdstat_mget" not in client.info("commandstats"), "a count needs no bodies"


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


def test_every_command_runs_in_bounded_time(cast: Cast, jobs: Jobs) -> None:
    fill(jobs.client, cast, WAITING)
    big = encode_envelope("tokentok", b"x" * (1 << 20))
    jobs.client.mset({cast.keys.body(f"m{n:07d}"): big for n in range(50_000, 50_030)})
    for number in range(2_000):
        cast.send(message_id=f"ready{number}")
    cast.take(500)
    counts = (f.count("id"), f.count_distinct("id"), f.sum(f.length("body")))
    reading = live(jobs).select(*counts)

    def read() -> None:
        (row,) = reading.collect()
        assert row[0] == row[1] == WAITING + 2_000
        assert row[2] == WAITING - 30 + 2_000 + 30 * (1 << 20)

    assert slow_commands(jobs.client, read) == []
