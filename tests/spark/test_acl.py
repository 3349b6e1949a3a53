"""All jobs run with the pipeline's ACL user: no command is refused, and no right is unused."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lisa.core.transitions.change import Cancel
from lisa.core.transitions.retry import Fail, Failure
from lisa.embedded import EmbeddedServer
from lisa.pipeline.archive import Archive, open_archive
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.jobs.audit import audit
from lisa.pipeline.jobs.deletion import erase
from lisa.pipeline.jobs.restore import restore
from lisa.pipeline.jobs.schedule import schedule
from lisa.pipeline.jobs.search import Query, search
from lisa.pipeline.server import Server
from lisa.pipeline.source.events import Mark
from lisa.pipeline.source.following import find_unread, raise_last_id
from lisa.pipeline.source.sending import SharedRate
from tests.acl_stage import Stage


@pytest.fixture
def stage(valkey_server: EmbeddedServer) -> Iterator[Stage]:
    stage = Stage(valkey_server.url, "pipeline")
    yield stage
    stage.close()


@pytest.mark.slow
def test_all_jobs_run_with_the_pipeline_s_rights(
    stage: Stage, spark: SparkSession, tmp_path: Path
) -> None:
    cast = stage.cast().declare(
        journal="1", retry_delays="3600000,3600000", dedupe_for="60000", capacity="100000"
    )
    h = stage.cast(group="h").declare()
    for number in range(6):
        cast.send({"order": number}, message_id=f"m{number}", ttl_ms=3_600_000)
    for one in (cast, h):
        dead, failed, *_ = one.take(3)
        one.discard(dead)
        one.store.call(Fail("orders", one.group, [Failure(failed.id, failed.entry, "no")]))
    cast.send(message_id="later", delay_ms=3_600_000, policy="1000")
    for name in ("gone", "m30", "erased"):
        cast.send(message_id=name, delay_ms=3_600_000)
    body = stage.admin.get(cast.keys.body("gone"))
    cast.store.call(Cancel("orders", ["gone", "m30", "erased"]))
    server, where = Server(stage.url), f"{tmp_path}/archive"

    def opened() -> Archive:
        return open_archive(spark, where)

    with stage.watched():
        rows = spark.range(0, 40, 1, 2).selectExpr("concat('x', id) AS body")
        schedule(
            rows,
            topic="orders",
            url=stage.url,
            job="j",
            max_rate=200.0,
            dedupe_for=timedelta(hours=1),
            report=f"{tmp_path}/report.json",
        )
        named = rows.selectExpr("concat('m', substr(body, 2)) AS id", "body")
        schedule(named, topic="orders", url=stage.url, on_duplicate="replace")
        local = rows.selectExpr(
            "body AS id", "body", "'2100-01-01T09:00' AS at_local", "'UTC' AS tz"
        )
        schedule(local, topic="orders", url=stage.url)
        loader: dict[str, Any] = {
            "job": "l",
            "due_within": timedelta(days=1),
            "cancelled": "gone",
            "sync": True,
        }
        for hours, gone in ((1, "false"), (2, "id = 'y1'")):
            due = f"unix_millis(now()) + {hours} * 3600000 AS due"
            loaded = spark.range(3).selectExpr("concat('y', id) AS id", "'' AS body", due)
            loaded = loaded.selectExpr("*", f"{gone} AS gone")
            schedule(loaded, topic="orders", url=stage.url, **loader)
        archive(spark, where, url=stage.url, once=True)
        search(spark, Query(), archive=opened(), server=server).collect()
        audit(spark, opened, server)
        erase(spark, where, ["erased"], server=server)
    stage.admin.flushdb()
    stage.admin.set(cast.keys.body("gone"), body)  # as on an older copy of the server
    stage.admin.zadd(cast.keys.waiting, {"gone": 4_102_444_800_000})
    with stage.watched():
        restored = restore(spark, opened(), server, f"{tmp_path}/lists", settle_revived=True)
        archive(spark, where, url=stage.url, once=True, on_gap="record")
        with server.open() as store:
            store.drive(raise_last_id(store, "fresh", Mark("1-1", 0)))
            store.drive(find_unread(store, "orders", Mark("99999999999999-0", 1), None))
            pace = SharedRate(store, "test", 100.0)
            for _ in range(5):
                pace.wait_for(6)  # of ten in a tenth of a second: every other one waits
    assert restored.counts["restored"]
    assert stage.refused() == []
    assert sorted(set(stage.rights) - stage.called) == []
