"""Keeps messages of a month in a table, and loads what falls due within a horizon.

    python benchmarks/pipeline/horizon.py [--rows 20000000] [--days 30] [--within 12]

The server's clock moves in steps of 15 minutes, for some of the table's days, so that loaded
messages and tombstones reach their steady number. At each step all due messages are handled, and
the loader runs. Prints one JSON document: seconds of a run, the server's peak memory, how many
messages were handled, and how many of them twice, late because of the loader, or not at all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from lisa.core.store.server_checks import info
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.promote import Promote
from lisa.pipeline import schedule, spark_session
from lisa.pipeline.server import Server
from lisa.testing.clocked_server import ClockedServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.core.store.store import SyncStore

TOPIC, GROUP = "bench", "g"
HOUR_MS = 3_600_000
STEP_MS = HOUR_MS // 4
CALL = 100
FILES_A_DAY = 4
BODY = '{"customer": "%08d", "kind": "payment-reminder", "text": "' + "x" * 38 + '"}'


def write_table(spark: SparkSession, path: str, rows: int, start_ms: int, days: int) -> DataFrame:
    """Ids, bodies of 100 bytes, and due times that are spread evenly, in files ordered by time."""
    span_ms = days * 24 * HOUR_MS
    columns = (
        "id",
        f"format_string('{BODY}', id) AS body",
        f"timestamp_millis({start_ms} + pmod(id * 1234567, {span_ms})) AS due",
    )
    made = spark.range(0, rows).selectExpr(*columns)
    ordered = made.repartitionByRange(FILES_A_DAY * days, "due").sortWithinPartitions("due")
    ordered.write.parquet(path)
    return spark.read.parquet(path)


class Handled:
    """Handles due messages, and counts for each id how often."""

    def __init__(self, store: SyncStore, rows: int) -> None:
        self._store = store
        self.counts = bytearray(rows)
        store.call(Declare(TOPIC, GROUP))
        store.drive(store.groups(TOPIC))

    def all_due(self) -> int:
        """Handle all messages that are due; returns how many."""
        handled = 0
        while True:
            moved = self._store.call(Promote(TOPIC, CALL)).moved
            for message_id in self._ready():
                self.counts[int(message_id)] += 1
                handled += 1
            if not moved:
                return handled

    def _ready(self) -> Iterator[str]:
        while entries := self._store.call(Pull(TOPIC, GROUP, "c", CALL)).entries:
            opened = self._store.call(Open(TOPIC, GROUP, entries)).envelopes
            settled = [
                Settlement(entry.id, entry.entry, envelope[1:10].decode(), entry.due_ms, 1)
                for entry, envelope in zip(entries, opened, strict=True)
                if envelope is not None
            ]
            self._store.call(Ack(TOPIC, GROUP, settled))
            yield from (one.id for one in settled)


def measure(rows: int, days: int, within: float, run_days: float, master: str) -> dict[str, Any]:
    """Run the loader through the first days of the table; returns the figures."""
    with tempfile.TemporaryDirectory() as scratch, ClockedServer() as server:
        spark = spark_session(app="bench", master=master, settings={"spark.local.dir": scratch})
        start_ms = int(time.time()) * 1000
        table = write_table(spark, f"{scratch}/table", rows, start_ms, days)
        with Server(server.url).open() as store:
            handled, steps = Handled(store, rows), int(run_days * 24 * HOUR_MS / STEP_MS)
            seconds, late, peak = list[float](), 0, 0
            for step in range(steps + 1):
                server.set_time((start_ms + step * STEP_MS) * 1000)
                handled.all_due()
                began = time.perf_counter()
                horizon = timedelta(hours=within)
                schedule(table, url=server.url, topic=TOPIC, job="bench", due_within=horizon)
                seconds.append(time.perf_counter() - began)
                late += handled.all_due()
                memory = info(store.ask("INFO", "memory"))
                peak = max(peak, int(memory["used_memory"]))
        due = table.where(f"due <= timestamp_millis({start_ms + steps * STEP_MS})")
        expected = due.where(f"due > timestamp_millis({start_ms})").count()
        spark.stop()
    once, several = handled.counts.count(1), rows - handled.counts.count(0)
    return {
        "rows": rows,
        "days": days,
        "within_hours": within,
        "run_days": run_days,
        "first_seconds": round(seconds[0], 2),
        "next_seconds": round(median(seconds[1:]), 2),
        "memory_mib": round(peak / 2**20, 1),
        "handled": once,
        "twice": several - once,
        "missing": expected - several,
        "late": late,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--within", type=float, default=12, metavar="HOURS")
    parser.add_argument("--run-days", type=float, default=1.3)
    parser.add_argument("--master", default="local[2]")
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
