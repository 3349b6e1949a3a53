"""The job `archive` on a real journal: exactly once, through kill -9 at any point."""

import json
import random
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from pyspark.sql import functions as sf

from lisa import Consumer, Manager
from lisa.cli.options import Chosen
from lisa.cli.pipeline.archive import _print_result
from lisa.core.model.clock import MAX_DUE_MS, ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys
from lisa.core.transitions.topic import Configure
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.jobs import archive as archive_job
from lisa.pipeline.jobs.archive import ArchiveResult, ArchiveRun, Progress
from tests.gateways import state
from tests.servers import JVM_PATIENCE, Processes, wait_until
from tests.spark.jobs import KEYS, Jobs
from tests.spark.stories import Event, Stories, entry


def journal(client: redis.Redis, events: list[Event]) -> None:
    """Write events as the scripts do."""
    keys = Keys()
    pipe = client.pipeline(transaction=False)
    for one in events:
        name, fields = entry(one)
        flat = [part for pair in fields.items() for part in pair]
        pipe.execute_command("XADD", keys.topic(one["topic"]).events, name, *flat)
    for topic in {one["topic"] for one in events}:
        found = [one["number"] for one in events if one["topic"] == topic]
        pipe.zadd(keys.topics, {topic: 1})
        pipe.hset(keys.topic(topic).options, "journal", "1")
        pipe.hset(keys.topic(topic).groups, "lisa", "1")
        pipe.hset(keys.topic(topic).stats, "journaled", max(found))
    pipe.execute()


def recorded(client: redis.Redis) -> dict[str, list[str]]:
    """Archive name -> recorded entry id and number."""
    found: dict[bytes, bytes] = dict(client.hgetall(KEYS.archived))  # type: ignore[arg-type]
    return {name.decode(): value.decode().split()[:2] for name, value in found.items()}


def test_once_archives_everything_and_a_second_run_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.where = str(jobs.folder / "archive [1] {a}")  # no pattern
    orders, other = Stories("orders"), Stories("a:b", 2)
    events = [*orders.extend(40), *other.extend(20)]
    journal(jobs.client, events)
    # Executors write to their own disks: the job fails, and the journal keeps its events.
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "files", lambda *_: [])
        with pytest.raises(LisaError, match="driver sees 0 there"):
            jobs.archive(max_events=200, name="mine")
    assert recorded(jobs.client) == {}
    told: list[Progress] = []
    done = jobs.archive(max_events=200, progress=told.append, name="mine")
    assert done.events == len(events) == sum(one.events for one in told)
    assert done.batches >= 2
    more = orders.extend(10)
    journal(jobs.client, more)
    assert jobs.archive(name="mine").events == len(more)
    jobs.check(events + more)
    last = orders.events[-1]
    assert recorded(jobs.client) == {"mine": [entry(last)[0], str(last["number"])]}
    assert jobs.opened().topics()["a:b"].groups == ("lisa",)
    # Without new events, nothing is written.
    before = sorted(Path(jobs.where).glob("*/_delta_log/*.json"))
    assert jobs.archive(name="mine").events == 0
    assert sorted(Path(jobs.where).glob("*/_delta_log/*.json")) == before


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_archive_is_kept_up_to_date(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Without further events there is no further batch, which would do it."""
    monkeypatch.setattr(archive_job, "TIDY_S", 0.01)
    monkeypatch.setattr(archive_job, "POLL_S", 0.01)
    query, tables = Mock(isActive=True), Mock()

    def tidy(**_: Any) -> None:
        query.isActive = tables.tidy.call_count < 2
        if fails:
            raise LisaError("the disk is full")

    tables.tidy.side_effect = tidy
    query.exception.return_value = None
    run = ArchiveRun(tables, Mock(), lambda _: None, threading.Event(), 9)
    if fails:
        with pytest.raises(LisaError, match="disk is full"):
            run.follow(lambda: query)
        query.stop.assert_called_once()
        return
    run.follow(lambda: query)
    assert tables.tidy.call_count == 2


def test_a_query_whose_python_was_slow_to_start_is_started_again() -> None:
    """The next test has Spark itself say so."""
    late, good = Mock(isActive=False), Mock(isActive=False)
    late.exception.return_value = Exception("... Python worker failed to connect back ...")
    good.exception.return_value = None
    run = ArchiveRun(Mock(), Mock(), lambda _: None, threading.Event(), 9)
    queries = iter([late, late, good])
    run.follow(lambda: next(queries))
    assert not list(queries)


@pytest.mark.slow
def test_a_slow_start_of_python_does_not_end_the_job(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that plans the batches needs longer than the ten seconds that Spark allows."""
    slow, first = jobs.folder / "python", jobs.folder / "first"
    slow.write_text(
        f"""#!/bin/sh
case "$*" in *streaming_source_runner*) mkdir '{first}' 2>/dev/null && sleep 15 ;; esac
exec '{sys.executable}' "$@"
"""
    )
    slow.chmod(0o755)
    monkeypatch.setattr(jobs.spark.sparkContext, "pythonExec", str(slow))
    events = Stories("orders").extend(10)
    journal(jobs.client, events)
    assert jobs.archive().events == len(events)
    assert first.exists()
    jobs.check(events)


def test_an_archive_without_its_checkpoint_and_from_a_backup(jobs: Jobs) -> None:
    """Events that the archive lacks are not skipped, although Spark has committed them."""
    orders, notes, backup = Stories("orders"), jobs.new_path(), jobs.new_path()

    def follow(where: str, checkpoint: str) -> int:
        return jobs.archive(where, checkpoint=checkpoint, name="mine").events

    first = orders.extend(10)
    journal(jobs.client, first)
    follow(jobs.where, notes)
    shutil.copytree(jobs.where, backup)
    journal(jobs.client, orders.extend(10))
    follow(jobs.where, notes)
    shutil.rmtree(jobs.where)
    Path(backup).rename(jobs.where)
    with pytest.raises(ConfigError, match="ahead of the archive: for topic 'orders'"):
        follow(jobs.where, notes)
    jobs.check(first)
    assert follow(jobs.where, f"{notes}-new") == len(orders.events) - len(first)
    jobs.check(orders.events)
    # A new archive of the same name starts at the first event.
    assert follow(jobs.new_path(), jobs.new_path()) == len(orders.events)


def test_a_trimmed_journal(jobs: Jobs) -> None:
    orders = Stories("orders")
    first, gone, rest = orders.extend(10), orders.extend(10), orders.extend(10)
    journal(jobs.client, first)
    words = ("archive", "--redis", jobs.url, "--to", jobs.where)
    jobs.command(*words, "--once")
    journal(jobs.client, [*gone, *rest])
    jobs.client.xtrim(KEYS.events, minid=entry(rest[0])[0], approximate=False)
    numbers = f"{gone[0]['number']} to {gone[-1]['number']}"
    said = jobs.command(*words, "--once", code=1).output.strip().splitlines()[-1]
    assert f"the journal of topic 'orders' lacks events {numbers}" in said
    assert "--on-gap record" in said
    assert "fail_on_gap" not in said
    jobs.check(first)
    assert jobs.archive(on_gap="record").events == len(rest)
    [gap] = jobs.opened().gaps()
    assert (gap.after_number, gap.to_number) == (first[-1]["number"], rest[0]["number"])
    assert numbers in gap.reason
    log = jobs.opened().log().where("state != 'gap'")
    assert sorted(row.number for row in log.collect()) == [one["number"] for one in (*first, *rest)]
    compacted = jobs.command(*words, "--compact", "--json")
    assert json.loads(compacted.output.strip().splitlines()[-1])["files"] > 0


def test_the_archive_agrees_with_get_after_real_traffic(jobs: Jobs) -> None:
    """With real producer, manager and consumer, the archive agrees with `get` for each message."""
    # `get` reads tombstones at the end, and archiving takes long on a busy machine.
    jobs.store.call(Configure("orders", {"journal": "1", "retention": "3600000"}))
    producer, hour = jobs.producer, timedelta(hours=1)
    later = producer.send("orders", {"n": 1}, delay=hour, headers={"a": "ü"})
    producer.send("orders", "replaced", id="again", delay=hour)
    producer.send("orders", "anew", id="again", delay=2 * hour, on_duplicate="replace")
    gone = producer.send("orders", b"gone", delay=hour)
    producer.cancel("orders", gone)
    # Its ttl ends after the year 9999.
    producer.send("orders", "x", id="never", at=ms_datetime(MAX_DUE_MS), ttl="365d")
    consumer = Consumer(jobs.url, group="lisa")

    @consumer.on("orders")
    def handle(message: Any) -> None:
        if message.body == "bad":
            raise ValueError("no good")

    with Manager(jobs.url, topics={"orders": {"retry_delays": []}}), consumer:
        good, bad = producer.send("orders", "good"), producer.send("orders", "bad")
        wait_until(lambda: state(producer, "orders", good) == "acked")
        wait_until(lambda: state(producer, "orders", bad) == "garbage")
    jobs.archive()
    messages = jobs.opened().messages().withColumn("due_ms", sf.unix_millis("due"))
    messages = messages.withColumn("expires_ms", sf.unix_millis("expires"))
    rows = {(row.id, row.settled): row for row in messages.collect()}
    assert len(rows) == 7
    assert rows["never", False].expires_ms == MAX_DUE_MS
    for name, settled in ((later, False), (gone, True), (good, True), (bad, False)):
        assert rows[name, settled].state == jobs.message(name).state
    found, again = jobs.message("again"), rows["again", False]
    assert (again.state, again.due_ms) == (found.state, found.due_ms)
    assert bytes(again.body) == b"anew"
    assert rows["again", True].state == "cancelled"
    assert rows["again", True].reason.startswith("replaced")
    assert rows[later, False].headers == {"a": "ü"}
    assert rows[good, True].late_us >= 0
    assert "no good" in rows[bad, False].groups[0].reason


DRIVER = """
import os, signal, sys
url, where, point = sys.argv[1:]
from lisa.pipeline import spark_session
from lisa.pipeline.archive import folder, table, writing
from lisa.pipeline.jobs import archive as job

spark = spark_session(master="local[2]", settings={"spark.sql.shuffle.partitions": "2"})

def die(*_, **__):
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def after(owner, name):
    call = getattr(owner, name)
    def both(*a, **k):
        result = call(*a, **k)
        die()
    setattr(owner, name, both)

def before(owner, name):
    setattr(owner, name, die)

{"staged": lambda: after(writing, "write_files"),
 "moving": lambda: after(folder.Folder, "rename"),
 "moved": lambda: before(table.ArchiveTable, "commit"),
 "committed": lambda: after(table.ArchiveTable, "commit"),
 "written": lambda: after(writing.FileWriter, "write"),
 "folding": lambda: after(writing, "lives"),
 "folded": lambda: after(writing, "_write_messages")}[point]()
job.archive(spark, where, url=url, once=True, max_events=400)
"""


@pytest.mark.parametrize(
    "points",
    [
        ("committed",),
        pytest.param(
            ("staged", "moving", "moved", "committed", "written", "folding", "folded"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kill_at_steps(points: tuple[str, ...], jobs: Jobs, processes: Processes) -> None:
    orders = Stories("orders")
    for point in points:
        journal(jobs.client, orders.extend(100))
        killed = processes.start("-c", DRIVER, jobs.url, jobs.where, point)
        killed.wait_for("dies", timeout=JVM_PATIENCE)
        killed.wait(timeout=JVM_PATIENCE)
    journal(jobs.client, orders.extend(20))
    jobs.archive(max_events=400)
    jobs.check(orders.events)


@pytest.mark.slow
def test_kill_at_random_times_under_traffic(jobs: Jobs, processes: Processes) -> None:
    orders, dice = Stories("orders"), random.Random(time.time())
    words = ("--redis", jobs.url, "--to", jobs.where, "--master", "local[2]")
    command = ("-m", "lisa.cli.main", "pipeline", "archive", *words, "--interval", "300ms")
    for _ in range(3):
        running = processes.start(*command, "--max-events", "300")
        journal(jobs.client, orders.extend(50))
        running.wait_for("batch", timeout=JVM_PATIENCE)
        until = time.monotonic() + dice.uniform(0.5, 3)
        while time.monotonic() < until:
            journal(jobs.client, orders.extend(10))
            time.sleep(0.05)
        running.kill()
    running = processes.start(*command, "--json")
    other = orders.extend(20)
    journal(jobs.client, other)
    end = entry(other[-1])[0]
    name = next(iter(recorded(jobs.client)))
    wait_until(lambda: recorded(jobs.client)[name][0] == end, timeout=JVM_PATIENCE)
    assert running.stop(timeout=JVM_PATIENCE) == 0
    final = json.loads(running.output.strip().splitlines()[-1])
    assert final["offsets"]["orders"] == [end, other[-1]["number"]]
    jobs.check(orders.events)


def test_exit_codes_and_output(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    away = ("--redis", "redis://127.0.0.1:1", "--to", jobs.where, "--once")
    unreachable = jobs.command("archive", *away, code=3)
    assert "127.0.0.1:1" in unreachable.output.strip().splitlines()[-1]
    with pytest.raises(ConfigError, match="on_gap"):
        jobs.archive(on_gap="ignore")
    with pytest.raises(ConfigError, match="checkpoint"):
        jobs.archive("jdbc:postgresql://127.0.0.1/none")
    where = "jdbc:postgresql://db/archive?user=lisa&password=secret"
    for as_json in (False, True):
        _print_result(ArchiveResult("db", where, 3, 1, 0.5), Chosen(json=as_json))
        printed = capsys.readouterr().out
        assert "jdbc:postgresql://db/archive" in printed
        assert "secret" not in printed
