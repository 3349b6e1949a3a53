"""Measures search, erasure and retention: `python benchmarks/pipeline/search.py [EVENTS]`.

Creates an archive in files with EVENTS (default 10,000,000: three days of six topics), and searches
it in a warm session on `local[2]`, as `lisa pipeline search --no-live` does: by id (median of five
different ids, each with opening the archive), and by a field of the body. Then erases one id, and
deletes the messages that ended in the first day. Also opens an archive of a year in 20,000 files,
and searches it by id. Prints one JSON document; the times of session start and archive creation are
not counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema

from benchmarks.pipeline.traffic import EVENTS_OF_A_MESSAGE, Tables, commit, write
from lisa.pipeline import spark_session
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.reading import MESSAGES, FoldState, new_number, save
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.table import COMPRESSION, STATE, WrittenFile, statistics_of
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.deletion import erase, retain
from lisa.pipeline.jobs.search import FieldTest, Query, search

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

END_S = int(datetime.now(UTC).timestamp())
HOURS, FILES, TOPICS = 72, 20_000, 100
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


def many_files(spark: SparkSession, where: Path) -> dict[str, Any]:
    """Seconds to open an archive of a year in FILES files, and to search it by id."""
    writer = FileWriter(spark, str(where))
    writer.write(_one_event(spark), 0, "benchmark")
    tables, number = writer.tables, new_number()
    save(tables.folder, FoldState(number, tables.state.number, tables.state.offsets))
    tables.messages.commit([_written(where, index) for index in range(FILES)], {STATE: number})
    opening = [seconds(partial(open_archive, spark, str(where))) for _ in range(5)]
    ids = [_id_in(FILES * part // 7) for part in range(7)]
    by_id, counts = list[float](), list[int]()
    for one in ids:
        began = time.perf_counter()
        counts.append(found(spark, str(where), Query(ids=[one])))
        by_id.append(time.perf_counter() - began)
    return {
        "files": FILES,
        "found_in_files": counts,
        "files_opening_seconds": round(statistics.median(opening), 2),
        "files_by_id_seconds": round(statistics.median(by_id[2:]), 2),
    }


def _written(where: Path, index: int) -> WrittenFile:
    """A file of messages that ended within half an hour; their ids sort in order of creation."""
    end = datetime.fromtimestamp(END_S, UTC) - timedelta(days=365) * (1 - index / FILES)
    message = {
        "topic": f"topic-{index % TOPICS}",
        "state": "acked",
        "settled": True,
        "attempts": 0,
        "updated_at": end,
        "settled_at": end,
        "groups": [],
    }
    messages = [{**message, "id": _id_in(index, row)} for row in range(10)]
    path = f"day={end.date()}/{index}.parquet"
    whole = where / MESSAGES / path
    whole.parent.mkdir(parents=True, exist_ok=True)
    schema = to_arrow_schema(MESSAGES_SCHEMA, timezone="UTC")
    pq.write_table(pa.Table.from_pylist(messages, schema), whole, compression=COMPRESSION)
    stats = statistics_of(pq.read_metadata(whole))
    return WrittenFile(path, whole.stat().st_size, str(end.date()), stats)


def _id_in(index: int, row: int = 0) -> str:
    """The id of a message in the file of an index."""
    return f"{index:08}-{row}"


def _one_event(spark: SparkSession) -> DataFrame:
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
    columns = (row.get(one.name, sf.lit(None)).cast(one.dataType) for one in EVENT_SCHEMA)
    names = EVENT_SCHEMA.names
    return spark.range(1).select(*(c.alias(n) for c, n in zip(columns, names, strict=True)))


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
            **many_files(spark, Path(folder, "files")),
        }
    spark.stop()
    return figures


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)))
