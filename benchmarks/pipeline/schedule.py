"""Compares scheduling a Parquet file with Spark and with `send_many` in one process.

    python benchmarks/pipeline/schedule.py [--rows 1000000]

Both send the same file to an embedded server that is emptied in between; the Spark session and the
producer are warmed up. Prints one JSON document: rows per second, their ratio, and the peak memory
of driver and workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
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


def bodies(path: Path) -> Iterator[str]:
    """Read the bodies."""
    for batch in pq.ParquetFile(path).iter_batches(columns=["body"]):
        yield from batch.column(0).to_pylist()


def messages(path: Path, *, ids: bool) -> Iterator[Outgoing]:
    """Read messages with due times, and with ids if `ids`."""
    for batch in pq.ParquetFile(path).iter_batches():
        columns = (batch.column(name).to_pylist() for name in ("id", "body", "due"))
        for message_id, body, due in zip(*columns, strict=True):
            yield Outgoing(body, id=message_id if ids else None, at_ms=due)


class Comparison:
    """Sends the same file with Spark and with a producer, to a server emptied before each run."""

    def __init__(self, spark: SparkSession, url: str, rows: int, scratch: Path) -> None:
        self._spark = spark
        self._url = url
        self._rows = rows
        self._path, self._warm = scratch / "rows.parquet", scratch / "warm.parquet"
        write_file(self._path, rows)
        write_file(self._warm, 5_000)

    def plain(self) -> dict[str, float]:
        """Seconds that one process takes with `send_many`; warms Spark up, too."""
        path = self._path
        with Producer(self._url) as producer:
            producer.send_many(TOPIC, ["warm"])
            for ids in (True, False):
                self._send(self._warm, ids=ids)
            return {
                "ids": self._timed(lambda: producer.send_many(TOPIC, messages(path, ids=True))),
                "no ids": self._timed(lambda: producer.send_many(TOPIC, messages(path, ids=False))),
                "bodies": self._timed(lambda: producer.send_many(TOPIC, bodies(path), at_ms=2**42)),
            }

    def by_spark(self) -> dict[str, float]:
        """Seconds that Spark takes."""
        taken = {
            "ids": self._timed(lambda: self._send(self._path, ids=True)),
            "no ids": self._timed(lambda: self._send(self._path, ids=False)),
        }
        began = time.perf_counter()
        self._send(self._path, ids=False, again=True)
        return taken | {"no ids, again": time.perf_counter() - began}

    def grown(self, times: int) -> float:
        """Seconds that Spark takes for `times` as many rows, with ids."""
        write_file(self._path, times * self._rows)
        return self._timed(lambda: self._send(self._path, ids=True))

    def _timed(self, work: Callable[[], Any]) -> float:
        link = Connection(Address(self._url))
        link.execute(("FLUSHALL",))
        link.close()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def _send(self, file: Path, *, ids: bool, again: bool = False) -> None:
        df = self._spark.read.parquet(str(file))
        done = schedule(
            df if ids else df.drop("id"),
            url=self._url,
            topic=TOPIC,
            job=None if ids else "bench",
        )
        if not again and done.accepted != pq.read_metadata(file).num_rows:
            raise SystemExit(f"{done} is not all of {file}")


def measure(rows: int, grow: int, master: str) -> dict[str, Any]:
    """Run all measurements; returns the figures."""
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer() as server:
        spark = spark_session(app="bench", master=master, settings={"spark.local.dir": scratch})
        comparison = Comparison(spark, server.url, rows, Path(scratch))
        plain = comparison.plain()
        with Peak() as memory:
            taken = comparison.by_spark()
            grown = {"ids": comparison.grown(grow)} if grow > 1 else {}
        spark.stop()
    rates = {name: round(rows / seconds) for name, seconds in taken.items()}
    plain_rates = {name: round(rows / seconds) for name, seconds in plain.items()}
    return {
        "rows": rows,
        "master": master,
        "spark_rows_per_s": rates,
        "plain_rows_per_s": plain_rates,
        "ratio": {name: round(rates[name] / plain_rates[name], 2) for name in ("ids", "no ids")},
        "ratio_to_bodies_alone": round(rates["ids"] / plain_rates["bodies"], 2),
        "growth": {
            name: round(seconds / (grow * taken[name]), 2) for name, seconds in grown.items()
        },
        "memory_mib": round(memory.mib),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--grow",
        type=int,
        default=1,
        metavar="N",
        help="also send N times as many rows: growth is time over N times the time",
    )
    parser.add_argument("--master", default="local[2]")
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
