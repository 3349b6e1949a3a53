"""Measures the restore of a lost server: `python benchmarks/pipeline/restore.py [MESSAGES]`.

Creates an archive with MESSAGES unsettled messages (default 1,000,000: most waiting, the others in
retry or garbage of one group, bodies of about 100 bytes) and a third as many settled ones, and
restores it into an empty server on `local[2]`. The times of session start and archive creation are
not counted. Prints one JSON document; `ratio` is the rate relative to `send_many` in one process in
the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from benchmarks.pipeline.memory import Peak
from lisa import Producer
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.archive.schemas import LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.jobs.restore import restore
from lisa.pipeline.server import Server

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TARGET_S = 120.0
PLAIN = 100_000


@dataclass(frozen=True)
class Record:
    """The options and groups of a topic in an archive."""

    options: dict[str, str]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """A generated archive in Parquet."""

    spark: SparkSession
    where: str

    def messages(self) -> DataFrame:
        """See `Archive`."""
        return self.spark.read.schema(MESSAGES_SCHEMA).parquet(self.where)

    def log(self) -> DataFrame:
        """An empty log, which is not read without a journal."""
        return self.spark.createDataFrame([], LOG_SCHEMA)

    def offsets(self) -> dict[str, tuple[str, int]]:
        """See `Archive`."""
        return {"orders": (f"{int(time.time() * 1000) - 60_000}-0", 1)}

    def topics(self) -> dict[str, Record]:
        """See `Archive`."""
        return {"orders": Record({"ack_timeout": "30000", "journal": "1"}, ("lisa",))}

    def gaps(self) -> list[Any]:
        """See `Archive`."""
        return []


def _body(number: Column) -> Column:
    filler = sf.lit('","customer":"somebody","items":["one","two","three"],"note":"')
    return sf.concat(
        sf.lit('{"order":"'), number, filler, sf.md5(number.cast("string")), sf.lit('"}')
    )


def make(spark: SparkSession, where: str, count: int) -> None:
    """Write the table `messages`."""
    number = sf.col("number")
    share = number % 12
    state = (
        sf.when(share < 7, "waiting")
        .when(share == 7, "retry")
        .when(share == 8, "garbage")
        .otherwise("acked")
    )
    now = sf.current_timestamp()
    due = now + sf.make_dt_interval(hours=sf.lit(1), secs=(number % 86_400).cast("decimal(18,6)"))
    in_group = sf.struct(
        sf.lit("lisa").alias("group"),
        sf.col("state"),
        sf.lit(2).alias("attempts"),
        due.alias("due"),
        sf.lit("it said no").alias("reason"),
        now.alias("at"),
    )
    rows = (
        spark.range(0, count * 4 // 3, numPartitions=8)
        .withColumnRenamed("id", "number")
        .select(
            sf.lit("orders").alias("topic"),
            sf.format_string("m%012d", number).alias("id"),
            sf.substring(sf.md5(number.cast("string")), 1, 8).alias("token"),
            state.alias("state"),
            (share > 8).alias("settled"),
            due.alias("due"),
            sf.lit(None).alias("expires"),
            sf.lit(None).alias("policy"),
            sf.when(share > 6, 2).otherwise(0).alias("attempts"),
            sf.lit("j").alias("kind"),
            sf.lit(None).alias("headers"),
            _body(number).cast("binary").alias("body"),
            now.alias("sent_at"),
            now.alias("updated_at"),
            sf.lit(None).alias("settled_at"),
            sf.lit("producer@bench:1").alias("actor"),
            sf.lit("bench").alias("host"),
            sf.lit(None).alias("reason"),
            sf.lit(None).alias("late_us"),
            number.alias("number"),
        )
    )
    groups = sf.when(sf.col("state") == "waiting", sf.array()).otherwise(sf.array(in_group))
    shaped = rows.withColumn("groups", groups)
    columns = [sf.col(one.name).cast(one.dataType).alias(one.name) for one in MESSAGES_SCHEMA]
    shaped.select(*columns).write.parquet(where)


def plain_rate(url: str) -> float:
    """Messages per second of `send_many` in this process."""
    bodies = [{"order": n, "customer": "somebody", "note": "x" * 60} for n in range(PLAIN)]
    with Producer(url) as producer:
        began = time.perf_counter()
        producer.send_many("plain", bodies, delay=timedelta(hours=1))
        return PLAIN / (time.perf_counter() - began)


def main(count: int) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    spark = spark_session(app="restore benchmark", master="local[2]")
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        make(spark, f"{folder}/messages", count)
        rate = plain_rate(server.url)
        client = Connection(Address(server.url))
        client.execute(("FLUSHALL",))
        archive: Any = Made(spark, f"{folder}/messages")
        with Peak() as memory:
            result = restore(
                spark,
                archive,
                Server(server.url),
                f"{folder}/report",
                stage=lambda line: print(line, file=sys.stderr),
            )
        waiting = client.execute(("ZCARD", "lisa:{orders}:waiting"))
        again = restore(spark, archive, Server(server.url), f"{folder}/again")
        lists = sum(file.stat().st_size for file in Path(folder, "report").rglob("*.parquet"))
        client.close()
    spark.stop()
    restored = result.counts["restored"]
    return {
        "messages": restored,
        "seconds": result.seconds,
        "target_s": TARGET_S * count / 1e6,
        "per_second": round(restored / result.seconds),
        "plain_per_second": round(rate),
        "ratio": round(restored / result.seconds / rate, 3),
        "waiting": waiting,
        "again": {"seconds": again.seconds, **again.counts},
        "lists_bytes": lists,
        "memory_mib": round(memory.mib),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)))
