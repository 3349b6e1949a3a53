"""Audit: finds exactly the messages that neither ended nor are live."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.records import ArchiveGap
from lisa.pipeline.jobs.archive import archive as run_archive
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.server import Server
from tests.servers import flush
from tests.spark.worlds import World, counted, frozen


@pytest.fixture
def server(redis_url: str) -> Server:
    return Server(redis_url)


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    """Messages: waiting, ready, in flight, in retry, in garbage; and four ended."""
    with server.open() as store:
        made = World(store, server.url, "orders", ["lisa"])
        made.send(["waits", "lingers", "strays"], delay=timedelta(hours=1))
        made.send(["flies", "fails", "dies", "done"])
        made.promote()
        taken = {entry.id: entry for entry in made.take("lisa", 4)}
        made.fail("lisa", [taken["fails"]], 3_600_000)
        made.fail("lisa", [taken["dies"]], "discard")
        made.ack("lisa", [taken["done"]])
        made.send(["back", "twice"], delay=timedelta(hours=1))
        made.cancel(["back"])
        made.producer.send(
            "orders", {"again": 1}, id="twice", on_duplicate="replace", delay=timedelta(hours=1)
        )
        yield made
        made.close()


ALL = {"live": 7, "acked": 1, "cancelled": 2}


def listed(found: Any, name: str) -> set[str]:
    return set(pq.read_table(f"{found.where}/{name}")["id"].to_pylist())


def test_ended_and_live_messages_are_not_missing(
    spark: SparkSession, server: Server, world: World, tmp_path: Path
) -> None:
    archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
    now, minutes = datetime.now(UTC), timedelta(minutes=5)
    span: dict[str, Any] = {"start": now - minutes, "end": now + minutes}
    found = audit(
        spark, lambda: archive, server, to=f"{tmp_path}/out", stuck_after=timedelta(0), **span
    )
    assert counted(found) == ALL
    assert (found.sent, found.missing, found.proven, found.checked) == (10, 0, True, True)
    assert listed(found, "stuck") == {"flies"}  # garbage is not stuck
    summary = json.loads(Path(f"{tmp_path}/out/summary.json").read_text("utf-8"))
    assert (summary["sent"], summary["proven"]) == (10, True)
    none = audit(spark, lambda: archive, server, end=now - timedelta(hours=1))
    assert (none.sent, none.missing) == (0, 0)
    with pytest.raises(ConfigError, match="no topic other; its topics are orders"):
        audit(spark, lambda: archive, server, topics=["orders", "other"])


def test_a_message_lost_without_an_end_is_missing(
    spark: SparkSession, server: Server, world: World, tmp_path: Path
) -> None:
    """Messages that ended or were sent again after the archive are not missing."""
    archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
    for one in ("waits", "dies", "lingers"):  # deleted by hand
        world.store.ask("DEL", f"lisa:{{orders}}:body:{one}")
    world.store.ask("ZREM", "lisa:{orders}:waiting", "lingers", "strays")
    world.producer.send("orders", {"new": 1}, id="lingers")  # another message
    world.ack("lisa", world.entries(["flies"]))  # its tombstone exists
    world.cancel(["twice"])
    world.store.ask("DEL", "lisa:{orders}:done:twice")  # only the journal knows
    world.producer.send("orders", {"new": 1}, id="fails", on_duplicate="replace")

    found = audit(spark, lambda: archive, server, to=f"{tmp_path}/out")

    assert counted(found) == {"live": 1, "missing": 3, "acked": 2, "cancelled": 3, "replaced": 1}
    assert listed(found, "missing") == {"waits", "dies", "lingers"}
    assert {row["id"] for row in found.first["missing"]} == {"waits", "dies", "lingers"}
    assert {row["id"]: row["state"] for row in found.first["stuck"]} == {"strays": "no-place"}
    assert not found.proven
    csv = "".join(one.read_text("utf-8") for one in Path(f"{tmp_path}/out").rglob("*.csv"))
    assert "waits" in csv


def test_an_archive_that_advances_during_the_audit(
    spark: SparkSession, server: Server, world: World, tmp_path: Path
) -> None:
    """The journal is trimmed up to the newer archive, so the audit must reopen the archive."""
    old = frozen(spark, server, ["orders"], f"{tmp_path}/old")
    world.cancel(["waits"])
    world.store.ask("DEL", "lisa:{orders}:done:waits")
    new = frozen(spark, server, ["orders"], f"{tmp_path}/new")
    world.store.ask("XTRIM", "lisa:{orders}:events", "MAXLEN", 1)
    opened = iter([old, new, new])
    found = audit(spark, lambda: next(opened), server)
    assert counted(found) == {"live": 6, "acked": 1, "cancelled": 3}
    assert found.proven


def test_the_command(
    spark: SparkSession,
    server: Server,
    world: World,
    pipeline: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """A missing message means exit code 1."""
    run_archive(spark, f"{tmp_path}/archive", url=server.url, once=True)
    command = ("audit", "--archive", f"{tmp_path}/archive", "--redis", server.url)
    offline = pipeline(*command, "--offline")
    assert offline.exit_code == 0, offline.output
    assert "all 10 messages" in offline.output
    world.store.ask("DEL", "lisa:{orders}:body:waits")
    done = pipeline(*command, "--json", "--out", f"{tmp_path}/out")
    assert done.exit_code == 1, done.output
    (line,) = [one for one in done.output.splitlines() if one.startswith("{")]
    document = json.loads(line)
    assert (document["sent"], document["missing"], document["proven"]) == (10, 1, False)
    assert document["first"]["missing"][0]["id"] == "waits"
    assert set(pq.read_table(f"{tmp_path}/out/missing")["id"].to_pylist()) == {"waits"}


def test_without_the_server_messages_without_an_end_count_as_live(
    spark: SparkSession, server: Server, world: World, tmp_path: Path
) -> None:
    archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
    flush(server.url)
    found = audit(spark, lambda: archive, None, stuck_after=timedelta(0))
    assert counted(found) == ALL
    assert not found.checked
    asked = audit(spark, lambda: archive, server)
    assert counted(asked) == {"missing": 7, "acked": 1, "cancelled": 2}
    # Messages sent after the archive were lost with the server, and are unknown.
    assert [gap.topic for gap in asked.gaps] == ["orders"]
    before = audit(spark, lambda: archive, server, end=datetime(2026, 1, 1, tzinfo=UTC))
    assert before.proven


def test_gaps_in_the_range_are_listed(
    spark: SparkSession, server: Server, world: World, tmp_path: Path
) -> None:
    archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    at, later = int(moment.timestamp() * 1000), moment + timedelta(days=1)
    archive.named_gaps.append(
        ArchiveGap("orders", f"{at}-0", 3, f"{at + 1000}-0", 9, "trimmed", moment)
    )
    [found] = audit(spark, lambda: archive, None).gaps
    assert (found.topic, found.after_ms, found.until_ms) == ("orders", at, at + 1000)
    none = audit(spark, lambda: archive, None, start=later)
    assert (none.gaps, none.proven) == ([], True)
    # As after a failover: a gap that is found before the next event lasts until that is archived.
    last = archive.committed["orders"][0]
    [first] = archive.events.select(sf.min(sf.unix_millis("at"))).head()
    for after in (f"{at}-0", last):
        archive.named_gaps.append(ArchiveGap("orders", after, 3, None, None, "lost", moment))
    now = int(time.time() * 1000)
    some = audit(spark, lambda: archive, None, start=later)
    earlier, still = some.gaps
    assert (earlier.after_ms, earlier.until_ms) == (at, first)
    assert still.after_ms == entry_number(last)[0]
    assert still.until_ms >= now
    assert not some.proven
