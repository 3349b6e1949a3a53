"""Failing tasks, repeated batches and killed drivers: no row is sent twice."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa.core.model.errors import ConfigError, KeyFull, LisaError, TopicFull
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.source import register
from tests.servers import JVM_PATIENCE, Processes, wait_until
from tests.spark.jobs import KEYS, TOPIC, Jobs

BATCH_SIZE = "spark.sql.execution.arrow.maxRecordsPerBatch"


def broken(rows: Iterable[Any]) -> Iterator[Any]:
    """Each task fails after it has sent rows; the second attempt reads them in another order."""
    context = TaskContext.get()
    attempt = context.attemptNumber() if context else 0
    found = list(rows)
    for number, row in enumerate(reversed(found) if attempt else found):
        if attempt == 0 and number == 600:
            raise OSError("the machine is gone")
        yield row


@pytest.mark.parametrize("ids", [True, False])
def test_a_task_that_fails_midway_is_repeated_and_adds_nothing(jobs: Jobs, *, ids: bool) -> None:
    spark, report = jobs.spark, jobs.folder / "report.json"
    columns = ["concat('body ', id % 1000) AS body", "4102444800000 AS due"]
    if ids:
        columns.append("cast(id AS string) AS id")
    df = spark.range(0, 2000, 1, 2).selectExpr(*columns)
    rows = spark.createDataFrame(df.rdd.mapPartitions(broken), df.schema)
    given = {"url": jobs.url, "topic": TOPIC, "report": str(report)}
    if not ids:
        given["job"] = "j"
    spark.conf.set(BATCH_SIZE, "250")
    try:
        rows.write.format("lisa").options(**given).mode("append").save()
    finally:
        spark.conf.unset(BATCH_SIZE)
    told = json.loads(report.read_text("utf-8"))
    # Each row gets the answer of the first attempt, although that attempt never reported.
    assert (told["accepted"], told["duplicate"]) == (2000, 0)
    assert jobs.client.zcard(KEYS.waiting) == 2000
    assert jobs.client.hget(KEYS.stats, "sent") == b"2000"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three files of 500 rows, each a batch of the stream."""
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"n": part * 500 + n, "text": f"row {n % 100}"}) for n in range(500)]
        (folder / f"{part}.json").write_text("\n".join(lines), "utf-8")
    return folder


def stream(spark: SparkSession, source: Path) -> DataFrame:
    reading = spark.readStream.schema("n long, text string").option("maxFilesPerTrigger", 1)
    return reading.json(str(source)).selectExpr("text AS body", "4102444800000 AS due")


def follow(df: DataFrame, url: str, checkpoint: Path, **options: str) -> None:
    register(df.sparkSession)
    given = {"url": url, "topic": TOPIC, "checkpointLocation": str(checkpoint), "job": "j"}
    writer = df.writeStream.format("lisa").options(**given | options)
    query = writer.trigger(availableNow=True).start()
    try:
        with unwrapped():
            query.awaitTermination()
    finally:
        query.stop()


def test_a_streams_batch_that_is_repeated_adds_nothing(jobs: Jobs, source: Path) -> None:
    """Equal rows, in one batch or several, are separate messages."""
    checkpoint, report = jobs.folder / "checkpoint", jobs.folder / "report"
    rows = stream(jobs.spark, source)

    def told(batch: int) -> tuple[int, int]:
        found = json.loads((report / f"batch-{batch}.json").read_text("utf-8"))
        return found["accepted"], found["duplicate"]

    follow(rows, jobs.url, checkpoint, report=str(report))
    assert jobs.client.zcard(KEYS.waiting) == 1500
    assert [told(batch) for batch in range(3)] == [(500, 0)] * 3
    # As if the driver had been killed before committing the last batch.
    shutil.rmtree(report)
    for name in ("2", ".2.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    follow(rows, jobs.url, checkpoint, report=str(report))
    assert told(2) == (500, 0)  # same answers as the first time
    assert jobs.client.zcard(KEYS.waiting) == 1500
    assert jobs.client.hget(KEYS.stats, "sent") == b"1500"
    wrong = rows.withColumn("due", F.lit("tomorrow"))
    with pytest.raises(ConfigError, match="column 'due' has type string"):
        follow(wrong, jobs.url, jobs.folder / "other")


def one_batch(jobs: Jobs, columns: str) -> DataFrame:
    """A stream of one batch of 20 rows."""
    folder = jobs.folder / "in"
    folder.mkdir()
    lines = [json.dumps({"n": n, "text": None if n % 8 == 7 else f"{n}"}) for n in range(20)]
    (folder / "0.json").write_text("\n".join(lines), "utf-8")
    rows = jobs.spark.readStream.schema("n long, text string").json(str(folder))
    return rows.selectExpr("n AS id", "3600000 AS delay", *columns.split(";"))


@pytest.mark.parametrize(
    ("option", "error", "sent"), [("capacity", TopicFull, 5), ("max_per_key", KeyFull, 10)], ids=str
)
def test_a_stream_into_a_full_topic_fails_and_continues_when_there_is_room(
    jobs: Jobs, option: str, error: type[Exception], sent: int
) -> None:
    """No option turns rows without room into refused ones. A full key holds up no other key."""
    jobs.client.hset(KEYS.options, option, "5")
    rows = one_batch(jobs, "'x' AS body;if(n % 4 = 3, 'other', 'k') AS key")
    checkpoint, report = jobs.folder / "checkpoint", jobs.folder / "report"
    for options in ({}, {"mode": "permissive", "refused": str(jobs.folder / "refused")}):
        with pytest.raises(error, match=option):
            follow(rows, jobs.url, checkpoint, report=str(report), patience="100ms", **options)
        assert jobs.client.zcard(KEYS.waiting) == sent
    assert not report.exists()
    assert not (jobs.folder / "refused").exists()
    jobs.client.hdel(KEYS.options, option)
    follow(rows, jobs.url, checkpoint, report=str(report))
    assert jobs.client.zcard(KEYS.waiting) == 20
    told = json.loads((report / "batch-0.json").read_text("utf-8"))
    assert (told["accepted"], told["duplicate"], told["refused"]) == (20, 0, 0)


def test_rows_of_a_stream_that_can_never_be_sent_fail_their_batch(jobs: Jobs) -> None:
    rows, checkpoint = one_batch(jobs, "text AS body"), jobs.folder / "checkpoint"
    for _ in range(2):
        with pytest.raises(LisaError, match=r"2 rows were refused, .* option 'refused'") as caught:
            follow(rows, jobs.url, checkpoint)
        assert f"{TOPIC} 7: body" in str(caught.value)
        assert jobs.client.zcard(KEYS.waiting) == 18
    folder = jobs.folder / "refused"
    follow(rows, jobs.url, checkpoint, refused=str(folder))
    texts = [file.read_text("utf-8") for file in folder.iterdir()]
    refused = [json.loads(line) for text in texts for line in text.splitlines()]
    assert sorted(line["row"]["id"] for line in refused) == [7, 15]
    assert jobs.client.zcard(KEYS.waiting) == 18


STREAM = """
import sys
from lisa.pipeline import spark_session

url, source, checkpoint = sys.argv[1:]
spark = spark_session(app="stream", master="local[2]")
rows = spark.readStream.schema("n long, text string").option("maxFilesPerTrigger", 1).json(source)
df = rows.selectExpr("text AS body", "4102444800000 AS due")
query = (df.writeStream.format("lisa").option("url", url).option("topic", "orders")
         .option("job", "j").option("checkpointLocation", checkpoint).option("max_rate", "200")
         .trigger(availableNow=True).start())
query.awaitTermination()
"""


def test_a_driver_killed_during_a_batch_sends_every_row_once(
    processes: Processes, jobs: Jobs, source: Path
) -> None:
    checkpoint, client = jobs.folder / "checkpoint", jobs.client
    run = processes.start("-c", STREAM, jobs.url, str(source), str(checkpoint))
    wait_until(lambda: not run.alive or client.zcard(KEYS.waiting) >= 600, timeout=JVM_PATIENCE)
    run.kill()
    run.end()  # its JVM, too
    assert 600 <= client.zcard(KEYS.waiting) < 1500, run.output
    follow(stream(jobs.spark, source), jobs.url, checkpoint)
    assert client.zcard(KEYS.waiting) == 1500
    assert client.hget(KEYS.stats, "sent") == b"1500"
