"""The archive in a database, on real PostgreSQL and MariaDB."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.embedded.server import free_port
from lisa.pipeline.archive import Archive, database, open_archive
from lisa.pipeline.archive.base import ArchiveGap, TopicRecord
from lisa.pipeline.archive.database import Database, JdbcConnection, jdbc_settings
from lisa.pipeline.archive.jdbc import JdbcWriter
from lisa.pipeline.archive.reading import with_log_columns
from lisa.pipeline.archive.schemas import GAP_STATE, LOG_SCHEMA
from tests import databases
from tests.databases import DatabaseServer
from tests.servers import ROOT
from tests.spark.jobs import KEYS, Jobs
from tests.spark.stories import (
    BEGIN_MS,
    Event,
    Stories,
    check_archive,
    entries,
    envelope,
    event,
    expected,
    frame,
    told,
)

YEAR_9999_MS = 253_402_300_799_999


@pytest.fixture(scope="module", params=databases.KINDS)
def running(request: pytest.FixtureRequest) -> Iterator[list[DatabaseServer]]:
    """One server of each kind, in a list because tests may restart it."""
    lacks = databases.missing(request.param, databases.JARS[request.param])
    if lacks:
        pytest.skip(lacks)
    servers = [databases.start(request.param)]
    yield servers
    servers[-1].stop()


@dataclass
class Store:
    """A database for archives, with the writers that a test has opened."""

    spark: SparkSession
    server: DatabaseServer
    open_writers: list[JdbcWriter] = field(default_factory=list)

    def writer(
        self, topics: Mapping[str, TopicRecord] | None = None, **properties: str
    ) -> JdbcWriter:
        given = self.server.properties | properties
        made = JdbcWriter(self.spark, self.server.url, given, topics=lambda _: topics or {})
        self.open_writers.append(made)
        return made

    def opened(self, **properties: str) -> Archive:
        return open_archive(self.spark, self.server.url, self.server.properties | properties)

    def rows(self, events: Iterable[Event]) -> DataFrame:
        """Events as a batch of the log."""
        return with_log_columns(frame(self.spark, events)).select(*LOG_SCHEMA.names)

    def connection(self) -> closing[JdbcConnection]:
        return closing(JdbcConnection(self.spark, Database.of(self.server.url, self.properties)))

    def do(self, *statements: str) -> None:
        with self.connection() as connection:
            for text in statements:
                connection._connection.createStatement().execute(text)

    def ask(self, text: str) -> list[tuple[Any, ...]]:
        """The rows of a query, as text."""
        with self.connection() as connection:
            return connection.ask(text)

    @property
    def properties(self) -> dict[str, str]:
        return self.server.properties


@pytest.fixture
def store(running: list[DatabaseServer], spark: SparkSession) -> Iterator[Store]:
    """An empty database."""
    store = Store(spark, running[-1])
    tables = ("lisa_archive", "lisa_archive_topics", "lisa_archive_gaps", "message_log", "messages")
    staged = ("lisa_staged_events", "lisa_staged_messages")
    views = ("mykit_delay_queue_job", "mykit_delay_queue_job_log")
    store.do(*(f"DROP VIEW IF EXISTS {name}" for name in views))
    store.do(*(f"DROP TABLE IF EXISTS {name}" for name in tables + staged))
    yield store
    for one in store.open_writers:
        with suppress(Exception):  # a test may have stopped its server
            one.close()


def end(events: list[Event]) -> tuple[str, int]:
    """The last event as an offset."""
    last = max(events, key=lambda one: (one["at"], one["seq"]))
    return f"{last['at']}-{last['seq']}", last["number"]


def test_batches_of_any_size_yield_the_same_archive(store: Store) -> None:
    stories, others = Stories("orders", seed=3), Stories("payments", seed=4)
    events = stories.extend(80) + others.extend(30)
    # Lives of many messages span several batches.
    events.sort(key=lambda one: (one["at"], one["seq"]))
    thirds = [events[:150], events[150:400], events[400:]]
    record = TopicRecord({"journal": "1", "ack_timeout": "30000"}, ("audit", "lisa"))
    writer = store.writer({"orders": record})
    for number, part in enumerate(thirds):
        writer.write(store.rows(part), number)
    writer.write(store.rows(thirds[0]), 0)  # again, as after a crash
    writer.close()
    # A query that lost its checkpoint counts from 0 again, with different batches.
    store.writer({"orders": record}).write(store.rows(events[400:]), 0)
    archive = store.opened()
    check_archive(archive, events)
    assert archive.topics() == {"orders": record, "payments": TopicRecord({}, ())}
    assert archive.gaps() == []


def test_every_column_round_trips(store: Store) -> None:
    odd = "Zoë 漢字 🐘 'q' \"d\" \\ back"
    far = {"due": YEAR_9999_MS, "expires": YEAR_9999_MS, "policy": "0,0,120000~0.2"}
    headers = {"bizkey": odd, "nul": "a\0b", "": ""}
    names = ["case", "CASE", "Case", "space", "space ", "e", "é", odd, "ß", "ss"]
    names += ["x" * 256, "漢" * 85]
    bodies = [{"n": odd}, odd, b"\0\xff\\'", "nul\0text", b"", "", b"\xf0\x28", [1, None, 0.5]]
    events = []
    for index, name in enumerate(names):
        data = envelope(f"tok{index:05}", bodies[index % len(bodies)], headers)
        sent = {"id": name, "state": "sent", "envelope": data, **far}
        events.append(event("T:a_b-c.1", BEGIN_MS + index, index % 3, index + 1, **sent))
    at, number = BEGIN_MS + 100, len(names)
    group = {"group": "g:1", "due": at, "attempt": 1}
    back = {**group, **far, "envelope": events[1]["envelope"]}
    more: list[tuple[int, int, dict[str, Any]]] = [
        (at, 5, {"id": "case", "state": "in_flight", "late_us": -3, **group}),
        (at, 6, {"id": "case", "state": "retry", "reason": odd + "\n", **group}),
        (at, 7, back | {"id": "CASE", "state": "restored", "place": "garbage", "due": None}),
        (at, 2**40, {"id": "é", "state": "acked", "settled": True, **group, "actor": None}),
        (at + 1, 0, {"id": "unknown", "state": "sent", "envelope": b"9" + b"\0" * 8 + b"-unknown"}),
        (at + 1, 1, {"id": "before", "state": "ready", **group}),
    ]
    events += [
        event("T:a_b-c.1", ms, seq, number + index, **fields)
        for index, (ms, seq, fields) in enumerate(more, 1)
    ]
    writer = store.writer()
    writer.write(store.rows(events), 0)
    archive, wanted = writer.archive(), store.rows(events)
    for left, right in ((archive.log(), wanted), (wanted, archive.log())):
        assert left.exceptAll(right).collect() == []
    readable = [one for one in events if one["id"] != "unknown"]
    assert told(archive.messages().where("id != 'unknown'")) == expected(readable)
    [unknown] = archive.messages().where("id = 'unknown'").select("token", "body").collect()
    assert (unknown.token, bytes(unknown.body)) == ("\ufffd" * 8, b"9" + b"\0" * 8 + b"-unknown")
    assert archive.messages().select("id").distinct().count() == len(names) + 2
    assert archive.log().where(sf.col("id") == odd).count() == 1
    assert archive.messages().where(sf.col("due") == ms_datetime(YEAR_9999_MS)).count() >= 12
    days = store.ask("SELECT DISTINCT day FROM message_log")
    assert days == [(ms_datetime(BEGIN_MS).date().isoformat(),)]
    # A reason is text in the database, so a NUL is replaced; a body of a megabyte is kept.
    large = [envelope("aaaaaaaa", random.Random(index).randbytes(1 << 20)) for index in range(24)]
    big = [
        event("orders", BEGIN_MS + n, 0, n + 1, id=f"m{n}", state="sent", envelope=one)
        for n, one in enumerate(large)
    ]
    dead = {"id": "m0", "state": "garbage", "group": "g", "reason": "bad \0 byte"}
    big.append(event("orders", BEGIN_MS + 99, 0, 25, **dead, attempt=1))
    writer.write(store.rows(big), 1)
    sums = archive.log().where("topic = 'orders'").select(sf.md5("envelope").alias("sum"))
    assert {row["sum"] for row in sums.collect()} == {
        None,
        *(hashlib.md5(one, usedforsecurity=False).hexdigest() for one in large),
    }
    [message] = archive.messages().where("id = 'm0'").collect()
    assert (message["state"], message["reason"]) == ("garbage", "bad \ufffd byte")


def test_gaps_are_recorded_once(store: Store) -> None:
    at = BEGIN_MS + 7
    events = [
        event("orders", BEGIN_MS, 0, 1, id="m", state="sent", envelope=envelope("aaaaaaaa", "x")),
        event("orders", at, 1, 2, id=None, state=GAP_STATE, reason="events 2 to 8 were trimmed"),
        # It may have the same position as the gap's row.
        event("orders", at, 1, 9, id="n", state="sent", envelope=envelope("bbbbbbbb", "y")),
        event("others", at, 1, 1, id=None, state=GAP_STATE, reason="it came back empty"),
    ]
    trimmed, moment = "events 2 to 8 were trimmed", ms_datetime(at)
    gaps = [
        ArchiveGap("orders", f"{at}-0", 1, f"{at}-1", 9, trimmed, moment),
        ArchiveGap("others", None, None, None, None, "it came back empty", moment),
    ]
    writer = store.writer()
    for _ in range(2):
        assert writer.write(store.rows(events), 0) == (2, tuple(gaps))
    archive = writer.archive()
    assert archive.gaps() == gaps
    assert len(entries(archive.log())) == 4
    assert archive.offsets() == {"orders": (f"{at}-1", 9)}
    # A gap without later events does not change the offsets.
    alone = event("orders", at, 2, 10, id=None, state=GAP_STATE, reason="it came back empty")
    assert writer.write(store.rows([alone]), 1)[0] == 0
    assert archive.offsets() == {"orders": (f"{at}-1", 9)}
    assert writer.write(store.rows([]), 2) == (0, ())


def test_retention_and_erasure_by_the_statements_of_the_docs(store: Store) -> None:
    """No event of a live message is deleted, nor of an id that was sent again and ended later."""
    stories, others = Stories("orders", seed=3), Stories("payments", seed=3)
    events = stories.extend(30) + others.extend(10)
    writer = store.writer()
    writer.write(store.rows(events), 0)
    cutoff = stories.events[len(stories.events) // 2]["at"]
    ends: dict[tuple[str, str], list[int | None]] = {}
    for (topic, name, _), message in expected(events).items():
        ends.setdefault((topic, name), []).append(message["settled_at"])
    old = {key for key, own in ends.items() if all(own) and max(end or 0 for end in own) < cutoff}
    page = (ROOT / "docs" / "how-to" / "pipeline-keep.md").read_text("utf-8")
    [block] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    given = "max(settled_at) < 1764547200000"
    ended = sorted(name for (topic, name), own in ends.items() if all(own) and topic == "payments")
    live = next(name for (topic, name), own in ends.items() if topic == "orders" and not all(own))
    for condition, gone in (
        (f"max(settled_at) < {cutoff}", old),
        (f"id = '{ended[-1]}'", {key for key in ends if key[1] == ended[-1] and all(ends[key])}),
        (f"id = '{live}' AND topic = 'orders'", set()),
    ):
        assert block.count(given) == 2
        store.do(*block.replace(given, condition).split(";\n")[:2])
        events = [one for one in events if (one["topic"], one["id"]) not in gone]
        archive = store.opened()
        assert entries(archive.log()) == sorted((one["topic"], one["number"]) for one in events)
        assert told(archive.messages()) == expected(events)
    assert old


def test_views_have_the_names_of_mykit_delay(store: Store) -> None:
    at = BEGIN_MS
    ends = ("acked", "cancelled", "expired", "purged", "lost")
    group_of = {"acked": "g", "purged": "g"}
    events: list[Event] = []

    def add(name: str, state: str, **fields: Any) -> None:
        index = len(events)
        events.append(event("orders", at + index, 0, index + 1, id=name, state=state, **fields))

    order = envelope("aaaaaaaa", {"order": 7}, {"bizkey": "order-7", "subtopic": "eu"})
    add("waits", "sent", due=at + 60_000, expires=at + 90_000, envelope=order)
    for state in (*ends, "ready", "in_flight", "retry", "garbage"):
        add(state, "sent", due=at, envelope=envelope("bbbbbbbb", "text ü", {"bizKey": "B"}))
        group = group_of.get(state, None if state in ends else "g")
        add(state, state, settled=state in ends, attempt=1, group=group)
    add("bytes", "sent", due=at, envelope=envelope("cccccccc", b"\xff\0"))
    add("anew", "sent", due=at, envelope=envelope("zzzzzzzz", "old"))
    add("anew", "replaced", due=at, envelope=envelope("aaaaaaaa", "new"))
    add("back", "restored", due=at, envelope=envelope("dddddddd", "x"))
    writer = store.writer()
    writer.write(store.rows(events), 0)

    jobs = {
        one[0]: one[1:]
        for one in store.ask(
            "SELECT id, bizkey, topic, subtopic, delay, create_time, body, status, ttl, "
            "update_time FROM mykit_delay_queue_job",
        )
    }
    assert len(jobs) == 1 + 9 + 3  # one row per message, even with two lives
    assert jobs["waits"][:8] == (
        *("order-7", "orders", "eu", "60000", str(at), '{"order":7}', "1", "30000"),
    )
    assert str(jobs["waits"][8]).startswith(ms_datetime(at).strftime("%Y-%m-%d %H:%M:%S"))
    statuses = {name: values[6] for name, values in jobs.items()}
    assert statuses == {
        **dict.fromkeys(("waits", "bytes", "anew", "back"), "1"),
        **dict.fromkeys(("ready", "in_flight", "retry"), "2"),
        "acked": "3",
        **dict.fromkeys(("cancelled", "expired", "purged", "lost", "garbage"), "4"),
    }
    assert (jobs["acked"][0], jobs["acked"][5]) == ("B", "text ü")
    assert jobs["bytes"][5] == "/wA="
    assert jobs["anew"][5] == "new"
    trail = store.ask(
        "SELECT id, status, thread, host, update_time FROM mykit_delay_queue_job_log "
        "WHERE id IN ('acked', 'back', 'anew', 'garbage') ORDER BY update_time",
    )
    assert [one[:2] for one in trail] == [
        *(("acked", "0"), ("acked", "3"), ("garbage", "0"), ("garbage", "4")),
        *(("anew", "0"), ("anew", "0"), ("back", "5")),
    ]
    assert {one[2:4] for one in trail} == {("consumer@box.example:7", "box.example")}


def test_the_job_archives_the_traffic_of_real_roles(store: Store, jobs: Jobs) -> None:
    jobs.client.hset(KEYS.options, "journal", "1")
    url, password = store.server.url, jobs.folder / "password"
    given: dict[str, Any] = {"properties": store.properties, "checkpoint": jobs.new_path()}
    hour = timedelta(hours=1)
    first, second = (jobs.producer.send("orders", {"order": n}, delay=hour) for n in range(2))
    assert jobs.archive(url, **given).events == 2
    jobs.producer.cancel("orders", first)
    assert jobs.archive(url, **given).events == 1
    password.write_text(f"{databases.PASSWORD}\nits first line")
    access = ("--user", databases.USER, "--password-file", str(password))
    found = told(store.opened().messages())
    states = {name: one["state"] for (_, name, _), one in found.items()}
    assert states == {first: "cancelled", second: "waiting"}
    jobs.client.flushdb()
    report = ("--report", jobs.new_path(), "--redis", jobs.url, "--json")
    done = jobs.command("restore", "--archive", url, *access, *report)
    assert json.loads(done.stdout)["counts"]["restored"] == 1
    assert jobs.message(second).state == "waiting"
    assert "query it with SQL" in jobs.command("search", "--archive", url, code=2).stderr


def test_each_prefix_has_one_writer_and_an_archive_of_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lisa.pipeline.archive.jdbc.LOCK_SECONDS", 0.5)
    mine, other = Stories("orders", seed=8).extend(5), Stories("orders", seed=9).extend(7)
    first = store.writer()
    with pytest.raises(ConfigError, match="another archive process writes to jdbc:"):
        store.writer()
    first.write(store.rows(mine), 0)
    # At the same time, because another prefix is another archive.
    store.writer(table_prefix="b_").write(store.rows(other), 0)
    check_archive(store.opened(), mine)
    check_archive(store.opened(table_prefix="b_"), other)
    first.close()
    store.writer()
    with pytest.raises(ConfigError, match=r"there is no archive in .* with table prefix 'c_'"):
        store.opened(table_prefix="c_")
    with pytest.raises(ConfigError, match="table_prefix 'x;' is not valid"):
        store.writer(table_prefix="x;")
    views = ("VIEW b_mykit_delay_queue_job", "VIEW b_mykit_delay_queue_job_log")
    tables = ("TABLE b_message_log", "TABLE b_messages", "TABLE b_lisa_archive")
    store.do(*(f"DROP {text}" for text in views + tables))


def fail_at(step: str, failure: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Call `failure` at one step of a writer: before or after a statement."""

    def wrap(owner: Any, name: str, told: Callable[[Any], str]) -> None:
        done = getattr(owner, name)

        def called(one: Any, *arguments: Any, **parts: Any) -> Any:
            if step == f"before {told(arguments)}":
                failure()
            answer = done(one, *arguments, **parts)
            if step == f"after {told(arguments)}":
                failure()
            return answer

        patch.setattr(owner, name, called)

    wrap(JdbcConnection, "run", lambda arguments: arguments[0])
    wrap(JdbcConnection, "put", lambda arguments: arguments[0])
    wrap(Database, "insert", lambda arguments: f"insert {arguments[1]}")


@pytest.mark.parametrize(
    "step",
    [
        "after put_messages",
        *(
            pytest.param(step, marks=pytest.mark.slow)
            for step in (
                "before stage_events",
                "after insert lisa_staged_events",
                "after insert lisa_staged_messages",
                "after add_events",
                "after put_archive",
                "before clear",
            )
        ),
    ],
)
def test_killed_between_steps_then_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The database sees a process that is killed as a connection that is gone."""
    events = Stories("orders", seed=11).extend(30)
    before, batch = store.rows(events[:60]), store.rows(events[60:])
    records = {"orders": TopicRecord({"journal": "1"}, ("lisa",))}
    writer = store.writer(records)
    writer.write(before, 6)

    def die() -> None:
        jvm: Any = store.spark._jvm
        writer._connection._connection.abort(jvm.java.util.concurrent.ForkJoinPool.commonPool())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        fail_at(step, die, patched)
        # The connection closes in another thread: before the writer's rollback, or after it.
        with pytest.raises((KeyboardInterrupt, ServerUnavailable)):
            writer.write(batch, 7)
    # Readers see the whole batch or nothing of it.
    known = events if step == "before clear" else events[:60]
    archive = store.opened()
    assert archive.log().count() == len(known)
    assert archive.offsets() == {"orders": end(known)}
    store.writer(records).write(batch, 7)
    check_archive(archive, events)
    assert archive.topics() == records
    staged = "SELECT count(*) FROM information_schema.tables WHERE table_name LIKE 'lisa_staged%'"
    assert store.ask(staged) == [("0",)]


def test_a_database_killed_during_a_batch_recovers(
    store: Store, running: list[DatabaseServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Stories("orders", seed=12).extend(50)
    writer = store.writer()
    writer.write(store.rows(events[:100]), 0)
    with monkeypatch.context() as patched:
        fail_at("after add_events", running[-1].crash, patched)
        with pytest.raises(LisaError):
            writer.write(store.rows(events[100:]), 1)
    running.append(running[-1].restart())
    writer.write(store.rows(events[100:]), 1)  # the writer reconnects
    check_archive(writer.archive(), events)


def test_errors_are_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url, good = store.server.url, store.properties

    def refused(where: str, properties: dict[str, str], kind: type[LisaError]) -> str:
        with pytest.raises(kind) as raised:
            JdbcWriter(store.spark, where, properties)
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
    if store.server.kind == "postgresql":  # a user without privileges
        store.do("DROP ROLE IF EXISTS guest")
        store.do(f"CREATE ROLE guest LOGIN PASSWORD '{databases.PASSWORD}'")
        said = refused(url, good | {"user": "guest"}, ConfigError)
        assert "permission denied for schema public" in said
    else:
        assert "denied" in refused(url.replace("/archive", "/mysql"), good, ConfigError)
    closed = url.replace(str(store.server.port), str(free_port()))
    assert "does not answer" in refused(closed, good, ServerUnavailable)
    with pytest.raises(ConfigError, match="there is no archive in"):
        open_archive(store.spark, url, good)
    with pytest.raises(ServerUnavailable):
        open_archive(store.spark, closed, good)
    wrong = ("jdbc:oracle:thin:me/secret@h/d", "jdbc:mysql://me:secret@h/d", "postgresql://h/d")
    for where in wrong:
        said = refused(where, good, ConfigError)
        assert "is not jdbc:postgresql://HOST/DATABASE or jdbc:mariadb://" in said
        assert "secret" not in said
    store.writer()
    store.do("INSERT INTO lisa_archive VALUES (2, 0, 0)")
    for layout in (9, 1):
        store.do(f"UPDATE lisa_archive SET layout = {layout}")  # noqa: S608
        with pytest.raises(ConfigError, match=f"has layout {layout}, this version of Lisa needs 2"):
            open_archive(store.spark, url, good)
    store.open_writers.pop().close()
    assert "has layout 1" in refused(url, good, ConfigError)
    # A missing driver.
    with pytest.raises(ConfigError, match=r"driver file /nowhere\.jar does not exist"):
        jdbc_settings(url, "/nowhere.jar")
    jar = databases.JARS[store.server.kind]
    assert jdbc_settings(url) == jdbc_settings(url, jar) == {"spark.jars": str(jar.resolve())}
    kind = replace(database.KINDS[store.server.kind], driver="org.none.Driver")
    monkeypatch.setitem(database.KINDS, store.server.kind, kind)
    said = refused(url, good, ConfigError)
    assert said.startswith(f"Spark has no driver for {store.server.kind} (org.none.Driver)")
    assert "--driver-jar FILE" in said
