"""Measures the archive job: `python benchmarks/pipeline/archive.py [EVENTS] [SECONDS]`.

Prints figures on `local[2]` with an embedded server as one JSON document:

- catching up with EVENTS (default 2,000,000; four per message, bodies of 100 bytes) in the
  journal: events per second without and with the final fold, in a session that has archived a
  quarter of them before, to another archive;
- keeping up with 5,000 events per second for SECONDS (default 60): the largest lag of a batch
  behind its last event, which must not grow. The writer of the events uses the same machine.

`memory_mib` is the peak memory of the driver's Python, its JVM and the workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import redis

from benchmarks.pipeline.memory import Peak
from lisa.core.model.envelope import encode_head, encode_headers, encode_tail
from lisa.core.model.keys import Keys
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.archive import Progress, archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RATE = 5_000
CATCH_UP = 50_000
MOST_MIB = 3 * 1024
TOPIC = "orders"
TAIL = encode_tail({"order": 123456, "note": "x" * 74}, encode_headers(None))
STATES = ("sent", "ready", "in_flight", "acked")


def fill(url: str, first: int, events: int, *, rate: float | None = None) -> None:
    """Write events with numbers from `first`, at `rate` per second or as fast as possible."""
    client = redis.Redis.from_url(url)
    keys = Keys().topic(TOPIC)
    client.zadd(Keys().topics, {TOPIC: 1})
    client.hset(keys.options, "journal", "1")
    began = time.monotonic()
    for start in range(first, first + events, 2_000):
        pipe = client.pipeline(transaction=False)
        for number in range(start, start + 2_000):
            pipe.execute_command("XADD", keys.events, "*", *_fields(number))
        pipe.hset(keys.stats, "journaled", start + 1_999)
        pipe.execute()
        if rate is not None:
            ahead = (start + 2_000 - first) / rate - (time.monotonic() - began)
            time.sleep(max(0.0, ahead))
    client.close()


def _fields(number: int) -> list[Any]:
    """The fields of one event; blocks of 500 messages go through four states each."""
    block, offset = divmod(number - 1, 2_000)
    state, message = STATES[offset // 500], block * 500 + offset % 500
    due = int(time.time() * 1000)
    fields: list[Any] = [
        "n",
        number,
        "actor",
        "consumer@host-1:4711",
        "id",
        f"0Q7zUEEpSsz28g{message:08}",
        "state",
        state,
        "group",
        "" if state == "sent" else "lisa",
        "attempt",
        0 if state == "sent" else 1,
        "due",
        due,
    ]
    if state == "sent":
        fields += ["envelope", encode_head(f"{message:08}"[-8:]) + TAIL]
    elif state == "in_flight":
        fields += ["late", 1500]
    elif state == "acked":
        fields += ["end", 1]
    return fields


def catch_up(spark: SparkSession, where: str, url: str) -> tuple[float, float]:
    """Archive the whole journal; returns events per second without and with the final fold."""
    archived: list[float] = []
    began = time.monotonic()
    result = archive(
        spark, where, url=url, once=True, progress=lambda _: archived.append(time.monotonic())
    )
    ended = time.monotonic()
    return result.events / (archived[-1] - began), result.events / (ended - began)


def keep_up(spark: SparkSession, where: str, url: str, first: int, events: int) -> list[Progress]:
    """Archive while another process writes events at RATE; returns the batches."""
    fields = (url, str(first), str(events))
    source = subprocess.Popen([sys.executable, __file__, "--fill", *fields])
    stop = threading.Event()
    told: list[Progress] = []

    def end() -> None:
        source.wait()
        time.sleep(8)  # one more batch
        stop.set()

    threading.Thread(target=end).start()
    archive(spark, where, url=url, interval=timedelta(seconds=5), progress=told.append, stop=stop)
    return told


def main(events: int, seconds: int) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    spark = spark_session(app="benchmark", master="local[2]")
    spark.range(1).count()
    with (
        EmbeddedServer() as server,
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as where,
        Peak() as memory,
    ):
        fill(server.url, 1, events // 4)
        cold, _ = catch_up(spark, first, server.url)
        fill(server.url, events // 4 + 1, events * 3 // 4)
        caught, whole = catch_up(spark, where, server.url)
        told = keep_up(spark, where, server.url, events + 1, RATE * seconds)
    spark.stop()
    kept = sum(one.events for one in told)
    return {
        "benchmark": "archive",
        "events": events,
        "cold_per_second": round(cold),
        "catch_up_per_second": round(caught),
        "with_fold_per_second": round(whole),
        "ratio": round(caught / CATCH_UP, 2),
        "kept_up_events": kept,
        "kept_up": round(kept / (RATE * seconds), 3),
        "batch_seconds": [round(one.seconds, 2) for one in told],
        "lags_ms": [one.lag_ms or 0 for one in told],
        "memory_mib": round(memory.mib),
        "passed": caught >= CATCH_UP and kept >= RATE * seconds and memory.mib <= MOST_MIB,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), rate=RATE)
    else:
        numbers = [int(one) for one in sys.argv[1:]]
        print(json.dumps(main(*(numbers + [2_000_000, 60][len(numbers) :]))))
