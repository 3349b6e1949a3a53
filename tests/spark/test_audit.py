"""Audit: finds exactly the messages that neither ended nor are live."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.base import ArchiveGap
from tests.spark.jobs import KEYS, Jobs
from tests.spark.worlds import World, counted

HOUR = timedelta(hours=1)
ALL = {"live": 7, "acked": 1, "cancelled": 2}


@pytest.fixture
def world(jobs: Jobs) -> World:
    """Messages: waiting, ready, in flight, in retry, in garbage; and four ended."""
    made = jobs.world()
    made.send(["waits", "lingers", "strays"], delay=HOUR)
    made.send(["flies", "fails", "dies", "done"])
    made.promote()
    taken = {entry.id: entry for entry in made.take("lisa", 4)}
    made.fail("lisa", [taken["fails"]], 3_600_000)
    made.fail("lisa", [taken["dies"]], "discard")
    made.ack("lisa", [taken["done"]])
    made.send(["back", "twice"], delay=HOUR)
    made.cancel(["back"])
    made.producer.send("orders", {"again": 1}, id="twice", on_duplicate="replace", delay=HOUR)
    return made


def listed(where: str | None, name: str) -> set[str]:
    return set(pq.read_table(f"{where}/{name}")["id"].to_pylist())


def test_ended_and_live_messages_are_not_missing(jobs: Jobs, world: World) -> None:
    archive = jobs.frozen()
    now, minutes = datetime.now(UTC), timedelta(minutes=5)
    span: dict[str, Any] = {"start": now - minutes, "end": now + minutes}
    found = jobs.audit(archive, to=jobs.new_path(), stuck_after=timedelta(0), **span)
    assert counted(found) == ALL
    assert (found.sent, found.missing, found.proven, found.checked) == (10, 0, True, True)
    assert listed(found.where, "stuck") == {"flies"}  # garbage is not stuck
    summary = json.loads(Path(f"{found.where}/summary.json").read_text("utf-8"))
    assert (summary["sent"], summary["proven"]) == (10, True)
    none = jobs.audit(archive, end=now - HOUR)
    assert (none.sent, none.missing) == (0, 0)
    with pytest.raises(ConfigError, match="no topic other; its topics are orders"):
        jobs.audit(archive, topics=["orders", "other"])


def test_a_message_lost_without_an_end_is_missing(jobs: Jobs, world: World) -> None:
    """Messages that ended or were sent again after the archive are not missing."""
    archive, ask, send = jobs.frozen(), world.store.ask, world.producer.send
    ask("DEL", *map(KEYS.body, ("waits", "dies", "lingers")))  # by hand
    ask("ZREM", KEYS.waiting, "lingers", "strays")
    send("orders", {"new": 1}, id="lingers")  # another message
    world.ack("lisa", world.entries(["flies"]))  # its tombstone exists
    world.cancel(["twice"])
    ask("DEL", KEYS.done("twice"))  # only the journal knows
    send("orders", {"new": 1}, id="fails", on_duplicate="replace")
    found = jobs.audit(archive, to=jobs.new_path())
    assert counted(found) == {"live": 1, "missing": 3, "acked": 2, "cancelled": 3, "replaced": 1}
    assert listed(found.where, "missing") == {"waits", "dies", "lingers"}
    assert {row["id"] for row in found.first["missing"]} == {"waits", "dies", "lingers"}
    assert {row["id"]: row["state"] for row in found.first["stuck"]} == {"strays": "no-place"}
    assert not found.proven
    assert any("waits" in one.read_text("utf-8") for one in Path(str(found.where)).rglob("*.csv"))


def test_an_archive_that_advances_during_the_audit(jobs: Jobs, world: World) -> None:
    """The journal is trimmed up to the newer archive, so the audit must reopen the archive."""
    old = jobs.frozen()
    world.cancel(["waits"])
    world.store.ask("DEL", KEYS.done("waits"))
    new = jobs.frozen()
    world.store.ask("XTRIM", KEYS.events, "MAXLEN", 1)
    opened = iter([old, new, new])
    found = jobs.audit(lambda: next(opened))
    assert counted(found) == {"live": 6, "acked": 1, "cancelled": 3}
    assert found.proven


def test_the_command(jobs: Jobs, world: World) -> None:
    """A missing message means exit code 1."""
    jobs.archive()
    command = ("audit", "--archive", jobs.where, "--redis", jobs.url)
    assert "all 10 messages" in jobs.command(*command, "--offline").output
    world.store.ask("DEL", KEYS.body("waits"))
    where = jobs.new_path()
    done = jobs.command(*command, "--json", "--out", where, code=1)
    (line,) = [one for one in done.output.splitlines() if one.startswith("{")]
    document = json.loads(line)
    assert (document["sent"], document["missing"], document["proven"]) == (10, 1, False)
    assert document["first"]["missing"][0]["id"] == "waits"
    assert listed(where, "missing") == {"waits"}


def test_without_the_server_messages_without_an_end_count_as_live(jobs: Jobs, world: World) -> None:
    archive = jobs.frozen()
    jobs.client.flushall()
    found = jobs.audit(archive, offline=True, stuck_after=timedelta(0))
    assert counted(found) == ALL
    assert not found.checked
    asked = jobs.audit(archive)
    assert counted(asked) == {"missing": 7, "acked": 1, "cancelled": 2}
    # Messages sent after the archive were lost with the server, and are unknown.
    assert [gap.topic for gap in asked.gaps] == ["orders"]
    assert jobs.audit(archive, end=datetime(2026, 1, 1, tzinfo=UTC)).proven


def test_gaps_in_the_range_are_listed(jobs: Jobs, world: World) -> None:
    archive = jobs.frozen()
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    at, later = int(moment.timestamp() * 1000), moment + timedelta(days=1)
    span = (f"{at}-0", 3, f"{at + 1000}-0", 9)
    archive.named_gaps.append(ArchiveGap("orders", *span, "trimmed", moment))
    [found] = jobs.audit(archive, offline=True).gaps
    assert (found.topic, found.after_ms, found.until_ms) == ("orders", at, at + 1000)
    none = jobs.audit(archive, offline=True, start=later)
    assert (none.gaps, none.proven) == ([], True)
    # As after a failover: a gap that is found before the next event lasts until that is archived.
    last = archive.committed["orders"][0]
    [first] = archive.events.select(sf.min(sf.unix_millis("at"))).head()
    for after in (f"{at}-0", last):
        archive.named_gaps.append(ArchiveGap("orders", after, 3, None, None, "lost", moment))
    now = int(time.time() * 1000)
    some = jobs.audit(archive, offline=True, start=later)
    earlier, still = some.gaps
    assert (earlier.after_ms, earlier.until_ms) == (at, first)
    assert still.after_ms == entry_number(last)[0]
    assert still.until_ms >= now
    assert not some.proven
