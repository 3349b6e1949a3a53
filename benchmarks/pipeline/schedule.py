"""Compares scheduling a Parquet file with Spark and with `send_many` in one process.

    python benchmarks/pipeline/schedule.py [--rows 1000000 --rows 5000000] [--grow 10]

Both send the same files to an embedded server, in turn; it is emptied in between. The Spark session
and the producer are warmed up. Prints one JSON document: for each number of rows those per second
and their ratio, the growth of the time with the rows, and the peak memory of driver and workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.pipeline.memory import Peak
from lisa import Producer
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.schedule import schedule
from lisa.producer import Outgoing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "bench"
PIECE = 50_000
FLUSH_S = 120
"""How long emptying the server may take; ten million messages need more than the usual limit."""
BODY = '{{"order": {n:010d}, "customer": "{c:08d}", "kind": "payment-reminder", "text": "{pad}"}}'


def write_file(path: Path, rows: int) -> None:
    """Write ids, bodies of 100 bytes, and due times within a day that begins in an hour."""
    start = int(time.time() * 1000) + 3_600_000
    names = [("id", pa.string()), ("body", pa.string()), ("due", pa.int64())]
    with pq.ParquetWriter(path, pa.schema(names)) as writer:
        for first in range(0, rows, PIECE):
            some = range(first, min(first + PIECE, rows))
            writer.write_table(
                pa.table(
                    {
                        "id": [f"order-{n:012d}" for n in some],
                        "body": [BODY.format(n=n, c=n * 7919 % 10**8, pad="x" * 20) for n in some],
                        "due": [start + n * 7919 % 86_400_000 for n in some],
                    }
                )
            )


def messages(path: Path, *, ids: bool) -> Iterator[Outgoing]:
    """Read messages with due times, and with ids if `ids`."""
    for batch in pq.ParquetFile(path).iter_batches():
        columns = (batch.column(name).to_pylist() for name in ("id", "body", "due"))
        for message_id, body, due in zip(*columns, strict=True):
            yield Outgoing(body, id=message_id if ids else None, at_ms=due)


class Comparison:
    """Sends the same rows with Spark and with a producer, to a server emptied before each run."""

    def __init__(self, spark: SparkSession, producer: Producer, url: str, scratch: Path) -> None:
        self._spark = spark
        self._producer = producer
        self._url = url
        self._path = scratch / "rows.parquet"

    def warm_up(self) -> None:
        """Send some rows in each way."""
        write_file(self._path, 5_000)
        for ids in (True, False):
            self.plain(ids=ids)
            self.by_spark(ids=ids)

    def run(self, rows: int) -> dict[str, Any]:
        """Rows per second of both, and their ratio, with given and with made ids."""
        write_file(self._path, rows)
        plain, by_spark = {}, {}
        for name, ids in (("ids", True), ("no ids", False)):
            plain[name] = round(rows / self.plain(ids=ids))
            by_spark[name] = round(rows / self.by_spark(ids=ids))
        ratio = {name: round(by_spark[name] / plain[name], 2) for name in plain}
        return {"rows": rows, "plain_per_s": plain, "spark_per_s": by_spark, "ratio": ratio}

    def grown(self, rows: int, times: int) -> float:
        """Spark's time for `times` as many rows, over `times` its time for `rows`; with ids."""
        write_file(self._path, rows)
        before = self.by_spark(ids=True)
        write_file(self._path, times * rows)
        return self.by_spark(ids=True) / (times * before)

    def plain(self, *, ids: bool) -> float:
        """Seconds that one process takes with `send_many`."""
        rows = messages(self._path, ids=ids)
        return self._timed(lambda: self._producer.send_many(TOPIC, rows))

    def by_spark(self, *, ids: bool) -> float:
        """Seconds that Spark takes."""
        return self._timed(lambda: self._send(ids=ids))

    def _timed(self, work: Callable[[], Any]) -> float:
        link = Connection(Address(self._url, socket_timeout_s=FLUSH_S))
        link.execute(("FLUSHALL", "SYNC"))
        link.close()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def _send(self, *, ids: bool) -> None:
        df = self._spark.read.parquet(str(self._path))
        done = schedule(
            df if ids else df.drop("id"),
            url=self._url,
            topic=TOPIC,
            job=None if ids else "bench",
        )
        if done.accepted != pq.read_metadata(self._path).num_rows:
            raise SystemExit(f"{done} is not all of {self._path}")


def measure(rows: Sequence[int], grow: int, master: str) -> dict[str, Any]:
    """Run all measurements; returns the figures."""
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer() as server:
        spark = spark_session(app="bench", master=master, settings={"spark.local.dir": scratch})
        with Producer(server.url) as producer, Peak() as memory:
            comparison = Comparison(spark, producer, server.url, Path(scratch))
            comparison.warm_up()
            runs = [comparison.run(count) for count in rows]
            growth = round(comparison.grown(rows[0], grow), 2) if grow > 1 else None
        spark.stop()
    return {"master": master, "runs": runs, "growth": growth, "memory_mib": round(memory.mib)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="may be repeated; 1,000,000")
    parser.add_argument(
        "--grow",
        type=int,
        default=1,
        metavar="N",
        help="also send N times the first number of rows: growth is time over N times the time",
    )
    parser.add_argument("--master", default="local[2]")
    given = parser.parse_args()
    print(json.dumps(measure(given.rows or [1_000_000], given.grow, given.master)))


if __name__ == "__main__":
    main()
