"""Scheduling a Parquet file with Spark against one plain process that uses `send_many`.

    python benchmarks/pipeline/schedule.py [--rows 1000000]

Both send the same file in the same run, to an embedded server that is emptied between them; Spark's
session is up and has worked before, as is the producer. Prints one JSON document: rows a second,
their ratio to plain, and the most memory that driver and workers took together.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.pipeline.memory import Peak
from lisa import Producer
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.schedule import schedule
from lisa.producer import Outgoing

TOPIC = "bench"
PIECE = 50_000
BODY = '{{"order": {n:010d}, "customer": "{c:08d}", "kind": "payment-reminder", "text": "{pad}"}}'


def write_file(place: Path, rows: int) -> None:
    """Ids, bodies of 100 bytes, dues over a day from now on in an hour."""
    start = int(time.time() * 1000) + 3_600_000
    names = [("id", pa.string()), ("body", pa.string()), ("due", pa.int64())]
    with pq.ParquetWriter(place, pa.schema(names)) as writer:
        for first in range(0, rows, PIECE):
            some = range(first, min(first + PIECE, rows))
            writer.write_table(pa.table({
                "id": [f"order-{n:012d}" for n in some],
                "body": [BODY.format(n=n, c=n * 7919 % 10**8, pad="x" * 20) for n in some],
                "due": [start + n * 7919 % 86_400_000 for n in some],
            }))  # fmt: skip


def bodies(place: Path) -> Iterator[str]:
    """The bodies alone."""
    for batch in pq.ParquetFile(place).iter_batches(columns=["body"]):
        yield from batch.column(0).to_pylist()


def messages(place: Path, *, ids: bool) -> Iterator[Outgoing]:
    """Messages with their due times, and their ids if these are wanted."""
    for batch in pq.ParquetFile(place).iter_batches():
        columns = (batch.column(name).to_pylist() for name in ("id", "body", "due"))
        for message_id, body, due in zip(*columns, strict=True):
            yield Outgoing(body, id=message_id if ids else None, at_ms=due)


def main() -> None:
    """Run all, print the figures."""
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer() as server:
        place, warm = Path(scratch) / "rows.parquet", Path(scratch) / "warm.parquet"
        write_file(place, asked.rows)
        write_file(warm, 5_000)
        spark = spark_session(app="bench", master=asked.master,
                              settings={"spark.local.dir": scratch})  # fmt: skip
        link = Connection(Address(server.url))

        def timed(work: Callable[[], Any]) -> float:
            link.execute(("FLUSHALL",))
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        def by_spark(file: Path, *, ids: bool, again: bool = False) -> None:
            df = spark.read.parquet(str(file))
            done = schedule(df if ids else df.drop("id"), url=server.url, topic=TOPIC,
                            job=None if ids else "bench")  # fmt: skip
            if not again and done.accepted != df.count():
                raise SystemExit(f"{done} is not all of {file}")

        with Producer(server.url) as producer:
            producer.send_many(TOPIC, ["warm"])
            for ids in (True, False):
                by_spark(warm, ids=ids)
            plain = {
                "ids": timed(lambda: producer.send_many(TOPIC, messages(place, ids=True))),
                "no ids": timed(lambda: producer.send_many(TOPIC, messages(place, ids=False))),
                "bodies": timed(lambda: producer.send_many(TOPIC, bodies(place), at_ms=2**42)),
            }
        with Peak() as memory:
            taken = {
                "ids": timed(lambda: by_spark(place, ids=True)),
                "no ids": timed(lambda: by_spark(place, ids=False)),
            }
            began = time.perf_counter()
            by_spark(place, ids=False, again=True)
            taken["no ids, again"] = time.perf_counter() - began
            grown = {}
            if asked.grow > 1:
                write_file(place, asked.grow * asked.rows)
                grown = {"ids": timed(lambda: by_spark(place, ids=True))}
        spark.stop()
        link.close()
    rates = {name: round(asked.rows / seconds) for name, seconds in taken.items()}
    plain_rates = {name: round(asked.rows / seconds) for name, seconds in plain.items()}
    print(json.dumps({
        "rows": asked.rows, "master": asked.master, "spark_rows_per_s": rates,
        "plain_rows_per_s": plain_rates,
        "ratio": {name: round(rates[name] / plain_rates[name], 2) for name in ("ids", "no ids")},
        "ratio_to_bodies_alone": round(rates["ids"] / plain_rates["bodies"], 2),
        "growth": {name: round(seconds / (asked.grow * taken[name]), 2)
                   for name, seconds in grown.items()},
        "memory_mib": round(memory.mib),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
