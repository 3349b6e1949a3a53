"""Measures the report job: `python benchmarks/pipeline/report.py [EVENTS] [DIR]`.

Creates an archive with EVENTS (default 10,000,000: three days of six topics) in DIR or a temporary
directory, and a report from it on `local[2]`. An existing archive in DIR is reused. The times of
session start and archive creation are not counted. Prints one JSON document: `ratio` is the target
time divided by the measured time, `scan_ratio` the measured time divided by the time of counting
the log's rows by state in the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pipeline.memory import Peak
from benchmarks.pipeline.traffic import EVENTS_OF_A_MESSAGE, Tables, write
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.report import report

TARGET_S = 180.0
MOST_MIB = 3 * 1024
END_S = 1_795_000_000
HOURS = 72


def main(events: int, where: Path) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    spark = spark_session(app="benchmark", master="local[2]")
    spark.range(1).count()
    try:
        made = Tables(spark, where / "archive")
        if not (where / "archive" / "messages" / "_SUCCESS").exists():
            messages = round(events / EVENTS_OF_A_MESSAGE)
            write(spark, where / "archive", messages, end_s=END_S, hours=HOURS)
        began = time.perf_counter()
        made.log().groupBy("state").count().collect()
        scanned = time.perf_counter() - began
        stages: list[tuple[str, float]] = []
        began = time.perf_counter()
        with Peak() as memory:
            found = report(
                made,
                where / "report",
                zone="Europe/Berlin",
                stage=lambda name: stages.append((name, time.perf_counter())),
            )
        ended = time.perf_counter()
        ends = [at for _, at in stages[1:]] + [ended]
        took = ended - began
        return {
            "benchmark": "report",
            "events": found.events,
            "seconds": round(took, 1),
            "events_per_second": round(found.events / took),
            "stages": {
                name: round(end - at, 1) for (name, at), end in zip(stages, ends, strict=True)
            },
            "scan_seconds": round(scanned, 1),
            "scan_ratio": round(took / scanned, 2),
            "memory_mib": round(memory.mib),
            "target_seconds": TARGET_S,
            "ratio": round(TARGET_S * found.events / 10_000_000 / took, 2),
            "passed": took <= TARGET_S and memory.mib <= MOST_MIB,
            "page": str(found.page),
        }
    finally:
        spark.stop()


if __name__ == "__main__":
    count = int(sys.argv[1].replace("_", "").replace(",", "")) if len(sys.argv) > 1 else 10_000_000
    if len(sys.argv) > 2:
        print(json.dumps(main(count, Path(sys.argv[2]))))
    else:
        with tempfile.TemporaryDirectory(prefix="lisa-report-") as scratch:
            print(json.dumps(main(count, Path(scratch))))
