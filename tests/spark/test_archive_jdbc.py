"""The archive in a database, on real PostgreSQL and MariaDB."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf

from lisa import Producer
from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.embedded.server import free_port
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.database import Database, JdbcConnection
from lisa.pipeline.archive.drivers import jdbc_settings
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.jdbc import JdbcWriter
from lisa.pipeline.archive.reading import with_log_columns
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, GAP_STATE, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.jobs.archive import ArchiveResult, archive
from tests import databases
from tests.servers import JVM_PATIENCE, connect
from tests.spark.stories import BEGIN_MS, Event, Stories, envelope, event, plain_fold, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive import Archive
    from tests.databases import DatabaseServer
    from tests.servers import Processes

YEAR_9999_MS = 253_402_300_799_999
STEPS = (
    "before stage_events",
    "after insert lisa_staged_events",
    "after insert lisa_staged_messages",
    "after add_events",
    "after put_messages",
    "after put_archive",
    "before clear",
)
"""Points at which a writer is killed: between its steps, and inside and after the transaction."""

KILLED_WRITER = """
import os, signal, sys
from lisa.pipeline import spark_session
from lisa.pipeline.archive.database import Database, JdbcConnection
from lisa.pipeline.archive.drivers import jdbc_settings
from lisa.pipeline.archive.jdbc import JdbcWriter
from lisa.pipeline.archive.records import TopicRecord

step, where, user, password, batch, local = sys.argv[1:]

def dying(when, done, name):
    def called(self, *arguments, **parts):
        what = name(arguments)
        if f"before {what}" == step and working:
            os.killpg(0, signal.SIGKILL)
        answer = done(self, *arguments, **parts)
        if f"after {what}" == step and working:
            os.killpg(0, signal.SIGKILL)
        return answer
    return called

working = False
JdbcConnection.run = dying(step, JdbcConnection.run, lambda arguments: arguments[0])
JdbcConnection.put = dying(step, JdbcConnection.put, lambda arguments: arguments[0])
Database.insert = dying(step, Database.insert, lambda arguments: f"insert {arguments[1]}")
spark = spark_session(master="local[1]", settings=jdbc_settings(where) | {
    "spark.local.dir": local, "spark.sql.shuffle.partitions": "1",
})
records = {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
properties = {"user": user, "password": password}
writer = JdbcWriter(spark, where, properties, topics=lambda _: records)
working = True
print("writing", flush=True)
writer.write(spark.read.parquet(batch), 7)
print("written", flush=True)
"""


@pytest.fixture(scope="module", params=databases.KINDS)
def running(request: pytest.FixtureRequest) -> Iterator[list[DatabaseServer]]:
    """One server of each kind, in a list because tests may restart it."""
    lacks = databases.missing(request.param)
    if lacks:
        pytest.skip(lacks)
    servers = [databases.start(request.param)]
    yield servers
    servers[-1].stop()


@pytest.fixture
def database(running: list[DatabaseServer], spark: SparkSession) -> DatabaseServer:
    """A server with an empty database."""
    server = running[-1]
    tables = ("lisa_archive", "lisa_archive_topics", "lisa_archive_gaps", "message_log", "messages")
    views = ("mykit_delay_queue_job", "mykit_delay_queue_job_log")
    for name in views:
        do(spark, server, f"DROP VIEW IF EXISTS {name}")
    for name in (*tables, "lisa_staged_events", "lisa_staged_messages"):
        do(spark, server, f"DROP TABLE IF EXISTS {name}")
    return server


@pytest.fixture
def writers(spark: SparkSession) -> Iterator[Callable[..., JdbcWriter]]:
    """Creates writers, and closes them after the test."""
    made: list[JdbcWriter] = []

    def make(
        server: DatabaseServer, topics: Mapping[str, TopicRecord] | None = None, **properties: str
    ) -> JdbcWriter:
        given = server.properties | properties
        made.append(JdbcWriter(spark, server.url, given, topics=lambda _: topics or {}))
        return made[-1]

    yield make
    for one in made:
        with suppress(Exception):  # a test may have stopped its server
            one.close()


def do(spark: SparkSession, server: DatabaseServer, text: str) -> None:
    """Run one statement."""
    connection = JdbcConnection(spark, Database.of(server.url, server.properties))
    statement = connection._connection.createStatement()
    statement.execute(text)
    connection.close()


def ask(spark: SparkSession, server: DatabaseServer, text: str) -> list[tuple[Any, ...]]:
    """The rows of a query, as text."""
    connection = JdbcConnection(spark, Database.of(server.url, server.properties))
    try:
        return connection.ask(text)
    finally:
        connection.close()


def log_rows(spark: SparkSession, events: Iterable[Event]) -> DataFrame:
    """Events as a batch of the log."""
    made = spark.createDataFrame([row(one) for one in events], EVENT_SCHEMA)
    return with_log_columns(made).select(*LOG_SCHEMA.names)


def comparable(rows: DataFrame) -> DataFrame:
    """The rows without maps and lists, which Spark cannot compare."""
    return rows.select(
        *(
            sf.to_json(name).alias(name) if name in ("headers", "groups") else name
            for name in rows.columns
        )
    )


def assert_same(left: DataFrame, right: DataFrame) -> None:
    """Assert that both have the same rows, equally often."""
    assert left.schema.simpleString() == right.schema.simpleString()
    left, right = comparable(left), comparable(right)
    assert left.exceptAll(right).collect() == []
    assert right.exceptAll(left).collect() == []


def assert_holds(archive: Archive, expected: DataFrame) -> None:
    """Assert that the archive has exactly these events, and the messages they fold to."""
    assert_same(archive.log(), expected)
    assert_same(archive.messages(), fold(expected))


def end(events: list[Event]) -> tuple[str, int]:
    """The last event as an offset."""
    last = max(events, key=lambda one: (one["at"], one["seq"]))
    return f"{last['at']}-{last['seq']}", last["number"]


def test_batches_of_any_size_yield_the_same_archive(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    stories, others = Stories("orders", seed=3), Stories("payments", seed=4)
    events = stories.extend(150) + others.extend(50)
    # Lives of many messages span several batches.
    events.sort(key=lambda one: (one["at"], one["seq"]))
    thirds = [events[:250], events[250:600], events[600:]]
    record = TopicRecord({"journal": "1", "ack_timeout": "30000"}, ("audit", "lisa"))
    writer = writers(database, {"orders": record})
    for number, part in enumerate(thirds):
        writer.write(log_rows(spark, part), number)
    archive = open_archive(spark, database.url, database.properties)
    assert_holds(archive, log_rows(spark, events))
    assert archive.offsets() == {"orders": end(stories.events), "payments": end(others.events)}
    assert archive.topics() == {"orders": record, "payments": TopicRecord({}, ())}
    assert archive.gaps() == []
    # A reference without Spark.
    plain = plain_fold(events)
    told = {
        (one["topic"], one["id"], one["token"]): (one["state"], one["attempts"])
        for one in archive.messages().select("topic", "id", "token", "state", "attempts").collect()
    }
    assert told == {key: (one["state"], one["attempts"]) for key, one in plain.items()}


def test_writing_a_batch_is_idempotent(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    events = Stories("orders", seed=5).extend(60)
    first, second = log_rows(spark, events[:120]), log_rows(spark, events[120:])
    writer = writers(database)
    for number, batch in enumerate((first, second, first, second, first)):
        writer.write(batch, number % 2)
    writer.close()
    # A query that lost its checkpoint counts from 0 again, with different batches.
    again = writers(database)
    again.write(log_rows(spark, events[60:]), 0)
    assert_holds(again.archive(), first.unionByName(second))


def test_every_column_round_trips(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    odd = "Zoë 漢字 🐘 'q' \"d\" \\ back"
    far = {"due": YEAR_9999_MS, "expires": YEAR_9999_MS, "policy": "0,0,120000~0.2"}
    headers = {"bizkey": odd, "nul": "a\0b", "": ""}
    names = [
        "case",
        "CASE",
        "Case",
        "space",
        "space ",
        "e",
        "é",
        odd,
        "x" * 256,
        "ß",
        "ss",
        "漢" * 85,
    ]
    bodies = [{"n": odd}, odd, b"\0\xff\\'", "nul\0text", b"", "", b"\xf0\x28", [1, None, 0.5]]
    events = [
        event(
            "T:a_b-c.1",
            BEGIN_MS + index,
            index % 3,
            index + 1,
            id=name,
            state="sent",
            envelope=envelope(f"tok{index:05}", bodies[index % len(bodies)], headers),
            **far,
        )
        for index, name in enumerate(names)
    ]
    at, number = BEGIN_MS + 100, len(names)
    group = {"group": "g:1", "due": at, "attempt": 1}
    events += [
        event("T:a_b-c.1", at, 5, number + 1, id="case", state="in_flight", late_us=-3, **group),
        event("T:a_b-c.1", at, 6, number + 2, id="case", state="retry", reason=odd + "\n", **group),
        event(
            "T:a_b-c.1",
            at,
            7,
            number + 3,
            id="CASE",
            state="restored",
            place="garbage",
            **group | {"due": None},
        ),
        event(
            "T:a_b-c.1",
            at,
            2**40,
            number + 4,
            id="é",
            state="acked",
            settled=True,
            **group | {"actor": None},
        ),
        event(
            "T:a_b-c.1",
            at + 1,
            0,
            number + 5,
            id="unknown",
            state="sent",
            envelope=b"9\0\0\0\0\0\0\0\0-unknown",
        ),
        event("T:a_b-c.1", at + 1, 1, number + 6, id="before", state="ready", **group),
    ]
    writer = writers(database)
    writer.write(log_rows(spark, events), 0)
    archive = writer.archive()
    expected = log_rows(spark, events)
    assert archive.log().schema.simpleString() == LOG_SCHEMA.simpleString()
    assert archive.messages().schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    assert_same(archive.log(), expected)
    clean = sf.when(sf.col("id") == "unknown", sf.lit("\ufffd" * 8)).otherwise(sf.col("token"))
    told = fold(expected)
    assert_same(archive.messages().drop("token"), told.drop("token"))
    assert (
        archive.messages()
        .select("id", "token")
        .exceptAll(told.select("id", clean.alias("token")))
        .isEmpty()
    )
    assert archive.messages().select("id").distinct().count() == len(names) + 2
    assert archive.log().where(sf.col("id") == odd).count() == 1
    assert archive.messages().where(sf.col("due") == ms_datetime(YEAR_9999_MS)).count() >= len(
        names
    )
    days = ask(spark, database, "SELECT DISTINCT day FROM message_log")
    assert days == [(ms_datetime(BEGIN_MS).date().isoformat(),)]


def test_text_with_nul_is_kept_readable(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    events = [
        event("orders", BEGIN_MS, 0, 1, id="m", state="sent", envelope=envelope("aaaaaaaa", "x")),
        event(
            "orders",
            BEGIN_MS,
            1,
            2,
            id="m",
            state="garbage",
            group="g",
            attempt=1,
            reason="bad \0 byte",
        ),
    ]
    writer = writers(database)
    writer.write(log_rows(spark, events), 0)
    [message] = writer.archive().messages().collect()
    assert message["reason"] == "bad \ufffd byte"
    assert message["state"] == "garbage"


def test_large_envelopes(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    events = [
        event(
            "orders",
            BEGIN_MS + index,
            0,
            index + 1,
            id=f"m{index}",
            state="sent",
            envelope=envelope("aaaaaaaa", random.Random(index).randbytes(1 << 20)),
        )
        for index in range(24)
    ]
    writer = writers(database)
    writer.write(log_rows(spark, events), 0)
    assert_holds(writer.archive(), log_rows(spark, events))


def test_gaps_are_recorded_once(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    at = BEGIN_MS + 7
    events = [
        event("orders", BEGIN_MS, 0, 1, id="m", state="sent", envelope=envelope("aaaaaaaa", "x")),
        event("orders", at, 1, 2, id=None, state=GAP_STATE, reason="events 2 to 8 were trimmed"),
        # It may have the same position as the gap's row.
        event("orders", at, 1, 9, id="n", state="sent", envelope=envelope("bbbbbbbb", "y")),
        event("others", at, 1, 1, id=None, state=GAP_STATE, reason="it came back empty"),
    ]
    gaps = [
        ArchiveGap(
            "orders", f"{at}-0", 1, f"{at}-1", 9, "events 2 to 8 were trimmed", ms_datetime(at)
        ),
        ArchiveGap("others", None, None, None, None, "it came back empty", ms_datetime(at)),
    ]
    writer = writers(database)
    for _ in range(2):
        assert writer.write(log_rows(spark, events), 0) == (2, tuple(gaps))
    archive = writer.archive()
    assert archive.gaps() == gaps
    assert_holds(archive, log_rows(spark, events))
    assert archive.offsets() == {"orders": (f"{at}-1", 9)}
    # A gap without later events does not change the offsets.
    alone = event("orders", at, 2, 10, id=None, state=GAP_STATE, reason="it came back empty")
    assert writer.write(log_rows(spark, [alone]), 1)[0] == 0
    assert archive.offsets() == {"orders": (f"{at}-1", 9)}
    assert writer.write(log_rows(spark, []), 2) == (0, ())


def test_retention_and_erasure(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    stories, others = Stories("orders", seed=3), Stories("payments", seed=3)
    events = stories.extend(40) + others.extend(10)
    writer = writers(database)
    writer.write(log_rows(spark, events), 0)
    archive = open_archive(spark, database.url, database.properties)
    cutoff = ms_datetime(stories.events[len(stories.events) // 2]["at"])
    lives = archive.messages().groupBy("topic", "id")
    ends = lives.agg(sf.max("settled_at").alias("end"), sf.bool_and("settled").alias("all"))
    old = ends.where(sf.col("all") & (sf.col("end") < sf.lit(cutoff)))
    gone = {(row.topic, row.id) for row in old.collect()}
    assert 0 < len(gone) < ends.count()
    left = [one for one in events if (one["topic"], one["id"]) not in gone]
    assert writer.retain(cutoff).events == len(events) - len(left)
    assert_holds(archive, log_rows(spark, left))
    assert writer.retain(cutoff) == (0, 0)
    shared = {one["id"] for one in left if one["topic"] == "payments"} & {
        one["id"] for one in left if one["topic"] == "orders"
    }
    one, other = sorted(shared)[:2]
    writer.erase([one], ["orders"])
    writer.erase([other], None)
    left = [
        event
        for event in left
        if event["id"] != other and (event["topic"], event["id"]) != ("orders", one)
    ]
    assert_holds(archive, log_rows(spark, left))


def test_views_have_the_names_of_mykit_delay(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    at = BEGIN_MS
    ends = ("acked", "cancelled", "expired", "purged", "lost")
    group_of = {"acked": "g", "purged": "g"}
    events: list[Event] = []

    def add(name: str, state: str, **fields: Any) -> None:
        index = len(events)
        events.append(event("orders", at + index, 0, index + 1, id=name, state=state, **fields))

    headers = {"bizkey": "order-7", "subtopic": "eu"}
    add(
        "waits",
        "sent",
        due=at + 60_000,
        expires=at + 90_000,
        envelope=envelope("aaaaaaaa", {"order": 7}, headers),
    )
    for state in (*ends, "ready", "in_flight", "retry", "garbage"):
        add(state, "sent", due=at, envelope=envelope("bbbbbbbb", "text ü", {"bizKey": "B"}))
        add(
            state,
            state,
            settled=state in ends,
            attempt=1,
            group=group_of.get(state, None if state in ends else "g"),
        )
    add("bytes", "sent", due=at, envelope=envelope("cccccccc", b"\xff\0"))
    add("anew", "sent", due=at, envelope=envelope("zzzzzzzz", "old"))
    add("anew", "replaced", due=at, envelope=envelope("aaaaaaaa", "new"))
    add("back", "restored", due=at, envelope=envelope("dddddddd", "x"))
    writer = writers(database)
    writer.write(log_rows(spark, events), 0)

    jobs = {
        one[0]: one[1:]
        for one in ask(
            spark,
            database,
            "SELECT id, bizkey, topic, subtopic, delay, create_time, body, status, ttl, "
            "update_time FROM mykit_delay_queue_job",
        )
    }
    assert len(jobs) == 1 + 9 + 3  # one row per message, even with two lives
    assert jobs["waits"][:8] == (
        "order-7",
        "orders",
        "eu",
        "60000",
        str(at),
        '{"order":7}',
        "1",
        "30000",
    )
    assert str(jobs["waits"][8]).startswith(ms_datetime(at).strftime("%Y-%m-%d %H:%M:%S"))
    statuses = {name: values[6] for name, values in jobs.items()}
    assert statuses == {
        "waits": "1",
        "ready": "2",
        "in_flight": "2",
        "retry": "2",
        "acked": "3",
        "cancelled": "4",
        "expired": "4",
        "purged": "4",
        "lost": "4",
        "garbage": "4",
        "bytes": "1",
        "anew": "1",
        "back": "1",
    }
    assert (jobs["acked"][0], jobs["acked"][5]) == ("B", "text ü")
    assert jobs["bytes"][5] == "/wA="
    assert jobs["anew"][5] == "new"
    trail = ask(
        spark,
        database,
        "SELECT id, status, thread, host, update_time FROM mykit_delay_queue_job_log "
        "WHERE id IN ('acked', 'back', 'anew', 'garbage') ORDER BY update_time",
    )
    assert [one[:2] for one in trail] == [
        ("acked", "0"),
        ("acked", "3"),
        ("garbage", "0"),
        ("garbage", "4"),
        ("anew", "0"),
        ("anew", "0"),
        ("back", "5"),
    ]
    assert {one[2:4] for one in trail} == {("consumer@box.example:7", "box.example")}


def test_archives_with_different_prefixes_are_independent(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    mine, other = Stories("orders", seed=8).extend(5), Stories("orders", seed=9).extend(7)
    writers(database).write(log_rows(spark, mine), 0)
    # At the same time, because another prefix is another archive.
    writers(database, table_prefix="b_").write(log_rows(spark, other), 0)
    plain, prefixed = database.properties, database.properties | {"table_prefix": "b_"}
    assert_holds(open_archive(spark, database.url, plain), log_rows(spark, mine))
    assert_holds(open_archive(spark, database.url, prefixed), log_rows(spark, other))
    with pytest.raises(ConfigError, match=r"there is no archive in .* with table prefix 'c_'"):
        open_archive(spark, database.url, database.properties | {"table_prefix": "c_"})
    with pytest.raises(ConfigError, match="table_prefix 'x;' is not valid"):
        JdbcWriter(spark, database.url, {"table_prefix": "x;"})
    for text in (
        "VIEW b_mykit_delay_queue_job",
        "VIEW b_mykit_delay_queue_job_log",
        "TABLE b_message_log",
        "TABLE b_messages",
        "TABLE b_lisa_archive",
    ):
        do(spark, database, f"DROP {text}")


def test_the_job_archives_the_traffic_of_real_roles(
    spark: SparkSession, database: DatabaseServer, redis_url: str, tmp_path: Path
) -> None:
    where, properties = database.url, database.properties
    with connect(redis_url) as client, Producer(redis_url) as producer:
        client.hset(Keys().topic("orders").options, "journal", "1")

        def follow() -> ArchiveResult:
            return archive(
                spark,
                where,
                url=redis_url,
                once=True,
                properties=properties,
                checkpoint=str(tmp_path / "checkpoint"),
            )

        first = producer.send("orders", {"order": 1}, delay=timedelta(hours=1))
        second = producer.send("orders", {"order": 2}, delay=timedelta(hours=1))
        assert follow().events == 2
        producer.cancel("orders", first)
        assert follow().events == 1
        assert follow().events == 0
    found = open_archive(spark, where, properties)
    states = {row.id: row.state for row in found.messages().collect()}
    assert states == {first: "cancelled", second: "waiting"}
    assert found.log().count() == 3


def test_a_second_archive_process_is_refused(
    spark: SparkSession,
    database: DatabaseServer,
    writers: Callable[..., JdbcWriter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lisa.pipeline.archive.jdbc.LOCK_SECONDS", 0.5)
    first = writers(database)
    with pytest.raises(ConfigError, match="another archive process writes to jdbc:"):
        writers(database)
    first.write(log_rows(spark, Stories("orders").extend(3)), 0)
    first.close()
    writers(database)


ALWAYS = ("after put_messages",)
"""A point inside the transaction; each needs its own JVM, so the others are slow tests."""


@pytest.mark.parametrize(
    "step",
    [step if step in ALWAYS else pytest.param(step, marks=pytest.mark.slow) for step in STEPS],
)
def test_killed_between_steps_then_written_again(  # noqa: PLR0917  its fixtures
    step: str,
    spark: SparkSession,
    database: DatabaseServer,
    writers: Callable[..., JdbcWriter],
    processes: Processes,
    tmp_path: Path,
) -> None:
    events = Stories("orders", seed=11).extend(80)
    before, batch = log_rows(spark, events[:150]), log_rows(spark, events[150:])
    first = writers(database)
    first.write(before, 6)
    first.close()
    batch.write.parquet(str(tmp_path / "batch"))
    killed = processes.start(
        "-c",
        KILLED_WRITER,
        step,
        database.url,
        databases.USER,
        databases.PASSWORD,
        str(tmp_path / "batch"),
        str(tmp_path / "local"),
    )
    assert killed.wait(timeout=JVM_PATIENCE) == -9, killed.output
    assert "writing" in killed.output
    assert "written" not in killed.output
    # Readers see the whole batch or nothing of it.
    whole = step == "before clear"
    archive = open_archive(spark, database.url, database.properties)
    assert archive.log().count() == len(events if whole else events[:150])
    assert archive.offsets() == {"orders": end(events if whole else events[:150])}
    again = writers(database, {"orders": TopicRecord({"journal": "1"}, ("lisa",))})
    again.write(batch, 7)
    assert_holds(archive, log_rows(spark, events))
    assert archive.offsets() == {"orders": end(events)}
    assert archive.topics() == {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
    staged = "SELECT count(*) FROM information_schema.tables WHERE table_name LIKE 'lisa_staged%'"
    assert ask(spark, database, staged) == [("0",)]


def test_a_database_killed_during_a_batch_recovers(
    spark: SparkSession,
    database: DatabaseServer,
    running: list[DatabaseServer],
    writers: Callable[..., JdbcWriter],
) -> None:
    events = Stories("orders", seed=12).extend(400)
    parts = [events[start : start + 400] for start in range(0, len(events), 400)]
    writer = writers(database)
    dice = random.Random(1)
    crashes = 0
    for number, part in enumerate(parts):
        batch = log_rows(spark, part).persist()
        batch.count()
        crash: threading.Timer | None = None
        if crashes < 3:
            crash = threading.Timer(dice.uniform(0.05, 1.0), running[-1].crash)
            crash.start()
        with suppress(LisaError):
            writer.write(batch, number)
        if crash is not None:
            crash.join()
            running.append(running[-1].restart())
            crashes += 1
            writer.write(batch, number)  # the writer reconnects
    assert crashes == 3
    assert_holds(writer.archive(), log_rows(spark, events))


def test_errors_are_one_line(
    spark: SparkSession, database: DatabaseServer, writers: Callable[..., JdbcWriter]
) -> None:
    url, good = database.url, database.properties

    def refused(where: str, properties: dict[str, str], kind: type[LisaError]) -> str:
        with pytest.raises(kind) as raised:
            JdbcWriter(spark, where, properties)
        text = str(raised.value)
        assert "\n" not in text
        assert databases.PASSWORD not in text
        return text

    text = refused(url, good | {"password": "wrong"}, ConfigError)
    assert text.startswith(url)
    assert "lisa" in text
    secret = f"{url}?user=lisa&password={databases.PASSWORD}x"
    assert refused(secret, {}, ConfigError).startswith(url)
    refused(url.replace("/archive", "/nowhere"), good, ConfigError)
    closed = url.replace(str(database.port), str(free_port()))
    assert "does not answer" in refused(closed, good, ServerUnavailable)
    with pytest.raises(ConfigError, match="there is no archive in"):
        open_archive(spark, url, good)
    with pytest.raises(ServerUnavailable):
        open_archive(spark, closed, good)
    for wrong in (
        "jdbc:oracle:thin:me/secret@h/d",
        "jdbc:mysql://me:secret@h/d",
        "postgresql://h/d",
    ):
        said = refused(wrong, good, ConfigError)
        assert "is not jdbc:postgresql://HOST/DATABASE or jdbc:mariadb://" in said
        assert "secret" not in said
    writers(database)
    do(spark, database, "UPDATE lisa_archive SET layout = 9")
    do(spark, database, "INSERT INTO lisa_archive VALUES (9, 0, 0)")
    with pytest.raises(ConfigError, match="has layout 9; this version of Lisa reads"):
        open_archive(spark, url, good)


def test_a_user_without_privileges_gets_a_config_error(
    spark: SparkSession, database: DatabaseServer
) -> None:
    if database.kind == "postgresql":
        do(spark, database, "DROP ROLE IF EXISTS guest")
        do(spark, database, f"CREATE ROLE guest LOGIN PASSWORD '{databases.PASSWORD}'")
        guest = database.properties | {"user": "guest"}
        with pytest.raises(ConfigError, match="permission denied for schema public"):
            JdbcWriter(spark, database.url, guest)
    else:
        with pytest.raises(ConfigError, match="denied"):
            JdbcWriter(spark, database.url.replace("/archive", "/mysql"), database.properties)


def test_a_missing_driver(
    processes: Processes, tmp_path: Path, running: list[DatabaseServer]
) -> None:
    url = running[-1].url
    with pytest.raises(ConfigError, match=r"driver file /nowhere\.jar does not exist"):
        jdbc_settings(url, "/nowhere.jar")
    assert jdbc_settings(url, databases.JARS[running[-1].kind])["spark.jars"].endswith(".jar")
    process = processes.start(
        "-c",
        f"""
from lisa.pipeline import spark_session
from lisa.pipeline.archive.jdbc import JdbcWriter
spark = spark_session(master="local[1]", settings={{"spark.local.dir": {str(tmp_path)!r}}})
try:
    JdbcWriter(spark, {url!r}, {{}})
except Exception as error:
    print(f"[{{type(error).__name__}}] {{error}}")
spark.stop()
""",
    )
    assert process.wait(timeout=JVM_PATIENCE) == 0, process.output
    assert f"[ConfigError] Spark has no driver for {running[-1].kind}" in process.output
    assert "--driver-jar FILE" in process.output


def test_a_streaming_query_can_use_the_writer(
    spark: SparkSession,
    database: DatabaseServer,
    writers: Callable[..., JdbcWriter],
    tmp_path: Path,
) -> None:
    """Spark calls the writer from another thread, which must find the driver too."""
    events = Stories("orders", seed=13).extend(40)
    for half in (events[:90], events[90:]):  # a journal is read in order
        part = log_rows(spark, half)
        part.coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
    source = spark.readStream.schema(LOG_SCHEMA).option("maxFilesPerTrigger", 1)

    def batch(rows: DataFrame, number: int) -> None:
        writer = writers(database)
        writer.write(rows, number)
        writer.close()

    query = (
        source.parquet(str(tmp_path / "in"))
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert_holds(open_archive(spark, database.url, database.properties), log_rows(spark, events))
