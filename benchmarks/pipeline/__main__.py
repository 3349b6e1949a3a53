"""Measurements of the pipeline: `python -m benchmarks.pipeline [--only NAME] [--out DIR]`.

Runs each program of PROGRAMS, or only some, one after the other, each in its own process on
`local[2]` with an embedded server. Prints the targets and figures; `--out` also writes
pipeline.json and pipeline.md, in which figures of programs that did not run remain. `--quick` uses
a tenth of the rows, which gives warm-up more weight. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.table import Figures, Row, show, write

HERE = Path(__file__).parent


def _scheduled(index: int, rows: str) -> Iterator[Row]:
    """The rows of one run of the schedule benchmark."""
    for ids, name in (("ids", "ids given"), ("no ids", "ids made")):

        def figure(of: str, figures: Figures, ids: str = ids) -> float:
            return float(figures["runs"][index][of][ids])

        yield Row(
            "schedule", f"{rows}, {name}, /s", partial(figure, "spark_per_s"), at_least=60_000
        )
        yield Row(
            "schedule",
            f"{rows}, {name} / one process with `send_many`",
            partial(figure, "ratio"),
            at_least=1.25,
        )


ROWS = (
    *_scheduled(0, "1,000,000 rows from Parquet"),
    *_scheduled(1, "5,000,000 rows from Parquet"),
    Row(
        "schedule",
        "time for ten times the rows / ten times the time",
        lambda f: f["growth"],
        at_most=1.1,
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
        "the same with the fold of a new archive, /s",
        lambda f: f["with_fold_per_second"],
        at_least=60_000,
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
        at_most=60,
    ),
    Row("restore", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
    Row(
        "report",
        "report, seconds for ten million events",
        lambda f: f["seconds"] * 1e7 / f["events"],
        at_most=180,
    ),
    Row("report", "driver and workers, MiB", lambda f: f["memory_mib"], at_most=3072),
    Row("search", "events in the archive", lambda f: f["events"]),
    Row("search", "search by id, seconds", lambda f: f["by_id_seconds"], at_most=0.5),
    Row("search", "search by a field of the body, seconds", lambda f: f["by_field_seconds"],
        at_most=10),
    Row("search", "opening an archive of 20,000 files, seconds",
        lambda f: f["files_opening_seconds"], at_most=1),
    Row("search", "search by id in 20,000 files, seconds",
        lambda f: f["files_by_id_seconds"], at_most=2),
    Row("search", "erasure of a message, seconds", lambda f: f["erase_seconds"]),
    Row("search", "retention that deletes a third, seconds", lambda f: f["retain_seconds"]),
    Row("horizon", "rows of 30 days in a table", lambda f: f["rows"]),
    Row("horizon", "Redis with a horizon of 12 h, MiB", lambda f: f["memory_mib"], at_most=300),
    Row("horizon", "first run, seconds", lambda f: f["first_seconds"]),
    Row("horizon", "a run every 15 minutes, seconds", lambda f: f["next_seconds"]),
    Row("horizon", "rows handled twice, not at all, or late because of the loader",
        lambda f: f["twice"] + f["missing"] + f["late"], at_most=0),
    Row("journals", "batch of 2,000 events of 1,000 journals, seconds",
        lambda f: f["batch_seconds"], at_most=5),
    Row("workers", "the same messages with one and two workers", lambda f: f["identical"],
        at_least=1),
    Row("workers", "time with one worker / with two", lambda f: f["speedup"]),
)  # fmt: skip

PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "schedule": (
        ("--rows", "1000000", "--rows", "5000000", "--grow", "10"),
        ("--rows", "100000", "--rows", "500000", "--grow", "10"),
    ),
    "archive": (("2000000", "60"), ("200000", "6")),
    "restore": (("5000000",), ("500000",)),
    "report": (("10000000",), ("1000000",)),
    "search": (("10000000",), ("1000000",)),
    "horizon": ((), ("--rows", "200000", "--run-days", "0.3")),
    "journals": (("1000",), ("100",)),
    "workers": (("500000",), ("50000",)),
}
"""Program -> its arguments, and those of `--quick`."""


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
    parser.add_argument("--only", action="append", choices=PROGRAMS, metavar="NAME")
    asked = parser.parse_args()
    kept = asked.out / "pipeline.json" if asked.out else None
    figures: dict[str, Figures] = (
        json.loads(kept.read_text("utf-8")) if kept and kept.exists() and asked.only else {}
    )
    for name in asked.only or PROGRAMS:
        figures[name] = measure(name, *PROGRAMS[name][asked.quick])
    rows = [row for row in ROWS if row.of in figures]
    met = show(rows, figures)
    if asked.out:
        head = "# The pipeline, measured\n\nBy `make bench-pipeline`, on `local[2]`, the server on "
        write(asked.out, "pipeline", f"{head}the same machine.", rows, figures)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
