"""Measurements of the pipeline: `python -m benchmarks.pipeline [--quick] [--out DIR]`.

Runs schedule, archive, restore and report one after the other, each in its own process on
`local[2]` with an embedded server. Prints the targets and figures; `--out` also writes
pipeline.json and pipeline.md. `--quick` uses a tenth of the rows, which gives warm-up more weight.
Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.table import Figures, Row, show, write

HERE = Path(__file__).parent


ROWS = (
    Row(
        "schedule",
        "rows scheduled from Parquet, ids given, /s",
        lambda f: f["spark_rows_per_s"]["ids"],
        at_least=60_000,
    ),
    Row(
        "schedule",
        "rows scheduled from Parquet, ids made, /s",
        lambda f: f["spark_rows_per_s"]["no ids"],
        at_least=60_000,
    ),
    Row(
        "schedule",
        "the same / one plain process, `send_many`",
        lambda f: min(f["ratio"].values()),
        at_least=0.5,
    ),
    Row(
        "schedule",
        "time for ten times the rows / ten times the time",
        lambda f: f["growth"]["ids"],
        at_most=1.2,
    ),
    Row("schedule", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
    Row(
        "archive",
        "events archived while catching up, /s",
        lambda f: f["catch_up_per_second"],
        at_least=50_000,
    ),
    Row(
        "archive",
        "events written at 5,000/s that were archived / those written",
        lambda f: f["kept_up"],
        at_least=1,
    ),
    Row("archive", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
    Row(
        "restore",
        "messages restored, seconds for a million",
        lambda f: f["seconds"] * 1e6 / f["messages"],
        at_most=120,
    ),
    Row("restore", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
    Row(
        "report",
        "report, seconds for ten million events",
        lambda f: f["seconds"] * 1e7 / f["events"],
        at_most=180,
    ),
    Row("report", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
)


def measure(name: str, *arguments: str) -> Figures:
    """Run one program; its last line of output has the figures."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> int:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    share = 10 if asked.quick else 1
    figures = {
        "schedule": measure("schedule", "--rows", str(1_000_000 // share), "--grow", "10"),
        "archive": measure("archive", str(2_000_000 // share), str(60 // share)),
        "restore": measure("restore", str(1_000_000 // share)),
        "report": measure("report", str(10_000_000 // share)),
    }
    met = show(ROWS, figures)
    if asked.out:
        head = "# The pipeline, measured\n\nBy `make bench-pipeline`, on `local[2]`, the server on "
        write(asked.out, "pipeline", f"{head}the same machine.", ROWS, figures)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
