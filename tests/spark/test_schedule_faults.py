"""Failing tasks, repeated batches and killed drivers: no row is sent twice."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.source import register
from tests.servers import JVM_PATIENCE, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import redis
    from pyspark.sql import DataFrame, SparkSession

    from tests.servers import Process, Processes

TOPIC = "orders"
KEYS = Keys().topic(TOPIC)

FAILING_TASKS = """
import sys, time
from pyspark import TaskContext
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.schedule import schedule

url, with_ids = sys.argv[1], sys.argv[2] == "ids"

def broken(rows):
    # Both tasks fail after sending some rows; the second attempt reads them in another order.
    attempt = TaskContext.get().attemptNumber()
    rows = list(rows)
    for number, row in enumerate(reversed(rows) if attempt else rows):
        if attempt == 0 and number == 2500:
            raise OSError("the machine is gone")
        yield row

spark = spark_session(app="faults", master="local[2,4]", settings={
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
})
columns = ["concat('body ', id % 4000) AS body", "4102444800000 AS due"]
if with_ids:
    columns.append("cast(id AS string) AS id")
df = spark.range(0, 8000, 1, 2).selectExpr(*columns)
df = spark.createDataFrame(df.rdd.mapPartitions(broken), df.schema)
options = {"url": url, "topic": "orders", "report": sys.argv[3]}
if not with_ids:
    options["job"] = "j"
df.write.format("lisa").options(**options).mode("append").save()
"""


@pytest.mark.parametrize("ids", ["ids", pytest.param("none", marks=pytest.mark.slow)])
def test_a_task_that_fails_midway_is_repeated_and_adds_nothing(
    processes: Processes, redis_url: str, client: redis.Redis, tmp_path: Path, ids: str
) -> None:
    program, report = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(FAILING_TASKS, "utf-8")
    run = processes.start(str(program), redis_url, ids, str(report))
    assert run.wait(timeout=JVM_PATIENCE) == 0, run.output
    told = json.loads(report.read_text("utf-8"))
    # Each row gets the answer of the first attempt, although that attempt never reported.
    assert (told["accepted"], told["duplicate"]) == (8000, 0)
    assert client.zcard(KEYS.waiting) == 8000
    sent = client.hget(KEYS.stats, "sent")
    assert sent == b"8000"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three files of 500 rows, each a batch of the stream."""
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"n": part * 500 + n, "text": f"row {n % 100}"}) for n in range(500)]
        (folder / f"{part}.json").write_text("\n".join(lines), "utf-8")
    return folder


def stream(spark: SparkSession, source: Path, *, ids: bool) -> DataFrame:
    rows = (
        spark.readStream.schema("n long, text string")
        .option("maxFilesPerTrigger", 1)
        .json(str(source))
    )
    columns = ["text AS body", "4102444800000 AS due"]
    return rows.selectExpr(*columns, *(["cast(n AS string) AS id"] if ids else []))


def follow(df: DataFrame, url: str, checkpoint: Path, **options: str) -> None:
    register(df.sparkSession)
    given = {"url": url, "topic": TOPIC, "checkpointLocation": str(checkpoint), **options}
    query = df.writeStream.format("lisa").options(**given).trigger(availableNow=True).start()
    try:
        with unwrapped():
            query.awaitTermination()
    finally:
        query.stop()


@pytest.mark.parametrize("ids", [True, False])
def test_a_streams_batch_that_is_repeated_adds_nothing(
    spark: SparkSession,
    client: redis.Redis,
    redis_url: str,
    source: Path,
    *,
    ids: bool,
) -> None:
    checkpoint, report = source / "../checkpoint", source / "../report"
    options = {"report": str(report)} | ({} if ids else {"job": "j"})
    follow(stream(spark, source, ids=ids), redis_url, checkpoint, **options)
    assert client.zcard(KEYS.waiting) == 1500  # without ids, equal rows are separate messages

    def told(batch: int) -> tuple[int, int]:
        found = json.loads((report / f"batch-{batch}.json").read_text("utf-8"))
        return found["accepted"], found["duplicate"]

    assert [told(batch) for batch in range(3)] == [(500, 0)] * 3
    # As if the driver had been killed before committing the last batch.
    shutil.rmtree(report)
    for name in ("2", ".2.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    follow(stream(spark, source, ids=ids), redis_url, checkpoint, **options)
    assert told(2) == (500, 0)  # same answers as the first time
    assert client.zcard(KEYS.waiting) == 1500
    assert client.hget(KEYS.stats, "sent") == b"1500"


def holds_more(client: redis.Redis, key: str, than: int) -> bool:
    return client.zcard(key) > than


def test_a_stream_of_the_rate_source_continues_after_each_restart(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """The last batch of each run is repeated, as after a kill before its commit.

    `stop` cancels the tasks of a batch, but does not wait for their processes, which may still
    send: the prefix keeps these rows out of the next test, and the last run ends by itself.
    """
    register(spark)
    checkpoint = tmp_path / "checkpoint"
    keys = Keys("rate").topic(TOPIC)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 200).load()
    df = rate.selectExpr("cast(value AS string) AS id", "'x' AS body", "4102444800000 AS due")
    given = {"prefix": "rate", "checkpointLocation": str(checkpoint)}
    writer = df.writeStream.format("lisa").options(url=redis_url, topic=TOPIC, **given)
    for _ in range(2):
        before = client.zcard(keys.waiting)
        query = writer.start()
        try:
            wait_until(partial(holds_more, client, keys.waiting, before), timeout=JVM_PATIENCE)
        finally:
            query.stop()
        assert query.exception() is None
        commits = [file for file in (checkpoint / "commits").iterdir() if file.name.isdigit()]
        if commits:
            last = max(commits, key=lambda file: int(file.name))
            last.unlink()
            (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    writer.trigger(availableNow=True).start().awaitTermination()
    ids: Any = client.zrange(keys.waiting, 0, -1)
    sent = sorted(map(int, ids))
    assert sent == list(range(len(sent)))
    assert client.hget(keys.stats, "sent") == str(len(sent)).encode()


def test_equal_rows_of_later_batches_are_new_messages(
    spark: SparkSession, redis_url: str, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    df = stream(spark, source, ids=False).withColumn("body", F.lit("the same"))
    follow(df, redis_url, tmp_path / "checkpoint", job="j")
    assert client.zcard(KEYS.waiting) == 1500


def test_a_stream_with_invalid_columns_fails_with_their_names(
    spark: SparkSession, redis_url: str, source: Path, tmp_path: Path
) -> None:
    df = stream(spark, source, ids=True).withColumn("due", F.lit("tomorrow"))
    with pytest.raises(ConfigError, match="column 'due' has type string"):
        follow(df, redis_url, tmp_path / "checkpoint")


STREAM = """
import sys
from lisa.pipeline import spark_session

url, source, checkpoint, rate = sys.argv[1:]
spark = spark_session(app="stream", master="local[2]")
rows = spark.readStream.schema("n long, text string").option("maxFilesPerTrigger", 1).json(source)
df = rows.selectExpr("text AS body", "4102444800000 AS due")
query = (df.writeStream.format("lisa").option("url", url).option("topic", "orders")
         .option("job", "j").option("checkpointLocation", checkpoint).option("max_rate", rate)
         .trigger(availableNow=True).start())
query.awaitTermination()
print("done", flush=True)
"""


def test_a_driver_killed_during_a_batch_sends_every_row_once(
    processes: Processes, redis_url: str, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    program = tmp_path / "stream.py"
    program.write_text(STREAM, "utf-8")

    def start(rate: str) -> Process:
        arguments = (str(program), redis_url, str(source), str(tmp_path / "checkpoint"), rate)
        return processes.start(*arguments)

    for reached in (150, 700):
        run = start("200")
        while client.zcard(KEYS.waiting) < reached:
            assert run.alive, run.output
            time.sleep(0.01)
        run.kill()
        run.end()  # its JVM, too
        assert client.zcard(KEYS.waiting) < 1500
    run = start("100000")
    assert run.wait(timeout=JVM_PATIENCE) == 0, run.output
    assert client.zcard(KEYS.waiting) == 1500
    assert client.hget(KEYS.stats, "sent") == b"1500"
