"""Audit: finds exactly the messages that neither ended nor are live."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.records import ArchiveGap
from lisa.pipeline.jobs.archive import archive as run_archive
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.server import Server
from tests.servers import JVM_PATIENCE, Processes, flush
from tests.spark.worlds import SMALL, World, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result
    from pyspark.sql import SparkSession


@pytest.fixture
def server(redis_url: str) -> Server:
    return Server(redis_url)


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    """Messages: waiting, overdue, ready, in flight, in retry, in garbage; and four ended."""
    with server.open() as store:
        made = World(store, server.url, "orders", ["lisa"])
        made.send(["waits"], delay=timedelta(hours=1))
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


def ends(found: Any) -> dict[str, int]:
    return {name: count for name, count in found.counts.items() if count}


def listed(found: Any, name: str) -> set[str]:
    return set(pq.read_table(f"{found.where}/{name}")["id"].to_pylist())


class TestAgainstTheServer:
    """The server decides which messages are live."""

    def test_ended_and_live_messages_are_not_missing(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        found = audit(spark, lambda: archive, server, to=f"{tmp_path}/out")
        assert ends(found) == {"live": 5, "acked": 1, "cancelled": 2}
        assert (found.sent, found.missing, found.stuck) == (8, 0, 0)
        assert found.proven
        assert found.checked
        summary = json.loads(Path(f"{tmp_path}/out/summary.json").read_text("utf-8"))
        assert (summary["sent"], summary["proven"]) == (8, True)

    def test_a_message_lost_without_an_end_is_missing(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        """Messages that ended or were sent again after the archive are not missing."""
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        for one in ("waits", "dies"):  # deleted by hand
            world.store.ask("DEL", f"lisa:{{orders}}:body:{one}")
        world.ack("lisa", world.entries(["flies"]))  # its tombstone exists
        world.cancel(["twice"])
        world.store.ask("DEL", "lisa:{orders}:done:twice")  # only the journal knows
        world.producer.send("orders", {"new": 1}, id="fails", on_duplicate="replace")

        found = audit(spark, lambda: archive, server, to=f"{tmp_path}/out")

        assert ends(found) == {"missing": 2, "acked": 2, "cancelled": 3, "replaced": 1}
        assert listed(found, "missing") == {"waits", "dies"}
        assert {row["id"] for row in found.first["missing"]} == {"waits", "dies"}
        assert not found.proven
        csv = "".join(one.read_text("utf-8") for one in Path(f"{tmp_path}/out").rglob("*.csv"))
        assert "waits" in csv

    def test_a_lost_id_sent_again_is_missing_and_a_message_in_no_state_is_stuck(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        world.store.ask("DEL", "lisa:{orders}:body:waits")
        world.store.ask("ZREM", "lisa:{orders}:waiting", "waits", "twice")
        world.producer.send("orders", {"new": 1}, id="waits")

        found = audit(spark, lambda: archive, server, to=f"{tmp_path}/out")

        assert listed(found, "missing") == {"waits"}
        assert {row["id"]: row["state"] for row in found.first["stuck"]} == {"twice": "no-place"}
        assert ends(found) == {"live": 4, "missing": 1, "acked": 1, "cancelled": 2}

    def test_an_archive_that_advances_during_the_audit(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        """The journal is trimmed up to the newer archive, so the audit must reopen the archive."""
        old = frozen(spark, server, ["orders"], f"{tmp_path}/old")
        world.cancel(["waits"])
        world.store.ask("DEL", "lisa:{orders}:done:waits")
        new = frozen(spark, server, ["orders"], f"{tmp_path}/new")
        world.store.ask("XTRIM", "lisa:{orders}:events", "MAXLEN", 1)
        opened = iter([old, new, new])
        found = audit(spark, lambda: next(opened), server)
        assert ends(found) == {"live": 4, "acked": 1, "cancelled": 3}
        assert found.proven

    def test_stuck_and_the_range_of_sent_times(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        now = datetime.now(UTC)
        found = audit(
            spark,
            lambda: archive,
            server,
            start=now - timedelta(minutes=5),
            end=now + timedelta(minutes=5),
            stuck_after=timedelta(0),
            to=f"{tmp_path}/out",
        )
        assert listed(found, "stuck") == {"flies"}  # garbage is not stuck
        assert found.sent == 8
        none = audit(spark, lambda: archive, server, end=now - timedelta(hours=1))
        assert (none.sent, none.missing) == (0, 0)
        with pytest.raises(ConfigError, match="no topic other; its topics are orders"):
            audit(spark, lambda: archive, server, topics=["orders", "other"])


class TestCommand:
    """`lisa pipeline audit`, from an archive that the archive job wrote."""

    def test_a_missing_message_means_exit_code_1(  # noqa: PLR0917  its fixtures
        self,
        spark: SparkSession,
        server: Server,
        world: World,
        processes: Processes,
        pipeline: Callable[..., Result],
        tmp_path: Path,
    ) -> None:
        run_archive(spark, f"{tmp_path}/archive", url=server.url, once=True)
        command = ("audit", "--archive", f"{tmp_path}/archive", "--redis", server.url)
        offline = pipeline(*command, "--offline")
        assert offline.exit_code == 0, offline.output
        assert "all 8 messages" in offline.output
        world.store.ask("DEL", "lisa:{orders}:body:waits")
        more = ("--json", "--out", f"{tmp_path}/out")
        process = processes.start("-m", "lisa.cli.main", "pipeline", *command, *SMALL, *more)
        assert process.wait(timeout=JVM_PATIENCE) == 1, process.output
        (line,) = [one for one in process.output.splitlines() if one.startswith("{")]
        document = json.loads(line)
        assert (document["sent"], document["missing"], document["proven"]) == (8, 1, False)
        assert document["first"]["missing"][0]["id"] == "waits"
        assert set(pq.read_table(f"{tmp_path}/out/missing")["id"].to_pylist()) == {"waits"}


class TestOffline:
    """With the archive alone, messages without an archived end count as live."""

    def test_after_the_server_is_gone(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        flush(server.url)
        found = audit(spark, lambda: archive, None, stuck_after=timedelta(0))
        assert ends(found) == {"live": 5, "acked": 1, "cancelled": 2}
        assert not found.checked
        asked = audit(spark, lambda: archive, server)
        assert ends(asked) == {"missing": 5, "acked": 1, "cancelled": 2}
        # Messages sent after the archive were lost with the server, and are unknown.
        assert [gap.topic for gap in asked.gaps] == ["orders"]
        before = audit(spark, lambda: archive, server, end=datetime(2026, 1, 1, tzinfo=UTC))
        assert before.proven

    def test_gaps_in_the_range_are_listed(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        moment = datetime(2026, 1, 2, tzinfo=UTC)
        at = int(moment.timestamp() * 1000)
        archive.named_gaps.append(
            ArchiveGap(
                "orders", f"{at}-0", 3, f"{at + 1000}-0", 9, "trimmed: events 4 to 8", moment
            )
        )
        found = audit(spark, lambda: archive, None)
        assert [(gap.topic, gap.after_ms, gap.until_ms) for gap in found.gaps] == [
            ("orders", at, at + 1000)
        ]
        assert not found.proven
        later = audit(spark, lambda: archive, None, start=moment + timedelta(days=1))
        assert later.gaps == []
        assert later.proven

    def test_a_gap_without_a_next_event_lasts_until_one_is_archived(
        self, spark: SparkSession, server: Server, world: World, tmp_path: Path
    ) -> None:
        """As after a failover: the gap is found before the next event is written."""
        archive = frozen(spark, server, ["orders"], f"{tmp_path}/log")
        moment = datetime(2026, 1, 2, tzinfo=UTC)
        at, last = int(moment.timestamp() * 1000), archive.committed["orders"][0]
        [first] = archive.events.select(sf.min(sf.unix_millis("at"))).head()
        for after in (f"{at}-0", last):
            archive.named_gaps.append(ArchiveGap("orders", after, 3, None, None, "lost", moment))
        now = int(time.time() * 1000)

        found = audit(spark, lambda: archive, None, start=moment + timedelta(days=1))

        earlier, later = found.gaps
        assert (earlier.after_ms, earlier.until_ms) == (at, first)
        assert later.after_ms == entry_number(last)[0]
        assert later.until_ms >= now
        assert not found.proven
