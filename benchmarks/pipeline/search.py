"""Measures search, erasure and retention: `python benchmarks/pipeline/search.py [EVENTS]`.

Creates an archive in files with EVENTS (default 10,000,000: three days of six topics), and searches
it in a warm session on `local[2]`, as `lisa pipeline search --no-live` does: by id (median of five
different ids, each with opening the archive), and by a field of the body. Then erases one id, and
deletes the messages that ended in the first day. Also measures the planning of a search by id in an
archive of a year with a file for each day and 100 topics. Prints one JSON document; the times of
session start and archive creation are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from benchmarks.pipeline.traffic import EVENTS_OF_A_MESSAGE, Tables, commit, write
from lisa.pipeline import spark_session
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.schemas import LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.jobs.deletion import erase, retain
from lisa.pipeline.jobs.search import FieldTest, Query, search

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

END_S = int(datetime.now(UTC).timestamp())
HOURS, DAYS, TOPICS = 72, 365, 100
SHOWN = 51
"""Number of messages that the command fetches: those it shows by default, and one more."""


def seconds(work: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def found(spark: SparkSession, where: str, query: Query) -> int:
    """The number of messages that a search shows."""
    return len(search(spark, query, archive=open_archive(spark, where)).limit(SHOWN).collect())


def searches(spark: SparkSession, where: str) -> dict[str, Any]:
    """Seconds of searches by id and by field."""
    messages = open_archive(spark, where).messages()
    ids = [row.id for row in messages.select("id").limit(7).collect()]
    expected = messages.where(sf.col("body").isNotNull()).select("body").first()
    body = json.loads(bytes(expected.body)) if expected else {}
    by_id = [seconds(partial(found, spark, where, Query(ids=[one]))) for one in ids]
    test = FieldTest.parse(f"$.order={body['order']}")
    by_field = [seconds(partial(found, spark, where, Query(fields=[test]))) for _ in range(2)]
    return {
        "first_search_seconds": round(by_id[0], 2),
        "by_id_seconds": round(statistics.median(by_id[2:]), 2),
        "by_field_seconds": round(by_field[-1], 2),
        "found_by_field": found(spark, where, Query(fields=[test])),
    }


def deletions(spark: SparkSession, where: str) -> dict[str, Any]:
    """Seconds of an erasure of one id, and of a retention that deletes a day of three."""
    one = open_archive(spark, where).messages().where("settled").select("id").first()
    began = time.perf_counter()
    erased = erase(spark, where, [one.id if one else ""], server=None)
    erasing = time.perf_counter() - began
    kept = retain(spark, where, timedelta(hours=HOURS - 24))
    return {
        "erase_seconds": round(erasing, 1),
        "erased_messages": erased.messages,
        "retain_seconds": round(kept.seconds, 1),
        "retained_deletes_events": kept.events,
    }


def a_year(spark: SparkSession, where: Path) -> dict[str, Any]:
    """Seconds to open an archive of a year and plan a search by id in it."""
    settled_at = sf.timestamp_seconds(sf.lit(END_S) - sf.col("n") % DAYS * 86_400)
    filled = {
        "topic": sf.concat(sf.lit("topic-"), sf.floor(sf.col("n") / DAYS).cast("string")),
        "id": sf.concat(sf.lit("m"), sf.col("n").cast("string")),
        "state": sf.lit("acked"),
        "settled": sf.lit(True),  # noqa: FBT003
        "attempts": sf.lit(0),
        "updated_at": settled_at,
        "settled_at": settled_at,
        "groups": sf.array(),
    }
    rows = spark.range(DAYS * TOPICS).toDF("n")
    commit(spark, where, _empty_log(spark), _shaped(rows, filled))
    files = len(list((where / "messages").rglob("*.parquet")))
    url, times = str(where), []
    for _ in range(5):
        planned = seconds(lambda: _plan(search(spark, _ONE, archive=open_archive(spark, url))))
        times.append(planned)
    whole = seconds(lambda: found(spark, url, _ONE))
    return {
        "year_files": files,
        "year_planning_seconds": round(statistics.median(times[1:]), 2),
        "year_by_id_seconds": round(whole, 2),
    }


_ONE = Query(ids=["m4711"])


def _plan(rows: DataFrame) -> None:
    """Plan a query without running it; the plan itself is not shown."""
    out = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            rows.explain()
            sys.stdout.flush()
        finally:
            os.dup2(out, 1)
            os.close(out)


def _empty_log(spark: SparkSession) -> DataFrame:
    row = {
        "topic": sf.lit("topic-0"),
        "id": sf.lit("m0"),
        "state": sf.lit("sent"),
        "at": sf.timestamp_seconds(sf.lit(END_S)),
        "attempt": sf.lit(0),
        "settled": sf.lit(False),  # noqa: FBT003
        "seq": sf.lit(0),
        "number": sf.lit(1),
    }
    columns = (row.get(one.name, sf.lit(None)).cast(one.dataType) for one in LOG_SCHEMA)
    names = LOG_SCHEMA.names
    return spark.range(1).select(*(c.alias(n) for c, n in zip(columns, names, strict=True)))


def _shaped(rows: DataFrame, filled: dict[str, Any]) -> DataFrame:
    return rows.select(
        *(
            filled.get(one.name, sf.lit(None)).cast(one.dataType).alias(one.name)
            for one in MESSAGES_SCHEMA
        )
    )


def main(events: int) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    spark = spark_session(app="benchmark", master="local[2]")
    with tempfile.TemporaryDirectory(prefix="lisa-search-") as folder:
        plain, where = Path(folder, "plain"), Path(folder, "archive")
        count = round(events / EVENTS_OF_A_MESSAGE)
        made: Tables = write(spark, plain, count, end_s=END_S, hours=HOURS)
        commit(spark, where, made.log(), made.messages())
        figures = {
            "events": made.log().count(),
            "messages": made.messages().count(),
            **searches(spark, str(where)),
            **deletions(spark, str(where)),
            **a_year(spark, Path(folder, "year")),
        }
    spark.stop()
    return figures


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)))
