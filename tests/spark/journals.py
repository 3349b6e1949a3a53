"""A journal written by tests, and streaming queries that read it."""

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from lisa.core.model.keys import Keys
from lisa.pipeline.jobs.archive import SLOW_START

SLOW_US = 5_000


class Journal:
    """Appends events to one topic's journal with consecutive numbers, as the scripts do."""

    def __init__(self, client: redis.Redis, topic: str = "orders", prefix: str = "lisa") -> None:
        self.client = client
        self.topic = topic
        keys = Keys(prefix)
        self.keys = keys.topic(topic)
        client.zadd(keys.topics, {topic: 1})

    def event(self, **fields: Any) -> bytes:
        """Append one event; returns its entry id."""
        number = int(self.client.hincrby(self.keys.stats, "journaled", 1))
        entry: Any = self.client.xadd(self.keys.events, _event(number, fields))
        return bytes(entry)

    def write(self, count: int, **fields: Any) -> None:
        """Append many events."""
        last = int(self.client.hincrby(self.keys.stats, "journaled", count))
        with self.client.pipeline(transaction=False) as pipe:
            for number in range(last - count + 1, last + 1):
                pipe.xadd(self.keys.events, _event(number, fields))
            pipe.execute()


def _event(number: int, fields: dict[str, Any]) -> dict[Any, Any]:
    plain = {
        "n": number,
        "actor": "producer@host:7",
        "id": f"m{number}",
        "state": "ready",
        "group": "g",
        "attempt": 1,
    }
    return plain | fields


class Following:
    """Runs one streaming query with one checkpoint; each run reads all events, then ends."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, **options: Any) -> None:
        self._spark = spark
        self._options = {"url": url, **{name: str(value) for name, value in options.items()}}
        self._checkpoint = str(folder / "checkpoint")
        self.schema: StructType | str | None = None
        self.after_batch: Callable[[], None] = lambda: None
        self.batches: dict[int, list[Row]] = {}
        self.tasks: dict[int, int] = {}

    def change(self, **options: Any) -> None:
        """Change options of later runs."""
        self._options |= {name: str(value) for name, value in options.items()}

    def frame(self) -> DataFrame:
        """The stream."""
        reading = self._spark.readStream.format("lisa").options(**self._options)
        return (reading.schema(self.schema) if self.schema is not None else reading).load()

    def run(self) -> list[Row]:
        """Read all present events; returns the rows of this run. Raises the query's error."""
        seen = set(self.batches)

        def take(frame: DataFrame, number: int) -> None:
            self.tasks[number] = frame.rdd.getNumPartitions()
            self.batches[number] = frame.collect()
            self.after_batch()

        while True:
            query = self._start(take)
            try:
                query.awaitTermination()
                break
            except StreamingQueryException as error:
                if SLOW_START not in str(error):  # on a busy machine
                    raise
            finally:
                query.stop()
        new = sorted(set(self.batches) - seen)
        return [row for number in new for row in self.batches[number]]

    def _start(self, take: Callable[[DataFrame, int], None]) -> StreamingQuery:
        writer = self.frame().writeStream.foreachBatch(take)
        return (
            writer.option("checkpointLocation", self._checkpoint).trigger(availableNow=True).start()
        )


def numbers(rows: Iterable[Row]) -> list[int]:
    """The event numbers, in order."""
    return sorted(row.number for row in rows)


BOUNDED = "for _ = 1, 2000 do redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1) end"
"""Takes the server about as long as the largest page of any reader: one to two milliseconds."""


def slow_commands(client: redis.Redis, work: Callable[[], object]) -> list[str]:
    """Commands that block the server too long in each of up to five runs of `work`.

    Too long is 5 ms, or three times the median of `BOUNDED` before and after the run: on a busy
    machine everything takes longer. A page that is too large is slow in every run.
    """
    client.config_set("slowlog-log-slower-than", SLOW_US)
    client.xadd("bounded", {"x": "x" * 100})
    slow: dict[bytes, int] = {}
    for run in range(5):
        bounded = [_elapsed_us(client) for _ in range(10)]
        client.slowlog_reset()
        work()
        found = {
            bytes(entry["command"]): int(entry["duration"])
            for entry in client.slowlog_get(128)
            if not entry["command"].startswith((b"CONFIG", b"SLOWLOG"))
        }
        bounded += [_elapsed_us(client) for _ in range(10)]
        limit_us = max(SLOW_US, 3 * statistics.median(bounded))
        slow = {
            name: us for name, us in found.items() if us > limit_us and (run == 0 or name in slow)
        }
        if not slow:
            break
    return [f"{us} us: {name[:100]!r}" for name, us in slow.items()]


def _elapsed_us(client: redis.Redis) -> int:
    """How long `BOUNDED` takes now."""
    begin = time.perf_counter()
    client.eval(BOUNDED, 1, "bounded")
    return int((time.perf_counter() - begin) * 1_000_000)
